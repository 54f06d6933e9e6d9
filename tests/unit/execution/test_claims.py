"""Keys and states are held by one attempt at a time."""

from __future__ import annotations

from pathlib import Path

from runner.execution.steps.commit import Keys
from tests.unit.execution.fakes import SimulatedRun, exits, runs_for, writes

SUB = """recipe: sub@1
summary: A test
inputs: {rank: {type: integer}}
steps:
  data: {run: "echo data", outputs: {o: data.txt}}
  train: {run: "echo {{ inputs.rank }} {{ steps.data.o }}"}
"""
TWINS = """
steps:
  s: {matrix: {rank: [4, 8]}, uses: ./sub.yaml, with: {rank: "{{ matrix.rank }}"}}
"""
DATA = ("s[rank=4]/data", "s[rank=8]/data")


def test_steps_that_make_the_same_run_once_and_both_publish(tmp_path: Path) -> None:
    (tmp_path / "sub.yaml").write_text(SUB)
    slow = runs_for(5, writes(data="1"))
    run = SimulatedRun(tmp_path, TWINS, dict.fromkeys(DATA, slow))
    assert run.run().state == "COMPLETED" and len(run.agents[""].started) == 3
    assert "another step of this run produced the result" in [event.reason for event in run.steps]
    found = [(tmp_path / f"s[rank={rank}]/data.txt").read_text() for rank in (4, 8)]
    assert found == ["1", "1"]


def test_the_second_runs_by_itself_when_the_first_fails(tmp_path: Path) -> None:
    (tmp_path / "sub.yaml").write_text(SUB)
    run = SimulatedRun(tmp_path, TWINS, dict.fromkeys(DATA, exits(1)))
    report = run.run()
    assert report.counts["FAILED"] >= 1 and set(run.started) <= set(DATA)


def test_a_key_that_another_run_holds_is_waited_for(tmp_path: Path) -> None:
    recipe = 'steps: {a: {run: "true", outputs: {o: a.txt}}}'
    SimulatedRun(tmp_path, recipe, {"a": exits(1)}).run()
    held: list[Keys] = []

    async def release(run: SimulatedRun) -> None:
        await run.until(lambda: run.loop)
        key = run.own.steps.verdicts["a"].key
        other = Keys(str(tmp_path / ".recipe" / "locks" / "keys"))
        assert other.try_hold(key)
        held.append(other)
        seen.append(len(run.agents[""].started))
        await run.until(lambda: run.own.schedule._resting)
        seen.append(len(run.agents[""].started))
        other.release(key)
        other.close()

    seen: list[int] = []
    run = SimulatedRun(tmp_path, recipe, {"a": writes(a="1")}, then=release)
    assert run.run().state == "COMPLETED" and run.agents[""].started == ["a"]
    assert seen == [0, 0]
