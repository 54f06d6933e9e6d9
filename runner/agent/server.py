"""The agent: parent of all jobs of one root on this machine. It knows no steps and no stores.

It starts jobs, ends them and records their ends. It outlives the worker that started it, and serves
the next client that connects to its root. The root directory contains

    lock      held (flock) while an agent lives here; never a PID, so no other process is mistaken for it
    socket    where clients connect
    journal   one JSON line for the start and one for the end of each job; an incomplete last line is ignored
    slots/    a locked file for each living job, see `slots`
    jobs      locked while any job lives
    context   identity of the agent, see `reach`
    logs/     output of jobs, written directly by their file descriptors

A client sends messages (4 bytes of length, little-endian, then fields separated by NUL: `start`,
`stop`, `wait`, `free`, `arm`, `leave`) and reads lines: a greeting, then the JSON line of every job
that ends. Every client receives every end.

A job may have locks, see `locks`. They are held from before its start until its end. If another job
holds one of them, the job does not start. Its end is then `busy`, which is not recorded, so the job
can be started later.

A job ends when its first process and all its background processes have ended. This process is a
subreaper: the kernel makes it the parent of all background processes of jobs, including those with
their own session. Their owner is the job in the variable `RECIPE_JOB`, otherwise in their session.

This process may be killed at any time, because of the order of its writes. First a job's slot is
locked, then its start is written to the journal, then its process is created. Its end is written to
the journal before any client is told, and only then its slot is reused. The next agent in this root
waits for jobs that outlive an agent, and reads their exit status from their slots. It ends the
processes of other jobs (SIGTERM, then SIGKILL) and records these jobs as lost.

Only a small part of the standard library is imported (signal, socket, pathlib, json or re only when
needed), because start-up time is part of every run.
"""

from __future__ import annotations

import os
import time

from .cgroups import oom_kills
from .clients import Clients
from .contact import Contact
from .ends import Ends
from .job import SIGCONT, SIGKILL, SIGTERM, Job, signal_of
from .journal import end_line, escape, start_line
from .locks import free_locks, take_locks
from .loop import Poller
from .processes import kill, kill_group, processes, words
from .regular import size_of
from .remains import HOPELESS, Remains
from .slots import Slots
from .spawning import explain_failure, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource

    from .sampler import Sampler

SAMPLED = 5.0  # seconds from a job's start to its first sample, and between samples
LINGER = 2.0  # seconds without jobs and clients before the agent exits
FULL = 600.0  # the same if the disk is full and an end exists only in the memory of this process
GRACE = (
    10.0  # seconds between SIGTERM and SIGKILL for timed-out jobs and processes of a killed agent
)
ORPHAN_LOOK = 0.1  # seconds between checks of a job whose agent was killed


