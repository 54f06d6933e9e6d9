"""Start, wait for and stop jobs on a host through its agent, and read their logs.

A start is one message, and the end of a job arrives as one line that completes the waiting future.
Nothing is polled.  If the agent is killed or the connection breaks, the next connection repeats
unconfirmed messages.  This is safe because an agent starts each job name only once.

A `Line` is the connection to an agent: a socket on this machine, or a `Stream` to another host.
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
from .local_agents import choose_root, process_identity

if TYPE_CHECKING:
    from .stream import Stream
    from .wire import Wire

CHUNK = 1 << 20
"""Most bytes of a log per read."""
BEATS = 9
"""Heartbeats within the deadman time of a client."""
FOREVER = 1e8
"""Seconds.  Longer waits get no alarm."""
ROOM = 1 << 15
"""Bytes per read of a socket, few enough that their memory is reused instead of mapped and unmapped
each time.
"""
REMEMBERED = 10_000
"""Finished jobs that a client remembers."""
SIGN = 5.0
"""Seconds between two heartbeats on a stream."""
PROTOCOLS = (NUMBER - 1, NUMBER)
"""Supported protocols.  An older agent with jobs still serves a newer recipe."""
UNUSED = 3.0
"""Seconds after which an agent without clients and jobs has exited."""
FAREWELL = 10.0
"""Seconds to send the last messages when closing."""
SILENCE = 20.0
"""Seconds without an answer after which the connection counts as broken."""


class AgentConnection(Protocol):
    """A connection to one agent.

    Calls `on_data` with received bytes, and `on_loss` with the reason when the connection ends.
    """

    patience: float
    """Seconds without a connection after which waiting callers get Unreachable."""
    pauses: Sequence[float]
    """Seconds between connection attempts.  The last value repeats."""
    hurried: bool
    """Whether a waiting caller gets Unreachable as soon as its own patience ends.

    Such a caller repeats its request itself.
    """
    deadman: float | None
    """Seconds without a client after which the agent stops all jobs; None for never."""

    def open(
        self, on_data: Callable[[bytes], None], on_loss: Callable[[DriverError | None], None]
    ) -> bool:
        """Start to connect; False if the agent is not ready yet.  Raises Denied, Unreachable."""
        ...

    def write(self, data: bytes) -> None:
        """Queue data for sending."""
        ...

    def close(self) -> None:
        """Close the connection without a call of `on_loss`.  Idempotent."""
        ...

    def host(self) -> Host:
        """Return the host of the agent."""
        ...

    async def log_path(self, log: str | None, name: str) -> str:
        """Return the absolute path of a job's log."""
        ...

    async def read(self, log: str, offset: int) -> bytes:
        """Read a log from byte `offset`, possibly not to its end."""
        ...

    async def aclose(self) -> None:
        """Close all connections, but keep the host."""
        ...


