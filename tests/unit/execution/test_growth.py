"""A matrix over files of another step becomes its instances when that step is done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.execution.steps import growth
from runner.execution.steps.growth import PlanGrowth
from runner.planning.judge import NOTHING, StepResult
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob, exits

RECIPE = """
steps:
  split: {run: "true", outputs: {parts: parts/}}
  each:
    matrix: {part: {glob: "{{ steps.split.parts }}/*.txt"}}
    run: "cat {{ matrix.part }} > {{ outputs.o }}"
    outputs: {o: "out/{{ matrix.part | name }}"}
  all: {run: "true", needs: [each]}
"""


def makes(*names: str) -> Program:
    async def program(job: StartedJob) -> Exit:
        folder = job.folder / "parts"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f"{name}.txt").write_text(name)
        return Exit(0)

    return program


async def copies(job: StartedJob) -> Exit:
    (job.folder / "out").mkdir(exist_ok=True)
    name = job.step.partition("=")[2].rstrip("]").rpartition("%2F")[2]
    (job.folder / "out" / name).write_text(job.step)
    return Exit(0)


def programs_for(*names: str) -> dict[str, Program]:
    each = {f"each[part=parts%2F{name}.txt]": copies for name in names}
    return {"split": makes(*names), "all": exits(0), **each}


@pytest.fixture
def grown(tmp_path: Path) -> SimulatedRun:
    run = SimulatedRun(tmp_path, RECIPE, programs_for("x", "y"))
    assert run.run().state == "COMPLETED", run.heard.words
    return run


def test_instances_run_between_the_step_that_makes_their_files_and_the_rest(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    assert grown.started[0] == "split" and grown.started[-1] == "all"
    assert len(grown.started) == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.txt", "y.txt"]


def test_the_expansion_is_stored_with_its_files_for_the_next_worker(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    (event,) = [each for each in grown.heard.moves if "globs" in each.data]
    (files,) = event.data["globs"].values()
    assert sorted(files) == ["x.txt", "y.txt"] and event.data["steps"] == 3


def test_only_instances_of_new_files_run_in_the_next_run(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    changed = RECIPE.replace('split: {run: "true"', 'split: {run: "true more"')
    again = SimulatedRun(tmp_path, changed, programs_for("x", "y", "z"))
    assert again.run().state == "COMPLETED"
    instances = [step for step in again.started if step.startswith("each")]
    assert len(instances) == 1 and "z" in instances[0]


def test_a_matrix_without_files_has_no_instances(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, programs_for())
    report = run.run()
    assert not [step for step in run.started if step.startswith("each")], report


def plan_of(*ids: str) -> Any:
    """A plan of these steps, in which a matrix is still pending."""
    index = {id: n for n, id in enumerate(ids)}
    nodes = [Of(id=id) for id in ids]
    return Of(
        nodes=nodes,
        index=index,
        pending=["each"],
        nodes_named=lambda name: {index[name]},
        after=lambda first: {n for n in index.values() if n >= min(first)},
    )


class Growing:
    """A run whose plan grows by the files of `each`, and what its owners are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, old: Any, new: Any) -> None:
        self.plan, self.new, self.grown = old, new, {"each": ["x"]}
        self.wanted, self.todo, self.made = set[str](), set[str](), dict[int, StepResult]()
        self.extended, self.renumbered, self.learned = list[Any](), list[Any](), list[Any]()
        self.expansions, self.published = list[Any](), list[int]()
        self.words, self.error, self.facts = list[str](), "", Of()
        self.survey = Of(
            globs={}, source=None, request=None, aside=set(), forced=set(), begin="",
            library=False, targets={}, select_wanted=self._select, targets_of=self._find_targets,
        )  # fmt: skip
        self.targets: dict[int, list[tuple[str, str]]] = {}
        ws: Any = Of(
            environ={},
            cache=Of(contents=lambda paths: {path: "content" for path in paths}),
            published_contents=lambda: {"ours"},
        )
        monkeypatch.setattr(growth, "find_expansions", lambda *_words: self.grown)
        monkeypatch.setattr(growth, "compile_request", lambda *_words: self.new)
        monkeypatch.setattr(growth, "collect_facts", lambda *_words: self.facts)
        monkeypatch.setattr(growth, "all_given", lambda plan, _environ: [plan])
        monkeypatch.setattr(growth, "tasks_of", lambda _plan, ids, *_words: sorted(ids))
        me: Any = self
        commits: Any = Of(
            expected={},
            masker=Of(learn=self.learned.append),
            add_expansion=lambda files, number: self.expansions.append((files, number)),
            say=self.words.append,
        )
        running: Any = Of(renumber=self.renumbered.append)
        self.growth = PlanGrowth(ws, me, me, commits, running, me)

    def _select(self, plan: Any) -> set[int]:
        return {plan.index[id] for id in self.wanted}

    def _find_targets(self, _ws: Any, _plan: Any) -> dict[int, list[tuple[str, str]]]:
        return self.targets

    def add(self, ids: set[str]) -> None:
        self.todo |= ids

    def replace(self, plan: Any, _facts: Any) -> None:
        self.plan = plan

    def extend(self, tasks: Iterable[str]) -> None:
        self.extended += tasks

    def try_publish(self, n: int, _made: StepResult) -> str:
        self.published.append(n)
        return self.error


def test_new_instances_and_steps_that_are_wanted_now_are_added_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = plan_of("split", "all"), plan_of("split", "each-x", "all", "other")
    run = Growing(monkeypatch, old, new)
    run.survey.aside, run.wanted = {"all", "other"}, {"split", "each-x", "all"}
    run.targets = {2: [("o", "all.txt")]}
    run.growth.grow()
    assert run.extended == ["all", "each-x"] == sorted(run.todo) and run.plan is new
    assert run.survey.aside == {"other"} and run.survey.forced == set()
    assert run.expansions == [({"each": ["x"]}, 2)]
    assert run.renumbered == run.learned[0] == [new]
    assert run.facts.there == {"all.txt": "content"} and run.facts.ours == {"ours"}
    run.growth.grow()  # the same files
    assert len(run.expansions) == 1


def test_new_instances_after_the_step_to_begin_from_are_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Growing(monkeypatch, plan_of("split", "all"), plan_of("split", "each-x", "all"))
    run.survey.begin = "each-x"
    run.growth.grow()
    assert run.survey.forced == {"each-x", "all"}


@pytest.mark.parametrize("is_library", [False, True])
def test_results_are_published_where_only_the_grown_plan_has_them(
    monkeypatch: pytest.MonkeyPatch, is_library: bool
) -> None:
    ids = ("a", "b", "c", "d", "e", "f")
    run = Growing(monkeypatch, plan_of(*ids), plan_of(*ids))
    made = StepResult(True, (), {})
    run.made = dict.fromkeys(range(4), made) | {4: NOTHING}
    run.todo, run.wanted, run.error = {"a", "d", "e", "f"}, {"a", "b"}, "a.txt is yours"
    run.survey.targets = {0: [("o", "old.txt")], 3: [("o", "d.txt")]}
    run.survey.library = is_library
    run.targets = {n: [("o", f"{id}.txt")] for n, id in enumerate(ids)}
    run.targets[0] = [("o", "old.txt"), ("p", "new.txt")]
    run.growth.grow()
    assert run.published == ([] if is_library else [0])  # only `a` has a new path and a result
    assert run.words == ([] if is_library else ["a: a.txt is yours"])
    assert run.extended == ([] if is_library else ["b"])  # up to date before, and wanted
