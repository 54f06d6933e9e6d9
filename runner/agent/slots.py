"""Slots of jobs: after an agent was killed, they tell if a job is alive and how its command ended.

A job that outlives its agent has a slot, a file that is locked (flock) by a descriptor of the agent
which the job inherits. The lock shows a restarted agent that a process of the job lives. The job
runs below a shell that writes the command's exit status into the file. Other jobs have no slot.
Slots are reused, because creating a file is expensive.
"""

from __future__ import annotations

import fcntl
import os

SHELL = (
    b"/bin/sh",
    b"-c",
    b'trap : HUP INT QUIT TERM USR1 USR2; "$@" 9>&-; s=$?; printf \'%s %s\\n\' "$0" $s >&9; exit $s',
)
"""Command prefix before a job's name and command.

Descriptor 9 is the slot's file. Signals that a shell traps are not ignored by its children.
"""
DESCRIPTOR = 9
ALL = "jobs"
"""File in the root that every job holds. If it is unlocked, no job of this root lives."""
_BLANK = b" " * 255 + b"\n"
"""Initial content of a slot's file, so that writing an exit status needs no disk space.

Job names have at most 200 bytes.
"""


class Slots:
    """Job slots in the directory `slots` of the working directory, which may change afterwards."""

    def __init__(self) -> None:
        os.makedirs("slots", mode=0o700, exist_ok=True)
        self._folder = os.open("slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._free: list[int] = []
        self._next = 0
        self._all: int | None = None

    def for_every_job(self) -> int:
        """Return the locked descriptor of the file `jobs`, which every job inherits.

        Raises OSError.
        """
        if self._all is None:
            fd = self._open(f"../{ALL}")
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                self._all = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)  # as in `take`
            finally:
                os.close(fd)
        return self._all

    def any_alive(self) -> bool:
        """Return True if any job of an earlier agent is alive.

        Unknown (False) once this agent has started a job.
        """
        return self._all is None and self.alive(f"../{ALL}")

    def keep(self, number: int) -> None:
        """Mark the slot of a killed agent's job as in use."""
        self._free += [other for other in range(self._next, number) if other not in self._free]
        self._next = max(self._next, number + 1)
        if number in self._free:
            self._free.remove(number)

    def take(self) -> tuple[int, int]:
        """Lock a free slot, and return its number and the lock's descriptor, which is not
        inheritable.

        Raises OSError.
        """
        while True:
            if self._free:
                number = self._free.pop()
            else:
                number, self._next = self._next, self._next + 1
            fd = self._open(number)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(fd, _BLANK, 0)
                # A high number, which no script's `exec 3>` replaces.
                return number, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
            except BlockingIOError:
                pass  # an unkillable process still holds this slot; use another
            finally:
                os.close(fd)

    def give(self, number: int) -> None:
        """Free a job slot, after the job's exit record was written to disk."""
        self._free.append(number)

    def alive(self, number: int | str) -> bool:
        """Return True if any process of the slot's job is alive."""
        fd = self._open(number)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def status(self, number: int, name: bytes) -> int | None:
        """Return the exit status of job `name`, as recorded in its slot, or None if not recorded."""
        if number < 0:
            return None
        fd = self._open(number)
        try:
            found, _, status = os.pread(fd, len(_BLANK), 0).partition(b"\n")[0].partition(b" ")
        finally:
            os.close(fd)
        return int(status) if found == name and status.isdigit() else None

    def _open(self, number: int | str) -> int:
        return os.open(
            str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder
        )