class Client:
    """Jobs on one host.

    They outlive the connection and this process.  A client belongs to one event loop at a time.
    """

    def __init__(self, line: AgentConnection) -> None:
        self._line = line
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connected = False  # or connecting
        self._greeted = False
        self._failing_since: float | None = None
        self._tries = 0
        self._retry: asyncio.TimerHandle | None = None
        self._beats: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._until_greeted = bytearray()
        """Messages that an exiting agent may not have read."""
        self._going: set[str] = set()
        """Names of running jobs."""
        self._pending: set[str] = set()
        """Names of jobs with a request of this connection and no answer yet."""
        self._starts: dict[str, bytes] = {}
        """Start messages of unfinished jobs, because a killed agent may not have read them."""
        self._stops: dict[str, bytes] = {}
        """Stop messages of unfinished jobs."""
        self._over: dict[str, Exit] = {}
        """Exits of finished jobs."""
        self._printed: dict[str, int] = {}
        """Log bytes of finished jobs."""
        self._waiting: dict[str, list[tuple[asyncio.Future[None], float]]] = {}
        """Callers of `wait` by job, each with the time at which its patience ends."""
        self._questions = 0
        self._asked: dict[int, asyncio.Future[dict[str, str]]] = {}
        """Questions about locks without an answer, by number."""

    @property
    def root(self) -> str:
        """The root directory of recipe on the host."""
        return self._line.host().root

    @property
    def failing_for(self) -> float:
        """Seconds of failed reconnection attempts; 0 if the agent answers or is not needed."""
        if self._loop is None or self._failing_since is None:
            return 0.0
        return self._loop.time() - self._failing_since

    def wake(self) -> None:
        """Start to connect to the agent early.  Errors are raised for the first job."""
        self._bind_loop()
        if not self._connected and self._retry is None:
            with suppress(DriverError):
                self._connect()

    async def start(self, command: Command, key: str) -> Job:
        """Start `command`.

        The same key finds the same job.  A start never queues and waits for no lock.
        """
        self._bind_loop()
        name = file_name(key)
        job = Job(key, {"log": await self._line.log_path(command.log, name)})
        if name not in self._over or self._over[name].reason == "busy":
            self._over.pop(name, None)
            self._starts[name] = _start_message(name, command, job.data["log"])
            try:
                self._ask_for_job(name)
            except DriverError:
                del self._starts[name]  # the caller gets the error, so the job must not start later
                raise
        return job

    async def find_free_locks(self, locks: Sequence[str]) -> Sequence[str]:
        """Return the locks that no job of this login on the machine holds.

        Raises Denied if locks do not work, and Unreachable.
        """
        self._bind_loop()
        self._questions += 1
        number = self._questions
        answer: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(_message("free", f"{number}", " ".join(locks)))
            slots = await answer
        finally:
            self._asked.pop(number, None)
        if slots["problem"]:
            raise Denied(f"cannot check which slots of the host are free: {slots['problem']}")
        return slots["locks"].split()

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """Wait for the end of a job; None if the job still runs after `patience`.  Raises Unreachable, HostLost."""
        self._bind_loop()
        name = file_name(job.key)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + min(patience.total_seconds(), FOREVER)
        while (over := self._over.get(name)) is None:
            now = loop.time()
            if name in self._going:
                if now >= give_up_at:
                    return None
            elif name not in self._pending:
                self._ask_for_job(name)
            await self._wait_for_news(name, now, give_up_at)
        return over

    async def _wait_for_news(self, name: str, now: float, give_up_at: float) -> None:
        """Wait for a message about a job, or until `give_up_at`.

        Raises the error of the connection.
        """
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        waiter = (woken, give_up_at)
        self._waiting.setdefault(name, []).append(waiter)
        alarm: asyncio.TimerHandle | None = None
        if now < give_up_at < now + FOREVER:
            alarm = loop.call_at(give_up_at, _resolve, woken)
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

    async def log(self, job: Job, offset: int) -> bytes:
        """Read the output of a job from byte `offset`; empty if there is no more output yet.

        The result may end before the end of the output.
        """
        name = file_name(job.key)
        if offset >= self._printed.get(name, offset + 1):
            return b""
        return await self._line.read(await self._line.log_path(job.data.get("log"), name), offset)

    def has_no_log(self, job: Job) -> bool:
        """Return whether a finished job has no readable log, because the agent reported no length."""
        return file_name(job.key) not in self._printed

    async def stop(self, job: Job, grace: timedelta) -> None:
        """Send SIGTERM to the process group, and SIGKILL after `grace`.

        Idempotent.  `wait` then returns an Exit.
        """
        self._bind_loop()
        name = file_name(job.key)
        if name not in self._over:
            self._stops[name] = _message("stop", name, f"{grace.total_seconds()}")
            self._send(self._stops[name])

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        """Run a program on the host: see `Host.call`."""
        return self._line.host().call(argv, stdin)

    async def aclose(self, lost: str = "") -> None:
        """Close the connections; jobs continue.  If `lost` names a reason, waiting callers get HostLost with this reason."""
        await self._line.aclose()
        self._disconnect()
        self._forget_requests()
        if lost:
            self._fail(HostLost(lost), None)

    # --- the connection

    def _forget_requests(self) -> None:
        """Forget the requests and running jobs of the present event loop.

        Exits of finished jobs stay known.
        """
        self._until_greeted.clear()
        self._going.clear()
        self._pending.clear()
        self._starts.clear()
        self._stops.clear()

    def _ask_for_job(self, name: str) -> None:
        """Send the start message of a job, or a wait message if this client did not start the job."""
        self._send(self._starts.get(name) or _message("wait", name))
        self._pending.add(name)

    def _bind_loop(self) -> None:
        """Reset the state if the event loop changed."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._disconnect()
            self._forget_requests()
            self._loop = loop

    def _send(self, message: bytes) -> None:
        """Send a message, and connect first if necessary."""
        if not self._connected and self._retry is None:
            self._failing_since, self._tries = None, 0
            self._connect()
        if not self._greeted:
            self._until_greeted += message
        if self._connected:
            self._line.write(message)

    def _connect(self) -> None:
        """Connect to the agent.

        An agent that is exiting still holds the lock but does not answer, so try again.
        """
        self._retry = None
        try:
            self._connected = self._line.open(self._receive, self._handle_loss)
        except DriverError as error:
            self._fail(error, None)
            raise
        if not self._connected:
            self._schedule_retry(None)
            return
        if self._line.deadman is not None:
            self._beat(self._line.deadman)
        if self._until_greeted:
            self._line.write(bytes(self._until_greeted))

    def _beat(self, deadman: float) -> None:
        """Send a heartbeat now and periodically, because the connection of a stopped process stays
        open.
        """
        assert self._loop is not None
        self._line.write(_message("arm", f"{deadman}", "beats"))
        self._beats = self._loop.call_later(deadman / BEATS, self._beat, deadman)

    def _schedule_retry(self, error: DriverError | None, least: float = 0.0) -> None:
        """Schedule another attempt after at least `least` seconds, or fail the waiting callers."""
        assert self._loop is not None
        now = self._loop.time()
        if self._failing_since is None:
            self._failing_since = now
        reason = error or Unreachable(
            f"no response from the agent of {self.root}; see agent.log in that directory"
        )
        if now - self._failing_since >= self._line.patience:
            self._until_greeted.clear()
            self._fail(reason, None)
            return
        if self._line.hurried:
            self._fail(reason, now)
        pauses = self._line.pauses
        pause = max(least, pauses[min(self._tries, len(pauses) - 1)])
        self._retry = self._loop.call_later(pause, self._reconnect)
        self._tries += 1

    def _reconnect(self) -> None:
        with suppress(DriverError):  # raised in the waiting callers
            self._connect()

    def _fail(self, error: DriverError, now: float | None) -> None:
        """Raise `error` in all waiting callers, or, with the time `now`, in callers whose patience
        has ended.
        """
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
        """Close the connection, and cancel heartbeats and retries."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
        self._line.close()
        self._connected = self._greeted = False
        self._received.clear()

    def _handle_loss(self, error: DriverError | None) -> None:
        """Handle a lost connection.

        The next connection repeats messages that the agent may not have received.
        """
        greeted = self._greeted
        self._disconnect()
        if error is not None and not isinstance(error, Unreachable):
            self._until_greeted.clear()
            self._fail(error, None)
            return
        if greeted:
            self._failing_since, self._tries = None, 0
            self._repeat_messages(error or Unreachable("the agent was killed"))
        if self._until_greeted or self._line.deadman is not None:
            self._schedule_retry(error)

    def _repeat_messages(self, error: DriverError) -> None:
        """Queue the messages of all unfinished jobs for the next connection, and fail questions
        about locks.
        """
        self._going.clear()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._until_greeted += b"".join(self._starts.values())
        self._pending = {*self._starts, *self._waiting}
        for name in self._pending - self._starts.keys():
            self._until_greeted += _message("wait", name)
        self._until_greeted += b"".join(self._stops.values())

    def _receive(self, data: bytes) -> None:
        """Handle the complete lines of the received data.

        The first line of a connection is the agent's greeting.
        """
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            if self._greeted:
                try:
                    self._handle_message(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    self._handle_loss(
                        Unreachable(f"the agent of {self.root} sent an invalid message")
                    )
                    return
                continue
            number = _protocol_of(line)
            if number in PROTOCOLS:
                self._greeted = True
                self._failing_since, self._tries = None, 0
                self._until_greeted.clear()
            else:
                self._disconnect()
                self._schedule_retry(Unreachable(_foreign_agent_message(self.root, number)), UNUSED)
                return

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "free" in message:
            asked = self._asked.get(message["free"])
            if asked is not None and not asked.done():
                asked.set_result(message)
            return
        name = str(message.pop("job"))
        self._pending.discard(name)
        if "code" in message:
            self._record_exit(name, message)
        else:
            self._going.add(name)
            for waiting, give_up_at in self._waiting.get(name, ()):
                if self._loop is None or give_up_at <= self._loop.time():
                    _resolve(waiting)

    def _record_exit(self, name: str, message: dict[str, Any]) -> None:
        """Record the exit of a job, and wake the callers that wait for the job."""
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


class SocketLine:
    """The connection to the agent of a root directory on this machine.

    Starts the agent if necessary.

    `context` is the identity of this process.  With `own`, only an agent with the same identity is
    accepted.
    """

    patience = 10.0
    pauses: Sequence[float] = (0.01,)
    hurried = False
    deadman: float | None = None

    def __init__(self, host: Host, context: str = "", *, own: bool = False) -> None:
        self._host = host
        self._root = host.root
        self._context, self._own = context, own
        self._awake: socket.socket | None = None
        """A connection to the agent without a request so far."""
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent = bytearray()

    def wake(self) -> None:
        """Start the agent if it does not run.  Errors are raised for the first job."""
        if self._awake is None and self._socket is None:
            with suppress(OSError):
                self._awake = self._connect()

    def open(
        self, on_data: Callable[[bytes], None], on_loss: Callable[[DriverError | None], None]
    ) -> bool:
        try:
            self._socket, self._awake = self._awake or self._connect(), None
        except OSError as error:
            raise _file_error(error, self._root) from error
        if self._socket is None:
            return False
        logging.getLogger("runner.hosts").debug("connected to the agent of %s", self._root)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive, self._socket, on_data, on_loss)
        return True

    def _connect(self) -> socket.socket | None:
        return reach(self._root, self._context, own=self._own)

    def write(self, data: bytes) -> None:
        assert self._socket is not None and self._loop is not None
        if not self._unsent:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the reader notices the closed connection
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._socket, self._write_rest)
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
            if error.strerror == NOT_REGULAR:  # the step replaced its log, for example by a pipe
                return b""
            raise _file_error(error, self._root) from error
        try:
            return os.pread(fd, CHUNK, offset)
        except OSError as error:
            raise _file_error(error, self._root) from error
        finally:
            os.close(fd)

    async def aclose(self) -> None:
        self.close()
        if self._awake is not None:
            self._awake.close()
            self._awake = None

    def _receive(
        self,
        ours: socket.socket,
        on_data: Callable[[bytes], None],
        on_loss: Callable[[DriverError | None], None],
    ) -> None:
        try:
            data = ours.recv(ROOM)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            on_data(data)
        else:
            on_loss(None)

    def _write_rest(self) -> None:
        assert self._socket is not None and self._loop is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket)


