"""Programs for the nodes of a Ray cluster: an actor that starts programs, and a watch process.

Daemons outlive a killed Ray actor.  So each actor starts a watch, a separate process that reads a
pipe held by the actor.  When the actor is lost, the watch tells the agent of its directory to end
all jobs, and exits once the agent has.  Until then the watch holds the directory's lock, so the
next actor on this node takes another directory.

Imports only the standard library and Ray, no module of this project.  The class is sent by value.
The watch runs this file's text: `python -c TEXT ROOT NAME GRACE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

CHUNK = 1 << 20
WORDS = 4096
"""Bytes of stderr to keep for error messages."""
LONGEST_POLL = 5.0
"""Longest wait of one read request, in seconds."""
ABANDONED = 30.0
"""Seconds without a read request after which a program counts as abandoned and is killed."""
LOOK = 1.0
"""Interval between checks for an idle lease, in seconds."""
STUBBORN = 10.0
"""Seconds beyond the grace period after which the watch stops waiting for the agent."""


class Stream:
    """A running program with its input and output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.asked = time.monotonic()
        self.words = b""
        self._drained = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(CHUNK):
            self.words = (self.words + data)[-WORDS:]

    async def write(self, data: bytes) -> bool:
        """Write to the program's stdin.  Return False if the program accepts no more input."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(data)
            await self.process.stdin.drain()
            return not self.process.stdin.is_closing()
        return False

    async def read(self) -> tuple[bytes, tuple[int, bytes] | None]:
        """Return new output and, after the last output, the exit code with the end of stderr."""
        self.asked = time.monotonic()
        assert self.process.stdout is not None
        with contextlib.suppress(TimeoutError):
            data = await asyncio.wait_for(self.process.stdout.read(CHUNK), LONGEST_POLL)
            if not data:
                code = await self.process.wait()
                # Child processes may keep stderr open.
                await asyncio.wait([self._drained], timeout=0.2)
                return b"", (code, self.words)
            return data, None
        return b"", None

    def end(self) -> None:
        """Kill the program and its process group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._drained.cancel()


class Node:
    """The actor of one bundle, which runs programs for the driver."""

    def __init__(
        self,
        text: str,
        name: str,
        names: list[str],
        namespace: str,
        root: str,
        grace: float,
        idle: float,
    ) -> None:
        self._text, self._name, self._names, self._namespace = text, name, names, namespace
        self._root, self._grace, self._idle = root, grace, idle
        self._streams: dict[str, Stream] = {}
        self._quiet_since = time.monotonic()
        self._watch: asyncio.subprocess.Process | None = None
        self._begun = asyncio.Lock()
        self._folder = ""
        self._minding: asyncio.Task[None] | None = None

    async def about(self) -> tuple[str, str]:
        """Return the lease's directory on this node, and the node's address.

        The first call starts the watch.  Raises OSError if the directory is not writable.
        """
        import ray

        async with self._begun:
            if self._watch is None:
                root = at_home(self._root)
                os.makedirs(root, exist_ok=True)
                argv = (
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    self._text,
                    root,
                    self._name,
                    str(self._grace),
                )
                pipe = asyncio.subprocess.PIPE
                watch = await asyncio.create_subprocess_exec(
                    *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=_env()
                )
                assert watch.stdout is not None and watch.stderr is not None
                self._folder = os.fsdecode((await watch.stdout.readline()).rstrip(b"\n"))
                if not self._folder:
                    raise OSError(
                        (await watch.stderr.read()).decode("utf-8", "replace").strip()[-WORDS:]
                    )
                self._watch = watch
                self._minding = asyncio.ensure_future(self._mind())
        return self._folder, ray.util.get_node_ip_address()

    async def begin(self, id: str, argv: list[bytes]) -> str:
        """Start a program.  Return an error message, or an empty text on success."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                cwd=at_home(""),
                env=_env(),
                limit=CHUNK,
            )
        except (OSError, ValueError) as error:
            return str(error)
        self._streams[id] = Stream(process)
        return ""

    async def write(self, id: str, data: bytes) -> bool:
        """Write to a program's stdin.  Return False if the program accepts no more input."""
        stream = self._streams.get(id)
        return stream is not None and await stream.write(data)

    async def close(self, id: str) -> None:
        """Close a program's stdin."""
        stream = self._streams.get(id)
        if stream is not None and stream.process.stdin is not None:
            stream.process.stdin.close()

    async def read(self, id: str) -> tuple[bytes, tuple[int, bytes] | None]:
        """Return new output of a program and, after the last, its exit code and end of stderr."""
        stream = self._streams.get(id)
        if stream is None:
            return b"", (-signal.SIGKILL, b"no client asked for its output")
        return await stream.read()

    async def end(self, id: str) -> None:
        """Kill the program if it is running and drop its record."""
        stream = self._streams.pop(id, None)
        if stream is not None:
            stream.end()

    async def leave(self) -> bool:
        """Stop all programs and jobs on this node.  Return True once none is left."""
        for id in list(self._streams):
            await self.end(id)
        if self._watch is None:
            return True
        assert self._watch.stdin is not None and self._watch.stdout is not None
        self._watch.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watch.stdout.read(), LONGEST_POLL)
        return self._watch.stdout.at_eof()

    async def quiet(self) -> float:
        """Return the seconds since a program last ran or a client was last connected on this node."""
        return time.monotonic() - self._quiet_since

    async def _mind(self) -> None:
        """Kill abandoned programs, and remove the placement group once all nodes are idle."""
        import ray

        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for id, stream in list(self._streams.items()):
                if now - stream.asked > ABANDONED:
                    await self.end(id)
            if self._streams or is_held(f"{self._folder}/agent/lock"):
                self._quiet_since = now
            if self._idle and now - self._quiet_since >= self._idle:
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    if await self._are_others_idle():
                        ray.util.remove_placement_group(ray.util.get_current_placement_group())

    async def _are_others_idle(self) -> bool:
        """Ask the actors of the other nodes. Raises ValueError if an actor no longer exists."""
        import ray

        names = [name for name in self._names if name != self._name]
        others = [ray.get_actor(name, namespace=self._namespace) for name in names]
        return all([await other.quiet.remote() >= self._idle for other in others])


