"""What is known of a job when its agent was killed: whether anything of it lives, and the exit of its command.

A job that is to outlive its agent has a slot: a file, locked (flock) through a descriptor that the agent opened and the job inherits.  By the lock a
restarted agent sees whether anything of the job lives.  It runs below a shell that writes the command's exit into the file.  Others have none.
Slots are used again: a new file costs more than all of this.
"""

from __future__ import annotations

import fcntl
import os

SHELL = (
    b"/bin/sh",
    b"-c",
    b'trap : HUP INT QUIT TERM USR1 USR2; "$@" 9>&-; s=$?; printf \'%s %s\\n\' "$0" $s >&9; exit $s',
)
"""Words before a job's name and its command.  Descriptor 9 is the slot's file.  What a shell traps, its children do not ignore."""
DESCRIPTOR = 9
ALL = "jobs"
"""The file in the root that every job holds, one for all: where it is free, no job of this root lives."""
_BLANK = b" " * 255 + b"\n"
"""What a slot's file holds at first: an exit that is written over it needs no room on the disk.  Names have at most 200 bytes."""


class Slots:
    """The slots below the folder `slots` of the working directory, which may change afterwards."""

    def __init__(self) -> None:
        os.makedirs("slots", mode=0o700, exist_ok=True)
        self._folder = os.open("slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._free: list[int] = []
        self._next = 0
        self._all: int | None = None

    def for_every_job(self) -> int:
        """The descriptor that each job inherits, beside that of its own slot.  Raises OSError."""
        if self._all is None:
            fd = self._open(f"../{ALL}")
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                self._all = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)  # as in `take`
            finally:
                os.close(fd)
        return self._all

    def any_alive(self) -> bool:
        """Whether a job that an earlier agent began lives; once we have begun one ourselves, that is not known any more."""
        return self._all is None and self.alive(f"../{ALL}")

    def keep(self, number: int) -> None:
        """This one belongs to a job of an agent that was killed."""
        self._free += [other for other in range(self._next, number) if other not in self._free]
        self._next = max(self._next, number + 1)
        if number in self._free:
            self._free.remove(number)

    def take(self) -> tuple[int, int]:
        """A slot for a new job: its number, and the descriptor that holds its lock, not inherited yet.  Raises OSError."""
        while True:
            if self._free:
                number = self._free.pop()
            else:
                number, self._next = self._next, self._next + 1
            fd = self._open(number)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(fd, _BLANK, 0)
                return number, fcntl.fcntl(
                    fd, fcntl.F_DUPFD_CLOEXEC, 64
                )  # a number that no script's `exec 3>` replaces
            except BlockingIOError:
                pass  # something that no signal could end still holds it: it is left alone
            finally:
                os.close(fd)

    def give(self, number: int) -> None:
        """The end of its job is on the disk."""
        self._free.append(number)

    def alive(self, number: int | str) -> bool:
        """Whether anything of the slot's job lives."""
        fd = self._open(number)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def status(self, number: int, name: bytes) -> int | None:
        """What the shell above the command of job `name` wrote: its exit; None as long as there is nothing, or where there is no slot."""
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
