"""Asks the agent of one host about files and has its answers whole.

A connection may break at any byte, and bytes may come wrong: an answer counts when it came as it was sent.  So every question may be asked twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drivers.base import Denied, Host, Rejected, Unreachable

from ...agent.frames import HEAD
from ...agent.squeeze import Squeezer, bytes_of, plain
from ...errors import Corrupt, DiskFull, Infrastructure
from ...language.units import about
from ...logs import Log
from ...retry import pause, retry_async
from ...storage.content.files import Changed
from .stream import FAREWELL, SMALL, Stream

TRIES = 8
"""Times that nothing at all may get through before we give up."""
NEAR, LANES, MOST = 0.015, 2, 14
"""Streams that carry bytes at once: where a round trip takes fewer seconds, and at most.  A server takes few bytes of one ahead (OpenSSH 2 MiB), so
the longer the way, the more are needed; fourteen, and one for jobs, are what two connections of eight have room for."""
LANE = 4 << 20
"""Bytes that are worth a stream of their own on a long way."""
FEW = 4
"""Streams that questions are worth there, whatever comes with them: each costs a round trip."""
BESIDE = 3
"""Streams that may be open besides, for questions."""
PIECE = (128 << 10) - HEAD - 1
"""Bytes in one frame: what a connection that breaks costs.  With what stands before them they fill packets of 32 KiB, which servers take."""
CHUNK = 8 << 20
"""Bytes: smaller files travel together, larger ones are compared and sent again in pieces of this size."""
LONGEST_ANSWER = 256 << 20
"""Bytes; a host that says more than this is not listened to."""
_T = TypeVar("_T")
CLOSED = "the connection was closed from here"
_FULL = ("No space left", "Disk quota exceeded", "disk full")
_count = itertools.count(1)
_log = Log("hosts")


class CorruptReply(Exception):
    """What arrived, here or there, is not what was sent.  It is tried again."""


class Gone(Exception):
    """What was arriving there is not there any more."""


def rest(failures: int) -> float:
    """Seconds to wait after so many failures without progress: a connection that broke once is made anew at once."""
    return pause(failures - 1, 0.2, 6.4) if failures > 1 else 0.0


def _again(error: Exception, tried: int) -> float | None:
    return rest(tried) if tried < TRIES and isinstance(error, (Unreachable, CorruptReply)) else None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is.  Bytes, bytes a second, seconds; `eta` None while it is unknown."""

    what: str
    done: int
    total: int
    rate: float
    eta: float | None


