"""An attempt failed or never began: the step waits for another try, or has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from drivers.base import Exit

from ...digest import Digest
from ...failures import StepFailure
from ...hosts.place.capacity import SOONEST_LOOK
from ...planning.plan import ALLOW_FAILURE
from ...planning.schedule import BUSY, Move, Outcome, State
from .adjusting import SmallerInputs
from .commit import GroupCommit
from .run_plan import RunPlan
from .run_schedule import RunSchedule

LINES: Final = 10
"""Lines of its log that are stored with the failure of a step."""
LONGEST_LINE: Final = 200


class Failure(NamedTuple):
    """A step that failed, and what is worth reading about it, masked."""

    id: str
    reason: str
    tail: bytes
    log: str
    hint: str
    left: str = ""  # the directory of what it wrote, if it wrote anything
    kind: str = "exit"  # as it is stored
    error: str = ""  # the error itself, if the log shows it, else how it ended
    allowed: bool = False  # the run may complete without it

    @property
    def began(self) -> bool:
        """Whether its command ran."""
        return self.kind not in (StepFailure.ERROR, StepFailure.UNPLACED)

    @property
    def unplaced(self) -> bool:
        """Whether no host could be had for it."""
        return self.kind == StepFailure.UNPLACED


class Cause(NamedTuple):
    """Why an attempt failed: the scheduler's word, a sentence, what to do."""

    reason: str
    words: str
    fix: str = ""


class Evidence(NamedTuple):
    """What a failed attempt left to look at."""

    tail: bytes = b""
    """The end of its log, masked."""
    log: str = ""
    left: str = ""
    """The directory of what it wrote, if it wrote anything."""
    error: str = ""
    """The error itself, if the log shows it."""
    warnings: Sequence[str] = ()
    exit: Exit | None = None
    saved: bool = False
    """It left a new checkpoint."""


NOTHING_LEFT: Final = Evidence()


class Failures:
    """The failed attempts of one run."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        smaller_inputs: SmallerInputs,
    ) -> None:
        self._steps, self._schedule, self._commits = steps, schedule, commits
        self._smaller_inputs = smaller_inputs
        self._final: list[Failure] = []

    @property
    def final(self) -> list[Failure]:
        """Of the steps that are not tried again, in order."""
        return self._final

    def fail(self, id: str, cause: Cause, left: Evidence = NOTHING_LEFT) -> None:
        """End a RUNNING step's attempt badly."""
        self._schedule.disturb()
        smaller = self._smaller_inputs.divide(id) if cause.reason == "oom" else ""
        outcome = Outcome(False, cause.reason, cause.words, left.saved, bool(smaller))
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
        """Fail a QUEUED step that could not be started."""
        self._schedule.start(id)
        self.fail(id, cause)

    def queue_again(self, id: str, key: Digest | None = None) -> None:
        """An attempt did not begin: its step waits again, at no cost to its retries.

        A GPU was taken in the moment before, or its host is gone. `key` is let go.
        """
        if key is not None:
            self._commits.release_after_flush(key)
        self._schedule.end(id, Outcome(False, BUSY))
        self._schedule.rest(id, SOONEST_LOOK)

    def _failure_of(self, id: str, cause: Cause, left: Evidence) -> Failure:
        masked = self._commits.masker.text
        return Failure(
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
    """The last lines of what a step printed, as they are stored with its failure."""
    lines = [line.rstrip() for line in tail.decode(errors="replace").splitlines()]
    return [line[:LONGEST_LINE] for line in lines if line][-LINES:]


def _facts_of(cause: Cause, left: Evidence) -> dict[str, object]:
    """What is stored of a failure beside its reason."""
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
    """How long a step rests before another try."""
    wait = move.data.get("wait", 0.0)
    return float(wait) if isinstance(wait, int | float) else 0.0
