"""Follow the log and the metrics of a running step, and make text safe for terminals.

Output of a step never acts on the terminal.  Escape sequences (colours, cursor moves, titles) and
invisible or bidirectional characters are removed. Other control characters are shown in caret
notation, such as `^[`; C1 characters as their two-character equivalents.
"""

from __future__ import annotations

import math
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from ..language.values import is_number
from ..planning.ids import readable
from ..secrets import SHORTEST, Masker

_LINE = 4 << 10  # maximum bytes read from the end of a log
_METRICS = 64 << 10
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9b-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC up to their end
    r"|\x1b[ -/]+[0-~]"  # character sets
)
_OURS = re.compile(
    r"(\n|\x1b\[(?:[012]|(?:1;)?3[1-6])m)"
)  # line ends and the colours of recipe's own output
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 16


def safe_line(text: str) -> str:
    """Return `text` as one line without control characters, safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(map(_character, _SEQUENCE.sub("", text)))


def safe_ids(text: str) -> str:
    """Return `text` as one safe line, with step ids in readable form."""
    if "%" in text:  # otherwise nothing is encoded
        text = readable(text)
    return safe_line(text)


class SafeTerminal:
    """A terminal stream that writes only printable text, line ends and the colours of recipe.

    Other methods belong to the wrapped stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        pieces = _OURS.split(text)
        pieces[::2] = map(safe_line, pieces[::2])
        self.stream.write("".join(pieces))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def canvas(stream: TextIO) -> TextIO:
    """Return the unguarded stream, for code that draws on the terminal and makes its text safe
    itself.
    """
    return stream.stream if isinstance(stream, SafeTerminal) else stream


def lines(data: bytes) -> list[str]:
    """Return the lines of a step's output, safe for a terminal.

    For an overwritten line (a progress bar), return its last version.
    """
    found = []
    for line in data.rstrip().split(b"\n"):
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        found.append(safe_line(last.decode(errors="replace")).rstrip())
    return found


def width(text: str) -> int:
    """Return the width of safe text on a terminal, in columns."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def fit(text: str, columns: int) -> str:
    """Truncate `text` to a number of columns, with `…` as its last character if text was cut."""
    if width(text) <= columns:
        return text
    kept, used = [], 0
    for char in text:
        used += _columns(char)
        if used >= columns:
            break
        kept.append(char)
    return "".join(kept) + "…" if columns > 0 else ""


def span(seconds: float) -> str:
    """Format a duration, such as 4.2s, 42s, 12m05s, 3h05m or 2d03h."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02}h"


class MaskedTail:
    """The last line of a growing log, with secrets masked."""

    __slots__ = ("_masker", "_path", "_size", "line")

    def __init__(self, path: str, masker: Masker) -> None:
        self._path = path
        self._masker = masker
        self._size = 0
        self.line = ""

    def poll(self) -> bool:
        """Read the log again.  Return True if the line has changed."""
        news = _read(self._path, 0, _LINE + self._masker.margin, self._size)
        if news is None:
            return False
        data, start, self._size = news
        stream = self._masker.stream()
        before = max(0, len(data) - _LINE) if start else 0
        stream.feed(data[:before])
        shown = stream.feed(data[before:])
        # Hide a possible beginning of a secret, unless it is shorter than the shortest secret.
        if len(stream.held) < SHORTEST:
            shown += stream.end()
        line = _last(shown)
        changed, self.line = line != self.line, line
        return changed


