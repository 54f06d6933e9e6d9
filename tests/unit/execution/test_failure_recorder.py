"""What is stored of an attempt that failed, was stopped early or could not be stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.execution.steps import tidying
from runner.execution.steps.failing import Cause, Evidence
from runner.execution.steps.failure_recorder import FailureRecorder
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

RECIPE = "steps: {a: {run: 'true', outputs: {o: a.txt}}}"


class Owners:
    """The owners of a run that a recorder calls, and what it calls, in this order."""

    def __init__(self) -> None:
        self.calls, self.failed = list[str](), list[tuple[Cause, Evidence]]()
        self.masker, self.diverged = None, ""
        me: Any = self
        self.recorder = FailureRecorder(me, me, me, me, me, me, me, me)

    def __getattr__(self, name: str) -> Any:
        def call(*_words: object, **_more: object) -> str:
            self.calls.append(name)
            return ""

        return call

    def warnings_of(self, _attempt: Any) -> list[str]:
        return ["few rows"]

    def close_numbers(self, _id: str, _attempt: Any) -> str:
        self.calls.append("close_numbers")
        return self.diverged

    def fail(self, _id: str, cause: Cause, evidence: Evidence) -> None:
        self.failed.append((cause, evidence))

    def fail_with(self, attempt: Any, cause: Cause, exit: Exit | None = None) -> Evidence:
        self.recorder.fail("a", attempt, cause, exit)
        return self.failed[-1][1]


def attempt(root: Path, log: str = "", **more: Any) -> Any:
    """An attempt whose outputs found no space, unless changed."""
    (root / "a.log").write_text(log)
    words: dict[str, Any] = {
        "key": "k", "number": 7, "log": f"{root}/a.log", "last_log": f"{root}/a.log",
        "directory": Of(path=f"{root}/a"), "result": Of(problem="full"),
        "place": Of(members=["local"], is_rented=False), "left_checkpoint": lambda: False,
    }  # fmt: skip
    return Of(**words | more)


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Owners:
    def read(path: str, _masker: object) -> bytes:
        return Path(path).read_bytes()

    monkeypatch.setattr(tidying.attempt_result, "read_tail", read)
    return Owners()


def test_outputs_that_found_no_space_stay_for_the_next_attempt(
    tmp_path: Path, owners: Owners
) -> None:
    owners.fail_with(attempt(tmp_path), Cause("disk", "the disk is full"))
    assert owners.calls == ["close_numbers", "look_again"]
    assert "the outputs are kept in the attempt directory" in owners.failed[0][0].words


@pytest.mark.parametrize(
    "more",
    [
        {"key": None},
        {"result": None},
        {"result": Of(problem="missing")},
        {"place": Of(members=["one", "two"], is_rented=False)},
        {"place": Of(members=["one"], is_rented=True)},
    ],
)
def test_outputs_that_no_attempt_would_find_again_do_not_stay(
    tmp_path: Path, owners: Owners, more: dict[str, Any]
) -> None:
    owners.fail_with(attempt(tmp_path, **more), Cause("disk", "the disk is full"))
    assert "look_again" not in owners.calls and "tidy" in owners.calls


def test_only_a_command_that_ended_itself_has_an_error_in_its_log(
    tmp_path: Path, owners: Owners
) -> None:
    failed = attempt(tmp_path, "ValueError: no rows\n", result=None)
    cause = Cause("exit", "exit 1")
    assert owners.fail_with(failed, cause, Exit(1)).error == "ValueError: no rows"
    assert owners.fail_with(failed, cause).error == ""


def test_a_loss_that_is_no_number_is_a_warning_of_the_failure(
    tmp_path: Path, owners: Owners
) -> None:
    owners.diverged = "loss is nan at step 1"
    evidence = owners.fail_with(attempt(tmp_path, result=None), Cause("exit", "exit 1"))
    assert evidence.warnings == ["few rows", "loss is nan at step 1"]


@pytest.mark.parametrize(
    ("reason", "left", "saved"),
    [("preempted", True, True), ("preempted", False, False), ("exit", True, False)],
)
def test_a_checkpoint_counts_as_saved_if_the_machine_was_taken_away(
    tmp_path: Path, owners: Owners, reason: str, left: bool, saved: bool
) -> None:
    failed = attempt(tmp_path, result=None, left_checkpoint=lambda: left)
    assert owners.fail_with(failed, Cause(reason, "over")).saved is saved


def test_the_files_of_an_attempt_that_did_not_start_go_before_its_step_is_queued(
    owners: Owners, tmp_path: Path
) -> None:
    owners.recorder.queue_again("a", attempt(tmp_path))
    assert owners.calls == ["discard", "queue_again"]


def test_a_step_that_was_stopped_early_has_its_numbers_its_log_and_no_result(
    owners: Owners, tmp_path: Path
) -> None:
    owners.recorder.stop_early("a", attempt(tmp_path), Cause("early", "worse than b"), None)
    assert owners.calls == [
        "close_numbers", "keep_log", "links_of", "store", "discard_log", "tidy", "set_made", "end"
    ]  # fmt: skip


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
