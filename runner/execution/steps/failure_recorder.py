"""Storage of a failed attempt: its log, files, cause and hint."""

from __future__ import annotations

from pathlib import Path

from drivers.base import Exit

from ...planning import causes
from ...planning.halving import STOPPED
from ...planning.judge import NOTHING
from ...planning.schedule import EARLY, PREEMPTIONS, AttemptOutcome
from ...storage.content.disk import delete
from ...storage.content.files import no_space
from . import attempt_result
from .attempt import Attempt
from .attempt_records import AttemptRecords
from .commit import GroupCommit
from .diagnosis import error_of
from .failing import Cause, Evidence, Failures
from .failure_hints import FailureHints
from .orphans import Orphans
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .tidying import AttemptCleanup


class FailureRecorder:
    """Recorder of attempts that failed, were stopped early or never started."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        failures: Failures,
        orphans: Orphans,
        hints: FailureHints,
        records: AttemptRecords,
        tidying: AttemptCleanup,
    ) -> None:
        self._steps, self._schedule, self._commits = steps, schedule, commits
        self._failures, self._orphans, self._hints = failures, orphans, hints
        self._records, self._tidying = records, tidying

    def queue_again(self, id: str, attempt: Attempt) -> None:
        """Delete the files of an attempt that did not start, and queue its step again."""
        self._tidying.discard(attempt)
        self._failures.queue_again(id)

    def stop_early(self, id: str, attempt: Attempt, cause: Cause, exit: Exit | None) -> None:
        """Store the log and metrics of an attempt that was stopped early, and skip its step.

        A later run resumes from its checkpoints.
        """
        self._records.close_numbers(id, attempt)
        self._records.keep_log(id, attempt)
        links, words = self._records.links_of(id, attempt), f"{cause.reason}: {cause.words}"
        self._records.store(id, attempt, STOPPED, words, exit, links=links)
        self._tidying.discard_log(attempt)
        self._tidying.tidy(attempt, success=False)
        self._steps.set_made(attempt.number, NOTHING)
        self._schedule.end(id, AttemptOutcome(False, EARLY, cause.words))

    def fail(self, id: str, attempt: Attempt, cause: Cause, exit: Exit | None) -> None:
        """Store the log and files of a failed attempt, and record its failure with a hint."""
        tail = attempt_result.read_tail(attempt.last_log, self._commits.masker)
        warnings = self._records.warnings_of(attempt)
        diverged = self._records.close_numbers(id, attempt)
        if diverged:
            warnings.append(diverged)
        if _is_kept(attempt):
            return self._keep_for_next(id, attempt, cause, tail)
        if cause.reason == "disk":
            # The attempt's files likely fill the disk; storing the failure needs space.
            delete(Path(attempt.directory.path))
        links = self._records.links_of(id, attempt)
        words = cause.words
        try:
            log = self._records.keep_log(id, attempt)
            self._tidying.discard_log(attempt)
        except OSError as error:
            full = no_space(error, attempt.log)
            log, words = attempt.log, f"{words}; the log stays in place ({full})"
        text = tail.decode(errors="replace")
        hint = self._hints.hint_for(id, attempt, cause, text, exit)
        saved = cause.reason in PREEMPTIONS and attempt.left_checkpoint()
        name = self._tidying.failed_name(id)
        self._records.store(
            id, attempt, "failed", cause.reason, None, links=links, name=name, saved=saved
        )
        self._tidying.tidy(attempt, success=False)
        cause = Cause(cause.reason, words, hint)
        shown = attempt_result.without_launcher(tail)
        found = error_of(cause, shown) if exit is not None else ""
        left = self._tidying.kept_directory(attempt)
        evidence = Evidence(shown, log, left, found, warnings, exit, saved)
        return self._failures.fail(id, cause, evidence)

    def _keep_for_next(self, id: str, attempt: Attempt, cause: Cause, tail: bytes) -> None:
        """Leave the directory of an attempt for the next attempt, which collects its outputs."""
        self._orphans.look_again()
        words = f"{cause.words}; the outputs are kept in the attempt directory until there is disk space"
        kept = Cause(cause.reason, words, causes.REMEDIES["disk"])
        self._failures.fail(id, kept, Evidence(tail, attempt.log))


def _is_kept(attempt: Attempt) -> bool:
    """Return True if an attempt succeeded but the disk had no space for its outputs.

    The next attempt reattaches to it, as after a kill, unless its machine is released before.
    """
    return (
        attempt.result is not None
        and attempt.result.problem == "full"
        and attempt.key is not None
        and len(attempt.place.members) == 1
        and not attempt.place.is_rented
    )
