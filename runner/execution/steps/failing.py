"""Handling of failed attempts: retry the step or fail it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from drivers.base import Exit

from ...digest import Digest
from ...failures import StepFailure
from ...hosts.place.capacity import SOONEST_LOOK
from ...planning.plan import ALLOW_FAILURE
from ...planning.schedule import BUSY, AttemptOutcome, Move, State
from .adjusting import SmallerInputs
from .commit import GroupCommit
from .run_plan import RunPlan
from .run_schedule import RunSchedule

LINES: Final = 10
"""Number of log lines stored with the failure of a step."""
LONGEST_LINE: Final = 200


class FailureDetails(NamedTuple):
    """Failed step with its log and hint, secrets masked."""

    id: str
    reason: str
    tail: bytes
    log: str
    hint: str
    left: str = ""  # directory of its files; empty without files
    kind: str = "exit"  # stored kind of failure
    error: str = ""  # error in the log, or description of the exit
    allowed: bool = False  # the run may complete without the step

    @property
    def has_begun(self) -> bool:
        """Return True if the command of the failed step ran."""
        return self.kind not in (StepFailure.ERROR, StepFailure.UNPLACED)

    @property
    def is_unplaced(self) -> bool:
        """Return True if no host was available for the step."""
        return self.kind == StepFailure.UNPLACED


class Cause(NamedTuple):
    """Cause of a failed attempt: a reason code, a sentence and a fix."""

    reason: str
    words: str
    fix: str = ""


class Evidence(NamedTuple):
    """Log, files and exit of a failed attempt."""

    tail: bytes = b""
    """End of the attempt's log, with secrets masked."""
    log: str = ""
    left: str = ""
    """Directory of the attempt's files; empty without files."""
    error: str = ""
    """Error message in the log; empty if there is none."""
    warnings: Sequence[str] = ()
    exit: Exit | None = None
    saved: bool = False
    """Whether the attempt saved a new checkpoint."""


NOTHING_LEFT: Final = Evidence()


class Failures:
    """Recorder of the failed attempts of one run."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        smaller_inputs: SmallerInputs,
    ) -> None:
        self._steps, self._schedule, self._commits = steps, schedule, commits
        self._smaller_inputs = smaller_inputs
        self._final: list[FailureDetails] = []

    @property
    def final(self) -> list[FailureDetails]:
        """Failures of steps that are not retried, in order."""
        return self._final

    def fail(self, id: str, cause: Cause, left: Evidence = NOTHING_LEFT) -> None:
        """Record a failed attempt of a RUNNING step, and retry the step or fail it."""
        self._schedule.disturb()
        smaller = self._smaller_inputs.divide(id) if cause.reason == "oom" else ""
        outcome = AttemptOutcome(False, cause.reason, cause.words, left.saved, bool(smaller))
        lines = last_lines(left.tail)
        own = self._schedule.end(
            id, outcome, _facts_of(cause, left), if_failed={"tail": lines} if lines else {}
        )
        if own.after == State.QUEUED and smaller:
            self._commits.say(f"{id} ran out of memory; retrying with {smaller}")
            self._schedule.judge_again(id, f"out of memory; retrying with {smaller}")
        elif own.after == State.QUEUED:
            self._schedule.rest(id, _seconds_of(own))
        elif own.after == State.FAILED:
            self._steps.set_failed(id)
            self._final.append(self._failure_of(id, cause, left))

    def fail_unstarted(self, id: str, cause: Cause) -> None:
        """Fail a QUEUED step that could not start."""
        self._schedule.start(id)
        self.fail(id, cause)

    def queue_again(self, id: str, key: Digest | None = None) -> None:
        """Queue a step again whose attempt did not start, without using up a retry.

        Another run took its GPU, or its host was lost. The key is released after the next flush.
        """
        if key is not None:
            self._commits.release_after_flush(key)
        self._schedule.end(id, AttemptOutcome(False, BUSY))
        self._schedule.rest(id, SOONEST_LOOK)

    def _failure_of(self, id: str, cause: Cause, left: Evidence) -> FailureDetails:
        masked = self._commits.masker.text
        return FailureDetails(
            id,
            masked(cause.words or cause.reason),
            left.tail,
            left.log,
            masked(cause.fix),
            left.left,
            cause.reason,
            masked(left.error or cause.words or cause.reason),
            bool(self._steps.node(id).flags & ALLOW_FAILURE),
        )


def last_lines(tail: bytes) -> list[str]:
    """Return the last log lines of a step, for storage with its failure."""
    lines = [line.rstrip() for line in tail.decode(errors="replace").splitlines()]
    return [line[:LONGEST_LINE] for line in lines if line][-LINES:]


def _facts_of(cause: Cause, left: Evidence) -> dict[str, object]:
    """Return the facts about a failure that are stored with its event."""
    facts: dict[str, object] = {}
    if left.error:
        facts["error"] = left.error
    if cause.fix:
        facts["fix"] = cause.fix
    if left.warnings:
        facts["warnings"] = list(left.warnings)
    if left.exit is not None:
        if left.exit.code is not None:
            facts["exit"] = left.exit.code
        if left.exit.signal is not None:
            facts["signal"] = left.exit.signal
    return facts


def _seconds_of(move: Move) -> float:
    """Return the delay before the next attempt, in seconds."""
    wait = move.data.get("wait", 0.0)
    return float(wait) if isinstance(wait, int | float) else 0.0
