"""Jobs that clients are interested in, and the dead-man timer.

The timer ends jobs whose clients were silent for too long.
"""

from __future__ import annotations

import os
import time

from .processes import read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .job import Job


class Contact:
    """Last contact of clients with their jobs.

    Create it in the root directory, where a file stores the timer for the next agent.

    The working directory may change afterwards.
    """

    def __init__(self, jobs: dict[bytes, Job]) -> None:
        self._jobs = jobs
        self._wanted: dict[int, set[bytes]] = {}  # jobs that a client started or waits for
        self._beating: set[int] = set()  # clients that send regular signs of life
        self._root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._patience: float | None = float(read("deadman"))
        except (OSError, ValueError):
            self._patience = None

    def add_client(self, fd: int) -> None:
        self._wanted[fd] = set()

    def remove_client(self, fd: int) -> None:
        if fd not in self._beating:
            self.record_sign_of_life(fd)
        self._beating.discard(fd)
        del self._wanted[fd]

    def add_job(self, fd: int, name: bytes) -> None:
        self._wanted.get(fd, set()).add(name)

    def remove_job(self, name: bytes) -> None:
        for names in self._wanted.values():
            names.discard(name)

    def record_sign_of_life(self, fd: int) -> None:
        """Record a message from a client as contact with all its jobs."""
        if self._patience is not None:
            now = time.monotonic()
            for name in self._wanted.get(fd, ()):
                self._jobs[name].word = now

    def arm(self, fd: int, seconds: float, beats: bool) -> None:
        """Set the dead-man timer, also for the next agent. It ends jobs without client contact.

        `beats`: the client sends regular signs of life.
        """
        if beats:
            self._beating.add(fd)
        if self._patience == seconds:
            return
        self._patience = seconds
        for each in self._wanted:
            self.record_sign_of_life(each)
        try:
            file = os.open(
                "deadman",
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC,
                0o600,
                dir_fd=self._root,
            )
        except OSError:
            return  # this agent still knows the value
        with open(file, "w", encoding="ascii") as written:
            written.write(f"{seconds}")

    def next_look(self) -> float | None:
        """Return the monotonic time when the dead-man timer may end a job, or None without timer or
        jobs.
        """
        if self._patience is None or not self._jobs:
            return None
        return min(job.word for job in self._jobs.values()) + self._patience

    def find_silent_jobs(self) -> list[Job]:
        """Return the jobs without client contact for longer than the dead-man timer allows."""
        if self._patience is None:
            return []
        for fd in self._wanted.keys() - self._beating:
            self.record_sign_of_life(fd)  # the connection is its only sign of life
        now = time.monotonic()
        found = [job for job in self._jobs.values() if now - job.word >= self._patience]
        for job in found:
            job.word = now
            job.detail = (
                b"no client contacted the agent about the job for %d seconds" % self._patience
            )
        return found
