"""Dependency graphs with networkx: cycles and topological orders.

A run with nothing to do never imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import networkx as nx

T = TypeVar("T")


def dag(dependencies: Mapping[T, Iterable[T]]) -> nx.DiGraph[T]:
    """Build a graph with an edge from each dependency to its dependent.

    Nodes keep the order of `dependencies`, and edges into a node keep the order of its
    dependencies.
    """
    graph: nx.DiGraph[T] = nx.DiGraph()
    graph.add_nodes_from(dependencies)
    for node, wanted in dependencies.items():
        graph.add_edges_from((dependency, node) for dependency in wanted)
    return graph


def find_cycle(graph: nx.DiGraph[T]) -> list[T]:
    """Return a dependency cycle as a list of nodes, or an empty list.

    Each node comes before one of its dependencies, and the first node is repeated at the end.  The
    search starts at the first node that a cycle blocks.
    """
    free: set[T] = set()
    try:
        for node in nx.topological_sort(graph):
            free.add(node)
    except nx.NetworkXUnfeasible:
        stuck = nx.subgraph_view(graph, filter_node=lambda node: node not in free)
        around = [edge[0] for edge in nx.find_cycle(stuck.reverse(copy=False))]
        return [*around, around[0]]
    return []


def as_written(graph: nx.DiGraph[T]) -> list[T]:
    """Return a topological order that otherwise keeps the written order.

    The graph must have no cycle.
    """
    return list(nx.lexicographical_topological_sort(graph, key=lambda _: 0))


def order_needs_first(graph: nx.DiGraph[T]) -> list[T]:
    """Return the nodes in written order, each directly after its unlisted dependencies.

    The graph must have no cycle.
    """
    return list(nx.dfs_postorder_nodes(graph.reverse(copy=False)))
