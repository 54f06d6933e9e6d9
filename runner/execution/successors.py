"""Attempts prepared while all room is taken: each begins, without us, when a certain other one has ended well.  Starts and stores nothing itself.

Between the end of a short step and the start of the next, processors would wait for this process.  So a near host is given the next steps beforehand,
in chains.  It begins one exactly when the one before it ends with exit 0: whoever hears of that end, in order, knows what has begun.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from drivers.base import DriverError, Exit, Job, NearHost

from ..planning.schedule import Scheduler
from .attempts import Running

BRISK = 0.3
"""Seconds within which a step ends whose successor is worth preparing: later, a loop that is a millisecond late does not matter."""
AHEAD = 2
"""Successors that are prepared for each running step."""


class Successors:
    """The prepared attempts of one run."""

    def __init__(self, near: NearHost) -> None:
        self.near = near
        self.brisk = False
        """Whether the last step to end did so within moments, and the next one is nothing special."""
        self._prepared: dict[str, Running] = {}
        self._after: dict[str, str] = {}  # step that is running or prepared -> the one that follows it
        self._taken_back: set[str] = set()  # those that may not begin any more, if they have not yet

    def __contains__(self, id: str) -> bool:
        return id in self._prepared

    def __iter__(self) -> Iterator[Running]:
        return iter(self._prepared.values())

    def wanted(self, scheduler: Scheduler, running: Mapping[str, Running], resting: Collection[str]) -> list[tuple[str, Job, str]]:
        """Which steps should be prepared now: the end of each chain, its job, and what is to follow it."""
        if not self.brisk or len(self._prepared) >= AHEAD * len(running):
            return []
        since = time.time() - BRISK
        ends = {id: each.job for id, each in running.items() if id not in self._after and each.started > since}
        ends |= {id: each.job for id, each in self._prepared.items() if id not in self._after}
        return [(ahead, ends[ahead], id) for ahead, id in scheduler.successors(ends, resting)]

    def add(self, ahead: str, id: str, prepared: Running) -> None:
        self._after[ahead] = id
        self._prepared[id] = prepared

    def take_back(self, running: Mapping[str, Running], *, all: bool) -> None:
        """Have what has not begun wait for its turn: where the step ahead takes its time after all, or everything."""
        since = time.time() - BRISK
        for ahead, id in self._after.items():
            if ahead in running and (all or running[ahead].started < since) and id not in self._taken_back:
                self._taken_back.add(id)
                with contextlib.suppress(DriverError):  # who listens for its end hears of it
                    self.near.withdraw(self._prepared[id].job)

    def begun(self, ahead: str, exit: object) -> str | None:
        """A step is over: the one that has begun in its place, if that is so.  Had it been withdrawn, we would have heard of that first."""
        id = self._after.pop(ahead, None)
        return id if isinstance(exit, Exit) and exit.code == 0 and exit.reason == "exit" else None

    def pop(self, id: str) -> Running:
        """A step that has begun, or never will."""
        self._taken_back.discard(id)
        self._after = {ahead: other for ahead, other in self._after.items() if other != id}
        return self._prepared.pop(id)
