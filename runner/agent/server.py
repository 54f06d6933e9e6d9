"""The agent: the parent of all jobs of one root on this machine.  Begins them, ends them, writes down how they ended; knows no steps and no stores.

It outlives the worker that started it and serves whoever connects to its root next.  The root directory holds

    lock      held (flock) as long as an agent lives here; never a pid, so nothing can be mistaken for it
    socket    where clients connect
    journal   one JSON line when a job begins and one when it is over, appended; a torn last line is ignored
    slots/    a locked file for each job that lives: see `slots`
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
import select
import sys
import time

from .journal import began, escaped, line, never, open_journal
from .locks import free_locks, take_locks
from .processes import kill, kill_group, oom_kills, processes, read, words
from .slots import DESCRIPTOR, SHELL, Slots

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from collections.abc import Callable, Iterable

GREETING = b'{"agent": 1}\n'
LINGER = 2.0  # seconds without jobs or clients before the end
STRAY_GRACE = 1.0  # seconds between SIGTERM and SIGKILL for what a job left behind
GRACE = 10.0  # the same for a job that ran out of time, and for what a dead agent left
HOPELESS = 5.0  # seconds after SIGKILL when we stop waiting for a process that cannot die
ORPHAN_LOOK = 0.1  # between looks at a job whose agent was killed
REMEMBERED = 10_000  # ends kept in memory
OOM_SCORE = b"500"  # of jobs, above ours: where memory runs out, the kernel takes a job before its agent
BACKLOG_LIMIT = 16 << 20  # bytes a client may leave unread

SIGKILL, SIGTERM, SIGCONT = 9, 15, 18
RESTORED = (1, 2, 3, 13, 15, 17, 25)  # signals that are ignored here, by Python or by whoever began us, but not in jobs
READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class _Job:
    """One job that is not over yet."""

    __slots__ = (
        *("code", "cpu", "deadline", "detail", "ended", "held", "idle", "idle_at", "kill_at", "killed", "log", "name", "orphaned", "outlives"),
        *("peak", "pid", "reason", "session", "signal", "slot", "started", "strays", "termed"),
    )

    def __init__(self, name: bytes, log: bytes) -> None:
        self.name = name
        self.log = log
        self.pid = 0  # 0: its first process is gone, or never was ours
        self.session = 0
        self.termed = False  # its group has been asked to end
        self.orphaned = False  # its parent was an agent that is dead
        self.outlives = False  # it runs below a shell that writes its exit down
        self.slot = -1
        self.started = 0.0
        self.ended = 0.0
        self.deadline: float | None = None
        self.idle: float | None = None
        self.idle_at: float | None = None
        self.kill_at: float | None = None
        self.killed = False  # no patience left: whatever appears now gets SIGKILL
        self.reason = b""
        self.detail = b""
        self.code: int | None = None
        self.signal: int | None = None
        self.cpu = 0.0
        self.peak = 0
        self.strays: set[int] = set()
        self.held: list[int] = []  # descriptors of its locks


class Agent:
    """Jobs, clients and the one loop."""

    def __init__(self, listener: int, first: int) -> None:
        self._listener = listener
        self._poll = select.epoll()
        self._poll.register(listener, READ)
        self._acts: dict[int, Callable[[int], None]] = {listener: self._accept}
        self._inputs: dict[int, bytearray] = {}
        self._outputs: dict[int, bytearray] = {}
        self._jobs: dict[bytes, _Job] = {}
        self._pids: dict[int, _Job] = {}
        self._ending: list[_Job] = []  # first process gone, strays not
        self._orphans: list[_Job] = []  # they go on, though their agent was killed
        self._orphans_at = 0.0  # the time of the next look at them
        self._tolerated: dict[int, _Job | None] = {}  # background processes that belong, or may belong, to a running job
        self._stirred = False  # a process that we watch has ended
        self._timed: set[_Job] = set()  # jobs with any deadline
        self._over: dict[bytes, bytes] = {}
        self._lines: list[bytes] = []  # ends to be written and told
        self._unwritten = b""
        self._programs: dict[tuple[bytes, bytes], bytes] = {}
        self._quiet_since: float | None = None
        self._root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._alone_since: float | None = None
        try:
            self._deadman: float | None = float(read("deadman"))
        except (OSError, ValueError):
            self._deadman = None
        root = os.stat(".")
        self._mark = b"@%d-%d" % (root.st_dev, root.st_ino)
        try:
            self._children: int | None = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
        except OSError:
            self._children = None
        self._ooms = oom_kills()
        self._slots = Slots()
        self._spent: list[int] = []  # slots of jobs whose end is not on the disk yet
        self._journal, open_jobs = open_journal(self._over, REMEMBERED)
        self._inherit(open_jobs)
        self._welcome(first)

    def serve(self) -> None:
        """Until there is nothing left to do and nobody to do it for."""
        while True:
            for fd, _ in self._poll.poll(self._patience()):
                act = self._acts.get(fd)
                if act is not None:
                    act(fd)
            self._reap()
            if self._orphans:
                self._look_after()
            if self._timed:
                self._keep_time()
            if self._lines or self._unwritten:
                self._publish()
            if self._deadman is not None:
                self._keep_contact(self._deadman)
            if self._jobs or self._inputs:
                self._quiet_since = None
            elif self._quiet_since is None:
                self._quiet_since = time.monotonic()
            elif time.monotonic() - self._quiet_since >= LINGER:
                # A client that connects from here on is turned away before it got a greeting, and begins the next agent.
                return

    def _patience(self) -> float | None:
        times = [when for job in self._timed for when in (job.deadline, job.idle_at, job.kill_at) if when is not None]
        if self._orphans:
            times.append(self._orphans_at)
        if self._deadman is not None and self._jobs and not self._inputs and self._alone_since is not None:
            times.append(self._alone_since + self._deadman)
        if times:
            return max(0.0, min(times) - time.monotonic())
        if self._jobs or self._inputs:
            return None
        return LINGER

    def _arm(self, seconds: float) -> None:
        """End all jobs when no client was there for so long; the next agent in this root does, too."""
        self._deadman = seconds
        try:
            fd = os.open("deadman", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._root)
        except OSError:
            return  # this one knows it
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{seconds}")

    def _keep_contact(self, patience: float) -> None:
        now = time.monotonic()
        if self._inputs or not self._jobs:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= patience:
            self._end_all(b"nobody asked after it for %d seconds" % patience, GRACE)

    def _end_all(self, why: bytes, grace: float) -> None:
        for job in list(self._jobs.values()):
            job.detail = why
            self._end(job, b"stopped", grace)

    # --- clients

    def _accept(self, _: int) -> None:
        import socket

        with socket.socket(fileno=os.dup(self._listener)) as listener:
            listener.setblocking(False)
            try:
                client, _address = listener.accept()
            except OSError:
                return
            self._welcome(client.detach())

    def _welcome(self, fd: int) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._inputs[fd] = bytearray()
        self._outputs[fd] = bytearray()
        self._acts[fd] = self._hear
        self._poll.register(fd, READ)
        self._tell(fd, GREETING)

    def _dismiss(self, fd: int) -> None:
        if self._inputs.pop(fd, None) is not None:
            del self._outputs[fd], self._acts[fd]
            self._poll.unregister(fd)
            os.close(fd)

    def _tell(self, fd: int, data: bytes) -> None:
        waiting = self._outputs.get(fd)
        if waiting is None:
            return
        waiting += data
        try:
            while waiting:
                del waiting[: os.write(fd, waiting)]
        except BlockingIOError:
            if len(waiting) > BACKLOG_LIMIT:
                self._dismiss(fd)  # it asks again when it comes back
            else:
                self._poll.modify(fd, READ | WRITE)
        except OSError:
            waiting.clear()  # it is gone; but what it asked for before it went is still to be read

    def _hear(self, fd: int) -> None:
        if self._outputs[fd]:
            self._poll.modify(fd, READ)
            self._tell(fd, b"")
            if fd not in self._inputs:
                return
        try:
            data = os.read(fd, 1 << 15)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(fd)
            return
        buffer = self._inputs[fd]
        buffer += data
        begin = 0
        starts: list[list[bytes]] = []
        while len(buffer) - begin >= 4:
            end = begin + 4 + int.from_bytes(buffer[begin : begin + 4], "little")
            if end > len(buffer):
                break
            fields = bytes(buffer[begin + 4 : end]).split(b"\0")
            begin = end
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
                self._arm(float(fields[1]))
            elif fields[0] == b"leave":
                self._end_all(fields[2], float(fields[1]))
            elif fields[0] == b"free":
                self._tell_free(fd, fields[1], fields[2].decode().split())
            else:
                self._answer(fd, fields[1])
        del buffer[:begin]
        self._begin(starts, fd)

    def _answer(self, fd: int, name: bytes) -> None:
        if name in self._jobs:
            self._tell(fd, b'{"job": "%s", "going": true}\n' % name)
        elif name in self._over:
            self._tell(fd, self._over[name])
        else:  # final, so that two askers never hear different things
            self._settle(name, line(name, None, None, b"lost", 0.0, time.time(), 0.0, 0, 0))

    def _tell_free(self, fd: int, number: bytes, names: list[str]) -> None:
        try:
            free, problem = free_locks(names), b""
        except OSError as error:
            free, problem = [], b"%s: %s" % (os.fsencode(error.filename or "locks"), words(error))
        self._tell(fd, b'{"free": %s, "locks": "%s", "problem": "%s"}\n' % (number, escaped(" ".join(free).encode()), escaped(problem)))

    # --- beginning

    def _begin(self, starts: list[list[bytes]], fd: int) -> None:
        """Write down that these begin, then begin them: in the other order a crash could run one twice."""
        fresh: list[list[bytes]] = []
        for fields in starts:
            name = fields[1]
            if name in self._over:
                self._lines.append(self._over[name])
            elif name not in self._jobs:
                job = _Job(name, fields[3])
                job.outlives = fields[7] == b"1"
                if self._holds(job, fields[6].decode().split()):
                    self._jobs[name] = job
                    fresh.append(fields)
        if fresh:
            self._launch(fresh)
        for fields in starts:
            if fields[1] in self._jobs:
                self._tell(fd, b'{"job": "%s", "going": true}\n' % fields[1])

    def _holds(self, job: _Job, locks: list[str]) -> bool:
        """Whether it has all its locks now; else its end is on its way."""
        try:
            held = take_locks(locks)
            if held is not None and job.outlives:
                job.slot, fd = self._slots.take()
                held.append(fd)
        except OSError as error:
            detail = b"cannot hold %s: %s" % (os.fsencode(error.filename or "its locks"), words(error))
            now = time.time()
            self._settle(job.name, line(job.name, 126, None, b"exit", now, now, 0.0, 0, 0, detail))
            return False
        if held is None:
            self._lines.append(never(job.name, b"busy"))
            return False
        job.held = held
        return True

    def _launch(self, frames: list[list[bytes]]) -> None:
        now = time.time()
        jobs = [self._jobs[fields[1]] for fields in frames]
        self._write(b"".join([began(now, job.name, job.slot, *fields[3:6]) for job, fields in zip(jobs, frames)]))
        for fields in frames:
            self._spawn(fields)

    def _spawn(self, fields: list[bytes]) -> None:
        _, name, cwd, log, timeout, idle, _, _, count, *rest = fields
        argv = rest[: int(count)]
        pairs = iter(rest[int(count) :])
        env = dict(zip(pairs, pairs))
        env[b"RECIPE_JOB"] = name + self._mark
        job = self._jobs[name]
        job.started = time.time()
        for fd in job.held:
            os.set_inheritable(fd, True)
        try:
            os.chdir(cwd)
            program, whole = self._program(argv[0], env), argv
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, b"/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            if job.outlives:
                whole = [*SHELL, name, program, *argv[1:]]
                program = SHELL[0]
                actions.append((os.POSIX_SPAWN_DUP2, job.held[-1], DESCRIPTOR))
            pid = os.posix_spawn(
                program,
                whole,
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=(),
                setsigdef=RESTORED,
            )
        except OSError as error:
            self._programs.clear()
            self._not_begun(job, argv[0], cwd, error)
            return
        for fd in job.held:
            os.set_inheritable(fd, False)
        job.pid = job.session = pid
        self._pids[pid] = job
        _prefer(pid)
        try:
            self._watch(pid)
        except OSError as error:  # no descriptor left to watch it with: it may not run unwatched
            os.killpg(pid, SIGKILL)
            os.waitpid(pid, 0)
            del self._pids[pid]
            self._not_begun(job, argv[0], cwd, error)
            return
        self._time(job, timeout, idle, 0.0)

    def _time(self, job: _Job, timeout: bytes | str, idle: bytes | str, since: float) -> None:
        """Keep the limits of a job that began at `since`, in seconds from now."""
        if timeout or idle:
            now = time.monotonic()
            self._timed.add(job)
            if timeout:
                job.deadline = now + since + float(timeout)
            if idle:
                job.idle = float(idle)
                job.idle_at = now + since + job.idle

    def _program(self, name: bytes, env: dict[bytes, bytes]) -> bytes:
        """What execvp would find, in the job's PATH and not in ours."""
        if b"/" in name:
            return name
        path = env.get(b"PATH", b"/bin:/usr/bin")
        found = self._programs.get((name, path))
        if found is None:
            candidates = [os.path.join(part or b".", name) for part in path.split(b":")]
            there = [candidate for candidate in candidates if os.path.isfile(candidate)]
            if not there:
                raise FileNotFoundError(2, "No such file or directory")
            found = next((candidate for candidate in there if os.access(candidate, os.X_OK)), there[0])
            if os.path.isabs(found):
                self._programs[name, path] = found
        return found

    def _not_begun(self, job: _Job, program: bytes, cwd: bytes, error: OSError) -> None:
        """Find out which part failed (posix_spawn does not say), tell it in the log, and end the job as a shell would."""
        code = 126
        what = b"cannot run " + program
        why = words(error)
        try:
            os.chdir(cwd)
        except OSError as cause:
            what, why = b"cannot enter the working directory " + cwd, words(cause)
        else:
            if error.errno == 2:
                code = 127
                if b"/" not in program:
                    why = b"no such program in PATH"
                elif os.path.exists(program):
                    why = b"the interpreter named in its first line does not exist"
            elif error.errno == 8:
                why += b" (a script must begin with #! and its interpreter)"
        try:
            log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as cause:
            code, what, why = 126, b"cannot write the log " + job.log, words(cause)
        else:
            try:
                os.write(log, b"recipe: %s: %s\n" % (what, why))
            except OSError as cause:
                what, why = b"cannot write the log " + job.log, words(cause)
            os.close(log)
        self._drop(job)
        self._settle(job.name, line(job.name, code, None, b"exit", job.started, time.time(), 0.0, 0, 0, what + b": " + why))

    # --- ending

    def _watch(self, pid: int) -> None:
        """Wake up when `pid` ends."""
        fd = os.pidfd_open(pid)
        try:
            self._poll.register(fd, READ)
        except OSError:
            os.close(fd)
            raise
        self._acts[fd] = self._unwatch

    def _unwatch(self, fd: int) -> None:
        del self._acts[fd]
        self._poll.unregister(fd)  # closing is not enough while a process between fork and exec still has a copy
        os.close(fd)
        self._stirred = True

    def _reap(self) -> None:
        if not self._stirred:
            return
        self._stirred = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            job = self._pids.pop(pid, None)
            if job is not None:
                self._first_process_ended(job, status, usage)
            elif self._tolerated.pop(pid, None) is None:
                for ending in self._ending:
                    if pid in ending.strays:
                        ending.cpu += usage.ru_utime + usage.ru_stime
        if self._ending:
            if self._bereft():
                for job in self._ending:
                    self._finish(job)
                self._ending.clear()
            else:
                self._sweep()

    def _first_process_ended(self, job: _Job, status: int, usage: resource.struct_rusage) -> None:
        job.pid = 0
        job.ended = time.time()
        job.cpu = usage.ru_utime + usage.ru_stime
        job.peak = usage.ru_maxrss * 1024
        if os.WIFSIGNALED(status):
            job.signal = os.WTERMSIG(status)
            job.code = 128 + job.signal
        else:
            job.code = os.WEXITSTATUS(status)
            job.signal = _signal_of(job.code) if job.outlives else None
        if not job.reason:
            job.reason = b"exit" if job.signal is None else b"signal"
            if job.code == 128 + SIGKILL:
                kills = oom_kills()
                if kills > self._ooms:
                    job.reason = b"oom"
                self._ooms = kills
        job.deadline = job.idle_at = None
        self._ending.append(job)
        if self._tolerated:
            self._tolerated = {pid: owner for pid, owner in self._tolerated.items() if owner is not job and (owner or self._pids)}

    def _bereft(self) -> bool:
        """Our children are first processes of running jobs, and their background processes: the ended ones left nothing behind."""
        if self._children is None:
            return False
        for child in os.pread(self._children, 1 << 16, 0).split():
            pid = int(child)
            if pid not in self._pids and pid not in self._tolerated:
                return False
        return not any(job.orphaned for job in self._ending)

    def _sweep(self) -> None:
        """End what ended jobs left behind; finish those of which nothing is left."""
        now = time.monotonic()
        ending = {job.name: job for job in self._ending}
        haunted: set[bytes] = set()
        table = processes()
        for pid in self._left_behind(table):
            _, group, session = table[pid]
            name = self._cookie(pid)
            if name is None:
                name = next((job.name for job in [*self._pids.values(), *self._ending] if job.session == session), None)
            if name is None and not self._pids:
                name = self._ending[-1].name  # nothing says whose it is, and no running job could be its owner
            if name is None or (name in self._jobs and name not in ending):
                self._tolerated[pid] = self._jobs[name] if name else None
            elif name in ending:
                haunted.add(name)
                self._signal_stray(ending[name], pid, group, now)
            else:
                kill(pid, SIGKILL)
        for job in list(self._ending):
            late = job.kill_at is not None and now >= job.kill_at
            if job.name not in haunted or (late and job.killed):
                self._ending.remove(job)
                self._finish(job)
            elif late:
                job.killed = True
                job.kill_at = now + HOPELESS

    def _signal_stray(self, job: _Job, pid: int, group: int, now: float) -> None:
        if job.kill_at is None:
            job.kill_at = now + STRAY_GRACE
            self._timed.add(job)
        if pid not in job.strays:
            job.strays.add(pid)
            try:
                self._watch(pid)
            except OSError:
                self._stirred = True  # gone already, or no descriptor to watch it with
            if not (job.termed and group == job.session):  # a second SIGTERM may mean "at once" to those who got the first
                kill(pid, SIGTERM)
                kill(pid, SIGCONT)
        if job.killed or now >= job.kill_at:
            kill(pid, SIGKILL)

    def _left_behind(self, table: dict[int, tuple[int, int, int]]) -> Iterable[int]:
        """Living processes below us but below no running job's first process, and what a dead agent's jobs left, which is below nobody."""
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in table.items():
            below.setdefault(parent, []).append(pid)
        pending = [pid for pid in below.get(os.getpid(), ()) if pid not in self._pids]
        orphaned = {job.name for job in self._ending if job.orphaned}
        if orphaned:
            pending += [pid for pid in table if self._cookie(pid) in orphaned]
        seen: set[int] = set()
        while pending:
            pid = pending.pop()
            if pid not in seen:
                seen.add(pid)
                yield pid
                pending += below.get(pid, ())

    def _cookie(self, pid: int) -> bytes | None:
        try:
            _, found, rest = (b"\0" + read(f"/proc/{pid}/environ")).partition(b"\0RECIPE_JOB=")
        except OSError:
            return None
        value = rest.split(b"\0", 1)[0]
        return value[: -len(self._mark)] if found and value.endswith(self._mark) else None

    def _end(self, job: _Job, reason: bytes, grace: float) -> None:
        """SIGTERM now, SIGKILL after `grace`; asked again, the earlier deadline holds."""
        kill_at = time.monotonic() + grace
        if (job.pid or job in self._orphans) and not job.termed:
            job.reason = reason
            job.termed = True
            for number in (SIGTERM, SIGCONT):
                if job.pid:
                    kill_group(job.pid, number)
                for pid in self._of(job) if job.orphaned else ():
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
                    self._over_at_last(job)
                    job.killed = True
                    job.kill_at = now + HOPELESS
                sweep = True
        if sweep:
            self._sweep()

    def _look_idle(self, job: _Job, now: float) -> None:
        assert job.idle is not None
        try:
            silent = max(0.0, time.time() - max(os.stat(job.log).st_mtime, job.started))
        except OSError:
            silent = job.idle
        if silent >= job.idle:
            self._end(job, b"idle", GRACE)
        else:
            job.idle_at = now + job.idle - silent

    def _finish(self, job: _Job) -> None:
        self._drop(job)
        try:
            printed = os.stat(job.log).st_size if job.log else -1
        except OSError:
            printed = -1
        end = line(job.name, job.code, job.signal, job.reason, job.started, job.ended, job.cpu, job.peak, len(job.strays), job.detail, printed)
        self._settle(job.name, end)

    def _drop(self, job: _Job) -> None:
        self._jobs.pop(job.name, None)
        self._timed.discard(job)
        while job.held:
            os.close(job.held.pop())
        if job.slot >= 0:
            self._spent.append(job.slot)

    def _settle(self, name: bytes, line: bytes) -> None:
        self._over[name] = line
        self._lines.append(line)
        self._unwritten += line
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]

    # --- remembering

    def _publish(self) -> None:
        """Ends are on disk before anybody hears of them; when the disk is full they are told all the same, and written as soon as there is room."""
        self._write(b"")
        data = b"".join(self._lines)
        self._lines = []
        if data:
            for fd in list(self._outputs):
                self._tell(fd, data)

    def _write(self, more: bytes) -> None:
        data = self._unwritten + more
        if data:
            try:
                self._unwritten = data[os.write(self._journal, data) :]
            except OSError:
                self._unwritten = data
        while self._spent and not self._unwritten:
            self._slots.give(self._spent.pop())

    def _inherit(self, began: dict[bytes, bytes]) -> None:
        """Wait for what is to outlive an agent that was killed here; end whatever else it left running."""
        cookies = {name for pid in processes() if (name := self._cookie(pid)) is not None}
        now = time.monotonic()
        if began:
            from json import loads
        for name in dict.fromkeys([*began, *cookies]):
            told = loads(began[name]) if name in began else {}
            job = _Job(name, os.fsencode(told.get("log", "")))
            job.orphaned, job.slot = True, told.get("slot", -1)
            if job.slot >= 0:
                self._slots.keep(job.slot)
                job.outlives, job.started = True, told["began"]
                self._jobs[name] = job
                self._orphans.append(job)
                self._time(job, told["timeout"], told["idle"], job.started - time.time())
                continue
            job.reason, job.ended = b"lost", time.time()
            if name in cookies:
                job.kill_at = now + GRACE
                self._jobs[name] = job
                self._ending.append(job)
                self._timed.add(job)
            else:
                self._finish(job)
        if self._ending:
            self._sweep()
        self._write(b"")

    def _look_after(self) -> None:
        """See which jobs of a dead agent are over."""
        now = time.monotonic()
        if now < self._orphans_at:
            return
        self._orphans_at = now + ORPHAN_LOOK
        over = [job for job in self._orphans if self._slots.status(job.slot, job.name) is not None or not self._slots.alive(job.slot)]
        for job in over:
            self._over_at_last(job)
        if over:
            self._sweep()

    def _over_at_last(self, job: _Job) -> None:
        """The shell of an orphan is gone, or has no patience left: what its slot says is its end."""
        self._orphans.remove(job)
        job.code, job.ended = self._slots.status(job.slot, job.name), time.time()
        job.signal = None if job.code is None else _signal_of(job.code)
        job.reason = job.reason or (b"lost" if job.code is None else b"exit" if job.signal is None else b"signal")
        job.deadline = job.idle_at = None
        self._ending.append(job)

    def _of(self, job: _Job) -> list[int]:
        """The processes that bear a job's cookie."""
        return [pid for pid in processes() if self._cookie(pid) == job.name]


def _prefer(pid: int) -> None:
    """Have the kernel end this process before us where memory runs out."""
    try:
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
    except OSError:
        return  # it is over, or there is no such file
    try:
        os.write(fd, OOM_SCORE)
    except OSError:
        pass
    finally:
        os.close(fd)


def _signal_of(code: int) -> int | None:
    """The signal that ended a command, as its shell tells it."""
    return code - 128 if 128 < code <= 128 + 64 else None


def main(root: str, lock: int, listener: int, first: int) -> None:
    """Serve `root` until nothing is left to do.  `lock` is its lock, held; `listener` its socket; `first` the client that began us."""
    # Whatever else the client held open (a pipe somebody reads to its end, a jobserver) would be held by us, and by every job.
    kept = sorted((2, lock, listener, first))
    for below, above in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
        os.closerange(below + 1, above)
    for fd in kept[1:]:
        os.set_inheritable(fd, False)
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    os.chdir(root)
    Agent(listener, first).serve()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