class StreamLine:
    """The connection to the agent of another machine, over a stream.

    Logs are read through `wire`.
    """

    patience = 60.0
    pauses: Sequence[float] = (0.1, 0.3, 1.0, 3.0)
    hurried = True

    def __init__(self, wire: Wire) -> None:
        self.deadman = wire.host.deadman
        self._wire = wire
        self._unsent = bytearray()
        self._news = asyncio.Event()
        self._leaving = False
        self._exchanging: asyncio.Task[None] | None = None

    def open(
        self, on_data: Callable[[bytes], None], on_loss: Callable[[DriverError | None], None]
    ) -> bool:
        self._unsent.clear()
        self._news = asyncio.Event()
        self._exchanging = asyncio.get_running_loop().create_task(self._exchange(on_data, on_loss))
        return True

    def write(self, data: bytes) -> None:
        self._unsent += data
        self._news.set()

    def close(self) -> None:
        exchanging, self._exchanging = self._exchanging, None
        if (
            exchanging is not None
            and not exchanging.done()
            and exchanging is not asyncio.current_task()
        ):
            exchanging.cancel()
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
        await asyncio.gather(self._finish(), self._wire.aclose())

    async def _finish(self) -> None:
        """Send the last messages and end the stream, within `FAREWELL` seconds."""
        exchanging, self._leaving = self._exchanging, True
        if exchanging is not None:
            self._news.set()
            await asyncio.wait([exchanging], timeout=FAREWELL)
            self.close()
            await asyncio.wait([exchanging])
        self._leaving = False

    async def _exchange(
        self, on_data: Callable[[bytes], None], on_loss: Callable[[DriverError | None], None]
    ) -> None:
        """Exchange messages over a stream until it ends, then call `on_loss` with the reason."""
        from .stream import Stream

        try:
            stream = await Stream.open(self._wire.host, self._wire.root, "jobs")
            sending = asyncio.ensure_future(self._send_queued(stream))
            try:
                while True:
                    async with asyncio.timeout(SILENCE):
                        payload = await stream.receive()
                    if payload[:1] == b"d":
                        # An empty answer, because some connections delay small packets until the
                        # other side answers.
                        await stream.send(b"d")
                        on_data(payload[1:])
                    if self._exchanging is not asyncio.current_task():
                        return
            finally:
                sending.cancel()
                await stream.aclose()
        except TimeoutError:
            on_loss(Unreachable(f"no response from the host for {SILENCE:g} seconds"))
        except DriverError as error:
            if not self._leaving:
                on_loss(error)

    async def _send_queued(self, stream: Stream) -> None:
        """Send queued messages as they come, and a heartbeat after `SIGN` seconds without a
        message.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SIGN):
                    await self._news.wait()
            self._news.clear()
            data = bytes(self._unsent)
            self._unsent.clear()
            if data:
                await stream.send(b"d", data)
            elif not self._leaving:
                await stream.send(b"p", data)
            if self._leaving and not self._unsent:
                await stream.finish()
                return


def connect_own(home: Path, deadman: float | None = None) -> Client:
    """Return a client for jobs on this machine with the limits and namespaces of this process.

    `home` is the workspace's `.recipe`.
    """
    context = process_identity()
    return _wake_client(
        SocketLine(LocalHost(choose_root(home, context)), context, own=True), deadman
    )


def connect_local(root: Path, deadman: float | None = None) -> Client:
    """Return a client for jobs on this machine, and start the agent of `root` if necessary.

    `deadman` is the time without a client, in seconds, after which the agent stops its jobs,
    because another machine may start them.
    """
    return _wake_client(SocketLine(LocalHost(root), process_identity()), deadman)


def _wake_client(line: SocketLine, deadman: float | None) -> Client:
    line.deadman = deadman
    line.wake()
    return Client(line)


def connect_remote(wire: Wire) -> Client:
    """Return a client for jobs on another machine, with the agent in the root of `wire`."""
    return Client(StreamLine(wire))


def _protocol_of(line: bytes | bytearray) -> int | None:
    """Parse the protocol number of an agent's greeting; None if the line is no greeting."""
    try:
        number = json.loads(line)["agent"]
    except (ValueError, TypeError, KeyError):
        return None
    return number if isinstance(number, int) else None


