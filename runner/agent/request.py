"""A request on the stream of a client, with its incoming and outgoing bytes."""

from __future__ import annotations

import fcntl
import json
import os
import select

from . import trees
from .frames import HEAD, frame, size_of, verify_payload
from .squeeze import Squeezer, bytes_of, plain

SENT = 1 << 17
"""Size of an outgoing frame in bytes. A broken connection loses at most one frame."""


class Over(Exception):
    """Raised when the client has disconnected."""


class AgentRequest:
    """The current request: its sender, and its incoming and outgoing bytes."""

    def __init__(self, root: str, boot: str) -> None:
        self.root, self.boot, self.partial = root, boot, ""
        self._lock = os.open("partial.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """Held during every request, because other requests may use the same directories of
        arriving objects.
        """
        self._held = memoryview(b"")
        self._whole = True
        self._out: list[bytes] = []
        self._size = 0
        self._squeezer: Squeezer | None = None
        self._untidy = False

    def begin(self) -> tuple[str, list[object]]:
        """Read the next request. Raises Over."""
        while True:
            payload = _next()
            if payload[:1] == b"q":
                break
        sender, *asked = json.loads(payload[1:])
        self.partial = f"partial/{sender}"
        self._held, self._whole, self._squeezer = memoryview(b""), False, None
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if os.path.isdir(self.partial):
            trees.touch(f"{self.partial}/.alive")  # the client is alive
        return str(asked[0]), asked[1:]

    def into(self, view: memoryview) -> int:
        """Read the next incoming bytes into `view`.

        Return their number, or 0 at the end of the data.
        """
        while not self._held:
            if self._whole:
                return 0
            payload = _next()
            self._whole = not payload
            self._held = memoryview(bytes_of(payload)) if payload else memoryview(b"")
        count = min(len(view), len(self._held))
        view[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def read(self, count: int) -> bytes:
        """Read `count` incoming bytes, or fewer at the end of the data."""
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count and (got := self.into(view[at:])):
            at += got
        return bytes(view[:at])

    def squeeze(self) -> None:
        """Compress outgoing bytes when that is faster."""
        self._squeezer = Squeezer()

    def emit(self, data: bytes | memoryview) -> None:
        """Send bytes to the client."""
        self._out.append(bytes(data))
        self._size += len(data)
        if self._size >= SENT:
            trees.put(1, self._frame())

    def flush(self) -> None:
        """Send buffered bytes now. Raises BrokenPipeError if the client has disconnected."""
        if self._out:
            trees.put(1, self._frame())

    def check(self) -> None:
        """Check during a long request that the client is connected. Raises Over."""
        poll = select.poll()
        poll.register(0, 0)
        if poll.poll(0):
            raise Over

    def end(self, kind: bytes, answer: object) -> None:
        """Send the answer."""
        while not self._whole:  # discard unread bytes
            self._whole = not _next()
        last = self._frame()
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        if self._untidy:
            self._tidy()
        trees.put(1, last + frame(kind, json.dumps(answer, separators=(",", ":")).encode()))

    def make_arriving(self, folder: str) -> None:
        """Create the sender's directory of partial uploads, and mark the sender as alive."""
        os.makedirs(folder, exist_ok=True)
        trees.touch(f"{self.partial}/.alive")

    def tidy(self) -> None:
        """Request that the sender's directory is deleted after the request if it is empty."""
        self._untidy = True

    def _tidy(self) -> None:
        self._untidy = False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # other requests are running; the last one tidies
        try:
            if set(os.listdir(self.partial)) <= {".alive"}:
                trees.remove(self.partial)
        except OSError:
            pass  # deleted already
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _frame(self) -> bytes:
        """Return the buffered bytes as a frame, or b""."""
        out, self._out, self._size = self._out, [], 0
        if not out:
            return b""
        return frame(*(self._squeezer.payload(out) if self._squeezer else plain(out)))


def _next() -> bytes:
    head = _exactly(HEAD)
    return verify_payload(head, _exactly(size_of(head)))


def _exactly(count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = os.readv(0, [view[at:]])
        if not got:
            raise Over
        at += got
    return bytes(data)
