"""The plan of a run: what is to be run, what is made, and who needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.session import preview
from runner.execution.steps.run_plan import RunPlan
from runner.execution.terms import Choice
from runner.planning.judge import NOTHING, StepResult
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.unit.execution.fakes import SimulatedRun, writes

RECIPE = """\
steps:
  a: {run: [tool, a], outputs: {a: a.txt}}
  b: {run: [tool, b], deps: [a.txt], outputs: {d: d.txt, b: {path: b.txt, temporary: true}}}
  c: {run: [tool, c], deps: [a.txt, b.txt], outputs: {c: c.txt}, where: local}
"""

PROGRAMS = {"a": writes(a="a"), "b": writes(b="b", d="d"), "c": writes(c="c")}


@pytest.fixture
def ws(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "recipe.yaml").write_text(f"recipe: t@1\nsummary: A test\n{RECIPE}")
    with Workspace.open(tmp_path) as ws:
        yield ws


def plan_of(ws: Workspace, *known: str) -> RunPlan:
    return RunPlan(preview(ws, Request("./recipe.yaml", {}), Choice()), known)


def test_a_new_run_has_all_steps_to_run_and_none_made(ws: Workspace) -> None:
    steps = plan_of(ws)
    assert steps.todo == {"a", "b", "c"} == set(steps.verdicts) and not steps.made
    assert [steps.node(id).id for id in "abc"] == ["a", "b", "c"]
    assert steps.spec("b").step == "b" and steps.number("c") == steps.plan.index["c"]
    assert [steps.is_local(id) for id in "abc"] == [False, False, True]


def test_results_are_noted_failed_and_forgotten(ws: Workspace) -> None:
    steps = plan_of(ws)
    made, number = StepResult(True, (), {"loss": 1.0}), steps.number("a")
    steps.set_made(number, made)
    steps.set_failed("b")
    assert steps.made[number] is made and steps.made[steps.number("b")] is NOTHING
    steps.forget_made(number)
    assert number not in steps.made
    verdict: Any = Of(key="k")
    steps.set_verdict("a", verdict)
    assert steps.verdicts["a"] is verdict


def test_consumers_are_the_steps_of_this_run_that_need_one(ws: Workspace) -> None:
    steps = plan_of(ws)
    assert sorted(steps.consumers(steps.number("a"))) == ["b", "c"]
    assert list(steps.consumers(steps.number("b"))) == ["c"]
    assert list(steps.consumers(steps.number("c"))) == []
    steps.todo = {"a"}
    steps.add({"c"})  # `b` is not in this run
    assert list(steps.consumers(steps.number("a"))) == ["c"]


def test_steps_of_an_earlier_worker_belong_to_the_run(tmp_path: Path) -> None:
    SimulatedRun(tmp_path, RECIPE, PROGRAMS).run()
    with Workspace.open(tmp_path) as ws:
        done = plan_of(ws)
        assert done.todo == set() and {done.plan.nodes[n].id for n in done.made} == {"a", "b", "c"}
        assert plan_of(ws, "b").todo == {"b"}


def test_results_move_to_the_numbers_of_an_expanded_plan(ws: Workspace) -> None:
    steps = plan_of(ws)
    made = StepResult(True, (), {})
    steps.set_made(steps.number("a"), made)
    steps.set_made(steps.number("b"), NOTHING)
    numbers = {"c": 0, "a": 1}  # `b` is not in it
    plan: Any = Of(index=numbers)
    facts: Any = Of()
    view = steps.made
    steps.replace(plan, facts)
    assert dict(steps.made) == {1: made} and view is steps.made
    assert steps.plan is plan and steps.facts is facts


def test_temporary_outputs_that_are_not_stored_here_may_be_on_a_host(tmp_path: Path) -> None:
    SimulatedRun(tmp_path, RECIPE, PROGRAMS).run()
    with Workspace.open(tmp_path) as ws:
        steps = plan_of(ws, "a", "b", "c")
        absent: Any = Of(has=lambda content: False)
        found = steps.left_on_hosts(absent)
        assert len(found) == 1 and steps.left_on_hosts(ws.objects) == set()
        trace = steps.facts.traces.get(steps.verdicts["b"].key or "")
        assert trace is not None
        assert found == {content for name, _, content in trace.outputs if name == "b"}
