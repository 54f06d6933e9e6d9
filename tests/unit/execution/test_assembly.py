"""What a run is made of, by its options and by what an earlier worker left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution import takeover
from runner.execution.session import preview
from runner.execution.steps.assembly import Options, _capacity_of, assemble
from runner.execution.steps.commit import GroupCommit
from runner.execution.steps.control import Handover
from runner.execution.steps.loop import Loop
from runner.execution.terms import Choice
from runner.planning.schedule import AttemptOutcome, SpentRetries, State
from runner.planning.step import ResourceSpec, StepSpec
from runner.secrets import Masker
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.unit.execution.fakes import SimulatedRun, StartedJob, runs_for, writes

RECIPE = """
steps:
  a: {run: "true", retries: 1, resources: {cpus: 1, pools: {slots: 1}}, outputs: {o: a.txt}}
  b: {run: "true", resources: {cpus: 1, pools: {slots: 1}}, outputs: {o: b.txt}}
"""


class Made:
    """The loops of runs of two steps, and what the workspace was asked for them."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = SimulatedRun(root, RECIPE, {})
        self.relied, self.counted, self.adopted = list[str](), list[str](), list[str]()
        self.inherited: list[int] = []
        self.patch = monkeypatch
        self.delivers = False

    def assemble(
        self,
        options: Options | None = None,
        handover: Handover | None = None,
        **claim: Any,
    ) -> Loop:
        with Workspace.open(self.run.root) as ws:
            ws.share(None)
            ws.delivers = self.delivers
            survey = preview(ws, Request("./recipe.yaml", {}), Choice())
            claimed = self.run._claim(ws, survey.plan.recipe)._replace(**claim)
            heard = self.run.heard
            commits = GroupCommit(
                ws, claimed.id, claimed.fence, "t@1", heard, {}, heard.say, Masker()
            )
            self._listen(ws)
            pool = self.run._pool(ws, claimed.id)
            loop = assemble(
                ws, survey, commits, pool, options or Options(jobs=1), claimed, None, handover
            )
            commits.keys.close()
            return loop

    def _listen(self, ws: Workspace) -> None:
        def adopt(_ws: Workspace, run: str) -> dict[str, Any]:
            self.adopted.append(run)
            return {}

        def attempts(run: str) -> list[Any]:
            self.counted.append(run)
            return []

        self.patch.setattr(takeover, "adopt_attempts", adopt)
        self.patch.setattr(ws.store.runs, "attempts", attempts)
        self.patch.setattr(type(ws.objects.tiny), "inherit", lambda _tiny: self.inherited.append(1))
        self.patch.setattr(ws.traces, "rely", lambda recipe, _alone: self.relied.append(recipe))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(tmp_path, monkeypatch)


@pytest.mark.parametrize(("handover", "handles"), [(None, True), (Handover(), False)])
def test_a_run_handles_signals_unless_its_worker_hands_them_over(
    made: Made, handover: Handover | None, handles: bool
) -> None:
    assert made.assemble(handover=handover)._handles_signals == handles


@pytest.mark.parametrize(("contended", "relied"), [(False, ["t@1"]), (True, [])])
def test_the_survey_is_relied_on_unless_another_run_has_stored_results_since(
    made: Made, contended: bool, relied: list[str]
) -> None:
    made.assemble(Options(jobs=1, contended=contended))
    assert made.relied == relied


@pytest.mark.parametrize(
    ("resumed", "delivers", "counts", "adopts"),
    [
        (False, False, False, False),
        (False, True, False, False),
        (True, False, True, False),
        (True, True, True, True),
    ],
)
def test_attempts_of_earlier_workers_are_counted_and_those_elsewhere_adopted(
    made: Made, resumed: bool, delivers: bool, counts: bool, adopts: bool
) -> None:
    made.delivers = delivers
    made.assemble(resumed=resumed)
    assert (bool(made.counted), bool(made.adopted)) == (counts, adopts)


def test_small_files_of_killed_workers_are_taken_over(made: Made) -> None:
    made.assemble()
    assert made.inherited == [1]


def test_steps_of_an_earlier_worker_go_on_from_their_states(made: Made) -> None:
    loop = made.assemble(
        Options(jobs=1, keep_going=True), states={"a": State.QUEUED, "b": State.FAILED}
    )
    schedule = loop.owners.schedule
    assert (schedule.state("a"), schedule.state("b")) == ("READY", "FAILED")


def _most_at_once(root: Path, options: Options) -> int:
    """The greatest number of steps that ran at the same time."""
    running: set[str] = set()
    most = 0

    def step(name: str) -> Callable[[StartedJob], Any]:
        async def program(job: StartedJob) -> Any:
            nonlocal most
            running.add(name)
            most = max(most, len(running))
            found = await runs_for(5, writes(**{name: "1"}))(job)
            running.remove(name)
            return found

        return program

    run = SimulatedRun(root, RECIPE, {"a": step("a"), "b": step("b")}, options=options)
    assert run.run().state == "COMPLETED"
    return most


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (Options(jobs=4), 1),  # a pool without a size admits one step
        (Options(jobs=4, pools={"slots": 2.0}), 2),
        (Options(jobs=1, pools={"slots": 2.0}), 1),
    ],
)
def test_as_many_steps_run_at_once_as_jobs_and_pools_allow(
    tmp_path: Path, options: Options, most: int
) -> None:
    assert _most_at_once(tmp_path, options) == most


@pytest.mark.parametrize("link", [False, True])
def test_outputs_are_links_if_asked(tmp_path: Path, link: bool) -> None:
    options = Options(jobs=1, pools={"slots": 1.0}, link=link)
    programs = {"a": writes(a="1" * 100_000), "b": writes(b="2")}
    assert SimulatedRun(tmp_path, RECIPE, programs, options=options).run().state == "COMPLETED"
    assert ((tmp_path / "a.txt").stat().st_nlink > 1) == link


@pytest.mark.parametrize(("spent", "after"), [(0, "QUEUED"), (1, "FAILED")])
def test_retries_that_an_earlier_worker_spent_are_not_had_again(
    made: Made, spent: int, after: str
) -> None:
    schedule = made.assemble(spent={"a": SpentRetries(failures=spent)}).owners.schedule
    schedule.judge("a", "run", "")
    schedule.start("a")
    assert schedule.end("a", AttemptOutcome(False)).after == after


def test_the_sizes_of_this_machine_are_those_that_steps_ask_for() -> None:
    asked: list[str] = []

    def total(names: Iterable[str]) -> dict[str, float]:
        asked.extend(names)
        return {"cpus": 4.0}

    spec = StepSpec("", "a", {}, resources=ResourceSpec(cpus=2, pools={"slots": 1, "port": 1}))
    plan: Any = Of(specs=lambda: [spec])
    pool: Any = Of(total_capacity=total)
    found = _capacity_of(plan, pool, {"slots": 3.0})
    assert asked == ["cpus"] and found == {"cpus": 4.0, "slots": 3.0, "port": 1.0}
