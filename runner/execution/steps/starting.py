"""Start of steps: choose a host, and claim GPUs, cache key and checkpoints for the launch.

Every claim is released on every exit path.
"""

from __future__ import annotations

from typing import Final

from drivers.base import DriverError, HostLost

from ...planning.judge import world_of
from ...storage.content.files import no_space
from .attempt import Attempt
from .claims import KeyClaims, StateClaims
from .commit import GroupCommit
from .failing import Cause, Failures
from .judging import Judge
from .launching import Launcher
from .placement import Placement
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule

NO_ROOM: Final = 0.2
"""Delay of a step without a free host or with its checkpoints in use, in seconds."""


class Starter:
    """Starter of one run's attempts."""

    def __init__(
        self,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        judge: Judge,
        placement: Placement,
        keys: KeyClaims,
        states: StateClaims,
        launcher: Launcher,
        failures: Failures,
        machines: Machines,
    ) -> None:
        self._steps, self._schedule, self._commits, self._judge = steps, schedule, commits, judge
        self._placement, self._keys, self._states = placement, keys, states
        self._launcher, self._failures, self._machines = launcher, failures, machines

    async def start_ready(self) -> bool:
        """Start every queued step that fits on a host; return True if a step changed its state."""
        moved = False
        for id in self._schedule.startable():
            moved |= await self._start(id)
        return moved

    # -- one step

    async def _start(self, id: str) -> bool:
        """Start an attempt of a step; return True if the step changed its state."""
        refusal = self._judge.refusal_of(id)
        if refusal is not None:
            self._failures.fail_unstarted(id, refusal)
            return True
        steps, n = self._steps, self._steps.number(id)
        node, spec, key = steps.node(id), steps.spec(id), steps.verdicts[id].key
        if key is not None and self._keys.is_out_of_reach(id, key):
            return False
        place = self._placement.find(node, spec)
        if place is None:
            self._schedule.rest(id, NO_ROOM)
            return self._placement.settle_unplaced(node, spec)
        world, _ = world_of(node, steps.facts, steps.made)
        attempt = Attempt(n, node, spec, key, world, place)
        # An earlier worker's attempt with this key may hold the GPUs.
        if attempt.gpus and not self._keys.has_orphan(key):
            has_moved = await self._pick_gpus(attempt)
            if not attempt.devices:
                return has_moved
        if key is not None and not self._keys.claim(id, n, key):
            return True  # another step can use the host
        return await self._open_and_launch(id, attempt)

    async def _pick_gpus(self, attempt: Attempt) -> bool:
        """Reserve free GPUs for an attempt; return True if the step failed or its host was lost."""
        try:
            attempt.devices = await self._placement.pick_gpus(
                attempt.id, attempt.place, attempt.gpus
            )
        except HostLost as error:
            self._machines.lose(attempt.place, error)
            return True
        except DriverError as error:
            self._failures.fail_unstarted(attempt.id, Cause("error", str(error)))
            return True
        return False

    async def _open_and_launch(self, id: str, attempt: Attempt) -> bool:
        """Claim the checkpoint directory of an attempt and launch the attempt.

        Return True if the step changed its state.
        """
        try:
            is_open = await self._states.open(attempt)
        except OSError as error:
            self._give_back(attempt)
            full = no_space(error, error.filename or "")
            self._failures.fail_unstarted(id, Cause("disk", str(full)))
            return True
        if not is_open:
            self._schedule.rest(id, NO_ROOM)
        # After an interrupt or at the run's limit, no step starts.
        if not is_open or self._schedule.is_disturbed:
            self._give_back(attempt)
            return False
        await self._launcher.launch(id, attempt)
        return True

    def _give_back(self, attempt: Attempt) -> None:
        """Release the cache key and the checkpoint directory of an attempt that does not start."""
        attempt.release_lock()
        if attempt.key is not None:
            self._commits.release(attempt.key)
