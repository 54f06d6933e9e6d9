"""A failed attempt is tried again, or fails its step with all that is known of it."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.execution.steps.failing import (
    LINES,
    LONGEST_LINE,
    Cause,
    Evidence,
    FailureDetails,
    Failures,
    last_lines,
)
from runner.execution.steps.run_schedule import RunSchedule
from runner.planning.plan import ALLOW_FAILURE, LOCAL
from runner.planning.schedule import Scheduler, Task
from tests.unit.execution.fakes import Journal
from tests.virtual import virtual


class Run:
    """A run of one QUEUED step `a`."""

    def __init__(self, *, retries: int = 0, flags: int = 0, smaller: str = "") -> None:
        self.said, self.released, self.divided = list[str](), list[str](), list[str]()
        self.failed_steps = list[str]()
        self.smaller, self.journal = smaller, Journal()
        scheduler = Scheduler([Task("a", retries=retries)], {}, jobs=1, keep_going=True)
        self.schedule = RunSchedule(scheduler, self.journal)
        self.schedule.judge("a", "run", "")
        steps: Any = Of(set_failed=self.failed_steps.append, node=lambda _id: Of(flags=flags))
        commits: Any = Of(
            say=self.said.append,
            release_after_flush=self.released.append,
            masker=Of(text=lambda text: text.replace("hunter2", "***")),
        )
        inputs: Any = Of(divide=self._divide)
        self.failures = Failures(steps, self.schedule, commits, inputs)

    def _divide(self, id: str) -> str:
        self.divided.append(id)
        return self.smaller

    def fail(self, cause: Cause, left: Evidence | None = None) -> None:
        self.schedule.start("a")
        if left is None:
            self.failures.fail("a", cause)
        else:
            self.failures.fail("a", cause, left)

    @property
    def stored(self) -> dict[str, object]:
        """What is stored with the last move."""
        data = self.journal.moves[-1].data
        return {key: value for key, value in data.items() if key not in ("wait", "detail")}


def test_a_step_without_retries_fails_with_all_that_is_known() -> None:
    run = Run()
    evidence = Evidence(b"x\nhunter2\n", "a.log", "left/a", "hunter2 is wrong", ["few rows"])
    run.fail(Cause("exit", "exit 1 of hunter2", "give hunter2"), evidence)
    (failure,) = run.failures.final
    assert failure == FailureDetails(
        "a", "exit 1 of ***", b"x\nhunter2\n", "a.log", "give ***", "left/a", "exit", "*** is wrong"
    )
    assert run.failed_steps == ["a"] and run.schedule.state("a") == "FAILED"
    assert run.schedule.is_disturbed and not run.divided


@pytest.mark.parametrize(
    ("words", "error", "reason", "shown"),
    [
        ("exit 1", "ValueError", "exit 1", "ValueError"),
        ("exit 1", "", "exit 1", "exit 1"),
        ("", "", "exit", "exit"),
    ],
)
def test_a_failure_has_words_and_an_error_in_any_case(
    words: str, error: str, reason: str, shown: str
) -> None:
    run = Run()
    run.fail(Cause("exit", words), Evidence(error=error))
    assert (run.failures.final[0].reason, run.failures.final[0].error) == (reason, shown)


@pytest.mark.parametrize("flags", [0, LOCAL, ALLOW_FAILURE])
def test_a_failure_may_be_allowed(flags: int) -> None:
    run = Run(flags=flags)
    run.fail(Cause("exit", "exit 1"))
    assert run.failures.final[0].allowed == (flags == ALLOW_FAILURE)


@pytest.mark.parametrize(
    ("reason", "has_begun", "is_unplaced"),
    [("exit", True, False), ("error", False, False), ("unplaced", False, True)],
)
def test_a_command_has_begun_unless_the_attempt_failed_before_it(
    reason: str, has_begun: bool, is_unplaced: bool
) -> None:
    run = Run()
    run.fail(Cause(reason, "no"))
    (failure,) = run.failures.final
    assert (failure.has_begun, failure.is_unplaced) == (has_begun, is_unplaced)


@pytest.mark.parametrize(
    ("exit", "facts"),
    [
        (None, {}),
        (Exit(3), {"exit": 3}),
        (Exit(0), {"exit": 0}),
        (Exit(None, signal=9), {"signal": 9}),
        (Exit(137, signal=9), {"exit": 137, "signal": 9}),
    ],
)
def test_the_exit_of_a_failed_step_is_stored(exit: Exit | None, facts: object) -> None:
    run = Run()
    run.fail(Cause("exit", "exit"), Evidence(exit=exit))
    assert run.stored == facts


def test_error_fix_warnings_and_the_end_of_the_log_are_stored_with_a_failure() -> None:
    run = Run()
    run.fail(Cause("exit", "exit 1", "do"), Evidence(b"x\n", error="E", warnings=("few rows",)))
    assert run.stored == {"error": "E", "fix": "do", "warnings": ["few rows"], "tail": ["x"]}


def test_a_step_with_a_retry_rests_first_and_is_no_failure_of_the_run() -> None:
    with virtual() as loop:
        run = Run(retries=1)
        run.fail(Cause("exit", "exit 1"), Evidence(b"x\n"))
        assert run.failures.final == [] and not run.failed_steps and "tail" not in run.stored
        assert run.schedule.state("a") == "QUEUED" and list(run.schedule.startable()) == []
        loop.now += 1.0
        assert list(run.schedule.startable()) == ["a"]
        run.fail(Cause("exit", "exit 1"))
        assert len(run.failures.final) == 1


def test_a_step_that_ran_out_of_memory_is_judged_again_with_smaller_inputs() -> None:
    run = Run(smaller="batch 4")
    run.fail(Cause("oom", "out of memory"))
    assert run.said == ["a ran out of memory; retrying with batch 4"]
    assert run.schedule.state("a") == "READY" and run.failures.final == []


@pytest.mark.parametrize(("reason", "divided"), [("oom", ["a"]), ("exit", [])])
def test_inputs_are_made_smaller_only_for_want_of_memory(reason: str, divided: list[str]) -> None:
    run = Run()
    run.fail(Cause(reason, "failed"))
    assert run.divided == divided and run.schedule.state("a") == "FAILED" and run.said == []


def test_a_lost_host_costs_no_retry_if_a_checkpoint_was_saved() -> None:
    run = Run()
    for _ in range(30):
        run.fail(Cause("lost", "gone"), Evidence(saved=True))
    assert run.failures.final == [] and run.schedule.state("a") == "QUEUED"
    for _ in range(30):
        if run.schedule.state("a") == "QUEUED":
            run.fail(Cause("lost", "gone"), Evidence(saved=False))
    assert len(run.failures.final) == 1


def test_a_step_that_could_not_start_fails_as_if_it_had() -> None:
    run = Run()
    run.failures.fail_unstarted("a", Cause("error", "no such image"))
    assert [after for _, after in run.journal.states[-2:]] == ["RUNNING", "FAILED"]
    assert run.failures.final[0].reason == "no such image"


@pytest.mark.parametrize(("key", "released"), [("k", ["k"]), (None, [])])
def test_an_attempt_that_did_not_begin_is_queued_again_at_no_cost(
    key: Any, released: list[str]
) -> None:
    with virtual() as loop:
        run = Run()
        run.schedule.start("a")
        run.failures.queue_again("a", key)
        assert run.schedule.state("a") == "QUEUED" and run.released == released
        assert list(run.schedule.startable()) == [] and run.failures.final == []
        loop.now += 0.2
        assert list(run.schedule.startable()) == ["a"]


def test_the_last_lines_of_a_log_are_kept_without_empty_ones() -> None:
    assert last_lines(b"") == [] and last_lines(b"a  \n\n \nb\xff\n") == ["a", "b\ufffd"]
    lines = last_lines(b"\n".join(b"%d" % n for n in range(LINES + 5)))
    assert len(lines) == LINES and lines[-1] == str(LINES + 4)
    assert last_lines(b"x" * 999) == ["x" * LONGEST_LINE]
