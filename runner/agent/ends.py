"""How jobs ended: on the disk before any client hears of it, and only then a job's slot is used again."""

from __future__ import annotations

import os

from .journal import open_journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slots import Slots

REMEMBERED = 10_000
"""Ends kept in memory."""


class Ends:
    """The record of a root, made in it.  `open_jobs`: by name, the journal's lines of jobs that have no end."""

    def __init__(self, slots: Slots) -> None:
        self.over: dict[bytes, bytes] = {}
        self._slots = slots
        self._lines: list[bytes] = []  # to be sent
        self._unwritten = b""
        self._spent: list[int] = []  # slots of jobs whose end is not on the disk yet
        self._journal, self.open_jobs = open_journal(self.over, REMEMBERED)

    @property
    def waiting(self) -> bool:
        """Whether something is to be written or sent."""
        return bool(self._lines or self._unwritten)

    @property
    def unwritten(self) -> bool:
        """Whether the disk had no room for an end."""
        return bool(self._unwritten)

    def settle(self, name: bytes, line: bytes, slot: int = -1) -> None:
        """A job is over; its slot is free when that is on the disk."""
        self.over[name] = line
        self._lines.append(line)
        self._unwritten += line
        if slot >= 0:
            self._spent.append(slot)
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    def tell(self, line: bytes) -> None:
        """Have a line sent that is on the disk already, or has no place there."""
        self._lines.append(line)

    def publish(self) -> bytes:
        """Write what ended; return what is to be sent of it, also when the disk is full: then it is written as soon as there is room."""
        self.write(b"")
        data = b"".join(self._lines)
        self._lines = []
        return data

    def write(self, more: bytes) -> None:
        data = self._unwritten + more
        if data:
            try:
                self._unwritten = data[os.write(self._journal, data) :]
            except OSError:
                self._unwritten = data
        while self._spent and not self._unwritten:
            self._slots.give(self._spent.pop())
