"""What is stored of an attempt that failed, was stopped early or could not be stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from runner.execution.steps import tidying
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

RECIPE = "steps: {a: {run: 'true', outputs: {o: a.txt}}}"


def test_an_attempt_that_filled_the_disk_leaves_no_files(tmp_path: Path) -> None:
    async def fills(job: StartedJob) -> Exit:
        await writes(b="much")(job)
        return await exits(1, "OSError: [Errno 28] No space left on device\n")(job)

    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": fills}).run().failures
    assert failure.kind == "disk" and failure.left == ""
    assert not list((tmp_path / ".recipe/attempts").glob("*/b.txt"))
    assert "No space left" in Path(failure.log).read_text()


def test_a_log_that_cannot_be_stored_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_words: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tidying.attempt_result, "copy_log", refuse)
    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": exits(1, "ValueError\n")}).run().failures
    assert "; the log stays in place (" in failure.reason
    assert Path(failure.log).read_text() == "ValueError\n"


def test_a_failed_attempt_has_its_row_its_log_and_its_warnings(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        job.report('{"step": 1, "loss": 0.5}\n{"warning": "few rows"}\n')
        return await exits(3, "reading\nValueError: no rows\n")(job)

    recipe = RECIPE.replace("outputs", "metrics: true, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": fails})
    (failure,) = run.run().failures
    own = run.last_of("a")
    assert own.after == "FAILED" and own.data["warnings"] == ["few rows"]
    with Workspace.open(tmp_path) as ws:
        (row,) = ws.store.runs.attempts(run.run_id)
    assert (row.outcome, row.reason) == ("failed", "exit") and failure.log


def test_files_of_the_last_failure_replace_those_of_the_one_before(tmp_path: Path) -> None:
    for text in ("first", "second"):

        async def fails(job: StartedJob, text: str = text) -> Exit:
            await writes(c=text)(job)
            return await exits(1)(job)

        (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": fails}).run().failures
    assert (Path(failure.left) / "c.txt").read_text() == "second"
    assert len(list((tmp_path / ".recipe/attempts").glob("failed-*"))) == 1


def test_an_attempt_that_did_not_start_leaves_no_files_and_no_failure(tmp_path: Path) -> None:
    programs = {"a": [exits(1, reason="busy"), writes(a="1")]}
    run = SimulatedRun(tmp_path, RECIPE, programs)
    report = run.run()
    assert report.state == "COMPLETED" and not report.failures
    with Workspace.open(tmp_path) as ws:
        assert [row.outcome for row in ws.store.runs.attempts(run.run_id)] == ["done"]
    assert not list((tmp_path / ".recipe/attempts").glob("failed-*"))
