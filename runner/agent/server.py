"""The agent: the parent of all jobs of one root on this machine.  Begins them, ends them, writes down how they ended; knows no steps and no stores.

It outlives the worker that started it and serves the next client that connects to its root.  The root directory holds

    lock      held (flock) as long as an agent lives here; never a pid, so nothing can be mistaken for it
    socket    where clients connect
    journal   one JSON line when a job begins and one when it is over, appended; a torn last line is ignored
    slots/    a locked file for each job that lives: see `slots`
    jobs      locked as long as any job lives
    context   what the agent was begun with: see `reach`
    logs/     what jobs print, straight from their own file descriptors

A client sends messages (4 bytes of length, little-endian, then fields joined by NUL: `start`, `stop`, `wait`, `free`, `arm`, `leave`) and reads
lines: a greeting, then the JSON line of every job that ends.  Every client hears of every end.

A job may have locks: see `locks`.  They are taken before it begins and held until it is over.  Where another job holds one, this one does not begin:
its end is `busy`, which is forgotten, so that it may be started later.

A job is over when its first process has ended and nothing of what it left behind is alive.  As a subreaper this process inherits every background
process that a job leaves, also one that made a session of its own; the cookie in its environment (`RECIPE_JOB`), else its session, says whose it is.

This process may be killed at any moment, by the order of its writes: a job's slot is locked, then `began` is in the journal, then the process
is there; its end is in the journal before anybody hears of it, and only then its slot is used again.  The next agent in this root waits for jobs
that were to outlive an agent, and learns their exits from their slots.  What is left of any other it ends (SIGTERM, then SIGKILL): it is lost.

Only the standard library, and little of it (no signal, socket, pathlib, json or re unless needed): start-up is part of every run.
"""

from __future__ import annotations

import os
import time

from .cgroups import oom_kills
from .clients import Clients
from .contact import Contact
from .ends import Ends
from .job import SIGCONT, SIGKILL, SIGTERM, Job, signal_of
from .journal import began, escaped, line
from .locks import free_locks, take_locks
from .loop import Loop
from .processes import kill, kill_group, processes, words
from .regular import size_of
from .remains import HOPELESS, Remains
from .slots import Slots
from .spawning import spawn, why_not

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource

    from .sampler import Sampler

SAMPLED = (
    5.0  # seconds that a job has lived when its host is first looked at, and between two looks
)
LINGER = 2.0  # seconds without jobs or clients before the end
FULL = (
    600.0  # the same while there is no room to write down how a job ended: only this process knows
)
GRACE = 10.0  # seconds between SIGTERM and SIGKILL for a job that ran out of time, and for what a dead agent left
ORPHAN_LOOK = 0.1  # between looks at a job whose agent was killed


