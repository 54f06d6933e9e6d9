"""What needs what, as a networkx graph: whether it goes round, and its orders.  Imported where a plan is compiled or drawn; a no-op never does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import networkx as nx

T = TypeVar("T")


def dag(needs: Mapping[T, Iterable[T]]) -> nx.DiGraph[T]:
    """Nodes are the keys as written; an edge points from what is needed to what needs it, and edges into a node keep the order of its needs."""
    graph: nx.DiGraph[T] = nx.DiGraph()
    graph.add_nodes_from(needs)
    graph.add_edges_from((need, node) for node, wanted in needs.items() for need in wanted)
    return graph


def circle(graph: nx.DiGraph[T]) -> list[T]:
    """Nodes that need each other, each before one that it needs, ending where they began; empty where there are none.

    It is the first that one meets who starts at the first node that a circle keeps back, and always goes on to the first such need.
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
    """Each node after all that it needs: always the first as written of those that may come next.  There must be no circle."""
    return list(nx.lexicographical_topological_sort(graph, key=lambda _: 0))


def needs_first(graph: nx.DiGraph[T]) -> list[T]:
    """Each node right after those of its needs that are not listed yet, otherwise as written.  There must be no circle."""
    return list(nx.dfs_postorder_nodes(graph.reverse(copy=False)))
