"""What runs on the nodes of a Ray cluster: an actor that begins programs, and a watch that ends what the actor leaves.  Imports nothing of ours.

Daemons outlive a killed actor of Ray.  So each actor begins a watch, a process of its own that reads a pipe which the actor holds.  When the actor is
gone, the watch has the agent of its folder end all jobs, and ends when the agent has.  Until then it holds the lock of the folder, so that the next
actor on this node takes another one.

Only the standard library and Ray.  The class is sent by value; the watch is this text: `python -c TEXT ROOT NAME GRACE`.
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
"""Bytes of stderr that are kept for an error."""
LONGEST_POLL = 5.0
"""Seconds for which a question for output waits."""
ABANDONED = 30.0
"""Seconds without a question after which a program has no reader any more, and is ended."""
LOOK = 1.0
"""Seconds between two looks whether the lease is idle."""
STUBBORN = 10.0
"""Seconds beyond the grace in which the agent must have ended."""


class Stream:
    """A program with its input and output."""

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
        """Whether the program takes more."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(data)
            await self.process.stdin.drain()
            return not self.process.stdin.is_closing()
        return False

    async def read(self) -> tuple[bytes, tuple[int, bytes] | None]:
        """What was printed since, and how the program ended: its exit code and its last words."""
        self.asked = time.monotonic()
        assert self.process.stdout is not None
        with contextlib.suppress(TimeoutError):
            data = await asyncio.wait_for(self.process.stdout.read(CHUNK), LONGEST_POLL)
            if not data:
                code = await self.process.wait()
                await asyncio.wait(
                    [self._drained], timeout=0.2
                )  # what the program left behind may hold its stderr
                return b"", (code, self.words)
            return data, None
        return b"", None

    def end(self) -> None:
        """Kill the program with its group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._drained.cancel()


class Node:
    """The actor of one bundle: begins programs for the holder of its name."""

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
        """The folder of this lease on this node, and the address of the node.  Raises OSError where the folder cannot be written."""
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
        """Begin a program.  Answers why it cannot be run, or nothing."""
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
        """Whether the program takes more."""
        stream = self._streams.get(id)
        return stream is not None and await stream.write(data)

    async def close(self, id: str) -> None:
        """Its input is over."""
        stream = self._streams.get(id)
        if stream is not None and stream.process.stdin is not None:
            stream.process.stdin.close()

    async def read(self, id: str) -> tuple[bytes, tuple[int, bytes] | None]:
        """What was printed since, and how the program ended."""
        stream = self._streams.get(id)
        if stream is None:
            return b"", (-signal.SIGKILL, b"no client asked for its output")
        return await stream.read()

    async def end(self, id: str) -> None:
        """Kill a program that is not over, and forget it."""
        stream = self._streams.pop(id, None)
        if stream is not None:
            stream.end()

    async def leave(self) -> bool:
        """End all that runs here.  Whether it has ended."""
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
        """Seconds for which nothing has run here and no client has been connected."""
        return time.monotonic() - self._quiet_since

    async def _mind(self) -> None:
        """End programs without a reader, and give the lease back when it is idle."""
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
                    others = [
                        ray.get_actor(name, namespace=self._namespace)
                        for name in self._names
                        if name != self._name
                    ]
                    if all([await other.quiet.remote() >= self._idle for other in others]):
                        ray.util.remove_placement_group(ray.util.get_current_placement_group())


def over(root: str, name: str) -> bool:
    """Whether nothing is left on this node of an actor that is gone."""
    for path in glob.glob(os.path.join(glob.escape(at_home(root)), "*.ray")):
        with (
            contextlib.suppress(OSError),
            open(path, encoding="utf-8", errors="surrogateescape") as file,
        ):
            if file.read() == name and is_held(path):
                return False
    return True


def at_home(path: str) -> str:
    """A path below the login's home, unless it is absolute."""
    return os.path.join(os.path.expanduser("~"), path)


def is_held(path: str) -> bool:
    """Whether a process holds the lock of this file."""
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
    """Take a folder below `root` that no other has, and print it.  When our input is over, end what runs there, and let go of our output."""
    if os.fork():
        os._exit(
            0
        )  # Ray kills the children of an actor that ends; a child's child it does not know
    taken, folder = next(filter(None, map(_taker(root), range(1000))))
    os.makedirs(os.path.join(folder, "agent"), mode=0o700, exist_ok=True)
    os.ftruncate(taken, 0)
    os.write(taken, name.encode("utf-8", "surrogateescape"))
    os.write(1, os.fsencode(folder) + b"\n")
    while os.read(0, 1):
        pass
    body = b"leave\0%f\0the actor of its node is gone" % grace
    os.chdir(os.path.join(folder, "agent"))  # an address may have 107 bytes
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
    """The environment of this node, without what Ray adds for its own workers."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))
    }


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2], float(sys.argv[3]))
