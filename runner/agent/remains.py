"""Detection and termination of leftover background processes of ended jobs."""

from __future__ import annotations

import os
import time

from .job import SIGCONT, SIGKILL, SIGTERM
from .processes import kill, processes, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .job import Job
    from .loop import Poller

STRAY_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for leftover processes."""
HOPELESS = 5.0
"""Seconds after SIGKILL until the agent stops waiting for a process."""


class Remains:
    """Tracker of leftover processes below the agent, by job.

    `jobs` holds unfinished jobs by name. `ours` tells if a child belongs to no job.
    """

    def __init__(
        self, loop: Poller, jobs: dict[bytes, Job], timed: set[Job], ours: Callable[[int], bool]
    ) -> None:
        self._loop, self._jobs, self._timed, self._ours = loop, jobs, timed, ours
        self.running: dict[int, Job] = {}
        """Running first processes of jobs, by PID."""
        self.ending: list[Job] = []
        """Jobs whose first process has ended, but not all other processes."""
        self._tolerated: dict[
            int, Job | None
        ] = {}  # background processes of running jobs, if known
        root = os.stat(".")
        self._mark = b"@%d-%d" % (root.st_dev, root.st_ino)
        try:
            self._children: int | None = os.open(
                f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY
            )
        except OSError:
            self._children = None

    def cookie(self, name: bytes) -> bytes:
        """Return the value of RECIPE_JOB in the environment of a job's processes."""
        return name + self._mark

    def name_of(self, pid: int) -> bytes | None:
        """Return the job in a process's RECIPE_JOB variable."""
        try:
            _, found, rest = (b"\0" + read(f"/proc/{pid}/environ")).partition(b"\0RECIPE_JOB=")
        except OSError:
            return None
        value = rest.split(b"\0", 1)[0]
        return value[: -len(self._mark)] if found and value.endswith(self._mark) else None

    def processes_of(self, job: Job) -> list[int]:
        """Return the processes with a job's RECIPE_JOB variable."""
        return [pid for pid in processes() if self.name_of(pid) == job.name]

    def add_ending(self, job: Job) -> None:
        """Record that the first process of a job has ended."""
        self.ending.append(job)
        for pid, owner in list(self._tolerated.items()):
            if owner is job or not (owner or self.running):
                del self._tolerated[pid]

    def record_reaped(self, pid: int, cpu: float) -> None:
        """Record the end and CPU seconds of a reaped background process."""
        if self._tolerated.pop(pid, None) is None:
            for job in self.ending:
                if pid in job.strays:
                    job.cpu += cpu

    def end_leftovers(self) -> list[Job]:
        """Return the ending jobs without remaining processes, and end processes of the others."""
        if not self.ending:
            return []
        if self._has_no_leftovers():
            done, self.ending[:] = list(self.ending), []
            return done
        return self.sweep()

    def _has_no_leftovers(self) -> bool:
        """Return True if all children belong to running jobs, so that ended jobs left nothing
        behind.
        """
        if self._children is None:
            return False
        for child in os.pread(self._children, 1 << 16, 0).split():
            pid = int(child)
            if pid not in self.running and pid not in self._tolerated and not self._ours(pid):
                return False
        return not any(job.orphaned for job in self.ending)

    def sweep(self) -> list[Job]:
        """End leftover background processes.

        Return the jobs without remaining processes, or with unkillable ones only.
        """
        now = time.monotonic()
        ending = {job.name: job for job in self.ending}
        haunted: set[bytes] = set()
        table = processes()
        for pid in self._left_behind(table):
            _, group, session = table[pid]
            name = self._find_owner(pid, session)
            if name is None or (name in self._jobs and name not in ending):
                self._tolerated[pid] = self._jobs[name] if name else None
            elif name in ending:
                haunted.add(name)
                self._signal(ending[name], pid, group, now)
            else:
                kill(pid, SIGKILL)
        return self._remove_ended(haunted, now)

    def _find_owner(self, pid: int, session: int) -> bytes | None:
        """Return the name of the job that started a process, or None if it is unknown."""
        name = self.name_of(pid)
        if name is not None:
            return name
        for job in [*self.running.values(), *self.ending]:
            if job.session == session:
                return job.name
        if not self.running and self.ending:
            return self.ending[-1].name  # no running job could be the owner
        return None

    def _remove_ended(self, haunted: set[bytes], now: float) -> list[Job]:
        """Remove the jobs that are not `haunted` by a process, or only by an unkillable one."""
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
                self._loop.stirred = True  # exited, or no descriptor available
            # Send SIGTERM only once, because a second one may mean "exit immediately".
            if not (job.termed and group == job.session):
                kill(pid, SIGTERM)
                kill(pid, SIGCONT)
        if job.killed or now >= job.kill_at:
            kill(pid, SIGKILL)

    def _left_behind(self, table: dict[int, tuple[int, int, int]]) -> Iterable[int]:
        """Yield descendants of the agent that do not descend from a running job's first process.

        Orphans of a killed agent's jobs, which have no parent here, are included.
        """
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in table.items():
            below.setdefault(parent, []).append(pid)
        pending = []
        for pid in below.get(os.getpid(), ()):
            if pid not in self.running and not self._ours(pid):
                pending.append(pid)
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
