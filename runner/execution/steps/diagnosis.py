"""Causes of failed attempts, found from exit code, stop requests and log."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...errors import RecipeError
from ...hosts.pool import HostPool
from ...planning import causes
from ...planning.schedule import EARLY, LIMIT
from ...secrets import Masker
from ...storage import metrics
from . import attempt_result
from .attempt import Attempt
from .control import Stopper
from .diverging import NAN, DivergedLosses
from .early import EarlyStops
from .environments import StepEnvironments
from .failing import Cause
from .health import PATIENCE, HealthChecks
from .running_attempts import End

UNWATCHED: Final = 3
"""Number of agent crashes during a step, in one run, at which the step fails."""


class Diagnosis:
    """Finder of the causes of one run's failed attempts."""

    def __init__(
        self,
        pool: HostPool,
        environments: StepEnvironments,
        stopper: Stopper,
        early_stops: EarlyStops,
        health: HealthChecks,
        diverged: DivergedLosses,
        masker: Masker,
    ) -> None:
        self._pool, self._environments, self._stopper = pool, environments, stopper
        self._early_stops, self._health = early_stops, health
        self._diverged, self._masker = diverged, masker
        self._unwatched: Counter[str] = Counter()  # kills of the agent, by step

    async def cause_of(self, id: str, attempt: Attempt, end: End) -> Cause | None:
        """Return the cause of a failed attempt; None if the attempt succeeded."""
        if not isinstance(end, Exit):
            return self._cause_of_error(attempt, end)
        if end.reason == "stopped":
            stopped = self._cause_of_stop(id, attempt, end)
            if stopped is not None:
                return stopped
        if end.code == 0 and end.reason == "exit":
            return _cause_of_outputs(attempt)
        return await self._cause_of_exit(id, attempt, end)

    def _cause_of_error(self, attempt: Attempt, error: DriverError | RecipeError) -> Cause:
        if isinstance(error, RecipeError):
            return self._limit() or Cause("error", str(error), error.fix)
        if isinstance(error, HostLost):
            preempted = self._pool.spot.is_preemptible(attempt.place)
            return Cause("preempted" if preempted else "lost", str(error))
        return Cause("driver", str(error))

    def _limit(self) -> Cause | None:
        if not self._stopper.limit:
            return None
        return Cause(LIMIT, f"stopped: {self._stopper.limit}")

    def _cause_of_stop(self, id: str, attempt: Attempt, end: Exit) -> Cause | None:
        """Return the cause for which an attempt was stopped; None if the whole run was stopped."""
        stopping = self._stopper.is_stopping
        early = self._early_stops.reason_for(id)
        if early and not stopping:
            return Cause(EARLY, early)
        limit = self._limit()
        if limit is not None:
            return limit
        diverged = self._diverged.words_of(attempt)
        if diverged and attempt.spec.options.ends_on_nan:
            return Cause(NAN, diverged)
        if end.detail:
            attempt.place.record_end(end.detail)
        preempted = None if stopping else _cause_of_preemption(attempt)
        if preempted is not None:
            return preempted
        if self._health.take_sick(id):
            return Cause("health", f"the recipe's health check failed {PATIENCE} times in a row")
        return None if stopping else _cause_of_lost_job(attempt, end)

    async def _cause_of_exit(self, id: str, attempt: Attempt, exit: Exit) -> Cause:
        """Return the cause of a non-zero exit, from the log and the host."""
        tail = attempt_result.read_tail(attempt.last_log, self._masker)
        words = self._describe_exit(attempt, exit, tail)
        member = attempt.place.members[_node_of(attempt)]
        where = member.elsewhere
        if exit.reason == "lost" and not where and self._is_unwatched(id):
            return Cause(
                "unwatched",
                f"the agent on this machine was killed {UNWATCHED} times during the step",
            )
        reason = attempt_result.reason_of(exit)
        if reason == "exit":
            full = attempt_result.describe_full_disk(
                tail, await member.folder.find_free_space(), where
            )
            if full:
                return Cause("disk", f"{words}: {full}")
        if exit.signal == signal.SIGTERM and where and self._is_taken_away(attempt):
            return Cause("preempted", f"{words}: {where} is being preempted")
        if reason in ("timeout", "idle") and _is_stalled(attempt):
            reason = "stalled"
        return Cause(causes.find_exit_cause(reason, tail.decode(errors="replace")), words)

    def _describe_exit(self, attempt: Attempt, exit: Exit, tail: bytes) -> str:
        """Describe a non-zero exit, with its node and host."""
        image = self._environments.container_image(attempt.spec, attempt.place)
        words = attempt_result.describe_exit(exit, attempt.spec, image, tail)
        node = _node_of(attempt)
        where = attempt.place.members[node].elsewhere
        if len(attempt.place.members) > 1:
            words += f" on node {node} ({where})"
        if not where:
            return words
        if exit.reason == "lost":
            return f"{words} ({where} was restarted, or the process was killed there)"
        if attempt_result.reason_of(exit) == "exit" and exit.code == 127 and not image:
            return f"{words} on {where}; run `recipe doctor --driver {self._pool.name}` to see the installed programs"
        return words

    def _is_unwatched(self, id: str) -> bool:
        """Return True if the agent of this machine was killed too often during a step.

        This process survives, so the step itself is the likely cause and fails.
        """
        self._unwatched[id] += 1
        return self._unwatched[id] >= UNWATCHED

    def _is_taken_away(self, attempt: Attempt) -> bool:
        """Return True if a SIGTERM from outside may be the preemption of a spot machine."""
        return self._pool.spot.is_preemptible(attempt.place) and not attempt.stop_asked


def _node_of(attempt: Attempt) -> int:
    """Return the number of the node whose exit ended an attempt."""
    return attempt.result.node if attempt.result is not None else 0


def _is_stalled(attempt: Attempt) -> bool:
    """Return True if an attempt had stopped to report progress before its time was over."""
    return causes.is_stalled(*metrics.pace(Path(attempt.metrics_file)))


def _cause_of_preemption(attempt: Attempt) -> Cause | None:
    leaving = [place for place in attempt.place.members if place.leaving]
    if not leaving:
        return None
    return Cause("preempted", f"{leaving[0].name}: {leaving[0].leaving}")


def _cause_of_lost_job(attempt: Attempt, end: Exit) -> Cause | None:
    """Return the cause if the host or an earlier run stopped the job; otherwise None."""
    if end.detail:
        return Cause("lost", f"{attempt.place.name} stopped the step: {end.detail}")
    if attempt.is_reattached:
        return Cause("lost", "an earlier run had stopped the step and then exited")
    return None


def _cause_of_outputs(attempt: Attempt) -> Cause | None:
    """Return the problem with the outputs of a successful command; None if there is none."""
    assert attempt.result is not None
    problem, words = attempt.result.problem, attempt.result.words
    if problem == "input":
        return Cause("input", f"{words}; inputs are read-only")
    if problem == "output":
        return Cause("lost" if attempt.is_reattached else "output", f"{words} (exit 0)")
    if problem == "full":
        return Cause("disk", words)
    return Cause(problem, words) if problem else None


def error_of(cause: Cause, tail: bytes) -> str:
    """Extract the error message of a failed command from the end of its log.

    Empty if the log has none, or if the command did not cause the failure.
    """
    if cause.reason not in ("exit", "oom", "nan", "signal", "disk"):
        return ""
    text = tail.decode(errors="replace")
    error = causes.find_error(text)
    if error:
        return error
    last = causes.find_last_line(text)
    return f"{cause.words}: {last}" if last and cause.reason == "exit" else ""
