"""Secret values and the masking of text.  Knows nothing of where secrets come from.

A Secret prints as `***`.  A Masker replaces every registered value, and its base64, URL, JSON and hex spellings, in a stream of bytes; it holds
back just enough of the end of each chunk that a value cut in two by a chunk edge is still found.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

SHORTEST: Final = 6
"""Values shorter than this are refused: masking them would shred ordinary text."""

STARS: Final = b"***"


class Secret:
    """A value that no text form of any object around it shows."""

    __slots__ = ("name", "reveal")

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.reveal = value

    def __repr__(self) -> str:
        return f"Secret({self.name}=***)"

    __str__ = __repr__


class Masker:
    """Replace secrets in a byte stream.  `feed` returns what is safe to show now, `end` the rest."""

    def __init__(self, secrets: Iterable[Secret]) -> None:
        needles = sorted({spelling for secret in secrets for spelling in _spellings(secret.reveal)}, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, needles))) if needles else None
        self._needles = needles
        self._hold = max(map(len, needles), default=1) - 1
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        if self._pattern is None:
            return chunk
        data = self._tail + chunk
        cut = len(data) - self._begun(data)
        for match in self._pattern.finditer(data):
            if match.start() < cut < match.end():
                cut = match.end()
        self._tail = data[cut:]
        return self._pattern.sub(STARS, data[:cut])

    def end(self) -> bytes:
        tail, self._tail = self._tail, b""
        return self.mask(tail)

    def _begun(self, data: bytes) -> int:
        """How many bytes at the end of `data` may be the beginning of a secret: only those wait for what comes next."""
        for length in range(min(self._hold, len(data)), 0, -1):
            end = data[-length:]
            if any(len(needle) > length and needle.startswith(end) for needle in self._needles):
                return length
        return 0

    def mask(self, data: bytes) -> bytes:
        """Mask one whole text."""
        return data if self._pattern is None else self._pattern.sub(STARS, data)


def _spellings(value: str) -> set[bytes]:
    raw = value.encode()
    found = {raw, raw.hex().encode(), quote(value, safe="").encode(), json.dumps(value)[1:-1].encode()}
    found |= {line.strip() for line in raw.splitlines() if len(line.strip()) >= SHORTEST}
    # Inside a longer base64 text the value starts at one of three alignments; only the characters wholly made of it are searched for.
    for pad in range(3):
        text = base64.b64encode(b"\0" * pad + raw).rstrip(b"=")
        start = (pad * 8 + 5) // 6
        middle = text[start : len(text) - (1 if (pad + len(raw)) % 3 else 0)]
        found |= {middle, middle.replace(b"+", b"-").replace(b"/", b"_")}
    return {spelling for spelling in found if len(spelling) >= SHORTEST}
