"""Compress transfers when CPU time is available and the data is compressible.

zlib at its fastest level is used, because every Python includes it.
"""

from __future__ import annotations

import time
import zlib
from functools import lru_cache

from .sparse import LEAST, is_zero

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WINDOW = 0.25
"""Seconds between two measurements of this process's CPU usage."""
BUSY = 0.7
"""CPU usage at which compression stops."""
IDLE = 0.4
"""CPU usage below which compression starts again."""
MOST = 1 << 20
"""Maximum number of decompressed bytes of a payload, against malicious data."""
WORTH = 0.85
"""Maximum compression ratio.

If a block compresses worse, the next `SKIPPED` are sent uncompressed.
"""
SKIPPED = 31


def plain(parts: Sequence[bytes | memoryview]) -> tuple[bytes | memoryview, ...]:
    """Return the uncompressed payload for these bytes.

    Zeros, such as a file's hole, take a few bytes.
    """
    size = sum(map(len, parts))
    if LEAST <= size <= MOST and all(map(is_zero, parts)):
        return (b"z", _zeros(size))
    return (b"d", *parts)


@lru_cache(4)
def _zeros(size: int) -> bytes:
    return zlib.compress(bytes(size), 9)


class Squeezer:
    """Encoder of transfer payloads: `z` with compressed bytes, or `d` with plain bytes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock, self._spent = clock, spent
        self._at, self._used = clock(), spent()
        self._spare = True
        self._skip = 0

    def payload(self, parts: Sequence[bytes | memoryview]) -> tuple[bytes | memoryview, ...]:
        """Return the transfer payload for these bytes."""
        now = self._clock()
        if now - self._at >= WINDOW:
            used = self._spent()
            busy = (used - self._used) / (now - self._at)
            self._spare = busy < (BUSY if self._spare else IDLE)
            self._at, self._used = now, used
        if not self._spare or self._skip:
            self._skip = max(0, self._skip - 1)
            return plain(parts)
        data = b"".join(parts)
        small = zlib.compress(data, 1)
        if len(small) > WORTH * len(data):
            self._skip = SKIPPED
            return (b"d", data)
        return (b"z", small)


def bytes_of(payload: bytes) -> bytes:
    """Decode a transfer payload `d` or `z`. Raises ValueError for an invalid payload."""
    if payload[:1] == b"d":
        return payload[1:]
    opened = zlib.decompressobj()
    try:
        data = opened.decompress(payload[1:], MOST)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if payload[:1] != b"z" or not opened.eof:
        raise ValueError("invalid compressed data")
    return data