class MetricsTail:
    """The training metrics of a running step so far, from JSON lines or from log lines that match a
    pattern.
    """

    __slots__ = (
        "_first",
        "_last",
        "_masker",
        "_path",
        "_pattern",
        "_points",
        "_seen",
        "_stride",
        "_sum",
        "_summed",
        "_total",
        "main",
        "values",
    )

    def __init__(
        self, path: str, masker: Masker, total: float | None = None, pattern: str | None = None
    ) -> None:
        self._path, self._masker, self._pattern = path, masker, pattern
        self._total = total  # number of training steps, from the inputs
        self._seen = 0
        self.values: dict[str, float] = {}
        self.main = ""
        self._first: tuple[float, float] | None = (
            None  # first step seen, and its time: a resumed training job does not start at step 0
        )
        self._last: tuple[float, float] | None = None
        self._points: list[float] = []
        self._stride, self._sum, self._summed = 1, 0.0, 0

    def poll(self, now: float) -> bool:
        """Read new metrics.  Return True for new lines."""
        news = _read(self._path, self._seen, _METRICS, self._seen)
        if news is None:
            return False
        data, start, end = news
        whole = data.rfind(b"\n") + 1
        if not whole:
            # Leave an incomplete line for the next poll, unless it is already too long to be shown.
            self._seen = end if len(data) == _METRICS else self._seen
            return False
        lines = data[:whole].splitlines()
        if start > self._seen:  # bytes were skipped, so the first line is incomplete
            del lines[0]
        self._seen = start + whole
        for numbers in self._numbers(lines):
            self._take(numbers)
        self._note_step(now)
        return bool(lines)

    def _note_step(self, now: float) -> None:
        """Record the time of the last training step, if it has changed."""
        step = self.values.get("step")
        is_known = self._last is not None and self._last[0] == step
        if step is not None and not is_known:
            self._last = (step, now)
            self._first = self._first or self._last

    @property
    def total(self) -> float | None:
        """The total number of training steps, from the metrics, else from the inputs; None if unknown."""
        return self.values.get("max_steps", self.values.get("total_steps", self._total))

    def left(self, now: float) -> float | None:
        """Return the estimated seconds until the last training step; None if unknown."""
        most = self.total
        if most is None or self._first is None or self._last is None:
            return None
        first_step, first_time = self._first
        last_step, last_time = self._last
        if last_step <= first_step:
            return None
        pace = (last_time - first_time) / (last_step - first_step)
        return max(0.0, (most - last_step) * pace - (now - last_time))

    def text(self, bars: bool) -> str:
        """Return the known metrics as text, such as `step 120/1000  loss 2.134 ▇▅▃▂▁  eval_loss 2.2
        1.2k tokens/s`.
        """
        parts = (self._position(), self._main_value(bars), self._eval_loss(), self._rate())
        return "  ".join(filter(None, parts))

    def _position(self) -> str:
        """Return the step with its total and percentage, else the epoch."""
        values, most = self.values, self.total
        if "step" in values:
            step = f"step {_number(values['step'])}"
            if most is None or most <= 0:
                return step
            return f"{step}/{_number(most)} {min(values['step'] / most, 1):.0%}"
        return f"epoch {_number(values['epoch'])}" if "epoch" in values else ""

    def _main_value(self, bars: bool) -> str:
        """Return the main metric with its last value, and with `bars` its sparkline."""
        if not self.main:
            return ""
        course = f" {sparkline(self._points)}" if bars and len(self._points) > 1 else ""
        return f"{safe_line(self.main)} {_number(self.values[self.main])}{course}"

    def _eval_loss(self) -> str:
        if "eval_loss" not in self.values or self.main == "eval_loss":
            return ""
        return f"eval_loss {_number(self.values['eval_loss'])}"

    def _rate(self) -> str:
        """Return the first throughput metric, such as `1.2k tokens/s`."""
        name = next((name for name in self.values if name.endswith(_RATES)), "")
        if not name:
            return ""
        unit = name.removesuffix("_per_second").removesuffix("/s")
        return f"{_short(self.values[name])} {safe_line(unit)}/s"

    def _numbers(self, lines: Iterable[bytes]) -> Iterator[dict[str, float]]:
        from ..storage.metrics import parse, reader

        if self._pattern is None:
            yield from (_finite(self._masker.value(parse(line))) for line in lines)
            return
        try:
            read = reader(self._pattern)
            yield from (_finite(read(self._masker.mask(line))) for line in lines)
        except TimeoutError:
            pass  # a slow pattern is reported when the step ends; the display does not wait for it

    def _take(self, numbers: Mapping[str, float]) -> None:
        self.values.update(numbers)
        if self.main != "loss":
            self.main = _main(self.values) or self.main
        value = numbers.get(self.main)
        if value is None:
            return
        self._sum, self._summed = self._sum + value, self._summed + 1
        if self._summed == self._stride:
            self._points.append(self._sum / self._stride)
            self._sum, self._summed = 0.0, 0
            if len(self._points) == _POINTS:
                # Halve the resolution, so that the sparkline covers the whole training job.
                points = self._points
                self._points = [(a + b) / 2 for a, b in zip(points[::2], points[1::2], strict=True)]
                self._stride *= 2


def sparkline(points: list[float]) -> str:
    """Draw numbers as a sparkline, one character each."""
    low, high = min(points), max(points)
    half = high / 2 - low / 2  # the full range may overflow a float
    if not 0 < half < math.inf:
        return _BARS[0] * len(points)
    heights = [(point / 2 - low / 2) / half for point in points]
    return "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)


_RATES = ("_per_second", "/s")
_CLOCKS = frozenset(
    {"step", "max_steps", "total_steps", "epoch", "time", "at", "seconds", "lr", "learning_rate"}
)


def _main(values: Mapping[str, float]) -> str:
    """Return the name of the main metric: the loss, else another loss, else the first metric; empty without metrics."""
    for name in ("loss", "train_loss"):
        if name in values:
            return name
    candidates = [name for name in values if name not in _CLOCKS and not name.endswith(_RATES)]
    for name in candidates:
        if name.endswith("loss"):
            return name
    return candidates[0] if candidates else ""


def _finite(numbers: Mapping[str, object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if is_number(value) and abs(value) < 1e300:  # sums for the sparkline must not overflow
            found[name] = value
    return found


def _last(data: bytes) -> str:
    """Return the last line that is not blank, safe for a terminal."""
    for line in reversed(data.replace(b"\r", b"\n").split(b"\n")):
        text = safe_line(line.decode(errors="replace")).strip()
        if text:
            return text
    return ""


def _read(path: str, start: int, most: int, known: int) -> tuple[bytes, int, int] | None:
    """Read a file from `start`, but at most its last `most` bytes.

    Returns the bytes with their begin and end offsets; None if the file cannot be read or still has
    the size `known`.
    """
    try:
        # A step may have created a pipe at this path: do not block on it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(handle)
        if found.st_size == known or not stat.S_ISREG(found.st_mode):
            return None
        if found.st_size < start:
            start = 0
        begin = max(start, found.st_size - most)
        data = os.pread(handle, found.st_size - begin, begin)
        return data, begin, begin + len(data)
    except OSError:
        return None
    finally:
        os.close(handle)


def _character(char: str) -> str:
    if char.isprintable():
        return char
    if char == "\t":
        return "    "
    code = ord(char)
    if code < 0x20:
        return "^" + chr(code + 0x40)
    if code == 0x7F:
        return "^?"
    if code < 0xA0:
        return "^[" + chr(code - 0x40)
    kind = unicodedata.category(char)
    if kind == "Cf":
        return ""
    return " " if kind[0] == "Z" else "\ufffd"


def _columns(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
