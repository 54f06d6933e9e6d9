"""Processes that a job leaves behind when its first one has ended: whose they are, and how they are ended, too."""

from __future__ import annotations

import os
import time

from .job import SIGCONT, SIGKILL, SIGTERM
from .processes import kill, processes, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .job import Job
    from .loop import Loop

STRAY_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for what a job left behind."""
HOPELESS = 5.0
"""Seconds after SIGKILL when we stop waiting for a process that cannot die."""


class Remains:
    """What is below this process and belongs to no running job.  `jobs` are those that are not over, by name; `ours`: whether a child is no job's."""

    def __init__(
        self, loop: Loop, jobs: dict[bytes, Job], timed: set[Job], ours: Callable[[int], bool]
    ) -> None:
        self._loop, self._jobs, self._timed, self._ours = loop, jobs, timed, ours
        self.running: dict[int, Job] = {}
        """By pid: first processes that have not ended."""
        self.ending: list[Job] = []
        """Jobs whose first process is gone, what they left is not."""
        self._tolerated: dict[
            int, Job | None
        ] = {}  # background processes that belong, or may belong, to a running job
        root = os.stat(".")
        self._mark = b"@%d-%d" % (root.st_dev, root.st_ino)
        try:
            self._children: int | None = os.open(
                f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY
            )
        except OSError:
            self._children = None

    def cookie(self, name: bytes) -> bytes:
        """What stands in the environment of a job's processes as RECIPE_JOB."""
        return name + self._mark

    def name_of(self, pid: int) -> bytes | None:
        """The job whose cookie a process bears."""
        try:
            _, found, rest = (b"\0" + read(f"/proc/{pid}/environ")).partition(b"\0RECIPE_JOB=")
        except OSError:
            return None
        value = rest.split(b"\0", 1)[0]
        return value[: -len(self._mark)] if found and value.endswith(self._mark) else None

    def of(self, job: Job) -> list[int]:
        """The processes that bear a job's cookie."""
        return [pid for pid in processes() if self.name_of(pid) == job.name]

    def first_ended(self, job: Job) -> None:
        """The first process of a job has ended; what else it left is to follow."""
        self.ending.append(job)
        if self._tolerated:
            self._tolerated = {
                pid: owner
                for pid, owner in self._tolerated.items()
                if owner is not job and (owner or self.running)
            }

    def reaped(self, pid: int, cpu: float) -> None:
        """A child that was no first process has ended, and took so many seconds of a processor."""
        if self._tolerated.pop(pid, None) is None:
            for job in self.ending:
                if pid in job.strays:
                    job.cpu += cpu

    def over(self) -> list[Job]:
        """Those of the ending jobs of which nothing is left; what the others left is asked to end."""
        if not self.ending:
            return []
        if self._bereft():
            done, self.ending[:] = list(self.ending), []
            return done
        return self.sweep()

    def _bereft(self) -> bool:
        """Our children are first processes of running jobs, and their background processes: the ended ones left nothing behind."""
        if self._children is None:
            return False
        for child in os.pread(self._children, 1 << 16, 0).split():
            pid = int(child)
            if pid not in self.running and pid not in self._tolerated and not self._ours(pid):
                return False
        return not any(job.orphaned for job in self.ending)

    def sweep(self) -> list[Job]:
        """End what ended jobs left behind: those of which nothing is left, or nothing that can be ended."""
        now = time.monotonic()
        ending = {job.name: job for job in self.ending}
        haunted: set[bytes] = set()
        table = processes()
        for pid in self._left_behind(table):
            _, group, session = table[pid]
            name = self.name_of(pid)
            if name is None:
                name = next(
                    (
                        job.name
                        for job in [*self.running.values(), *self.ending]
                        if job.session == session
                    ),
                    None,
                )
            if name is None and not self.running and self.ending:
                name = self.ending[
                    -1
                ].name  # nothing says whose it is, and no running job could be its owner
            if name is None or (name in self._jobs and name not in ending):
                self._tolerated[pid] = self._jobs[name] if name else None
            elif name in ending:
                haunted.add(name)
                self._signal(ending[name], pid, group, now)
            else:
                kill(pid, SIGKILL)
        done = []
        for job in list(self.ending):
            late = job.kill_at is not None and now >= job.kill_at
            if job.name not in haunted or (late and job.killed):
                self.ending.remove(job)
                done.append(job)
            elif late:
                job.killed = True
                job.kill_at = now + HOPELESS
        return done

    def _signal(self, job: Job, pid: int, group: int, now: float) -> None:
        if job.kill_at is None:
            job.kill_at = now + STRAY_GRACE
            self._timed.add(job)
        if pid not in job.strays:
            job.strays.add(pid)
            try:
                self._loop.watch_process(pid)
            except OSError:
                self._loop.stirred = True  # gone already, or no descriptor to watch it with
            if not (
                job.termed and group == job.session
            ):  # a second SIGTERM may mean "at once" to those who got the first
                kill(pid, SIGTERM)
                kill(pid, SIGCONT)
        if job.killed or now >= job.kill_at:
            kill(pid, SIGKILL)

    def _left_behind(self, table: dict[int, tuple[int, int, int]]) -> Iterable[int]:
        """Living processes below us but below no running job's first process, and what a dead agent's jobs left, which has no parent."""
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in table.items():
            below.setdefault(parent, []).append(pid)
        pending = [
            pid
            for pid in below.get(os.getpid(), ())
            if pid not in self.running and not self._ours(pid)
        ]
        orphaned = {job.name for job in self.ending if job.orphaned}
        if orphaned:
            pending += [pid for pid in table if self.name_of(pid) in orphaned]
        seen: set[int] = set()
        while pending:
            pid = pending.pop()
            if pid not in seen:
                seen.add(pid)
                yield pid
                pending += below.get(pid, ())
