"""What an earlier worker began is gone on with."""

from __future__ import annotations

from pathlib import Path

from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import FakeAgent, Program, SimulatedRun, exits, runs_for, writes

RECIPE = """
steps:
  a: {run: "true", deps: [in.txt], outputs: {o: a.txt}}
  b: {run: "cat {{ steps.a.o }}"}
"""
SLOW = runs_for(100, writes(a="1"))


async def _leave(run: SimulatedRun) -> None:
    await run.until(lambda: run.agents[""].started)
    for _ in range(3):
        run.own.stopper.interrupt()


def _left(root: Path, program: Program = SLOW) -> FakeAgent:
    """The agent of a run whose worker left while `a` ran."""
    (root / "in.txt").write_text("x")
    run = SimulatedRun(root, RECIPE, {"a": program}, then=_leave)
    assert run.run().abandoned == ["a"]
    with Workspace.open(root) as ws:
        fence = ws.store.runs.get(run.run_id).fence
        ws.store.runs.release(run.run_id, fence)
    return run.agents[""]


def _goes_on(root: Path, agent: FakeAgent, ends: Program) -> SimulatedRun:
    """The next run, whose agent has the jobs of the earlier one."""
    run = SimulatedRun(root, RECIPE, {"a": writes(a="2"), "b": exits(0)})
    earlier = {key: job for key, job in agent.jobs.items() if job.step == "a"}

    async def attach(run: SimulatedRun) -> None:
        for key, job in earlier.items():
            run.agents[""].adopt(key, job, ends)

    run.before = attach
    return run


def test_a_job_that_runs_still_is_waited_for_and_not_begun_again(tmp_path: Path) -> None:
    agent = _left(tmp_path)
    run = _goes_on(tmp_path, agent, writes(a="1"))
    assert run.run().state == "COMPLETED"
    assert run.agents[""].started == ["b"] and (tmp_path / "a.txt").read_text() == "1"
    start = next(event for event in run.steps if event.after == "RUNNING")
    assert start.data["taken_up"] is True


def test_a_job_whose_input_is_not_what_its_key_says_is_ended(tmp_path: Path) -> None:
    agent = _left(tmp_path)
    (name,) = agent.jobs
    given = tmp_path / ".recipe" / "attempts" / name / "in.txt"
    given.unlink()
    given.write_text("other")
    run = _goes_on(tmp_path, agent, runs_for(100, writes(a="1")))
    assert run.run().state == "COMPLETED" and run.agents[""].started == ["a", "b"]
    assert run.agents[""].stopped == ["a"] and (tmp_path / "a.txt").read_text() == "2"


def test_a_job_that_failed_in_a_run_that_is_over_is_begun_again(tmp_path: Path) -> None:
    agent = _left(tmp_path)
    run = _goes_on(tmp_path, agent, exits(1))
    assert run.run().state == "COMPLETED" and run.agents[""].started == ["a", "b"]
