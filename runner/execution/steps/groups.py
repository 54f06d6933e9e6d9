"""Timing of a run's group commits.

Groups are large enough for a slow disk and frequent enough for a person who watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from ...errors import Corrupt, Infrastructure
from ...logs import Log
from ...planning.ids import readable
from ...planning.schedule import Move
from .commit import GroupCommit

_log: Final = Log("loop")
GROUP_SECONDS: Final = 0.1
GROUP_MOVES: Final = 1024


class Groups:
    """Timer of a run's group commits, which calls `wake` when a group is on disk."""

    def __init__(
        self, commits: GroupCommit, running: Collection[str], wake: Callable[[], None]
    ) -> None:
        self.commits, self.running, self._wake = commits, running, wake
        self.landed = False  # the last group is on disk, and `land` is due
        self._dirty = 0.0
        self._pace = GROUP_SECONDS
        self._sent = 0.0
        self._strained = False

    @property
    def due(self) -> bool:
        """Return True if the pending changes should be stored now."""
        size = self.commits.size
        return (
            size > 0
            and not self.commits.busy
            and (size >= GROUP_MOVES or time.monotonic() - self._dirty >= self._pace)
        )

    def send(self) -> None:
        """Start storing the pending changes.

        The event loop continues while the disk writes.
        """
        loop = asyncio.get_running_loop()

        def wake_loop() -> None:
            # After the end of the run, its flush waits for this group.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ring_landed)

        self._sent = time.monotonic()
        self._store(functools.partial(self.commits.send, wake_loop))

    def _ring_landed(self) -> None:
        self.landed = True
        self._wake()

    def land(self) -> None:
        """Finish the last group commit after its write."""
        self.landed = False
        if self._store(self.commits.land):
            # A slow disk gets larger groups.
            self._pace = max(GROUP_SECONDS, 10 * (time.monotonic() - self._sent))

    def _store(self, do: Callable[[], None]) -> bool:
        try:
            do()
        except Infrastructure as error:
            if not self.running or isinstance(error, Corrupt):
                raise
            # A running step may fill the disk. Its failure frees the space, and the group is
            # stored then.
            self._pace, self._dirty = 1.0, time.monotonic()
            if not self._strained:
                self.commits.say(f"waiting for the running steps: {error}")
            self._strained = True
            return False
        return True

    def report(self, step: str, numbers: str) -> None:
        """Add the latest metrics of a running step to the next group commit."""
        if not self.commits.size:
            self._dirty = time.monotonic()
        self.commits.add_metrics(step, numbers)

    def record(self, moves: Sequence[Move]) -> None:
        """Add state changes to the next group commit."""
        if not self.commits.size:
            self._dirty = time.monotonic()
        for move in moves:
            _log.debug("%s: %s → %s %s", readable(move.id), move.before, move.after, move.reason)
            self.commits.add_move(move)
