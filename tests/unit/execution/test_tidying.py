"""What stays of an attempt's files, and when the rest is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

RECIPE = "steps: {a: {run: 'true', deps: [in.txt], metrics: true, outputs: {o: a.txt}}}"


@pytest.fixture(autouse=True)
def _input(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("given")


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_failed_attempt_without_own_files_leaves_no_directory_to_look_at(tmp_path: Path) -> None:
    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": exits(1)}).run().failures
    assert failure.left == ""


def test_a_failed_attempt_with_own_files_leaves_them_with_its_inputs(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        await writes(half="1")(job)
        return await exits(1)(job)

    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": fails}).run().failures
    assert Path(failure.left).name.startswith("failed-")
    assert names_below(Path(failure.left)) == ["half.txt", "in.txt"]


def test_logs_and_metrics_of_all_attempts_are_kept_by_their_numbers(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        job.report('{"loss": 2}\n')
        return await exits(1, "first\n")(job)

    async def works(job: StartedJob) -> Exit:
        job.print("second\n")
        job.report('{"loss": 1}\n')
        return await writes(a="1")(job)

    recipe = RECIPE.replace("outputs", "retries: 1, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": [fails, works]})
    assert run.run().state == "COMPLETED"
    kept = tmp_path / ".recipe/runs" / run.run_id
    logs = [(kept / f"a.{number}.log").read_text() for number in (1, 2)]
    assert logs == ["first\n", "second\n"]
    metrics = [(kept / f"a.{number}.metrics").read_text() for number in (1, 2)]
    assert metrics == ['{"loss": 2}\n', '{"loss": 1}\n']


def test_after_a_success_nothing_is_left_among_the_attempts(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"a": writes(a="1", more="2")})
    assert run.run().state == "COMPLETED"
    assert names_below(tmp_path / ".recipe/attempts") == []


def test_steps_of_two_recipes_keep_their_failures_apart(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        await writes(half="1")(job)
        return await exits(1)(job)

    (first,) = SimulatedRun(tmp_path, RECIPE, {"a": fails}).run().failures
    other = RECIPE.replace("{a:", "{b:")
    (second,) = SimulatedRun(tmp_path, other, {"b": fails}).run().failures
    assert first.left != second.left and Path(first.left).exists()
    with Workspace.open(tmp_path) as ws:
        assert len(ws.store.runs.latest()) == 2
