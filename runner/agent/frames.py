"""Frames on the stream between an agent and its client, with checksums.

A frame is a length, its CRC-32, the payload's CRC-32 (four bytes each, little-endian), and the
payload. Damaged frames are detected.
"""

from __future__ import annotations

from zlib import crc32

HEAD = 12
LONGEST = 64 << 20
"""Maximum size of a payload in bytes."""


class BadFrame(Exception):
    """A frame is damaged."""


def frame(*parts: bytes | memoryview) -> bytes:
    """Encode a frame with these parts as payload."""
    payload = b"".join(parts)
    size = len(payload).to_bytes(4, "little")
    return b"".join(
        (size, crc32(size).to_bytes(4, "little"), crc32(payload).to_bytes(4, "little"), payload)
    )


def size_of(head: bytes) -> int:
    """Return the payload size in a frame header. Raises BadFrame."""
    size = int.from_bytes(head[:4], "little")
    if size > LONGEST or crc32(head[:4]) != int.from_bytes(head[4:8], "little"):
        raise BadFrame
    return size


def verify_payload(head: bytes, payload: bytes) -> bytes:
    """Return the payload if its checksum is correct. Raises BadFrame."""
    if crc32(payload) != int.from_bytes(head[8:12], "little"):
        raise BadFrame
    return payload


class FrameParser:
    """A parser of frames from pieces of a stream."""

    def __init__(self) -> None:
        self.broken = False
        """True if the next data is damaged."""
        self._waiting = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the complete payloads.

        Raises BadFrame if the stream is damaged. Payloads before the damage are returned first.
        """
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
                found.append(verify_payload(head, bytes(waiting[at + HEAD : end])))
                at = end
        except BadFrame:
            self.broken = True
            if not found:
                raise
        del waiting[:at]
        return found
