"""Lines of a log by their numbers: a part of them, or those that contain a text.  Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

LONGEST: Final = 4000
"""Characters of a line that are shown."""
HELD: Final = 64 << 10
"""Bytes of a line without an end that are held in memory."""
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])")


class LogLine(NamedTuple):
    """A line as a terminal shows it: what was overwritten behind a carriage return is not in it."""

    number: int
    """From 1."""
    text: str
    """With its escape sequences, `LONGEST` characters at most."""
    cut: bool
    """Whether the line is longer."""


class LogPage(NamedTuple):
    """Lines of a log, and of how many they are."""

    lines: list[LogLine]
    total: int
    """Lines of the whole log."""
    matches: int
    """Lines that contain the text that was looked for; all if none was."""
    size: int
    """Bytes of the lines that have an end: a client reads on from there."""
    is_open: bool
    """Whether the last line has no end."""


def page_of(pieces: Iterable[bytes], *, find: str = "", first: int = 0, limit: int) -> LogPage:
    """Return `limit` lines from number `first` on, or the last ones if that is 0, of those that contain `find` in any case."""
    wanted = find.casefold()
    found: deque[LogLine] = deque(maxlen=None if first else limit)
    total = matches = 0
    read = _Counted(pieces)
    for total, raw in enumerate(_lines(read), 1):
        text = ""
        if wanted:
            text = folded(raw)
            if wanted not in _ESCAPES.sub("", text).casefold():
                continue
        matches += 1
        if total >= first and (not first or len(found) < limit):
            text = text or folded(raw)
            found.append(LogLine(total, text[:LONGEST], len(text) > LONGEST))
    return LogPage(list(found), total, matches, read.whole, read.whole < read.passed)


def folded(line: bytes) -> str:
    """Return a line as a terminal leaves it: what stands behind its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class _Counted:
    """Pieces of a text; `whole` counts the bytes of its lines that have an end."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.whole = self.passed = 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            if end := piece.rfind(b"\n") + 1:
                self.whole = self.passed + end
            self.passed += len(piece)
            yield piece


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a text, without their ends; of one that is longer than `HELD` the beginning, or what a progress bar shows now."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > HELD:
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :][:HELD]
    if rest:
        yield rest