class Agent:
    """What is begun and what is ended, and when."""

    def __init__(self, listener: int, first: int, *, blind: bool = False) -> None:
        """`blind`: jobs of the agent before this one may be processes that this one cannot see, nor end."""
        self._blind = blind
        self._jobs: dict[bytes, Job] = {}
        self._timed: set[Job] = set()  # jobs with any deadline
        self._orphans: list[Job] = []  # they go on, though their agent was killed
        self._orphans_at = 0.0  # the time of the next look at them
        self._quiet_since: float | None = None
        self._ooms = oom_kills()
        self._sampler: Sampler | None = None
        self._sample_at: float | None = (
            None  # the time of the next look at the host; None while there is no job
        )
        self._loop = Loop()
        self._contact = Contact(self._jobs)
        self._clients = Clients(self._loop, self._contact, listener, self._obey)
        self._remains = Remains(self._loop, self._jobs, self._timed, self._samples)
        self._slots = Slots()
        self._ends = Ends(self._slots)
        self._inherit(self._ends.open_jobs)
        self._clients.welcome(first)

    def serve(self) -> None:
        """Until there is nothing left to do and no client to do it for."""
        while True:
            self._loop.turn(self._patience())
            if self._loop.stirred:
                self._reap()
            if self._orphans:
                self._look_after()
            if self._timed:
                self._keep_time()
            if self._ends.waiting and (data := self._ends.publish()):
                self._clients.tell_all(data)
            for job in self._contact.forgotten():
                self._end(job, b"stopped", GRACE)
            if self._sample_at is not None and time.monotonic() >= self._sample_at:
                self._sample()
            if self._jobs or self._clients.connected:
                self._quiet_since = None
            elif self._quiet_since is None:
                self._quiet_since = time.monotonic()
            elif time.monotonic() - self._quiet_since >= (FULL if self._ends.unwritten else LINGER):
                # A client that connects from here on is turned away before it got a greeting, and begins the next agent.
                return

    def _patience(self) -> float | None:
        times = [
            when
            for job in self._timed
            for when in (job.deadline, job.idle_at, job.kill_at)
            if when is not None
        ]
        if self._orphans:
            times.append(self._orphans_at)
        if (look := self._contact.next_look()) is not None:
            times.append(look)
        if self._sample_at is not None and self._jobs:
            times.append(self._sample_at)
        if times:
            return max(0.0, min(times) - time.monotonic())
        if self._jobs or self._clients.connected:
            return None
        return LINGER

    def _sample(self) -> None:
        """Look at the host for the jobs that have lived for a while."""
        now = time.time()
        self._sample_at = time.monotonic() + SAMPLED if self._jobs else None
        watched = [
            job
            for job in self._jobs.values()
            if job.started and now - job.started >= SAMPLED and job.log.endswith(b".log")
        ]
        if watched:
            if self._sampler is None:
                from .sampler import Sampler

                self._sampler = Sampler()
            self._sampler.look([(job.name, job.log, *job.sampled) for job in watched])

    def _samples(self, pid: int) -> bool:
        """Whether this child is no job's: the sampler began it."""
        return self._sampler is not None and pid == self._sampler.child

    # --- what clients ask for

    def _obey(self, fd: int, messages: list[list[bytes]]) -> None:
        starts: list[list[bytes]] = []
        for fields in messages:
            if fields[0] == b"start":
                starts.append(fields)
                continue
            self._begin(starts, fd)
            starts = []
            if fields[0] == b"stop":
                job = self._jobs.get(fields[1])
                if job is not None:
                    self._end(job, b"stopped", float(fields[2]))
            elif fields[0] == b"arm":
                self._contact.arm(fd, float(fields[1]), len(fields) > 2)
            elif fields[0] == b"leave":
                for job in list(self._jobs.values()):
                    job.detail = fields[2]
                    self._end(job, b"stopped", float(fields[1]))
            elif fields[0] == b"free":
                self._tell_free(fd, fields[1], fields[2].decode().split())
            else:
                self._answer(fd, fields[1])
        self._begin(starts, fd)

    def _answer(self, fd: int, name: bytes) -> None:
        if name in self._jobs:
            self._tell_going(fd, name)
        elif name in self._ends.over:
            self._clients.tell(fd, self._ends.over[name])
        else:  # final, so that two askers never hear different things
            self._ends.settle(name, line(name, None, None, b"lost", ended=time.time()))

    def _tell_going(self, fd: int, name: bytes) -> None:
        self._contact.wants(fd, name)
        self._clients.tell(fd, b'{"job": "%s", "going": true}\n' % name)

    def _tell_free(self, fd: int, number: bytes, names: list[str]) -> None:
        try:
            free, problem = free_locks(names), b""
        except OSError as error:
            free, problem = [], b"%s: %s" % (os.fsencode(error.filename or "locks"), words(error))
        self._clients.tell(
            fd,
            b'{"free": %s, "locks": "%s", "problem": "%s"}\n'
            % (number, escaped(" ".join(free).encode()), escaped(problem)),
        )

    # --- beginning

    def _begin(self, starts: list[list[bytes]], fd: int) -> None:
        """Write down that these begin, then begin them: in the other order a crash could run one twice."""
        fresh: list[list[bytes]] = []
        for fields in starts:
            name = fields[1]
            if name in self._ends.over:
                self._ends.tell(self._ends.over[name])
            elif name not in self._jobs:
                job = Job(name, fields[3])
                job.outlives = fields[7] == b"1"
                if self._holds(job, fields[6].decode().split()):
                    self._jobs[name] = job
                    fresh.append(fields)
        if fresh:
            now = time.time()
            self._ends.write(
                b"".join(
                    [
                        began(now, fields[1], self._jobs[fields[1]].slot, *fields[3:6])
                        for fields in fresh
                    ]
                )
            )
        for fields in fresh:
            self._spawn(fields)
        for fields in starts:
            if fields[1] in self._jobs:
                self._tell_going(fd, fields[1])

    def _holds(self, job: Job, locks: list[str]) -> bool:
        """Whether it has all its locks now; else its end is on its way."""
        held: list[int] | None = []
        try:
            self._slots.for_every_job()
            held = take_locks(locks)
            if held is not None and job.outlives:
                job.slot, fd = self._slots.take()
                held.append(fd)
        except OSError as error:
            for fd in held or ():
                os.close(fd)
            detail = b"cannot hold %s: %s" % (
                os.fsencode(error.filename or "its locks"),
                words(error),
            )
            now = time.time()
            self._ends.settle(job.name, line(job.name, 126, None, b"exit", now, now, detail=detail))
            return False
        if held is None:
            self._ends.tell(line(job.name, None, None, b"busy"))
            return False
        job.held = held
        return True

    def _spawn(self, fields: list[bytes]) -> None:
        _, name, cwd, _, timeout, idle, _, _, count, *rest = fields
        argv = rest[: int(count)]
        pairs = iter(rest[int(count) :])
        env = dict(zip(pairs, pairs))
        env[b"RECIPE_JOB"] = self._remains.cookie(name)
        job = self._jobs[name]
        job.started = time.time()
        job.sampled = fields[6], env.get(b"RECIPE_TOTAL_STEPS", b""), env.get(b"PATH", b"")
        if self._sample_at is None:
            self._sample_at = time.monotonic() + SAMPLED
        try:
            inherited = (self._slots.for_every_job(), *job.held)
            job.pid = job.session = spawn(self._loop, job, cwd, argv, env, inherited)
        except OSError as error:
            code, why = why_not(job.log, argv[0], cwd, error)
            self._over(job, line(name, code, None, b"exit", job.started, time.time(), detail=why))
            return
        self._remains.running[job.pid] = job
        self._time(job, timeout, idle, 0.0)

    def _time(self, job: Job, timeout: bytes | str, idle: bytes | str, since: float) -> None:
        """Keep the limits of a job that began at `since`, in seconds from now."""
        if timeout or idle:
            now = time.monotonic()
            self._timed.add(job)
            if timeout:
                job.deadline = now + since + float(timeout)
            if idle:
                job.idle = float(idle)
                job.idle_at = now + since + job.idle

    # --- ending

    def _end(self, job: Job, reason: bytes, grace: float) -> None:
        """SIGTERM now, SIGKILL after `grace`; asked again, the earlier deadline holds."""
        kill_at = time.monotonic() + grace
        if (job.pid or job in self._orphans) and not job.termed:
            job.reason = reason
            job.termed = True
            for number in (SIGTERM, SIGCONT):
                if job.pid:
                    kill_group(job.pid, number)
                for pid in self._remains.of(job) if job.orphaned else ():
                    kill(pid, number)
        if job.kill_at is None or kill_at < job.kill_at:
            job.kill_at = kill_at
        job.deadline = job.idle_at = None
        self._timed.add(job)

    def _keep_time(self) -> None:
        now = time.monotonic()
        sweep = False
        for job in list(self._timed):
            if job.deadline is not None and now >= job.deadline:
                self._end(job, b"timeout", GRACE)
            elif job.idle_at is not None and now >= job.idle_at:
                self._look_idle(job, now)
            if job.kill_at is not None and now >= job.kill_at:
                if job.pid:
                    kill_group(job.pid, SIGKILL)
                    job.killed = True
                    job.kill_at = now + HOPELESS
                    continue
                if job in self._orphans:
                    if self._blind and self._lives(job):
                        job.kill_at = None  # no signal of ours reaches it: it is waited for
                        continue
                    self._over_at_last(job)
                    job.killed = True
                    job.kill_at = now + HOPELESS
                sweep = True
        if sweep:
            self._finish(self._remains.sweep())

    def _look_idle(self, job: Job, now: float) -> None:
        assert job.idle is not None
        try:
            silent = max(0.0, time.time() - max(os.stat(job.log).st_mtime, job.started))
        except OSError:
            silent = job.idle
        if silent >= job.idle:
            self._end(job, b"idle", GRACE)
        else:
            job.idle_at = now + job.idle - silent

    def _reap(self) -> None:
        self._loop.stirred = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            job = self._remains.running.pop(pid, None)
            if job is not None:
                self._first_process_ended(job, status, usage)
            else:
                self._remains.reaped(pid, usage.ru_utime + usage.ru_stime)
        self._finish(self._remains.over())

    def _first_process_ended(self, job: Job, status: int, usage: resource.struct_rusage) -> None:
        job.pid = 0
        job.ended = time.time()
        job.cpu = usage.ru_utime + usage.ru_stime
        job.peak = usage.ru_maxrss * 1024
        if os.WIFSIGNALED(status):
            job.signal = os.WTERMSIG(status)
            job.code = 128 + job.signal
        else:
            job.code = os.WEXITSTATUS(status)
            job.signal = signal_of(job.code) if job.outlives else None
        if not job.reason:
            job.reason = b"exit" if job.signal is None else b"signal"
            if job.code == 128 + SIGKILL:
                kills = oom_kills()
                if kills > self._ooms:
                    job.reason = b"oom"
                self._ooms = kills
        job.deadline = job.idle_at = None
        self._remains.first_ended(job)

    def _finish(self, jobs: list[Job]) -> None:
        """Nothing is left of these."""
        for job in jobs:
            printed = size_of(job.log) if job.log else -1
            spent = job.started, job.ended, job.cpu, job.peak, len(job.strays)
            self._over(
                job, line(job.name, job.code, job.signal, job.reason, *spent, job.detail, printed)
            )

    def _over(self, job: Job, end: bytes) -> None:
        self._jobs.pop(job.name, None)
        self._contact.over(job.name)
        if self._sampler is not None:
            self._sampler.over(job.name)
        self._timed.discard(job)
        while job.held:
            os.close(job.held.pop())
        self._ends.settle(job.name, end, job.slot)

    # --- what an agent that was killed left

    def _inherit(self, began: dict[bytes, bytes]) -> None:
        """Wait for what is to outlive an agent that was killed here; end whatever else it left running."""
        cookies = {name for pid in processes() if (name := self._remains.name_of(pid)) is not None}
        now = time.monotonic()
        if began:
            from json import loads
        for name in dict.fromkeys([*began, *cookies]):
            noted = loads(began[name]) if name in began else {}
            job = Job(name, os.fsencode(noted.get("log", "")))
            job.orphaned, job.slot = True, noted.get("slot", -1)
            if job.slot >= 0:
                self._slots.keep(job.slot)
                job.outlives, job.started = True, noted["began"]
                self._jobs[name] = job
                self._orphans.append(job)
                self._sample_at = now + SAMPLED
                self._time(job, noted["timeout"], noted["idle"], job.started - time.time())
                continue
            if self._blind and name not in cookies and self._slots.any_alive():
                self._jobs[name] = job
                self._orphans.append(job)
                continue
            job.reason, job.ended = b"lost", time.time()
            if name in cookies:
                job.kill_at = now + GRACE
                self._jobs[name] = job
                self._timed.add(job)
                self._remains.ending.append(job)
            else:
                self._finish([job])
        if self._remains.ending:
            self._finish(self._remains.sweep())
        if self._orphans:
            self._look_after()  # before any client is heard: none has stopped what is over already
        self._ends.write(b"")

    def _look_after(self) -> None:
        """See which jobs of a dead agent are over."""
        now = time.monotonic()
        if now < self._orphans_at:
            return
        self._orphans_at = now + ORPHAN_LOOK
        over = [
            job
            for job in self._orphans
            if self._slots.status(job.slot, job.name) is not None or not self._lives(job)
        ]
        for job in over:
            self._over_at_last(job)
        if over:
            self._finish(self._remains.sweep())

    def _lives(self, job: Job) -> bool:
        """Whether anything of a job of a dead agent lives."""
        return self._slots.alive(job.slot) if job.slot >= 0 else self._slots.any_alive()

    def _over_at_last(self, job: Job) -> None:
        """The shell of an orphan is gone, or has no patience left: what its slot says is its end."""
        self._orphans.remove(job)
        job.code, job.ended = self._slots.status(job.slot, job.name), time.time()
        job.signal = None if job.code is None else signal_of(job.code)
        job.reason = job.reason or (
            b"lost" if job.code is None else b"exit" if job.signal is None else b"signal"
        )
        job.deadline = job.idle_at = None
        self._remains.ending.append(job)


def main(root: str, lock: int, listener: int, first: int, blind: int = 0) -> None:
    """Serve `root` until nothing is left to do.  `lock` is its lock, held; `listener` its socket; `first` the client that began us.

    `blind`: as in `Agent`.
    """
    # Whatever else the client held open (a pipe somebody reads to its end, a jobserver) would be held by us, and by every job.
    # Not every number up to the limit: in a container that may be a thousand million, and a Python for older systems would take minutes.
    kept = (lock, listener, first)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # it was the list's own
    for fd in kept:
        os.set_inheritable(fd, False)
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.chdir(root)
    Agent(listener, first, blind=bool(blind)).serve()
