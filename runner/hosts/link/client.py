"""Run jobs on a host, through its agent: begin them, hear of their ends, read what they print, end them.

A start is a message written at once, and ends arrive as lines that turn into finished waits: nothing is asked twice, nothing is polled.  When the
agent was killed, or the way to it broke, the next connection repeats what the last may not have carried: an agent begins no job of one name twice.

How the agent is reached is a `Line`: on this machine its socket, elsewhere a `Stream` to the program that it has there for clients.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivers.base import (
    NOTHING,
    Argv,
    Command,
    Denied,
    DriverError,
    Exit,
    Host,
    HostLost,
    Job,
    Rejected,
    Unreachable,
    file_name,
)
from drivers.local import LocalHost

from ...agent.protocol import NUMBER
from ...agent.reach import reach
from ...agent.regular import NOT_REGULAR, descriptor_of
from .local_agents import identity, own_root

if TYPE_CHECKING:
    from .stream import Stream
    from .wire import Wire

CHUNK = 1 << 20
BEATS = (
    9  # signs of life in the time after which an agent ends the jobs of a client that gives none
)
FOREVER = 1e8  # seconds; a longer patience needs no alarm
ROOM = (
    1 << 15
)  # bytes of one read: small enough that memory for it is at hand, and not mapped and given back each time
REMEMBERED = 10_000
SIGN = 5.0  # seconds between signs of life on a stream
PROTOCOLS = (
    NUMBER - 1,
    NUMBER,
)  # those that we speak: an agent with jobs still serves a newer recipe
UNUSED = 3.0  # seconds after which an agent that no client has and that has no jobs is gone
FAREWELL = 10.0  # seconds in which what was asked for last must have been sent
SILENCE = 20.0  # seconds without an answer to any after which it is taken for broken


class Line(Protocol):
    """A way to one agent.  Tells what comes to `hear`, and its end to `lost`, with the reason."""

    patience: float
    """Seconds in which an agent must be reached before waiting callers get Unreachable."""
    pauses: Sequence[float]
    """Seconds between tries; the last one again and again."""
    hurried: bool
    """Whether a caller hears that the agent cannot be reached as soon as its own patience has passed, since it asks again by itself."""
    deadman: float | None
    """Seconds without any client after which the agent is to end all jobs."""

    def open(
        self, hear: Callable[[bytes], None], lost: Callable[[DriverError | None], None]
    ) -> bool:
        """Connect, or begin to; False when it cannot be now.  Raises Denied, Unreachable."""
        ...

    def write(self, data: bytes) -> None:
        """Send it, now or as soon as there is room."""
        ...

    def close(self) -> None:
        """Let go of the connection, without a word to `lost`.  Idempotent."""
        ...

    def host(self) -> Host:
        """The host that it leads to."""
        ...

    async def log_path(self, log: str | None, name: str) -> str:
        """Where the log of a job is: absolute."""
        ...

    async def read(self, log: str, offset: int) -> bytes:
        """What is in a log from `offset` on, some or all of it."""
        ...

    async def aclose(self) -> None:
        """Let go of all connections, but not of the host."""
        ...


class Client:
    """Jobs on one host.  They outlive the connection and us.  Belongs to one event loop at a time."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected = False  # or about to be
        self._greeted = False
        self._failing_since: float | None = None
        self._tries = 0
        self._retry: asyncio.TimerHandle | None = None
        self._beats: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._until_greeted = bytearray()  # what an agent that was just leaving may never have read
        self._going: set[str] = set()
        self._pending: set[str] = (
            set()
        )  # what this connection has asked for, and the agent has not answered
        self._starts: dict[
            str, bytes
        ] = {}  # of jobs that are not over: an agent that was killed may never have read it
        self._stops: dict[str, bytes] = {}
        self._over: dict[str, Exit] = {}
        self._printed: dict[str, int] = {}  # bytes, of jobs that are over
        self._waiting: dict[str, list[tuple[asyncio.Future[None], float]]] = {}
        self._questions = 0
        self._asked: dict[int, asyncio.Future[dict[str, str]]] = {}

    @property
    def root(self) -> str:
        """The folder of ours on that host."""
        return self._line.host().root

    @property
    def failing_for(self) -> float:
        """Seconds for which the agent has been tried to be reached again, and was not; 0 where it answers, or nothing is wanted of it."""
        since = self._failing_since
        return self._loop.time() - since if self._loop is not None and since is not None else 0.0

    def wake(self) -> None:
        """Begin to reach the agent: somebody will want it soon.  What is wrong is met by the first job."""
        self._enter()
        if not self._connected and self._retry is None:
            with suppress(DriverError):
                self._connect()

    async def start(self, command: Command, key: str) -> Job:
        """Begin `command`.  The same key finds the same job; a start never queues, nor does it wait for a lock."""
        self._enter()
        name = file_name(key)
        job = Job(key, {"log": await self._line.log_path(command.log, name)})
        if name not in self._over or self._over[name].reason == "busy":
            self._over.pop(name, None)
            limits = (f"{command.timeout or ''}", f"{command.idle_timeout or ''}")
            env = (
                text
                for pairs in (command.env, command.secrets)
                for pair in pairs.items()
                for text in pair
            )
            how = (" ".join(command.locks), "1" if command.outlives else "", f"{len(command.argv)}")
            self._starts[name] = _frame(
                "start", name, command.cwd, job.data["log"], *limits, *how, *command.argv, *env
            )
            try:
                self._ask(name)
            except DriverError:
                del self._starts[name]  # its caller hears of it: it may not begin later
                raise
        return job

    async def free(self, locks: Sequence[str]) -> Sequence[str]:
        """Those of these locks that no job of this login on that machine holds.  Raises Denied where none can be held, and Unreachable."""
        self._enter()
        number = self._questions = self._questions + 1
        answer: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(_frame("free", f"{number}", " ".join(locks)))
            found = await answer
        finally:
            self._asked.pop(number, None)
        if found["problem"]:
            raise Denied(f"no lock can be held: {found['problem']}")
        return found["locks"].split()

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """The job's end, at once when it is over; None when `patience` passed and its agent says that it goes on.  Raises Unreachable, HostLost."""
        self._enter()
        name = file_name(job.key)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + min(patience.total_seconds(), FOREVER)
        while (over := self._over.get(name)) is None:
            now = loop.time()
            if name in self._going:
                if now >= give_up_at:
                    return None
            elif name not in self._pending:
                self._ask(name)
            woken: asyncio.Future[None] = loop.create_future()
            waiter = (woken, give_up_at)
            self._waiting.setdefault(name, []).append(waiter)
            alarm = (
                loop.call_at(give_up_at, _resolve, woken)
                if now < give_up_at < now + FOREVER
                else None
            )
            try:
                await woken
            finally:
                if alarm is not None:
                    alarm.cancel()
                waiting = self._waiting.get(name, [])
                if waiter in waiting:
                    waiting.remove(waiter)
                    if not waiting:
                        del self._waiting[name]
        return over

    async def log(self, job: Job, offset: int) -> bytes:
        """What the job printed from byte `offset` on, some or all of it; empty when there is nothing more yet."""
        name = file_name(job.key)
        if offset >= self._printed.get(name, offset + 1):
            return b""
        return await self._line.read(await self._line.log_path(job.data.get("log"), name), offset)

    def has_no_log(self, job: Job) -> bool:
        """Whether the agent told no length of the log of this job, which is over: it found none that can be read."""
        return file_name(job.key) not in self._printed

    async def stop(self, job: Job, grace: timedelta) -> None:
        """SIGTERM to the whole group, SIGKILL after `grace`.  Idempotent; `wait` then reports an Exit."""
        self._enter()
        name = file_name(job.key)
        if name not in self._over:
            self._stops[name] = _frame("stop", name, f"{grace.total_seconds()}")
            self._send(self._stops[name])

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """See `Host.call`."""
        return self._line.host().call(argv, stdin)

    async def aclose(self, lost: str = "") -> None:
        """Let go of our connections, not of the host; jobs continue.  `lost`: why it is given up, raised as HostLost where its jobs are awaited."""
        await self._line.aclose()
        self._disconnect()
        self._forget()
        if lost:
            self._fail(HostLost(lost), None)

    # --- the connection

    def _forget(self) -> None:
        for of_this_loop in (
            self._until_greeted,
            self._going,
            self._pending,
            self._starts,
            self._stops,
        ):
            of_this_loop.clear()

    def _ask(self, name: str) -> None:
        """Have the agent say what becomes of a job; one that was never begun there begins."""
        self._send(self._starts.get(name) or _frame("wait", name))
        self._pending.add(name)

    def _enter(self) -> None:
        """What another event loop began is not known in this one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._disconnect()
            self._forget()
            self._loop = loop

    def _send(self, frame: bytes) -> None:
        if not self._connected and self._retry is None:
            self._failing_since, self._tries = None, 0
            self._connect()
        if not self._greeted:
            self._until_greeted += frame
        if self._connected:
            self._line.write(frame)

    def _connect(self) -> None:
        """Reach the agent.  One that is just leaving still holds the lock and does not answer: try again."""
        self._retry = None
        try:
            self._connected = self._line.open(self._hear, self._lost)
        except DriverError as error:
            self._fail(error, None)
            raise
        if not self._connected:
            self._again(None)
            return
        if self._line.deadman is not None:
            self._beat(self._line.deadman)
        if self._until_greeted:
            self._line.write(bytes(self._until_greeted))

    def _beat(self, deadman: float) -> None:
        """Say that we live, now and from now on: a connection stays open although its process is stopped."""
        assert self._loop is not None
        self._line.write(_frame("arm", f"{deadman}", "beats"))
        self._beats = self._loop.call_later(deadman / BEATS, self._beat, deadman)

    def _again(self, error: DriverError | None, least: float = 0.0) -> None:
        """Try again in a while, of at least so many seconds, or tell waiting callers that there is no answer."""
        assert self._loop is not None
        now = self._loop.time()
        if self._failing_since is None:
            self._failing_since = now
        reason = error or Unreachable(
            f"the agent of {self.root} does not answer; what it said is in agent.log there"
        )
        if now - self._failing_since >= self._line.patience:
            self._until_greeted.clear()
            self._fail(reason, None)
        else:
            if self._line.hurried:
                self._fail(reason, now)
            pauses = self._line.pauses
            self._retry = self._loop.call_later(
                max(least, pauses[min(self._tries, len(pauses) - 1)]), self._reconnect
            )
            self._tries += 1

    def _reconnect(self) -> None:
        with suppress(DriverError):  # raised where they wait
            self._connect()

    def _fail(self, error: DriverError, now: float | None) -> None:
        """Tell those who wait, or, at a time `now`, those whose patience has passed."""
        for waiting in self._waiting.values():
            for woken, give_up_at in waiting:
                if (now is None or give_up_at <= now) and not woken.done():
                    woken.set_exception(error)
        if now is None:
            self._going.clear()
            self._pending.clear()
            asked, self._asked = self._asked, {}
            for question in asked.values():
                if not question.done():
                    question.set_exception(error)

    def _disconnect(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
        self._line.close()
        self._connected = self._greeted = False
        self._received.clear()

    def _lost(self, error: DriverError | None) -> None:
        """The agent was killed or was just leaving, or the way to it broke.  The next connection repeats what this one may not have carried."""
        greeted = self._greeted
        self._disconnect()
        if error is not None and not isinstance(error, Unreachable):
            self._until_greeted.clear()
            self._fail(error, None)
            return
        if greeted:
            self._failing_since, self._tries = None, 0
            self._going.clear()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(error or Unreachable("the agent was killed"))
            self._until_greeted += b"".join(self._starts.values())
            self._pending = {*self._starts, *self._waiting}
            for name in self._pending - self._starts.keys():
                self._until_greeted += _frame("wait", name)
            self._until_greeted += b"".join(self._stops.values())
        if self._until_greeted or self._line.deadman is not None:
            self._again(error)

    def _hear(self, data: bytes) -> None:
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            if self._greeted:
                try:
                    self._understand(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    self._lost(
                        Unreachable(f"the agent of {self.root} says something that makes no sense")
                    )
                    return
            elif (number := _protocol_of(line)) in PROTOCOLS:
                self._greeted = True
                self._failing_since, self._tries = None, 0
                self._until_greeted.clear()
            else:
                self._disconnect()
                self._again(Unreachable(_foreign_agent(self.root, number)), UNUSED)
                return

    def _understand(self, message: dict[str, Any]) -> None:
        if "free" in message:
            if (asked := self._asked.get(message["free"])) is not None and not asked.done():
                asked.set_result(message)
            return
        name = str(message.pop("job"))
        self._pending.discard(name)
        if "code" in message:
            printed = message.pop("printed", None)
            exit = Exit(**message)
            self._going.discard(name)
            self._starts.pop(name, None)
            self._stops.pop(name, None)
            self._over[name] = exit
            if printed is not None and exit.reason != "busy":
                self._printed[name] = int(printed)
            if len(self._over) > REMEMBERED:
                oldest = next(iter(self._over))
                del self._over[oldest]
                self._printed.pop(oldest, None)
            for waiting, _ in self._waiting.pop(name, ()):
                _resolve(waiting)
        else:
            self._going.add(name)
            for waiting, give_up_at in self._waiting.get(name, ()):
                if self._loop is None or give_up_at <= self._loop.time():
                    _resolve(waiting)


class Socket:
    """The line to the agent of a root on this machine, which is begun when there is none."""

    patience = 10.0
    pauses: Sequence[float] = (0.01,)
    hurried = False
    deadman: float | None = None

    def __init__(self, host: Host, context: str = "", *, own: bool = False) -> None:
        """`context`: our identity; `own`: only an agent of the same will do, else whichever serves that root."""
        self._host = host
        self._root = host.root
        self._context, self._own = context, own
        self._awake: socket.socket | None = None  # to an agent that was not asked for anything yet
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent = bytearray()

    def wake(self) -> None:
        """Begin the agent, if there is none.  What is wrong is met by the first job."""
        if self._awake is None and self._socket is None:
            with suppress(OSError):
                self._awake = self._reach()

    def open(
        self, hear: Callable[[bytes], None], lost: Callable[[DriverError | None], None]
    ) -> bool:
        try:
            self._socket, self._awake = self._awake or self._reach(), None
        except OSError as error:
            raise _foreign(error, self._root) from error
        if self._socket is None:
            return False
        logging.getLogger("runner.hosts").debug("connected to the agent of %s", self._root)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read, self._socket, hear, lost)
        return True

    def _reach(self) -> socket.socket | None:
        return reach(self._root, self._context, own=self._own)

    def write(self, data: bytes) -> None:
        assert self._socket is not None and self._loop is not None
        if not self._unsent:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader sees the same end
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._socket, self._write_more)
        self._unsent += data

    def close(self) -> None:
        if self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        self._unsent.clear()

    def host(self) -> Host:
        return self._host

    async def log_path(self, log: str | None, name: str) -> str:
        return log or f"{self._root}/logs/{name}"

    async def read(self, log: str, offset: int) -> bytes:
        try:
            fd = descriptor_of(log)
        except FileNotFoundError:
            return b""
        except OSError as error:
            if error.strerror == NOT_REGULAR:  # its step put a pipe, say, in the place of its log
                return b""
            raise _foreign(error, self._root) from error
        try:
            return os.pread(fd, CHUNK, offset)
        except OSError as error:
            raise _foreign(error, self._root) from error
        finally:
            os.close(fd)

    async def aclose(self) -> None:
        self.close()
        if self._awake is not None:
            self._awake.close()
            self._awake = None

    def _read(
        self,
        ours: socket.socket,
        hear: Callable[[bytes], None],
        lost: Callable[[DriverError | None], None],
    ) -> None:
        try:
            data = ours.recv(ROOM)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            hear(data)
        else:
            lost(None)

    def _write_more(self) -> None:
        assert self._socket is not None and self._loop is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket)


class Streamed:
    """The line to the agent of another machine, whose files are asked about over `wire`."""

    patience = 60.0
    pauses: Sequence[float] = (0.1, 0.3, 1.0, 3.0)
    hurried = True

    def __init__(self, wire: Wire) -> None:
        self.deadman = wire.host.deadman
        self._wire = wire
        self._unsent = bytearray()
        self._news = asyncio.Event()
        self._leaving = False
        self._carrying: asyncio.Task[None] | None = None

    def open(
        self, hear: Callable[[bytes], None], lost: Callable[[DriverError | None], None]
    ) -> bool:
        self._unsent.clear()
        self._news = asyncio.Event()
        self._carrying = asyncio.get_running_loop().create_task(self._carry(hear, lost))
        return True

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._news.set()

    def close(self) -> None:
        carrying, self._carrying = self._carrying, None
        if carrying is not None and not carrying.done() and carrying is not asyncio.current_task():
            carrying.cancel()
        self._unsent.clear()

    def host(self) -> Host:
        return self._wire.host

    async def log_path(self, log: str | None, name: str) -> str:
        if log is None:
            await self._wire.open()
        return log or f"{self._wire.root}/agent/logs/{name}"

    async def read(self, log: str, offset: int) -> bytes:
        _, data = await self._wire.read("read", log, offset, CHUNK)
        return data

    async def aclose(self) -> None:
        await asyncio.gather(self._leave(), self._wire.aclose())

    async def _leave(self) -> None:
        carrying, self._leaving = self._carrying, True
        if carrying is not None:
            self._news.set()
            await asyncio.wait([carrying], timeout=FAREWELL)
            self.close()
            await asyncio.wait([carrying])
        self._leaving = False

    async def _carry(
        self, hear: Callable[[bytes], None], lost: Callable[[DriverError | None], None]
    ) -> None:
        """Hold a stream until it ends; then say why."""
        from .stream import Stream

        try:
            stream = await Stream.open(self._wire.host, self._wire.root, "jobs")
            sending = asyncio.ensure_future(self._send(stream))
            try:
                while True:
                    async with asyncio.timeout(SILENCE):
                        payload = await stream.receive()
                    if payload[:1] == b"d":
                        await stream.send(
                            b"d"
                        )  # says nothing: a connection that waits for an answer lets the next word through
                        hear(payload[1:])
                    if self._carrying is not asyncio.current_task():
                        return
            finally:
                sending.cancel()
                await stream.aclose()
        except TimeoutError:
            lost(Unreachable(f"the host has said nothing for {SILENCE:g} seconds"))
        except DriverError as error:
            if not self._leaving:
                lost(error)

    async def _send(self, stream: Stream) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN):
                    await self._news.wait()
            self._news.clear()
            data = bytes(self._unsent)
            self._unsent.clear()
            if data or not self._leaving:
                await stream.send(b"d" if data else b"p", data)
            if self._leaving and not self._unsent:
                await stream.finish()
                return


def own(home: Path, deadman: float | None = None) -> Client:
    """Jobs of this machine that have the limits and namespaces of this process: see `here`.  `home` is the workspace's `.recipe`."""
    context = identity()
    return _woken(Socket(LocalHost(own_root(home, context)), context, own=True), deadman)


