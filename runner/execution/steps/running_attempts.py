"""Running attempts of a run, and the queue of finished attempts."""

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
"""Result of an attempt's execution: an exit or an error."""


class RunningAttempts(Mapping[str, Attempt]):
    """Mapping of step IDs to their running attempts, with a queue of finished attempts."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._running: dict[str, Attempt] = {}
        self._vacated: set[str] = set()  # steps whose capacity is free before their end
        self._ended: deque[tuple[str, End]] = deque()

    def __getitem__(self, id: str) -> Attempt:
        return self._running[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def add(self, id: str, attempt: Attempt) -> None:
        """Add an attempt, and reserve its capacity on the host."""
        self._running[id] = attempt
        attempt.place.capacity.reserve(attempt.wants, attempt.devices)

    def pop(self, id: str) -> Attempt:
        """Remove and return an attempt, and free its capacity on the host."""
        self._free_capacity(id)
        self._vacated.remove(id)
        return self._running.pop(id)

    def make_room(self, id: str) -> None:
        """Free the capacity of an attempt whose command succeeded, and wake the event loop."""
        self._free_capacity(id)
        self._bell.wake()

    def _free_capacity(self, id: str) -> None:
        if id not in self._vacated:
            self._vacated.add(id)
            attempt = self._running[id]
            attempt.place.capacity.release(attempt.wants, attempt.devices)

    def note_end(self, id: str, end: End) -> None:
        """Queue the result of a finished attempt for the event loop."""
        self._ended.append((id, end))
        self._bell.wake()

    @property
    def has_ended(self) -> bool:
        """Return True if a finished attempt waits for the event loop."""
        return bool(self._ended)

    def next_end(self) -> tuple[str, End]:
        """Remove and return the oldest finished attempt's step and result.

        Raises IndexError.
        """
        return self._ended.popleft()

    def renumber(self, plan: Plan) -> None:
        """Update the step numbers of the attempts after the plan has grown."""
        for id, attempt in self._running.items():
            attempt.number = plan.index[id]
            attempt.node = plan.nodes[attempt.number]
