"""Requests to the agent of one host about files.

A connection may break at any byte, and bytes may be damaged.  An answer counts only if it arrives
complete, so each request may run twice.
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
"""Attempts without any progress before a transfer fails."""
NEAR = 0.015
"""Longest round-trip time of a near host in seconds."""
LANES = 2
"""Streams to a near host."""
MOST = 14
"""Most streams to a far host.

A server reads ahead few bytes per stream (OpenSSH 2 MiB), so a longer round trip needs more
streams.  Fourteen streams and the one for jobs fit into two connections with eight streams each.
"""
LANE = 4 << 20
"""Bytes that justify another stream to a far host."""
FEW = 4
"""Streams for requests to a far host, with or without data: each request costs a round trip."""
BESIDE = 3
"""Additional streams for requests."""
PIECE = (128 << 10) - HEAD - 1
"""Bytes per frame, the loss if a connection breaks.

With their headers, frames fill packets of 32 KiB, which servers accept.
"""
CHUNK = 8 << 20
"""Bytes per chunk.

Smaller files are sent together, larger files are compared and sent again in chunks of this size.
"""
LONGEST_ANSWER = 256 << 20
"""Maximum size of an answer in bytes."""
_T = TypeVar("_T")
CLOSED = "the connection was closed from here"
_FULL = ("No space left", "Disk quota exceeded", "disk full")
_count = itertools.count(1)
_log = Log("hosts")


class CorruptReply(Exception):
    """Damaged data arrived, here or on the host.  The request is repeated."""


class UploadGone(Exception):
    """The partial upload no longer exists on the host."""


def retry_pause(failures: int) -> float:
    """Return the seconds to wait after `failures` attempts without progress.

    The first reconnect is immediate.
    """
    return pause(failures - 1, 0.2, 6.4) if failures > 1 else 0.0


def _retry_policy(error: Exception, tried: int) -> float | None:
    """Return the seconds to wait before another attempt, None for no more attempts."""
    if tried >= TRIES or not isinstance(error, (Unreachable, CorruptReply)):
        return None
    return retry_pause(tried)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """The progress of a transfer, with speed and remaining time.

    Units are bytes, bytes per second, and seconds.
    """

    what: str
    done: int
    total: int
    rate: float
    eta: float | None
    """Remaining seconds; None while unknown."""


class Wire:
    """Requests to the agent of one host about files below `root`.

    A relative root starts at the login's home.
    """

    def __init__(
        self,
        host: Host,
        root: str,
        *,
        name: str = "the host",
        say: Callable[[str], None] = lambda _text: None,
        progress: Callable[[TransferProgress], None] = lambda _progress: None,
    ) -> None:
        self.host, self.root, self.name, self.say = host, root, name, say
        self.sender = f"{process_name()}-{next(_count)}"
        """The name of this sender on the host."""
        self.chunk = CHUNK
        self._progress = progress
        self._idle: list[Stream] = []
        self._wanting: deque[asyncio.Future[Stream]] = deque()
        """Requests that wait for a stream, in order."""
        self._opening: set[asyncio.Task[Stream]] = set()
        self._closed = False
        self._count = 0
        """Number of open and opening streams."""
        self._round_trip = float("inf")
        """Seconds of the fastest answer so far."""
        self._squeezer = Squeezer()

    async def open(self) -> None:
        """Create the directories on the host, and determine the absolute path of `root`.

        Opens the streams of a near host and waits for one of them.
        """
        while self._count < LANES:
            self._start_opening()

        async def once() -> None:
            async with self._reserve_stream():
                pass

        await self.retry(once)

    @property
    def is_far(self) -> bool:
        """Whether one stream cannot use the full bandwidth, because the round trip is long."""
        return self._round_trip > NEAR

    def open_lanes(self, size: int, requests: int) -> int:
        """Return the number of streams for `requests` requests with `size` bytes, and start to open
        the missing ones of a far host.
        """
        if not self.is_far:
            return LANES
        lanes = max(FEW, size // LANE)
        lanes = max(1, min(MOST, requests, lanes))
        while self._count < lanes:
            self._start_opening()
        return lanes

    async def run_parallel(
        self, jobs: Sequence[Callable[[], Awaitable[object]]], size: int
    ) -> BaseException | None:
        """Run all jobs, `size` bytes together, on several streams.

        After a broken connection or damaged data, no more jobs start, and the first such error is
        returned.  Other errors are raised.
        """
        remaining, errors = iter(jobs), list[BaseException]()

        async def run_lane() -> None:
            for job in remaining:
                try:
                    await job()
                except (Unreachable, CorruptReply) as error:
                    errors.append(error)
                if errors:
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.open_lanes(size, len(jobs))):
                    group.create_task(run_lane())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return errors[0] if errors else None

    async def aclose(self) -> None:
        """Stop the programs on the host.  Later requests fail."""
        self._closed = True
        while self._wanting:
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_exception(Unreachable(CLOSED))
        for opening in self._opening:
            opening.cancel()
        if self._opening:
            # A stream that opened just now is idle then.
            await asyncio.wait(self._opening, timeout=FAREWELL)
        idle, self._idle = self._idle, []
        self._count -= len(idle)
        await asyncio.gather(*(stream.leave() for stream in idle))

    async def ask(self, function: str, *arguments: object, read: Callable[[Any], _T]) -> _T:
        """Call a function of `agent.files` and return its answer, parsed by `read`.

        The function may run twice.

        Raises Gone, Unreachable, Corrupt if no complete answer arrives, and Infrastructure with the
        host's error message.
        """
        return await self.retry(lambda: self.ask_once(function, *arguments, read=read))

    async def ask_once(
        self,
        function: str,
        *arguments: object,
        read: Callable[[Any], _T],
        data: bytes | Iterator[bytes] = b"",
    ) -> _T:
        """Call a function as `ask` does, with `data` to send, but without a second attempt.

        Raises the read error of `data`, and CorruptReply for a damaged answer.
        """
        answer, _ = await self._exchange(function, arguments, data)
        try:
            return read(answer)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptReply from error

    async def read(self, function: str, *arguments: object) -> tuple[Any, bytes]:
        """Return a function's answer and its data."""
        return await self.retry(lambda: self._exchange(function, arguments, b""))

    async def stream(self, function: str, *arguments: object) -> AsyncIterator[bytes]:
        """Yield the data of an answer as it arrives, without a second attempt."""
        async with self._reserve_stream() as stream:
            await self._send_request(stream, function, arguments, b"")
            while (payload := await stream.receive())[:1] in (b"d", b"z"):
                yield _open_payload(payload)
            self._parse_answer(payload)

    async def _exchange(
        self, function: str, arguments: tuple[object, ...], data: bytes | Iterator[bytes]
    ) -> tuple[Any, bytes]:
        """Send a request with its data, and return the answer and its data."""
        async with self._reserve_stream() as stream:
            began = time.monotonic()
            sending = asyncio.ensure_future(self._send_request(stream, function, arguments, data))
            try:
                received = bytearray()
                while (payload := await stream.receive())[:1] in (b"d", b"z"):
                    received += _open_payload(payload)
                    if len(received) > LONGEST_ANSWER:
                        raise Infrastructure(
                            f"{self.name} sends an endless reply",
                            fix="check which program runs on the host, and that it is the right host",
                        )
                read_error = await sending
            finally:
                sending.cancel()
        if read_error is not None:
            raise read_error
        self._round_trip = min(self._round_trip, time.monotonic() - began)
        return self._parse_answer(payload), bytes(received)

    async def _send_request(
        self,
        stream: Stream,
        function: str,
        arguments: tuple[object, ...],
        data: bytes | Iterator[bytes],
    ) -> Exception | None:
        """Send a request with its data.

        Returns the read error of the data, if any, because the host answers even then.
        """
        # Short data too, because srun delays data longer than 1 KiB.
        is_short = isinstance(data, bytes) and len(data) <= SMALL
        compress = self.is_far or is_short
        read_error: Exception | None = None
        await stream.send(b"q", json.dumps([self.sender, function, *arguments]).encode())
        encode = self._squeezer.payload if compress else plain
        blocks = (data,) if isinstance(data, bytes) else data
        try:
            for parts in _split_into_pieces(blocks):
                await stream.send(*encode(parts))
        except (Changed, OSError) as error:
            read_error = error
        await stream.send(b"")
        return read_error

    def _parse_answer(self, payload: bytes) -> Any:
        """Return the answer of a payload.

        Raises UploadGone, and Infrastructure with the host's error message.
        """
        kind = payload[:1]
        try:
            answer = json.loads(payload[1:])
            fault, message = answer if kind == b"e" else ("", "")
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptReply from error
        if kind == b"r":
            return answer
        if fault == "gone":
            raise UploadGone
        self.raise_if_disk_full(str(message))
        raise Infrastructure(f"{self.name}: {message}")

    @contextlib.asynccontextmanager
    async def _reserve_stream(self) -> AsyncIterator[Stream]:
        """Reserve a stream for one request.  A stream with an error is closed."""
        stream = self._idle.pop() if self._idle else await self._wait_for_stream()
        try:
            yield stream
        except (UploadGone, Infrastructure):
            await self._release_stream(stream)  # the host answered, so the stream is in order
            raise
        except BaseException:
            self._count -= 1
            self._open_if_wanted()
            await stream.aclose()
            raise
        await self._release_stream(stream)

    async def _wait_for_stream(self) -> Stream:
        """Wait for a stream, new or released by another request.

        Some servers allow only a few streams.
        """
        if self._closed:
            raise Unreachable(CLOSED)
        turn: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._wanting.append(turn)
        self._open_if_wanted()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                await self._release_stream(turn.result())
            raise

    async def _release_stream(self, stream: Stream) -> None:
        """Release a stream after a request."""
        if self._closed:
            self._count -= 1
            await stream.aclose()
        else:
            self._hand_out(stream)

    def _hand_out(self, stream: Stream) -> None:
        """Give a stream to a waiting request, or keep it for the next."""
        while self._wanting:
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_result(stream)
                return
        self._idle.append(stream)

    def _open_if_wanted(self) -> None:
        """Open another stream if more requests wait than streams open, up to the maximum."""
        lanes = MOST if self.is_far else LANES
        most = lanes + BESIDE
        if self._closed or self._count >= most:
            return
        if len(self._wanting) > len(self._opening):
            self._start_opening()

    def _start_opening(self) -> None:
        """Open a stream in the background."""
        self._count += 1
        opening = asyncio.get_running_loop().create_task(self._open_stream())
        self._opening.add(opening)
        opening.add_done_callback(self._finish_opening)

    async def _open_stream(self) -> Stream:
        try:
            return await Stream.open(self.host, self.root, "files")
        except (Denied, Rejected) as error:
            self.raise_if_disk_full(str(error))
            raise

    def _finish_opening(self, opening: asyncio.Task[Stream]) -> None:
        """Hand out a new stream, or give its error to one waiting request.

        The other requests try again.
        """
        self._opening.discard(opening)
        error = Unreachable(CLOSED) if opening.cancelled() else opening.exception()
        if error is None:
            self.root = opening.result().root
            self._hand_out(opening.result())
            return
        self._count -= 1
        while self._wanting:
            turn = self._wanting.popleft()
            if not turn.done():
                turn.set_exception(error)
                break
        self._open_if_wanted()

    async def retry(self, what: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a request after a broken connection or damaged data, up to `TRIES` times.

        Raises Unreachable, or Corrupt.
        """
        try:
            return await retry_async(
                what,
                _retry_policy,
                on_retry=lambda error: _log.info("%s is asked again: %s", self.name, error),
            )
        except CorruptReply as error:
            raise Corrupt(
                f"replies of {self.name} arrive incomplete",
                fix="check the connection to the host",
            ) from error

    def raise_if_disk_full(self, message: str) -> None:
        """Raise DiskFull if the host's error message says that its disk is full."""
        if any(sign in message for sign in _FULL):
            text = " ".join(message.split())
            raise DiskFull(
                f"the disk of {self.name} is full ({text})",
                fix=f"free disk space below {self.root} on the host, or set another `root`",
            )

    def disk_full_error(self, free: int, needed: int) -> Infrastructure:
        """Return the error for too little free disk space; `free` and `needed` are bytes."""
        return Infrastructure(
            f"{self.name} has {about(free)} free disk space, but {about(needed)} are required",
            fix=f"free disk space below {self.root} on the host",
        )

    @contextlib.contextmanager
    def measure(self, what: str, total: int) -> Iterator[Meter]:
        """Measure a transfer of `total` bytes, and report its progress and its end."""
        meter = Meter(what, total, self._progress)
        began = time.monotonic()
        yield meter
        _log.info("%s: %d bytes in %.3f s", what, total, time.monotonic() - began)
        meter.done = meter.total
        meter.report()


def _open_payload(payload: bytes) -> bytes:
    try:
        return bytes_of(payload)
    except ValueError as error:
        raise CorruptReply from error


def _split_into_pieces(blocks: Iterable[bytes]) -> Iterator[list[bytes | memoryview]]:
    """Regroup blocks into pieces of `PIECE` bytes; the last one is shorter."""
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
    """Counts transferred bytes and reports the progress about four times a second."""

    def __init__(self, what: str, total: int, show: Callable[[TransferProgress], None]) -> None:
        self.total, self.done = total, 0
        self._what, self._show = what, show
        self._began = self._reported = time.monotonic()

    def count(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the blocks, and count each after its transfer."""
        for block in blocks:
            yield block
            self.add(len(block))

    def add(self, size: int) -> None:
        """Count `size` bytes, and report the progress if the last report is old."""
        self.done = min(self.total, self.done + size)
        if time.monotonic() - self._reported > 0.25:
            self.report()

    def report(self) -> None:
        """Report the progress now."""
        self._reported = time.monotonic()
        rate = self.done / max(1e-6, self._reported - self._began)
        eta = (self.total - self.done) / rate if rate else None
        self._show(TransferProgress(self._what, self.done, self.total, rate, eta))


def ignore_answer(answer: object) -> None:
    """Ignore an answer that only confirms a request."""


def parse_strings(answer: Any) -> list[str]:
    """Parse an answer that is a list of strings.  Raises TypeError, ValueError."""
    if not isinstance(answer, list) or not all(isinstance(word, str) for word in answer):
        raise ValueError
    return answer


def parse_digests(answer: Any) -> tuple[int, list[str]]:
    """Parse an answer with the size of a file and the digests of its parts.

    Raises TypeError, ValueError.
    """
    size, digests = answer
    return int(size), parse_strings(digests)


def process_name() -> str:
    """Return a unique name of this process, from its boot id, pid namespace, pid, and start time."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{os.getpid()}.{process_start_time(os.getpid())}"
    except OSError:
        return f"{secrets.token_hex(4)}.0.{os.getpid()}.0"


def process_start_time(pid: int) -> str:
    """Return the start time of a local process in clock ticks since boot.

    Raises OSError if it does not exist.
    """
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]