class Wire:
    """Questions to the agent of one host about what is below `root` there; a relative one begins at the login's home."""

    def __init__(
        self,
        host: Host,
        root: str,
        *,
        name: str = "the host",
        say: Callable[[str], None] = lambda _text: None,
        progress: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        self.host, self.root, self.name, self.say = host, root, name, say
        self.sender = f"{process()}-{next(_count)}"
        """Who we are among those who send to that host."""
        self.chunk = CHUNK
        self._progress = progress
        self._idle: list[Stream] = []
        self._wanting: deque[asyncio.Future[Stream]] = deque()
        self._opening: set[asyncio.Task[Stream]] = set()
        self._closed = False
        self._count = 0  # streams that are open, or about to be
        self._round_trip = float("inf")  # seconds: the quickest answer yet
        self._squeezer = Squeezer()

    async def open(self) -> None:
        """Make the folders there, and find out where they are.  As many streams as a near host gets come up, and one of them is waited for."""
        while self._count < LANES:
            self._begin()

        async def once() -> None:
            async with self._held():
                pass

        await self.patiently(once)

    @property
    def far(self) -> bool:
        """Whether one stream carries less than the wire could."""
        return self._round_trip > NEAR

    def lanes(self, size: int, questions: int) -> int:
        """How many streams should carry so many questions with so many bytes.  On a long way they begin to be opened now."""
        if not self.far:
            return LANES
        lanes = max(1, min(MOST, questions, max(FEW, size // LANE)))
        while self._count < lanes:
            self._begin()
        return lanes

    async def side_by_side(
        self, jobs: Sequence[Callable[[], Awaitable[object]]], size: int
    ) -> BaseException | None:
        """Do all these, of so many bytes, on a few streams.  Answers what broke the connection, if anything did: no job begins after that."""
        left, trouble = iter(jobs), list[BaseException]()

        async def lane() -> None:
            for job in left:
                try:
                    await job()
                except (Unreachable, CorruptReply) as error:
                    trouble.append(error)
                if trouble:
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.lanes(size, len(jobs))):
                    group.create_task(lane())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return trouble[0] if trouble else None

    async def aclose(self) -> None:
        """End what answers us there.  Nothing is asked any more."""
        self._closed = True
        while self._wanting:
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_exception(Unreachable(CLOSED))
        for opening in self._opening:
            opening.cancel()
        if self._opening:
            await asyncio.wait(
                self._opening, timeout=FAREWELL
            )  # one that was open just now is idle then
        idle, self._idle = self._idle, []
        self._count -= len(idle)
        await asyncio.gather(*(stream.leave() for stream in idle))

    async def ask(self, function: str, *arguments: object, read: Callable[[Any], _T]) -> _T:
        """What a function of `agent.files` answers, as `read` understands it; asked again until it comes whole.  Every function may run twice.

        Raises Gone, Unreachable, Corrupt when no answer comes whole, and Infrastructure with the host's own words for what it cannot do.
        """
        return await self.patiently(lambda: self.once(function, *arguments, read=read))

    async def once(
        self,
        function: str,
        *arguments: object,
        read: Callable[[Any], _T],
        data: bytes | Iterator[bytes] = b"",
    ) -> _T:
        """The same, asked once; `data` goes with the question.  Raises what keeps `data` from coming, and CorruptReply where the answer is."""
        answer, _ = await self._asked(function, arguments, data)
        try:
            return read(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptReply from error

    async def read(self, function: str, *arguments: object) -> tuple[Any, bytes]:
        """What a function answers, and the bytes that come with it."""
        return await self.patiently(lambda: self._asked(function, arguments, b""))

    async def stream(self, function: str, *arguments: object) -> AsyncIterator[bytes]:
        """The bytes that come with an answer, as they come, asked for once."""
        async with self._held() as stream:
            await self._ask(stream, function, arguments, b"")
            while (payload := await stream.receive())[:1] in (b"d", b"z"):
                yield _open_payload(payload)
            self._answer(payload)

    async def _asked(
        self, function: str, arguments: tuple[object, ...], data: bytes | Iterator[bytes]
    ) -> tuple[Any, bytes]:
        async with self._held() as stream:
            asked = time.monotonic()
            sending = asyncio.ensure_future(self._ask(stream, function, arguments, data))
            try:
                said = bytearray()
                while (payload := await stream.receive())[:1] in (b"d", b"z"):
                    said += _open_payload(payload)
                    if len(said) > LONGEST_ANSWER:
                        raise Infrastructure(
                            f"{self.name} does not stop answering",
                            fix="look at what runs there, and at who it is",
                        )
                failed = await sending
            finally:
                sending.cancel()
        if failed is not None:
            raise failed
        self._round_trip = min(self._round_trip, time.monotonic() - asked)
        return self._answer(payload), bytes(said)

    async def _ask(
        self,
        stream: Stream,
        function: str,
        arguments: tuple[object, ...],
        data: bytes | Iterator[bytes],
    ) -> Exception | None:
        """Send a question, and the bytes that go with it; what kept those from coming is answered, for the question is over only with its answer."""
        failed: Exception | None = None
        squeeze = self.far or (
            isinstance(data, bytes) and len(data) <= SMALL
        )  # srun holds back what is longer than 1 KiB
        await stream.send(b"q", json.dumps([self.sender, function, *arguments]).encode())
        try:
            for parts in _pieces((data,) if isinstance(data, bytes) else data):
                await stream.send(*(self._squeezer.payload(parts) if squeeze else plain(parts)))
        except (Changed, OSError) as error:
            failed = error
        await stream.send(b"")
        return failed

    def _answer(self, payload: bytes) -> Any:
        try:
            answer = json.loads(payload[1:])
            kind, words = answer if payload[:1] == b"e" else ("", "")
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptReply from error
        if payload[:1] == b"r":
            return answer
        if kind == "gone":
            raise Gone
        self.complain(str(words))
        raise Infrastructure(f"{self.name}: {words}")

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[Stream]:
        """A stream for this caller alone.  One on which something went wrong is not used again."""
        stream = self._idle.pop() if self._idle else await self._another()
        try:
            yield stream
        except (Gone, Infrastructure):
            await self._back(stream)  # it was answered
            raise
        except BaseException:
            self._count -= 1
            self._more()
            await stream.aclose()
            raise
        await self._back(stream)

    async def _another(self) -> Stream:
        """A stream: a new one, or one that somebody is done with before that is there.  Some servers allow only a few."""
        if self._closed:
            raise Unreachable(CLOSED)
        turn: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._wanting.append(turn)
        self._more()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                await self._back(turn.result())
            raise

    async def _back(self, stream: Stream) -> None:
        """Somebody is done with a stream."""
        if self._closed:
            self._count -= 1
            await stream.aclose()
        else:
            self._offer(stream)

    def _offer(self, stream: Stream) -> None:
        """To who wants one, else to who will."""
        while self._wanting:
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_result(stream)
                return
        self._idle.append(stream)

    def _more(self) -> None:
        if (
            not self._closed
            and len(self._wanting) > len(self._opening)
            and self._count < (MOST if self.far else LANES) + BESIDE
        ):
            self._begin()

    def _begin(self) -> None:
        self._count += 1
        opening = asyncio.get_running_loop().create_task(self._open())
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    async def _open(self) -> Stream:
        try:
            return await Stream.open(self.host, self.root, "files")
        except (Denied, Rejected) as error:
            self.complain(str(error))
            raise

    def _opened(self, opening: asyncio.Task[Stream]) -> None:
        self._opening.discard(opening)
        error = Unreachable(CLOSED) if opening.cancelled() else opening.exception()
        if error is None:
            self.root = opening.result().root
            self._offer(opening.result())
            return
        self._count -= 1
        while self._wanting:  # one of those who want it hears why; the others try themselves
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_exception(error)
                break
        self._more()

    async def patiently(self, what: Callable[[], Awaitable[_T]]) -> _T:
        """Ask again when the connection broke or bytes came wrong, `TRIES` times.  Raises Unreachable, or Corrupt when no answer comes whole."""
        try:
            return await retry_async(
                what,
                _again,
                on_retry=lambda error: _log.info("%s is asked again: %s", self.name, error),
            )
        except CorruptReply as error:
            raise Corrupt(
                f"the answers of {self.name} do not arrive whole",
                fix="look at the connection to it",
            ) from error

    def complain(self, words: str) -> None:
        """A disk that is full there has words of its own."""
        if any(sign in words for sign in _FULL):
            text = " ".join(words.split())
            raise DiskFull(
                f"the disk of {self.name} is full ({text})",
                fix=f"free some space below {self.root} there, or give it another root",
            )

    def full(self, free: int, needed: int) -> Infrastructure:
        """The error for too little room there, in bytes."""
        return Infrastructure(
            f"{self.name} has {about(free)} free, and needs {about(needed)}",
            fix=f"free some space below {self.root} there",
        )

    @contextlib.contextmanager
    def measured(self, what: str, total: int) -> Iterator[Meter]:
        """A transfer of so many bytes, with its progress."""
        meter = Meter(what, total, self._progress)
        begun = time.monotonic()
        yield meter
        _log.info("%s: %d bytes in %.3f s", what, total, time.monotonic() - begun)
        meter.done = meter.total
        meter.tell()


def _open_payload(payload: bytes) -> bytes:
    try:
        return bytes_of(payload)
    except ValueError as error:
        raise CorruptReply from error


def _pieces(blocks: Iterable[bytes]) -> Iterator[list[bytes | memoryview]]:
    """The same bytes, `PIECE` at once, the last ones fewer."""
    held: list[bytes | memoryview] = []
    size = 0
    for block in blocks:
        view = memoryview(block)
        while size + len(view) >= PIECE:
            held.append(view[: PIECE - size])
            yield held
            view = view[PIECE - size :]
            held, size = [], 0
        if view:
            held.append(view)
            size += len(view)
    if held:
        yield held


class Meter:
    """Counts bytes, and tells about four times a second."""

    def __init__(self, what: str, total: int, show: Callable[[Progress], None]) -> None:
        self.total, self.done = total, 0
        self._what, self._show = what, show
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
        self._show(
            Progress(
                self._what,
                self.done,
                self.total,
                rate,
                (self.total - self.done) / rate if rate else None,
            )
        )


def nothing(answer: object) -> None:
    """Of an answer that only says that something is done."""


def words_of(answer: Any) -> list[str]:
    """An answer that is a list of words.  Raises TypeError, ValueError."""
    if not isinstance(answer, list) or not all(isinstance(word, str) for word in answer):
        raise ValueError
    return answer


def chunks_of(answer: Any) -> tuple[int, list[str]]:
    """How long a file is, and the digests of its grains.  Raises TypeError, ValueError."""
    size, digests = answer
    return int(size), words_of(digests)


def process() -> str:
    """A name for this process that no other has: the machine's boot, the names its pids belong to, pid, and when that began."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{os.getpid()}.{process_start(os.getpid())}"
    except OSError:
        return f"{secrets.token_hex(4)}.0.{os.getpid()}.0"


def process_start(pid: int) -> str:
    """When a process of this machine began, in ticks since boot.  Raises OSError when there is none."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]
