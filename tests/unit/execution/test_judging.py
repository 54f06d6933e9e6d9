"""Which steps run, are reused or skipped once their dependencies are finished."""

from __future__ import annotations

from pathlib import Path

from drivers.base import Exit
from runner.execution.steps.assembly import Options
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

CHAIN = """
steps:
  a: {run: "true", deps: [in.txt], outputs: {o: a.txt}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
outputs: {b: "{{ steps.b.o }}"}
"""
PROGRAMS = {"a": writes(a="1"), "b": writes(b="2")}


def _run(root: Path, recipe: str = CHAIN) -> SimulatedRun:
    run = SimulatedRun(root, recipe, PROGRAMS)
    assert run.run().state == "COMPLETED"
    return run


def test_a_step_with_an_equal_input_is_reused_although_its_dependency_ran(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    _run(tmp_path)
    (tmp_path / "in.txt").write_text("y")
    run = _run(tmp_path)
    assert run.started == ["a"] and run.states_of("b") == ["READY", "FRESH"]


def test_a_reused_result_that_is_not_in_place_is_restored(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x")
    _run(tmp_path)
    for each in tmp_path.rglob("b.txt"):
        if "objects" not in each.parts:
            each.unlink()
    (tmp_path / "in.txt").write_text("y")
    run = _run(tmp_path)
    assert run.last_of("b").data["restored"] is True


def test_instances_that_failed_are_left_out_of_what_needs_all(tmp_path: Path) -> None:
    recipe = """
steps:
  a: {matrix: {n: [1, 2]}, run: "echo {{ matrix.n }}", allow_failure: true, outputs: {o: "a{{ matrix.n }}.txt"}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
"""
    read: list[int] = []

    async def counts(job: StartedJob) -> Exit:
        read.append(len([*job.folder.rglob("a*.txt")]))
        return await writes(b="2")(job)

    run = SimulatedRun(
        tmp_path,
        recipe,
        {"a[n=1]": exits(1), "a[n=2]": writes(a2="1"), "b": counts},
        options=Options(jobs=4, keep_going=True),
    )
    assert run.run().state == "COMPLETED" and read == [1]
