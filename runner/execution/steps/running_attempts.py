"""The attempts of a run that are under way, and those whose end waits for its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from drivers.base import DriverError, Exit

from ...errors import RecipeError
from ...planning.plan import Plan
from .attempt import Attempt
from .bell import Bell

End: TypeAlias = "Exit | DriverError | RecipeError"
"""How an attempt is over."""


class RunningAttempts(Mapping[str, Attempt]):
    """The attempt of each RUNNING step, by the step's id."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._running: dict[str, Attempt] = {}
        self._ended: deque[tuple[str, End]] = deque()

    def __getitem__(self, id: str) -> Attempt:
        return self._running[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def add(self, id: str, attempt: Attempt) -> None:
        """An attempt begins, and takes its part of the host."""
        self._running[id] = attempt
        attempt.place.capacity.enter(attempt.wants, attempt.devices)

    def pop(self, id: str) -> Attempt:
        """An attempt is over: its part of the host is free again."""
        attempt = self._running.pop(id)
        attempt.place.capacity.leave(attempt.wants, attempt.devices)
        return attempt

    def note_end(self, id: str, end: End) -> None:
        """An attempt has ended: the loop looks at it when it is its turn."""
        self._ended.append((id, end))
        self._bell.wake()

    @property
    def has_ended(self) -> bool:
        """Whether the end of an attempt waits to be looked at."""
        return bool(self._ended)

    def next_end(self) -> tuple[str, End]:
        """The step whose attempt ended first, and how.  Raises IndexError when there is none."""
        return self._ended.popleft()

    def renumber(self, plan: Plan) -> None:
        """The plan has grown: steps have other numbers now."""
        for id, attempt in self._running.items():
            attempt.number = plan.index[id]
            attempt.node = plan.nodes[attempt.number]
