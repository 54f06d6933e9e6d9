"""Exclusive claims on cache keys and checkpoint directories, across all machines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from drivers.base import Job

from ...digest import Digest
from ...storage.workspace import Workspace
from ..takeover import Left
from .attempt import GRACE, Attempt
from .commit import GroupCommit
from .judging import Judge
from .orphans import Orphans
from .preparing import Preparer, find_restored
from .run_schedule import RunSchedule
from .shared_states import SharedStates

KEY_IN_USE: Final = 0.1
"""Delay before a retry of a step whose key another run holds, in seconds."""
KEY_ELSEWHERE: Final = 1.0
"""Delay before a retry of a step whose key another machine may hold, in seconds."""


class KeyClaims:
    """Exclusive claims on cache keys, against other runs and other steps of this run.

    `contended`: another run has stored results since this run's survey.
    """

    def __init__(
        self,
        ws: Workspace,
        schedule: RunSchedule,
        commits: GroupCommit,
        orphans: Orphans,
        judge: Judge,
        *,
        contended: bool,
    ) -> None:
        self._ws, self._schedule, self._commits = ws, schedule, commits
        self._orphans, self._judge = orphans, judge
        self._contended = contended

    def is_out_of_reach(self, id: str, key: Digest) -> bool:
        """Return True if an unreachable agent may still run a step with this key.

        The step is then delayed.
        """
        if not self._orphans.has_unreachable(key[:24]):
            return False
        self._schedule.rest(id, KEY_ELSEWHERE)
        return True

    def has_orphan(self, key: Digest | None) -> bool:
        """Return True if an earlier worker left an unfinished attempt with this cache key."""
        return key is not None and key[:24] in self._orphans

    def claim(self, id: str, n: int, key: Digest) -> bool:
        """Claim the cache key of a step that must run; return False if the step cannot start now.

        If the key is in use, the step is delayed. If the result exists by now, the step is looked
        up in the cache again.
        """
        commits, delivers = self._commits, self._ws.delivers
        if not commits.hold(key, id):
            self._schedule.rest(id, KEY_ELSEWHERE if delivers else KEY_IN_USE)
            self._contended |= not commits.holds(key)
            return False
        contended = self._contended or delivers or not commits.keys.alone()
        if contended:
            # The run that held the key may have died while its attempt was running.
            self._orphans.look_again()
        made_here = key in commits.made
        if delivers and self._ws.remote_cache is not None and not made_here:
            self._ws.remote_cache.look_again(key)  # another machine may have stored a result
        if (contended or made_here) and self._judge.is_made(n):
            commits.release(key)
            who = "another step of this run" if made_here else "another run"
            self._schedule.judge_again(id, f"{who} produced the result")
            return False
        return True


class StateClaims:
    """Exclusive claims on checkpoint directories, and the choice of checkpoints to resume from."""

    def __init__(
        self,
        ws: Workspace,
        preparer: Preparer,
        orphans: Orphans,
        shared_states: SharedStates,
        inherited: Mapping[str, Left],
    ) -> None:
        """Create the claims for a run.

        `inherited` maps names to attempts that another machine's worker began.
        """
        self._ws, self._preparer, self._orphans = ws, preparer, orphans
        self._shared_states, self._inherited = shared_states, inherited

    async def open(self, attempt: Attempt) -> bool:
        """Claim the checkpoint directory of an attempt; return False if another attempt holds it.

        Returns True for a step without checkpoints. Two trainers with different `continues` values
        would corrupt the directory. Raises OSError.
        """
        spec = attempt.spec
        if not spec.state:
            return True
        from ...storage import checkpoints

        processes = self._preparer.processes(spec, attempt.number, attempt.place)
        key = checkpoints.key(spec, attempt.world, attempt.id)
        lock = self._ws.locks.try_hold(f"state-{key}")
        if lock is None:
            return False
        root, own = self._ws.home / "states" / key, (attempt.key or "-")[:24]
        holder = checkpoints.holder(root)
        if holder and not holder.startswith(own) and not await self._is_over(holder):
            lock.release()
            return False
        attempt.lock = lock
        await self._shared_states.restore(attempt.id, spec, key, root)
        for name, left in self._inherited.items():
            if left.generation and name.startswith(own):
                note = {"continues": dict(spec.continues), "id": left.generation}
                checkpoints.adopt(root, note)
        attempt.state = checkpoints.choose(root, spec.continues, processes=processes)
        attempt.restored = await asyncio.to_thread(find_restored, spec, attempt.state, processes)
        return True

    async def _is_over(self, holder: str) -> bool:
        """Return True if an earlier worker's attempt no longer writes to the checkpoint directory.

        Stops the attempt if it is still running.
        """
        if self._orphans.is_unreachable(holder):
            return False
        place = self._orphans.place_of(holder)
        if place is None:
            return True
        if await place.contact.insist(lambda: self._orphans.is_running(holder)):
            await place.stop(Job(holder), GRACE)
            return False
        return True