def over(root: str, name: str) -> bool:
    """Return True if the lost actor `name` left no running watch process on this node."""
    for path in glob.glob(os.path.join(glob.escape(at_home(root)), "*.ray")):
        with (
            contextlib.suppress(OSError),
            open(path, encoding="utf-8", errors="surrogateescape") as file,
        ):
            if file.read() == name and is_held(path):
                return False
    return True


def at_home(path: str) -> str:
    """Convert a path relative to the login's home directory to an absolute path."""
    return os.path.join(os.path.expanduser("~"), path)


def is_held(path: str) -> bool:
    """Return True if a process holds the file's lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def watch(root: str, name: str, grace: float) -> None:
    """Claim, print and guard a work directory below `root` until stdin closes.

    Then have the directory's agent end its jobs, and wait until the agent has exited.
    """
    if os.fork():
        os._exit(0)  # Ray kills the children of an exited actor, but not its grandchildren
    taken, folder = next(filter(None, map(_taker(root), range(1000))))
    os.makedirs(os.path.join(folder, "agent"), mode=0o700, exist_ok=True)
    os.ftruncate(taken, 0)
    os.write(taken, name.encode("utf-8", "surrogateescape"))
    os.write(1, os.fsencode(folder) + b"\n")
    while os.read(0, 1):
        pass
    body = b"leave\0%f\0the actor of its node is gone" % grace
    os.chdir(os.path.join(folder, "agent"))  # a socket address is limited to 107 bytes
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as agent:
        agent.connect("socket")
        agent.sendall(len(body).to_bytes(4, "little") + body)
    give_up_at = time.monotonic() + grace + STUBBORN
    while is_held("lock") and time.monotonic() < give_up_at:
        time.sleep(0.05)


def _taker(root: str) -> Callable[[int], tuple[int, str] | None]:
    def take(number: int) -> tuple[int, str] | None:
        folder = os.path.join(root, f"{socket.gethostname()}-{number}")
        fd = os.open(f"{folder}.ray", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd, folder

    return take


def _env() -> dict[str, str]:
    """Return this node's environment without the variables that Ray sets for its own workers."""
    own = ("RAY_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2], float(sys.argv[3]))
