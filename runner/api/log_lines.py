"""Pages of log lines: a range of line numbers, or the lines that contain a text. Pure functions."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

LONGEST: Final = 4000
"""Maximum number of characters shown of a line."""
HELD: Final = 64 << 10
"""Maximum number of bytes in memory of a line without a line end."""
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])")


class LogLine(NamedTuple):
    """A log line as displayed by a terminal, after carriage returns have overwritten earlier text."""

    number: int
    """Line number, from 1."""
    text: str
    """Text with escape sequences, at most `LONGEST` characters."""
    cut: bool
    """True if the line is longer than `LONGEST`."""


class LogPage(NamedTuple):
    """A page of log lines, with the totals of the log."""

    lines: list[LogLine]
    total: int
    """Number of lines in the log."""
    matches: int
    """Number of lines that contain the searched text, or of all lines without a search."""
    size: int
    """Size of all complete lines in bytes. A client continues reading at this offset."""
    is_open: bool
    """True if the last line has no line end."""


def page_of(pieces: Iterable[bytes], *, find: str = "", first: int = 0, limit: int) -> LogPage:
    """Return `limit` log lines from line `first`, or the last `limit` lines if `first` is 0.

    With `find`, return only the lines that contain this text, ignoring case.
    """
    wanted = find.casefold()
    # Without a first line, the deque drops all but the last lines.
    most = None if first else limit
    found: deque[LogLine] = deque(maxlen=most)
    total = matches = 0
    read = _ByteCounter(pieces)
    for total, raw in enumerate(_split_lines(read), 1):
        text = ""
        if wanted:
            text = visible_text(raw)
            if wanted not in _ESCAPES.sub("", text).casefold():
                continue
        matches += 1
        is_full = first and len(found) >= limit
        if total >= first and not is_full:
            text = text or visible_text(raw)
            found.append(LogLine(total, text[:LONGEST], len(text) > LONGEST))
    return LogPage(list(found), total, matches, read.whole, read.whole < read.passed)


def visible_text(line: bytes) -> str:
    """Return the displayed part of a log line, after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class _ByteCounter:
    """Iterator over log pieces that counts the bytes of complete lines in `whole`."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.whole = self.passed = 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            end = piece.rfind(b"\n") + 1
            if end:
                self.whole = self.passed + end
            self.passed += len(piece)
            yield piece


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log without line ends.

    A line longer than `HELD` is reduced to its start, or to the latest state of a progress bar.
    """
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > HELD:
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :][:HELD]
    if rest:
        yield rest