class Agent:
    """The agent of one root directory, which starts, supervises and ends jobs."""

    def __init__(self, listener: int, first: int, *, blind: bool = False) -> None:
        """With `blind`, jobs of the previous agent may be processes that this one cannot see or
        signal.
        """
        self._blind = blind
        self._jobs: dict[bytes, Job] = {}
        self._timed: set[Job] = set()  # jobs with a deadline
        self._orphans: list[Job] = []  # running jobs of a killed agent
        self._orphans_at = 0.0  # monotonic time of their next check
        self._quiet_since: float | None = None
        self._ooms = oom_kills()
        self._sampler: Sampler | None = None
        self._sample_at: float | None = None  # monotonic time of the next sample; None without jobs
        self._loop = Poller()
        self._contact = Contact(self._jobs)
        self._clients = Clients(self._loop, self._contact, listener, self._obey)
        self._remains = Remains(self._loop, self._jobs, self._timed, self._is_sampler)
        self._slots = Slots()
        self._ends = Ends(self._slots)
        self._inherit(self._ends.open_jobs)
        self._clients.welcome(first)

    def serve(self) -> None:
        """Run the agent until there are no jobs and no clients."""
        while True:
            self._loop.run_once(self._seconds_to_wait())
            if self._loop.stirred:
                self._reap()
            if self._orphans:
                self._check_orphans()
            if self._timed:
                self._keep_time()
            if self._ends.has_pending and (data := self._ends.publish()):
                self._clients.tell_all(data)
            for job in self._contact.find_silent_jobs():
                self._end(job, b"stopped", GRACE)
            if self._sample_at is not None and time.monotonic() >= self._sample_at:
                self._sample()
            if self._is_unused():
                # A client that connects now gets no greeting, and starts the next agent.
                return

    def _is_unused(self) -> bool:
        """Return True if there were no jobs and no clients for long enough to exit."""
        if self._jobs or self._clients.has_clients:
            self._quiet_since = None
            return False
        now = time.monotonic()
        if self._quiet_since is None:
            self._quiet_since = now
            return False
        return now - self._quiet_since >= (FULL if self._ends.has_unwritten else LINGER)

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds until the next deadline, or None to wait for an event."""
        deadlines = [self._contact.next_look()]
        for job in self._timed:
            deadlines += [job.deadline, job.idle_at, job.kill_at]
        if self._orphans:
            deadlines.append(self._orphans_at)
        if self._jobs:
            deadlines.append(self._sample_at)
        times = [when for when in deadlines if when is not None]
        if times:
            return max(0.0, min(times) - time.monotonic())
        if self._jobs or self._clients.has_clients:
            return None
        return LINGER

    def _sample(self) -> None:
        """Sample machine metrics for jobs that have run for a while."""
        now = time.time()
        self._sample_at = time.monotonic() + SAMPLED if self._jobs else None
        watched = []
        for job in self._jobs.values():
            has_run_for_a_while = job.started and now - job.started >= SAMPLED
            if has_run_for_a_while and job.log.endswith(b".log"):
                watched.append((job.name, job.log, *job.sampled))
        if watched:
            if self._sampler is None:
                from .sampler import Sampler

                self._sampler = Sampler()
            self._sampler.look(watched)

    def _is_sampler(self, pid: int) -> bool:
        """Return True if a child belongs to the sampler, not to a job."""
        return self._sampler is not None and pid == self._sampler.child

    # --- requests of clients

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
        else:  # recorded, so that all clients receive the same end
            self._ends.record(name, end_line(name, None, None, b"lost", ended=time.time()))

    def _tell_going(self, fd: int, name: bytes) -> None:
        self._contact.add_job(fd, name)
        self._clients.tell(fd, b'{"job": "%s", "going": true}\n' % name)

    def _tell_free(self, fd: int, number: bytes, names: list[str]) -> None:
        try:
            free, problem = free_locks(names), b""
        except OSError as error:
            free, problem = [], b"%s: %s" % (os.fsencode(error.filename or "locks"), words(error))
        self._clients.tell(
            fd,
            b'{"free": %s, "locks": "%s", "problem": "%s"}\n'
            % (number, escape(" ".join(free).encode()), escape(problem)),
        )

    # --- starting jobs

    def _begin(self, starts: list[list[bytes]], fd: int) -> None:
        """Record the start of jobs in the journal, then start them.

        In the other order, a crash could run a job twice.
        """
        fresh: list[list[bytes]] = []
        for fields in starts:
            name = fields[1]
            if name in self._ends.over:
                self._ends.tell(self._ends.over[name])
            elif name not in self._jobs:
                job = Job(name, fields[3])
                job.outlives = fields[7] == b"1"
                if self._take_locks(job, fields[6].decode().split()):
                    self._jobs[name] = job
                    fresh.append(fields)
        if fresh:
            now = time.time()
            self._ends.write(
                b"".join(
                    [
                        start_line(now, fields[1], self._jobs[fields[1]].slot, *fields[3:6])
                        for fields in fresh
                    ]
                )
            )
        for fields in fresh:
            self._spawn(fields)
        for fields in starts:
            if fields[1] in self._jobs:
                self._tell_going(fd, fields[1])

    def _take_locks(self, job: Job, locks: list[str]) -> bool:
        """Take the locks of a job. If that fails, report the job's end and return False."""
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
            self._ends.record(
                job.name, end_line(job.name, 126, None, b"exit", now, now, detail=detail)
            )
            return False
        if held is None:
            self._ends.tell(end_line(job.name, None, None, b"busy"))
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
            code, why = explain_failure(job.log, argv[0], cwd, error)
            self._record_end(
                job, end_line(name, code, None, b"exit", job.started, time.time(), detail=why)
            )
            return
        self._remains.running[job.pid] = job
        self._set_limits(job, timeout, idle, 0.0)

    def _set_limits(self, job: Job, timeout: bytes | str, idle: bytes | str, since: float) -> None:
        """Set the time limits of a job, counted from `since` seconds from now."""
        if timeout or idle:
            now = time.monotonic()
            self._timed.add(job)
            if timeout:
                job.deadline = now + since + float(timeout)
            if idle:
                job.idle = float(idle)
                job.idle_at = now + since + job.idle

    # --- ending jobs

    def _end(self, job: Job, reason: bytes, grace: float) -> None:
        """Send SIGTERM to a job now, and SIGKILL after `grace` seconds.

        On repeated calls, the earlier time applies.
        """
        kill_at = time.monotonic() + grace
        if (job.pid or job in self._orphans) and not job.termed:
            job.reason = reason
            job.termed = True
            self._send_sigterm(job)
        if job.kill_at is None or kill_at < job.kill_at:
            job.kill_at = kill_at
        job.deadline = job.idle_at = None
        self._timed.add(job)

    def _send_sigterm(self, job: Job) -> None:
        """Send SIGTERM to a job's processes, and SIGCONT so that stopped ones receive it."""
        for number in (SIGTERM, SIGCONT):
            if job.pid:
                kill_group(job.pid, number)
            if job.orphaned:
                for pid in self._remains.processes_of(job):
                    kill(pid, number)

    def _keep_time(self) -> None:
        now = time.monotonic()
        sweep = False
        for job in list(self._timed):
            if job.deadline is not None and now >= job.deadline:
                self._end(job, b"timeout", GRACE)
            elif job.idle_at is not None and now >= job.idle_at:
                self._look_idle(job, now)
            if job.kill_at is not None and now >= job.kill_at and self._kill(job, now):
                sweep = True
        if sweep:
            self._finish(self._remains.sweep())

    def _kill(self, job: Job, now: float) -> bool:
        """Kill a job whose grace period is over. Return True if its leftovers can be swept now."""
        if job.pid:
            kill_group(job.pid, SIGKILL)
            job.killed = True
            job.kill_at = now + HOPELESS
            return False
        if job in self._orphans:
            if self._blind and self._lives(job):
                # The process cannot be signaled from here, so wait for its end.
                job.kill_at = None
                return False
            self._finish_orphan(job)
            job.killed = True
            job.kill_at = now + HOPELESS
        return True

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
                self._remains.record_reaped(pid, usage.ru_utime + usage.ru_stime)
        self._finish(self._remains.end_leftovers())

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
        self._remains.add_ending(job)

    def _finish(self, jobs: list[Job]) -> None:
        """Record the end of jobs without remaining processes."""
        for job in jobs:
            printed = size_of(job.log) if job.log else -1
            spent = job.started, job.ended, job.cpu, job.peak, len(job.strays)
            self._record_end(
                job,
                end_line(job.name, job.code, job.signal, job.reason, *spent, job.detail, printed),
            )

    def _record_end(self, job: Job, end: bytes) -> None:
        self._jobs.pop(job.name, None)
        self._contact.remove_job(job.name)
        if self._sampler is not None:
            self._sampler.over(job.name)
        self._timed.discard(job)
        while job.held:
            os.close(job.held.pop())
        self._ends.record(job.name, end, job.slot)

    # --- jobs of a killed agent

    def _inherit(self, began: dict[bytes, bytes]) -> None:
        """Supervise the surviving jobs of a killed agent, and end its other processes."""
        named = [self._remains.name_of(pid) for pid in processes()]
        cookies = {name for name in named if name is not None}
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
                self._add_orphan(job)
                self._sample_at = now + SAMPLED
                self._set_limits(job, noted["timeout"], noted["idle"], job.started - time.time())
            elif self._blind and name not in cookies and self._slots.any_alive():
                self._add_orphan(job)
            else:
                self._give_up(job, now, is_alive=name in cookies)
        if self._remains.ending:
            self._finish(self._remains.sweep())
        if self._orphans:
            self._check_orphans()  # before reading requests, so that no client stops an ended job
        self._ends.write(b"")

    def _add_orphan(self, job: Job) -> None:
        self._jobs[job.name] = job
        self._orphans.append(job)

    def _give_up(self, job: Job, now: float, *, is_alive: bool) -> None:
        """Record a killed agent's job as lost, after its living processes have ended."""
        job.reason, job.ended = b"lost", time.time()
        if not is_alive:
            self._finish([job])
            return
        job.kill_at = now + GRACE
        self._jobs[job.name] = job
        self._timed.add(job)
        self._remains.ending.append(job)

    def _check_orphans(self) -> None:
        """Check which jobs of a killed agent have ended."""
        now = time.monotonic()
        if now < self._orphans_at:
            return
        self._orphans_at = now + ORPHAN_LOOK
        over = [job for job in self._orphans if self._is_over(job)]
        for job in over:
            self._finish_orphan(job)
        if over:
            self._finish(self._remains.sweep())

    def _is_over(self, job: Job) -> bool:
        """Return True if a killed agent's job has an exit status or no living process."""
        if self._slots.status(job.slot, job.name) is not None:
            return True
        return not self._lives(job)

    def _lives(self, job: Job) -> bool:
        """Return True if any process of a killed agent's job is alive."""
        return self._slots.alive(job.slot) if job.slot >= 0 else self._slots.any_alive()

    def _finish_orphan(self, job: Job) -> None:
        """Record the exit status of an orphaned job from its slot."""
        self._orphans.remove(job)
        job.code, job.ended = self._slots.status(job.slot, job.name), time.time()
        if job.code is None:
            job.signal, how = None, b"lost"
        else:
            job.signal = signal_of(job.code)
            how = b"exit" if job.signal is None else b"signal"
        # A reason that was set before tells why the agent ended the job.
        job.reason = job.reason or how
        job.deadline = job.idle_at = None
        self._remains.ending.append(job)


def main(root: str, lock: int, listener: int, first: int, blind: int = 0) -> None:
    """Run the agent of `root` until there are no jobs and no clients.

    `lock` is the held lock of the root, `listener` its socket, `first` the client that started this
    process. `blind` is as in `Agent`.
    """
    # Close inherited descriptors, such as a pipe that another process reads to its end. Otherwise
    # this process and all jobs would keep them open. The limit of descriptors may be 10^9 in a
    # container, so only the existing ones are closed.
    kept = (lock, listener, first)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the directory listing itself
    for fd in kept:
        os.set_inheritable(fd, False)
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.chdir(root)
    Agent(listener, first, blind=bool(blind)).serve()
