"""Exit records of jobs, written to disk before clients are notified and slots are reused."""

from __future__ import annotations

import os

from .journal import open_journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .slots import Slots

REMEMBERED = 10_000
"""Maximum number of ends kept in memory."""


class Ends:
    """Writer of the exit records of a root directory's jobs. Create it in the root directory.

    `open_jobs` holds the journal lines of jobs without an end, by name.
    """

    def __init__(self, slots: Slots) -> None:
        self.over: dict[bytes, bytes] = {}
        self._slots = slots
        self._lines: list[bytes] = []  # lines for clients
        self._unwritten = b""
        self._spent: list[int] = []  # slots to free once the ends are on disk
        self._journal, self.open_jobs = open_journal(self.over, REMEMBERED)

    @property
    def has_pending(self) -> bool:
        """True if exit records are waiting to be written or sent."""
        return bool(self._lines or self._unwritten)

    @property
    def has_unwritten(self) -> bool:
        """True if an exit record could not be written because the disk is full."""
        return bool(self._unwritten)

    def record(self, name: bytes, line: bytes, slot: int = -1) -> None:
        """Record the exit of a job. Its slot is freed once the record is on disk."""
        self.over[name] = line
        self._lines.append(line)
        self._unwritten += line
        if slot >= 0:
            self._spent.append(slot)
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    def tell(self, line: bytes) -> None:
        """Queue a message line for clients, without writing it to disk."""
        self._lines.append(line)

    def publish(self) -> bytes:
        """Write queued exit records to disk, and return the message lines for clients.

        If the disk is full, the lines are sent anyway and written once there is space.
        """
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
