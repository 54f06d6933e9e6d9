"""This machine as a driver: nothing to rent, one host whose jobs belong to a agent that outlives us.  Knows that process's wire, not its work.

`LocalHost` is one connection to the agent of a root directory, which it begins when none holds the root's lock.  A start is a message written
at once, and ends arrive as lines that one reader turns into finished waits: nothing is asked twice, nothing is polled.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from .base import (
    NOTHING,
    Argv,
    Command,
    Denied,
    DriverError,
    Exit,
    HostLost,
    Job,
    Lease,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Wish,
)

CHUNK = 1 << 20
FOREVER = 1e8  # seconds; a longer patience needs no alarm
ROOM = 1 << 15  # bytes of one read: small enough that memory for it is at hand, and not mapped and given back each time
REMEMBERED = 10_000
PATIENCE = 10.0  # seconds in which a agent must have greeted us
RETRY = 0.01  # between attempts to reach one that is just leaving
GREETING = b'{"agent": 1}'
SAFE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-+=,")
AGENT = Path(__file__).parents[1] / "runner"
"""The folder of the package `agent`: a program of its own, which is started and never imported."""
BEGIN = "import sys; sys.path.append(sys.argv.pop(1)); from agent import server; server.main(sys.argv[1], *map(int, sys.argv[2:]))"


class Local:
    """This machine.  `root` is the directory, ours alone, where its agent and the logs of its jobs live."""

    traits = Traits(shared_disk=True, replays=True, comes_up=timedelta(0))

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._host = LocalHost(self._root)

    def wake(self) -> None:
        """Begin the agent of this root, if there is none: it comes up while its first job is being prepared."""
        self._host.wake()

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        from . import machine

        have = await _machine(self._root)
        return (Offer("local", "local", have),) if machine.enough(have, wish) else ()

    async def acquire(self, order: Order) -> Lease:
        lease = Lease("local", _name(order.key), order.key)
        with _translated(self._root):
            _make_private(self._root / "leases")
            (self._root / "leases" / lease.id).write_text(order.key, encoding="utf-8")
        return lease

    async def hosts(self, lease: Lease) -> Sequence[LocalHost] | None:
        if not (self._root / "leases" / lease.id).exists():
            raise HostLost(f'the lease "{lease.key}" of this machine was given back')
        return (self._host,)

    async def release(self, lease: Lease) -> bool:
        with _translated(self._root):
            (self._root / "leases" / lease.id).unlink(missing_ok=True)
        return True

    async def leases(self) -> Sequence[Lease]:
        with _translated(self._root), suppress(FileNotFoundError):
            return [Lease("local", path.name, path.read_text(encoding="utf-8")) for path in sorted((self._root / "leases").iterdir())]
        return ()


class LocalHost:
    """A shell and a disk: ours.  Belongs to one event loop at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._awake: socket.socket | None = None  # to a agent that nobody has asked for anything yet
        self._greeted = False
        self._give_up_at = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._unsent = bytearray()
        self._until_greeted = bytearray()  # what a agent that was just leaving may never have read
        self._going: set[str] = set()
        self._starts: dict[str, bytes] = {}  # of jobs that are not over: an agent that was killed may never have read it
        self._stops: dict[str, bytes] = {}
        self._over: dict[str, Exit] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._questions = 0
        self._asked: dict[int, asyncio.Future[dict[str, str]]] = {}

    def wake(self) -> None:
        if self._awake is None and self._socket is None:
            with suppress(OSError, DriverError):  # whoever starts a job meets it again
                self._awake = _reach(self._root)

    async def start(self, command: Command, key: str) -> Job:
        name = _name(key)
        job = Job(key, {"log": command.log or str(self._root / "logs" / name)})
        if name not in self._over or self._over[name].reason == "busy":
            self._over.pop(name, None)
            limits = (f"{command.timeout or ''}", f"{command.idle_timeout or ''}")
            env = (text for pairs in (command.env, command.secrets) for pair in pairs.items() for text in pair)
            how = (" ".join(command.locks), "1" if command.outlives else "", f"{len(command.argv)}")
            self._starts[name] = _frame("start", name, command.cwd, job.data["log"], *limits, *how, *command.argv, *env)
            self._send(self._starts[name])
            self._going.add(name)
        return job

    async def free(self, locks: Sequence[str]) -> Sequence[str]:
        number = self._questions = self._questions + 1
        told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._asked[number] = told
        try:
            self._send(_frame("free", f"{number}", " ".join(locks)))
            found = await told
        finally:
            self._asked.pop(number, None)
        if found["problem"]:
            raise Denied(f"no lock can be held: {found['problem']}")
        return found["locks"].split()

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        name = _name(job.key)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + min(patience.total_seconds(), FOREVER)
        while (over := self._over.get(name)) is None:
            known = name in self._going
            if not known:
                self._send(_frame("wait", name))
            elif loop.time() >= give_up_at:
                return None
            told: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(name, []).append(told)
            alarm = loop.call_at(give_up_at, _resolve, told) if known and patience.total_seconds() < FOREVER else None
            try:
                await told
            finally:
                if alarm is not None:
                    alarm.cancel()
                waiting = self._waiting.get(name)
                if waiting is not None and told in waiting:
                    waiting.remove(told)
                    if not waiting:
                        del self._waiting[name]
        return over

    async def log(self, job: Job, offset: int) -> bytes:
        try:
            fd = os.open(job.data.get("log") or self._root / "logs" / _name(job.key), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _foreign(error, self._root) from error
        try:
            return os.pread(fd, CHUNK, offset)
        except OSError as error:
            raise _foreign(error, self._root) from error
        finally:
            os.close(fd)

    async def stop(self, job: Job, grace: timedelta) -> None:
        name = _name(job.key)
        if name not in self._over:
            self._stops[name] = _frame("stop", name, f"{grace.total_seconds()}")
            self._send(self._stops[name])

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        from . import calls

        return calls.call(argv, stdin, {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"})

    async def aclose(self) -> None:
        self._disconnect()
        if self._awake is not None:
            self._awake.close()
            self._awake = None
        self._forget()

    # --- the connection

    def _forget(self) -> None:
        for of_this_loop in (self._until_greeted, self._going, self._starts, self._stops):
            of_this_loop.clear()

    def _send(self, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._disconnect()
            self._forget()
            self._loop = loop
        if self._socket is None and self._retry is None:
            self._give_up_at = loop.time() + PATIENCE
            self._connect()
        if not self._greeted:
            self._until_greeted += frame
        if self._socket is not None:
            self._write(frame)

    def _write(self, data: bytes | bytearray) -> None:
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

    def _connect(self) -> None:
        """Reach the agent of this root, or begin one.  One that is just leaving still holds the lock and answers nobody: try again."""
        assert self._loop is not None
        self._retry = None
        try:
            with _translated(self._root):
                self._socket, self._awake = self._awake or _reach(self._root), None
        except (Denied, Unreachable, Rejected) as error:
            self._fail(error)
            raise
        if self._socket is None:
            self._again()
            return
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)
        if self._until_greeted:
            self._write(bytes(self._until_greeted))

    def _again(self) -> None:
        assert self._loop is not None
        if self._loop.time() < self._give_up_at:
            self._retry = self._loop.call_later(RETRY, self._reconnect)
        else:
            self._until_greeted.clear()
            self._fail(Unreachable(f"the agent of {self._root} does not answer; what it said is in {self._root / 'agent.log'}"))

    def _reconnect(self) -> None:
        with suppress(Denied, Unreachable, Rejected):  # told to those who wait
            self._connect()

    def _fail(self, error: DriverError) -> None:
        waiting, self._waiting = self._waiting, {}
        self._going.clear()
        self._starts.clear()
        asked, self._asked = self._asked, {}
        futures: list[asyncio.Future[Any]] = [told for several in waiting.values() for told in several]
        for told in (*futures, *asked.values()):
            if not told.done():
                told.set_exception(error)

    def _disconnect(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        self._greeted = False
        self._received.clear()
        self._unsent.clear()

    def _read(self) -> None:
        assert self._socket is not None and self._loop is not None
        try:
            data = self._socket.recv(ROOM)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost_agent()
            return
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            if self._greeted:
                self._hear(json.loads(line))
            elif line == GREETING:
                self._greeted = True
                self._until_greeted.clear()
            else:
                self._disconnect()
                self._fail(Unreachable(f"{self._root} is served by a agent of another version; wait for its jobs to end"))
                return

    def _lost_agent(self) -> None:
        """It was killed, or was just leaving as we came.  The next one knows what became of our jobs, and begins those that never began."""
        assert self._loop is not None
        greeted = self._greeted
        self._disconnect()
        if greeted:
            self._give_up_at = self._loop.time() + PATIENCE
            self._going.clear()
            for told in self._asked.values():
                if not told.done():
                    told.set_exception(Unreachable("the agent was killed"))
            for frame in self._starts.values():
                self._until_greeted += frame
            for name in self._waiting.keys() - self._starts.keys():
                self._until_greeted += _frame("wait", name)
            for frame in self._stops.values():
                self._until_greeted += frame
        if self._until_greeted:
            self._again()

    def _hear(self, told: dict[str, Any]) -> None:
        if "free" in told:
            if (asked := self._asked.get(told["free"])) is not None and not asked.done():
                asked.set_result(told)
            return
        name = str(told.pop("job"))
        if "code" in told:
            self._going.discard(name)
            self._starts.pop(name, None)
            self._stops.pop(name, None)
            exit = Exit(**told)  # our own agent's words
            self._over[name] = exit
            if len(self._over) > REMEMBERED:
                del self._over[next(iter(self._over))]
        else:
            self._going.add(name)
        for waiting in self._waiting.pop(name, ()):
            _resolve(waiting)


def _resolve(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)


def _name(key: str) -> str:
    """A key as a file name and a word in a line of JSON."""
    if 0 < len(key) <= 200 and SAFE.issuperset(key) and key[0] != ".":
        return key
    import hashlib

    return f"_{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _frame(*fields: str) -> bytes:
    body = "\0".join(fields)
    if body.count("\0") != len(fields) - 1:
        raise Rejected("a command's arguments, environment and paths cannot contain a NUL character")
    data = body.encode("utf-8", "surrogateescape")
    return len(data).to_bytes(4, "little") + data


def _reach(root: Path) -> socket.socket | None:
    """A connection to the live agent of `root`, or to one begun now; None while one is leaving or another process is beginning one."""
    lock = _open_lock(root)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _dial(root)
        return _begin(root, lock)
    finally:
        os.close(lock)


def _open_lock(root: Path) -> int:
    try:
        return os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        _make_private(root / "logs")  # its parent too
        return os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)


def _make_private(directory: Path) -> None:
    """What is below may hold secrets that a step printed."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.parent.chmod(0o700)
    directory.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _address(root: Path) -> Iterator[str]:
    """The socket's address: short, however long the path of `root` is (the kernel takes 107 bytes)."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _dial(root: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        with _address(root) as address:
            connection.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    return connection


def _begin(root: Path, lock: int) -> socket.socket:
    """Make the socket, hand it and the lock to a new process, and talk to it right away: what we write waits while it comes up."""
    logging.getLogger("drivers.local").debug("beginning a agent of %s", root)
    _make_private(root / "logs")
    with suppress(FileNotFoundError):
        (root / "socket").unlink()
    ours, its = socket.socketpair()
    with its, socket.socket(socket.AF_UNIX) as listener, (root / "agent.log").open("ab") as said:
        with _address(root) as address:
            listener.bind(address)
        (root / "socket").chmod(0o600)
        listener.listen(128)
        fds = (lock, listener.fileno(), its.fileno())
        argv = [sys.executable, "-I", "-S", "-E", "-c", BEGIN, str(AGENT), str(root), *map(str, fds)]
        try:
            for fd in fds:
                os.set_inheritable(fd, True)
            null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)
            quiet = ((os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, said.fileno(), 2))
            os.posix_spawn(sys.executable, argv, {"PATH": os.defpath}, file_actions=(null, *quiet), setsid=True)
        finally:
            for fd in fds:
                os.set_inheritable(fd, False)
    return ours


@contextmanager
def _translated(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _foreign(error, root) from error


def _foreign(error: OSError, root: Path) -> Denied | Unreachable:
    words = f"{error.filename or root}: {error.strerror or error}"
    return Denied(words) if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR) else Unreachable(words)


async def _machine(root: Path) -> Resources:
    names, sizes = await _gpus()
    return Resources(
        cpus=float(len(os.sched_getaffinity(0))),
        memory=_memory(),
        gpus=len(names),
        gpu=names[0] if names else None,
        gpu_memory=min(sizes, default=None),
        disk=_free(root),
    )


def _memory() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def _free(root: Path) -> int:
    import shutil

    return shutil.disk_usage(next(directory for directory in (root, *root.parents) if directory.exists())).free


async def _gpus() -> tuple[list[str], list[int]]:
    """Names and bytes of memory, as the vendor's tool tells them; no tool is no GPU."""
    import shutil

    if shutil.which("nvidia-smi") is None:
        return [], []
    host = LocalHost(Path())
    try:
        told = b"".join([data async for data in host.call(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))])
    except Rejected:
        return [], []
    rows = [row.rpartition(",") for row in told.decode().splitlines() if row.strip()]
    return [name.strip() for name, _, _ in rows], [int(size) << 20 for _, _, size in rows if size.strip().isdigit()]
