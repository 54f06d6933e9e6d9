"""Frames on a stream between an agent and its client: a length, its CRC-32, that of the payload, each four bytes, little-endian; then the payload.

What is cut or flipped on the way is never taken for something that was sent.
"""

from __future__ import annotations

from zlib import crc32

HEAD = 12
LONGEST = 64 << 20
"""Bytes that a payload may have."""


class Broken(Exception):
    """What came is no frame: something on the way changed it."""


def frame(*parts: bytes | memoryview) -> bytes:
    """One frame whose payload is these parts."""
    payload = b"".join(parts)
    size = len(payload).to_bytes(4, "little")
    return b"".join(
        (size, crc32(size).to_bytes(4, "little"), crc32(payload).to_bytes(4, "little"), payload)
    )


def size_of(head: bytes) -> int:
    """Bytes of the payload behind this head.  Raises Broken."""
    size = int.from_bytes(head[:4], "little")
    if size > LONGEST or crc32(head[:4]) != int.from_bytes(head[4:8], "little"):
        raise Broken
    return size


def checked(head: bytes, payload: bytes) -> bytes:
    """The payload, if it is what was sent.  Raises Broken."""
    if crc32(payload) != int.from_bytes(head[8:12], "little"):
        raise Broken
    return payload


class Frames:
    """Payloads out of pieces of a stream."""

    def __init__(self) -> None:
        self.broken = False
        """What comes next is not what was sent."""
        self._waiting = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are whole now.  Raises Broken; where some are whole before what is broken, those are given first."""
        waiting = self._waiting
        waiting += data
        found: list[bytes] = []
        at = 0
        try:
            while len(waiting) - at >= HEAD:
                head = bytes(waiting[at : at + HEAD])
                end = at + HEAD + size_of(head)
                if end > len(waiting):
                    break
                found.append(checked(head, bytes(waiting[at + HEAD : end])))
                at = end
        except Broken:
            self.broken = True
            if not found:
                raise
        del waiting[:at]
        return found
