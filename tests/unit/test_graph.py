"""Promise: a plan's steps are in one certain order, a circle that is reported is one, and what is before, after and longest is so by definition."""

from __future__ import annotations

from itertools import pairwise, permutations

import hypothesis.strategies as st
import networkx as nx
import pytest
from hypothesis import given, settings

from runner.digest import Digest
from runner.planning.graph import as_written, dag, find_cycle, order_needs_first
from runner.planning.plan import Node, Plan
from runner.planning.schedule import Task, priorities
from runner.planning.step import RunSettings
from runner.planning.step_order import is_in_order

Needs = dict[int, list[int]]
"""What each node needs, the nodes as written."""


@st.composite
def acyclic(draw: st.DrawFn, most: int = 6) -> Needs:
    """Any graph without a circle; the order as written is any, too."""
    made: Needs = {
        n: draw(st.lists(st.integers(0, n - 1), max_size=3)) if n else []
        for n in range(draw(st.integers(1, most)))
    }
    return {n: made[n] for n in draw(st.permutations(list(made)))}


@st.composite
def any_needs(draw: st.DrawFn) -> Needs:
    size = draw(st.integers(1, 6))
    return {
        n: draw(st.lists(st.integers(0, size - 1), max_size=2))
        for n in draw(st.permutations(range(size)))
    }


def holds(order: tuple[int, ...] | list[int], needs: Needs) -> bool:
    return all(order.index(need) < order.index(node) for node in needs for need in needs[node])


def reached(needs: Needs, start: int) -> set[int]:
    """A node and all that it needs, by definition: what it needs, and what that needs."""
    return {start}.union(*(reached(needs, need) for need in needs[start]))


def ways(needs: Needs, start: int) -> list[list[int]]:
    """Every way from a node to one that nothing needs."""
    above = [node for node in needs if start in needs[node]]
    return [[start, *way] for node in above for way in ways(needs, node)] or [[start]]


def plan(needs: Needs) -> Plan:
    """A plan of these nodes; each needs only earlier ones."""
    nodes = [
        Node(f"s{n}", Digest(""), [], [], 0, [], [], [], list(dict.fromkeys(needs[n])), [], "", "", 0) for n in range(len(needs))
    ]  # fmt: skip
    return Plan("p@1", Digest(""), [], nodes, [], [], {}, {}, list, RunSettings())


@given(needs=acyclic())
def test_steps_stand_as_written_where_no_need_says_otherwise(needs: Needs) -> None:
    place = {node: n for n, node in enumerate(needs)}
    allowed = [order for order in permutations(needs) if holds(order, needs)]
    assert as_written(dag(needs)) == list(
        min(allowed, key=lambda order: [place[node] for node in order])
    )


@given(needs=acyclic())
def test_what_a_step_needs_stands_before_it_and_nothing_is_lost(needs: Needs) -> None:
    order = order_needs_first(dag(needs))
    assert sorted(order) == sorted(needs) and holds(order, needs)


@given(needs=any_needs())
def test_steps_that_are_in_order_as_written_need_no_sorting(needs: Needs) -> None:
    """Then both orders are the one as written, and there is no circle; any other has a need that stands later, or in a circle."""
    if is_in_order(needs):
        assert find_cycle(dag(needs)) == [] and as_written(dag(needs)) == order_needs_first(
            dag(needs)
        ) == list(needs)
    else:
        assert not holds(list(needs), needs) or any(
            node in wanted for node, wanted in needs.items()
        )


@given(needs=any_needs())
def test_a_circle_is_reported_exactly_where_there_is_one(needs: Needs) -> None:
    found = find_cycle(dag(needs))
    assert bool(found) != any(holds(order, needs) for order in permutations(needs))
    if found:
        assert found[0] == found[-1] and len(set(found)) == len(found) - 1
        assert all(need in needs[node] for node, need in pairwise(found))


@pytest.mark.parametrize(
    ("needs", "around"),
    [
        ({1: [1]}, [1, 1]),
        ({1: [2], 2: [3], 3: [2]}, [2, 3, 2]),  # one that a circle only keeps back is no part of it
        ({1: [2], 2: [1], 3: [4], 4: [3]}, [1, 2, 1]),
        ({1: [3, 2], 2: [1], 3: [1]}, [1, 3, 1]),  # by the need that is written first
    ],
)
def test_the_first_circle_is_shown_from_where_it_is_entered(
    needs: Needs, around: list[int]
) -> None:
    assert find_cycle(dag(needs)) == around


@given(
    needs=acyclic().map(lambda needs: dict(sorted(needs.items()))),
    chosen=st.sets(st.integers(0, 5), max_size=3),
)
def test_before_and_after_agree_with_the_definition_and_with_networkx(
    needs: Needs, chosen: set[int]
) -> None:
    chosen &= needs.keys()
    found = plan(needs)
    assert found.before(chosen) == set().union(*(reached(needs, n) for n in chosen))
    assert found.after(chosen) == {n for n in needs if reached(needs, n) & chosen}
    assert {f"s{n}" for n in found.before(chosen)} == {f"s{n}" for n in chosen}.union(
        *(nx.ancestors(found.graph, f"s{n}") for n in chosen)
    )
    assert {f"s{n}" for n in found.after(chosen)} == {f"s{n}" for n in chosen}.union(
        *(nx.descendants(found.graph, f"s{n}") for n in chosen)
    )


@given(
    needs=acyclic().map(lambda needs: dict(sorted(needs.items()))),
    seconds=st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=6),
)
def test_a_priority_is_the_longest_of_all_ways_to_the_end(
    needs: Needs, seconds: dict[int, int]
) -> None:
    tasks = [
        Task(str(n), tuple(map(str, needs[n][:1])), tuple(map(str, needs[n][1:]))) for n in needs
    ]
    lengths = priorities(tasks, {str(n): value for n, value in seconds.items()})
    assert lengths == {
        str(n): max(sum(seconds.get(each, 1) for each in way) for way in ways(needs, n))
        for n in needs
    }


@settings(max_examples=20)
@given(needs=acyclic().map(lambda needs: dict(sorted(needs.items()))))
def test_the_graph_of_a_plan_has_its_nodes_and_edges_in_order(needs: Needs) -> None:
    found = plan(needs)
    graph = found.graph
    assert (
        list(graph) == [node.id for node in found.nodes]
        and [graph.nodes[id]["node"] for id in graph] == found.nodes
    )
    assert graph.graph["recipe"] == "p@1"
    assert {id: list(graph.pred[id]) for id in graph} == {
        f"s{n}": [f"s{need}" for need in sorted(set(needs[n]))] for n in needs
    }
