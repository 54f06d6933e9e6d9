"""Asks programs on one host and has their answers whole.  Knows how to run them there and to try again, not what they are for.

A connection may break at any byte, and bytes may come wrong: an answer counts when its digest does.  So every program may run twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from drivers.base import NOTHING, Host, Rejected, Unreachable

from ..errors import Corrupt, Infrastructure
from ..language.units import about
from ..logs import Log
from ..retry import pause, retry_async
from ..storage.files import Changed
from . import hostwork as work
from .hostwork import Garbled

TRIES = 8
"""Times that nothing at all may get through before we give up."""
_T = TypeVar("_T")
_FULL = ("No space left", "Disk quota exceeded", "disk full")
_count = itertools.count(1)
_log = Log("hosts")


def rest(failures: int) -> float:
    """Seconds to wait after so many failures without progress: a connection that broke once is made anew at once."""
    return pause(failures - 1, 0.2, 6.4) if failures > 1 else 0.0


def _again(error: Exception, tried: int) -> float | None:
    return rest(tried) if tried < TRIES and isinstance(error, (Unreachable, Garbled)) else None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is.  Bytes, bytes a second, seconds; `eta` None while nobody can tell."""

    what: str
    done: int
    total: int
    rate: float
    eta: float | None


class Wire:
    """The programs of `hostwork` on one host, below `root` there; a relative one begins at the login's home."""

    def __init__(self, host: Host, root: str, *, name: str, say: Callable[[str], None], progress: Callable[[Progress], None]) -> None:
        self.host, self.root, self.name, self.say = host, root, name, say
        self.boot = ""
        """What tells one boot of the host from the next; empty before `open`."""
        self.word = secrets.token_hex(8)
        """Marks what is an answer in all that a login prints."""
        self.sender = f"{process()}-{next(_count)}"
        """Who we are among those who send to that host."""
        self._progress = progress
        self._hashes, self._lists = "sha256sum", "exec"

    async def open(self) -> None:
        """Make the folders there, and find out how that host does things."""

        async def once() -> list[str]:
            said = await self.raw(("sh", "-c", work.OPENING, "sh", self.root, self.word), b"")
            parts = said.split(f"\n{self.word}\n".encode())
            body, _, digest = parts[1].rpartition(b"\n") if len(parts) == 3 else (b"", b"", b"")
            lines = body.decode("utf-8", "surrogateescape").split("\n")
            if len(lines) != 5 or (lines[1] and hashlib.sha256(body).hexdigest() != digest.decode("ascii", "replace")):
                raise Garbled
            return lines

        root, hashes, lists, lacks, boot = await self.patiently(once)
        if lacks or hashes not in work.HASHES or lists not in work.LISTS:
            raise Infrastructure(
                f"{self.name} has no{lacks or ' sha256sum'}", fix="install it there; everything of coreutils, findutils and tar is needed"
            )
        self.root, self._hashes, self._lists, self.boot = root, hashes, lists, boot

    async def ask(self, body: str, *arguments: str, stdin: bytes = b"") -> bytes:
        """What a program there answers; asked again until an answer comes whole.  Every program may run twice."""
        return await self.patiently(lambda: self.once(body, *arguments, stdin=stdin))

    async def once(self, body: str, *arguments: str, stdin: bytes | Iterator[bytes] = b"") -> bytes:
        """What a program there answers; Garbled when the answer is not whole."""
        argv = ("sh", "-c", work.program(self._hashes, self._lists, body), "sh", self.word, self.root, self.sender, self.boot, *arguments)
        return work.answer(await self.raw(argv, stdin), self.word)

    async def raw(self, argv: Sequence[str], stdin: bytes | Iterator[bytes]) -> bytes:
        """All that a command prints.  Raises Infrastructure with its words when it fails, and what kept its input from coming."""
        received = bytearray()
        source = Source(stdin)
        stream = cast("AsyncGenerator[bytes, None]", self.host.call(argv, source.stream()))
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    received += data
                    if len(received) > work.LONGEST_ANSWER:
                        raise Infrastructure(f"{self.name} does not stop answering", fix="look at what runs there, and at who it is")
        except Rejected as error:
            if source.failed is None:
                self.complain(str(error))
                raise Infrastructure(f"{self.name}: {error}") from error
        if source.failed is not None:
            raise source.failed
        return bytes(received)

    async def patiently(self, what: Callable[[], Awaitable[_T]]) -> _T:
        """Ask again when the connection broke or bytes came wrong, `TRIES` times.  Raises Unreachable, or Corrupt when no answer comes whole."""
        try:
            return await retry_async(what, _again, told=lambda error: _log.info("%s is asked again: %s", self.name, error))
        except Garbled as error:
            raise Corrupt(f"the answers of {self.name} do not arrive whole", fix="look at the connection to it") from error

    def complain(self, words: str) -> None:
        """A disk that is full there has words of its own."""
        if any(sign in words for sign in _FULL):
            text = " ".join(words.split())
            raise Infrastructure(f"the disk of {self.name} is full ({text})", fix=f"free some space below {self.root} there, or give it another root")

    def full(self, free: int, needed: int) -> Infrastructure:
        """The error for too little room there, in bytes."""
        return Infrastructure(f"{self.name} has {about(free)} free, and needs {about(needed)}", fix=f"free some space below {self.root} there")

    @contextlib.contextmanager
    def measured(self, what: str, total: int) -> Iterator[Meter]:
        """A transfer of so many bytes, told of while it goes on."""
        meter = Meter(what, total, self._progress)
        begun = time.monotonic()
        yield meter
        _log.info("%s: %d bytes in %.3f s", what, total, time.monotonic() - begun)
        meter.done = meter.total
        meter.tell()


class Source:
    """What a program reads, and what kept it from coming: that is told when the program is over, whatever that said."""

    def __init__(self, data: bytes | Iterator[bytes]) -> None:
        self._data = data
        self.failed: Exception | None = None

    def stream(self) -> AsyncIterable[bytes]:
        return self._stream() if self._data else NOTHING

    async def _stream(self) -> AsyncIterator[bytes]:
        if isinstance(self._data, bytes):
            yield self._data
            return
        try:
            for block in self._data:
                yield block
        except (Changed, OSError) as error:
            self.failed = error


class Meter:
    """Counts bytes, and tells about four times a second."""

    def __init__(self, what: str, total: int, told: Callable[[Progress], None]) -> None:
        self.total, self.done = total, 0
        self._what, self._told = what, told
        self._begun = self._last = time.monotonic()

    def counted(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block
            self.add(len(block))

    def add(self, size: int) -> None:
        self.done = min(self.total, self.done + size)
        if time.monotonic() - self._last > 0.25:
            self.tell()

    def tell(self) -> None:
        self._last = time.monotonic()
        rate = self.done / max(1e-6, self._last - self._begun)
        self._told(Progress(self._what, self.done, self.total, rate, (self.total - self.done) / rate if rate else None))


def process() -> str:
    """A name for this process that no other has: the machine's boot, the names its pids belong to, pid, and when that began."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{os.getpid()}.{started(os.getpid())}"
    except OSError:
        return f"{secrets.token_hex(4)}.0.{os.getpid()}.0"


def started(pid: int) -> str:
    """When a process of this machine began, in ticks since boot.  Raises OSError when there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]