def _foreign_agent_message(root: str, number: int | None) -> str:
    if number is None:
        return f"{root} is used by an unknown agent"
    if number > NUMBER:
        return (
            f"the agent in {root} belongs to a newer recipe (protocol {number}, this version has "
            f"{NUMBER}): use the newer version, or wait until the agent's jobs finish"
        )
    return f"the agent in {root} belongs to an older recipe (protocol {number}, this version has {NUMBER}): wait until the agent's jobs finish"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _start_message(name: str, command: Command, log: str) -> bytes:
    """Return the start message of a job."""
    limits = (f"{command.timeout or ''}", f"{command.idle_timeout or ''}")
    outlives = "1" if command.outlives else ""
    env: list[str] = []
    for pairs in (command.env, command.secrets):
        for variable, value in pairs.items():
            env += (variable, value)
    return _message(
        *("start", name, command.cwd, log, *limits, " ".join(command.locks), outlives),
        *(f"{len(command.argv)}", *command.argv, *env),
    )


def _message(*fields: str) -> bytes:
    """Return a message to the agent."""
    body = "\0".join(fields)
    if body.count("\0") != len(fields) - 1:
        raise Rejected(
            "a command's arguments, environment and paths cannot contain a NUL character"
        )
    data = body.encode("utf-8", "surrogateescape")
    return len(data).to_bytes(4, "little") + data


def _file_error(error: OSError, root: str) -> Denied | Unreachable:
    message = f"{error.filename or root}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return Denied(message)
    return Unreachable(message)