def here(root: Path, deadman: float | None = None) -> Client:
    """Jobs of this machine, whose agent serves `root`.  It begins now, if there is none, and comes up while its first job is being prepared.

    `deadman`: seconds without any client after which the agent ends its jobs, because another machine may begin them.
    """
    return _woken(Socket(LocalHost(root), identity()), deadman)


def _woken(line: Socket, deadman: float | None) -> Client:
    line.deadman = deadman
    line.wake()
    return Client(line)


def there(wire: Wire) -> Client:
    """Jobs of another machine, whose agent serves the root of `wire`."""
    return Client(Streamed(wire))


def _protocol_of(line: bytes | bytearray) -> int | None:
    """The number of the protocol in which an agent greets; None for what is no greeting."""
    try:
        number = json.loads(line)["agent"]
    except (ValueError, TypeError, KeyError):
        return None
    return number if isinstance(number, int) else None


def _foreign_agent(root: str, number: int | None) -> str:
    if number is None:
        return f"what serves {root} is no agent of ours"
    if number > NUMBER:
        return (
            f"{root} is served by the agent of a newer recipe (protocol {number}, "
            f"this one has {NUMBER}): use that one, or wait for its jobs to end"
        )
    return f"{root} is served by the agent of an older recipe (protocol {number}, this one has {NUMBER}): wait for its jobs to end"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _frame(*fields: str) -> bytes:
    body = "\0".join(fields)
    if body.count("\0") != len(fields) - 1:
        raise Rejected(
            "a command's arguments, environment and paths cannot contain a NUL character"
        )
    data = body.encode("utf-8", "surrogateescape")
    return len(data).to_bytes(4, "little") + data


def _foreign(error: OSError, root: str) -> Denied | Unreachable:
    words = f"{error.filename or root}: {error.strerror or error}"
    return (
        Denied(words)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
        else Unreachable(words)
    )
