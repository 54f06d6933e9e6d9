"""Processing of a finished attempt: diagnose it and store its result or failure."""

from __future__ import annotations

import contextlib
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...errors import StoreUnavailable
from ...logs import Log
from ...planning.ids import readable
from ...planning.schedule import BUSY, EARLY
from . import attempt_result
from .attempt import Attempt
from .commit import GroupCommit
from .diagnosis import Diagnosis
from .early import EarlyStops
from .environments import StepEnvironments
from .failure_recorder import FailureRecorder
from .renting import Machines
from .running_attempts import End, RunningAttempts
from .success_recorder import SuccessRecorder

_log: Final = Log("loop")


class Ender:
    """Processor of finished attempts of one run, one after another."""

    def __init__(
        self,
        commits: GroupCommit,
        running: RunningAttempts,
        machines: Machines,
        environments: StepEnvironments,
        early_stops: EarlyStops,
        diagnosis: Diagnosis,
        successes: SuccessRecorder,
        failures: FailureRecorder,
    ) -> None:
        self._commits, self._running, self._machines = commits, running, machines
        self._environments, self._early_stops = environments, early_stops
        self._diagnosis, self._successes, self._failures = diagnosis, successes, failures

    async def end_next(self) -> bool:
        """Process the next finished attempt; return False if there is none."""
        if not self._running.has_ended:
            return False
        await self.end(*self._running.next_end())
        return True

    async def end(self, id: str, end: End) -> None:
        """Process a finished attempt: store its outputs or its failure.

        Raises StoreUnavailable, which says nothing about the attempt: the next worker takes it up.
        """
        if isinstance(end, StoreUnavailable):
            raise end
        attempt = self._running.pop(id)
        if isinstance(end, Exit):
            _log_exit(id, attempt, end)
        for words in attempt_result.remove_replaced(attempt.directory.path, attempt.logs):
            self._commits.say(f"{readable(id)}: {words}")
        try:
            await self._record(id, attempt, end)
        finally:
            self._early_stops.forget(id)
            attempt.release_lock()
            if attempt.key is not None:
                self._commits.release_after_flush(attempt.key)

    async def _record(self, id: str, attempt: Attempt, end: End) -> None:
        """Record an attempt as a success or a failure, or queue its step again."""
        exit = None
        if isinstance(end, Exit):
            exit = end
            await self._close_containers(attempt, exit)
            if exit.reason == BUSY:
                self._failures.queue_again(id, attempt)
                return
        elif isinstance(end, HostLost):
            self._machines.lose(attempt.place, end)
        cause = await self._diagnosis.cause_of(id, attempt, end)
        if cause is not None and cause.reason == EARLY:
            self._failures.stop_early(id, attempt, cause, exit)
        elif cause is not None:
            self._failures.fail(id, attempt, cause, exit)
        elif exit is not None and attempt.result is not None:
            self._successes.store(id, attempt, exit, attempt.result)

    async def _close_containers(self, attempt: Attempt, exit: Exit) -> None:
        if not self._environments.container_image(attempt.spec, attempt.place):
            return
        parts = attempt.task.parts or [attempt.task]
        for place, part in zip(attempt.place.members, parts, strict=True):
            containers = self._environments.containers_of(place)
            with contextlib.suppress(DriverError):
                await containers.clean_up(place.paths(part.attempt).cwd, exit)


def _log_exit(id: str, attempt: Attempt, exit: Exit) -> None:
    _log.info(
        "%s ended on %s: %s %s after %.3f s",
        readable(id),
        attempt.place.name,
        exit.reason,
        exit.code,
        exit.ended - exit.started,
    )
