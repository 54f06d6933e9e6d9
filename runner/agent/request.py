"""One question on the stream of a client, the bytes that come with it and those that go back."""

from __future__ import annotations

import fcntl
import json
import os
import select

from . import trees
from .frames import HEAD, checked, frame, size_of
from .squeeze import Squeezer, bytes_of, plain

SENT = 1 << 17
"""Bytes of one frame that goes back: what a connection that breaks costs."""


class Over(Exception):
    """The client is gone."""


class Request:
    """One question: who asks, and the bytes that come with it and go back."""

    def __init__(self, root: str, boot: str) -> None:
        self.root, self.boot, self.partial = root, boot, ""
        self._lock = os.open("partial.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        """Held by every question while it is at work: in folders of what is arriving, others may be, too."""
        self._held = memoryview(b"")
        self._whole = True
        self._out: list[bytes] = []
        self._size = 0
        self._squeezer: Squeezer | None = None
        self._untidy = False

    def begin(self) -> tuple[str, list[object]]:
        """The next question.  Raises Over."""
        while True:
            payload = _next()
            if payload[:1] == b"q":
                break
        sender, *asked = json.loads(payload[1:])
        self.partial = f"partial/{sender}"
        self._held, self._whole, self._squeezer = memoryview(b""), False, None
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        if os.path.isdir(self.partial):
            trees.touch(f"{self.partial}/.alive")  # a client that asks is not silent
        return str(asked[0]), asked[1:]

    def into(self, view: memoryview) -> int:
        """Bytes that came with the question, as many as there are at hand; 0 at their end."""
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
        """So many bytes, fewer at their end."""
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count and (got := self.into(view[at:])):
            at += got
        return bytes(view[:at])

    def squeeze(self) -> None:
        """Compress what goes back, if that is quicker."""
        self._squeezer = Squeezer()

    def emit(self, data: bytes | memoryview) -> None:
        """Send bytes back."""
        self._out.append(bytes(data))
        self._size += len(data)
        if self._size >= SENT:
            trees.put(1, self._frame())

    def flush(self) -> None:
        """Send what is to go back now.  Raises BrokenPipeError when its client is gone."""
        if self._out:
            trees.put(1, self._frame())

    def check(self) -> None:
        """While an answer takes long: the client is there still.  Raises Over."""
        poll = select.poll()
        poll.register(0, 0)
        if poll.poll(0):
            raise Over

    def end(self, kind: bytes, answer: object) -> None:
        """The question is answered."""
        while not self._whole:  # what was not wanted
            self._whole = not _next()
        last = self._frame()
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        if self._untidy:
            self._tidy()
        trees.put(1, last + frame(kind, json.dumps(answer, separators=(",", ":")).encode()))

    def arriving(self, folder: str) -> None:
        """Have a folder of what is arriving, with the sign that its sender is alive."""
        os.makedirs(folder, exist_ok=True)
        trees.touch(f"{self.partial}/.alive")

    def tidy(self) -> None:
        """Something arrived: when this is answered, a sender of whom nothing is left is forgotten."""
        self._untidy = True

    def _tidy(self) -> None:
        self._untidy = False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # others are at work; the last of them does it
        try:
            if set(os.listdir(self.partial)) <= {".alive"}:
                trees.remove(self.partial)
        except OSError:
            pass  # it is gone already
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _frame(self) -> bytes:
        """What is to go back, as a frame; empty where nothing is."""
        out, self._out, self._size = self._out, [], 0
        if not out:
            return b""
        return frame(*(self._squeezer.payload(out) if self._squeezer else plain(out)))


def _next() -> bytes:
    head = _exactly(HEAD)
    return checked(head, _exactly(size_of(head)))


def _exactly(count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = os.readv(0, [view[at:]])
        if not got:
            raise Over
        at += got
    return bytes(data)
