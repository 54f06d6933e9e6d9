"""Which clients want which jobs, and the dead-man: jobs of which no client was heard for too long are to end."""

from __future__ import annotations

import os
import time

from .processes import read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .job import Job


class Contact:
    """Is made in the root, where a file keeps the dead-man's seconds for the next agent; the working directory may change afterwards."""

    def __init__(self, jobs: dict[bytes, Job]) -> None:
        self._jobs = jobs
        self._wanted: dict[
            int, set[bytes]
        ] = {}  # of each client: the jobs that it began or asked after
        self._beating: set[int] = set()  # clients that say again and again that they live
        self._root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._patience: float | None = float(read("deadman"))
        except (OSError, ValueError):
            self._patience = None

    def came(self, fd: int) -> None:
        self._wanted[fd] = set()

    def went(self, fd: int) -> None:
        if fd not in self._beating:
            self.heard(fd)
        self._beating.discard(fd)
        del self._wanted[fd]

    def wants(self, fd: int, name: bytes) -> None:
        self._wanted.get(fd, set()).add(name)

    def over(self, name: bytes) -> None:
        for names in self._wanted.values():
            names.discard(name)

    def heard(self, fd: int) -> None:
        """A client lives: its jobs are wanted."""
        if self._patience is not None:
            now = time.monotonic()
            for name in self._wanted.get(fd, ()):
                self._jobs[name].word = now

    def arm(self, fd: int, seconds: float, beats: bool) -> None:
        """End each job of which no client was heard for so many seconds; the next agent in this root does, too.  `beats`: it says that it lives."""
        if beats:
            self._beating.add(fd)
        if self._patience == seconds:
            return
        self._patience = seconds
        for each in self._wanted:
            self.heard(each)
        try:
            file = os.open(
                "deadman",
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                0o600,
                dir_fd=self._root,
            )
        except OSError:
            return  # this one knows it
        with open(file, "w", encoding="ascii") as written:
            written.write(f"{seconds}")

    def next_look(self) -> float | None:
        """When a job may have been forgotten, of the monotonic clock; None while that cannot be."""
        if self._patience is None or not self._jobs:
            return None
        return min(job.word for job in self._jobs.values()) + self._patience

    def forgotten(self) -> list[Job]:
        """Jobs of which no client was heard for too long."""
        if self._patience is None:
            return []
        for fd in self._wanted.keys() - self._beating:
            self.heard(fd)  # that it is connected is all that it says
        now = time.monotonic()
        found = [job for job in self._jobs.values() if now - job.word >= self._patience]
        for job in found:
            job.word = now
            job.detail = b"no client asked for it for %d seconds" % self._patience
        return found
