"""Reattachment to an earlier worker's attempt that still runs, or ended without a worker."""

from __future__ import annotations

import sys
from collections.abc import Collection

from drivers.base import HostLost, Unreachable

from ...planning.plan import UNCACHED
from .attempt import Attempt
from .inputs import InputStager
from .orphans import Orphans
from .preparing import Preparer
from .renting import Machines
from .run_plan import RunPlan


class NotNow(Exception):
    """Signal that an attempt's host or GPUs are unavailable, so that its step is queued again."""


class Reattacher:
    """Finder of attempts left by earlier workers of the same workspace."""

    def __init__(
        self,
        steps: RunPlan,
        orphans: Orphans,
        preparer: Preparer,
        stager: InputStager,
        machines: Machines,
        inherited: Collection[str],
    ) -> None:
        """Create the finder of earlier attempts.

        `inherited` names attempts started and staged on another machine.
        """
        self._steps, self._orphans, self._preparer = steps, orphans, preparer
        self._stager, self._machines, self._inherited = stager, machines, inherited

    async def find(self, attempt: Attempt) -> Attempt | None:
        """Return an earlier worker's attempt with the same cache key; None if none can continue.

        Raises NotNow if its host does not answer, and RecipeError, OSError, DriverError.
        """
        if attempt.key is None:
            return None
        # Runs although a result exists.
        is_forced = self._steps.verdicts[attempt.id].forced
        always = is_forced or bool(attempt.node.flags & UNCACHED)
        for name in self._orphans.take(attempt.key[:24]):
            found = await self._join(attempt, name, always)
            if found is not None:
                return found
        return None

    async def _join(self, attempt: Attempt, name: str, always: bool) -> Attempt | None:
        try:
            left = await self._orphans.find_job(attempt.node, name, always)
        except HostLost as error:
            self._machines.lose(self._orphans.place_of(name) or attempt.place, error)
            raise NotNow from error
        except Unreachable as error:  # its agent exited, or another one is starting
            self._orphans.look_again()
            raise NotNow from error
        if left is None:
            return None
        job, place = left
        found = attempt.begun_by_earlier_worker(name, place)
        self._preparer.compose_task(found, [sys.executable] * len(place.members))
        if name not in self._inherited and not self._stager.recall(found.node, found.directory):
            await self._orphans.end(found.node, job, place)
            return None
        found.task.job, found.task.rejoined = job, True
        return found
