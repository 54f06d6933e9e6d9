"""Reading of a step's metrics: one JSON object per line, or pattern matches in its log."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from ..agent.regular import open_regular
from ..errors import Invalid, Problem
from ..language.values import is_finite
from ..secrets import Masker

Value = float | int | str | bool
LONGEST = 1 << 20
"""Maximum length of a line in bytes."""
WHOLE: Final = 64 << 20
"""Maximum size of a file to parse at once, in bytes."""
PATIENCE = 1.0
"""Timeout for matching a pattern against one line, in seconds."""
_HUGE: Final = 1e300
_NOT_FINITE: Final = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
NOTHING: Final = Masker()
WARNING: Final = "warning"
"""Key of a warning message in a `$RECIPE_METRICS` line."""
MOST_WARNINGS: Final = 20
LONGEST_WARNING: Final = 500


def last(lines: Iterable[bytes]) -> dict[str, Value]:
    """Return the last value of each metric in lines of JSON objects.

    Lines that are not JSON objects are skipped, such as an incomplete last line. Nested names are
    joined with dots.
    """
    found: dict[str, Value] = {}
    for line in lines:
        point = parse(line)
        if point:
            found.update(point)
    return found


def parse(line: bytes) -> dict[str, Value]:
    """Return the metrics in one line of JSON, without warnings.

    Returns an empty mapping for anything but a JSON object, or for excessive nesting.
    """
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            return {}
        if isinstance(value.get(WARNING), str):
            del value[WARNING]
        return _flat(value, "")
    except (ValueError, RecursionError):
        return {}


def warnings(path: Path, masker: Masker) -> list[str]:
    """Return the distinct warnings in a metrics file, with secrets masked and repeat counts.

    At most `MOST_WARNINGS`.
    """
    found: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                text = warning_of(line)
                if text:
                    found[" ".join(masker.text(text).split())] += 1
    except OSError:
        return []
    shown = []
    for text, count in list(found.items())[:MOST_WARNINGS]:
        repeated = f" ({count} times)" if count > 1 else ""
        shown.append(on_one_line(text) + repeated)
    more = len(found) - len(shown)
    return [*shown, f"{more} more warnings: see the step's log"] if more else shown


def on_one_line(text: str) -> str:
    """Put a warning on one line, and shorten a long one."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_WARNING else f"{line[: LONGEST_WARNING - 1]}…"


def warning_of(line: bytes) -> str:
    """Return the warning in a `$RECIPE_METRICS` line, or ""."""
    if b'"warning"' not in line:
        return ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    text = value.get(WARNING) if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def read(path: Path) -> dict[str, Value]:
    """Return the last value of each metric in a file; empty if the file does not exist.

    Raises OSError for other than regular files.
    """
    try:
        with open_regular(path) as file:
            return last(_lines(file))
    except FileNotFoundError:
        return {}


def points(path: Path) -> list[dict[str, Value]]:
    """Return the metrics of each line in a file; empty if the file cannot be read."""
    try:
        with open_regular(path) as file:
            data = file.read(WHOLE)
            if len(data) < WHOLE:
                quick = _parse_plain_points(data)
                if quick is not None:
                    return quick
            file.seek(0)
            return [point for point in map(parse, _lines(file)) if point]
    except OSError:
        return []


def _parse_plain_points(data: bytes) -> list[dict[str, Value]] | None:
    """Parse lines of JSON objects with plain numbers at once; None for any other content."""
    lines = [line for line in data.splitlines() if line.strip()]
    try:
        found: list[dict[str, Value]] = _loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    # A line with a comma between two objects would give more points than lines.
    if len(found) != len(lines):
        return None
    # `parse` handles non-finite numbers and warnings.
    if not all(map(_is_plain_point, found)):
        return None
    return found


def _is_plain_point(point: object) -> bool:
    """Return True for a JSON object with finite numbers only, and at least one."""
    if not isinstance(point, dict) or not point:
        return False
    for value in point.values():
        if type(value) is not float and type(value) is not int:
            return False
        if not -_HUGE < value < _HUGE:
            return False
    return True


def _loads(data: bytes) -> Any:
    """Parse JSON with the fastest available parser.

    Raises ValueError. Uses pydantic's parser if it is loaded (in the server), which takes less
    than half the time.
    """
    fast = sys.modules.get("pydantic_core")
    return fast.from_json(data) if fast is not None else json.loads(data)


def pace(path: Path) -> tuple[list[float], float]:
    """Return the seconds of each training step, and the seconds since the last report.

    The source is the metrics file of the step.
    """
    try:
        silent = time.time() - path.stat().st_mtime
    except OSError:
        return [], 0.0
    times = [line.get("time_step") for line in points(path)]
    return [float(seconds) for seconds in times if isinstance(seconds, (int, float))], silent


def mean_rate(lines: Sequence[Mapping[str, object]], name: str) -> float | None:
    """Return the mean rate of a per-second metric over all steps, or None.

    The first step (allocation and compilation) is left out if others follow.
    """
    values = []
    for line in lines:
        value = line.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values.append(float(value))
    if len(values) > 1:
        values = values[1:]
    if not values or not all(value > 0 for value in values):
        return None
    # The harmonic mean: a slow step takes longer, and so counts more.
    return len(values) / sum(1 / value for value in values)


def first_step(path: Path) -> int | None:
    """Return the first `step` value in a metrics file, or None."""
    try:
        with open_regular(path) as file:
            for line in _lines(file):
                step = parse(line).get("step")
                if isinstance(step, int):
                    return step
    except OSError:
        pass
    return None


def matches(log: Path, pattern: str, masker: Masker) -> Iterator[dict[str, Value]]:
    """Yield the named groups of `pattern` for each matching line of a log, with secrets masked.

    Numbers are converted.

    Raises Invalid if one line takes more than `PATIENCE` seconds.
    """
    with open_regular(log) as file:
        yield from match_lines(_lines(file, masker), pattern)


def match_lines(lines: Iterable[bytes], pattern: str) -> Iterator[dict[str, Value]]:
    """Yield the named groups of `pattern` for each matching line.

    Progress bars with carriage returns are split into lines. Raises Invalid.
    """
    read = reader(pattern)
    for line in _split_at_returns(lines):
        try:
            found = read(line)
        except TimeoutError:
            message = f"the metrics pattern `{pattern}` takes more than {PATIENCE:g} s for one line of the log"
            fix = "remove nested repetitions from the pattern"
            raise Invalid([Problem("pattern-too-slow", message, None, fix)]) from None
        if found:
            yield found


def _split_at_returns(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield from line.split(b"\r")


def reader(pattern: str) -> Callable[[bytes], dict[str, Value]]:
    """Return a function that parses metrics from a line with `pattern`.

    The function raises TimeoutError after `PATIENCE` seconds.
    """
    import regex

    compiled = regex.compile(pattern.encode())

    def read(line: bytes) -> dict[str, Value]:
        hit = compiled.search(line[:4096], timeout=PATIENCE)
        if not hit:
            return {}
        groups = hit.groupdict()
        return {name: _number(text) for name, text in groups.items() if text is not None}

    return read


def find_divergence(point: Mapping[str, object]) -> str:
    """Describe a NaN or infinite loss in reported metrics; return "" if there is none."""
    for name, value in point.items():
        if isinstance(value, str) and _NOT_FINITE.fullmatch(value) and _is_loss(name):
            step = point.get("step")
            at = f" at step {step}" if isinstance(step, (int, float)) else ""
            return f"{name} is {value}{at}"
    return ""


def _is_loss(name: str) -> bool:
    """Return True if the name of a metric denotes a loss.

    Examples are `loss`, `eval_loss`, `train/loss`, `losses/policy`, but not `loss_scale`.
    """
    words = re.split(r"[\W_]+", name.lower())
    return bool({"loss", "losses"} & {words[0], words[-1]}) and words[-1] != "scale"


def match(log: Path, pattern: str, masker: Masker) -> dict[str, Value]:
    """Return the last value of each named group of `pattern` in a log."""
    values: dict[str, Value] = {}
    for found in matches(log, pattern, masker):
        values.update(found)
    return values


def _lines(file: BinaryIO, masker: Masker = NOTHING) -> Iterator[bytes]:
    """Yield the lines of a file, with secrets masked.

    Overlong lines are split, so that a log without newlines is never in memory as a whole.
    """
    if not masker:
        yield from iter(lambda: file.readline(LONGEST), b"")
        return
    stream, rest = masker.stream(), b""
    while data := file.read(LONGEST):
        *lines, rest = (rest + stream.feed(data)).split(b"\n")
        yield from lines
        if len(rest) > LONGEST:
            yield rest
            rest = b""
    yield rest + stream.end()


def _flat(value: dict[str, object], head: str) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found.update(_flat(inner, f"{head}{name}."))
        elif isinstance(inner, (str, bool)):
            found[head + name] = inner
        elif isinstance(inner, (int, float)):
            # Keys, tables and plots have no form for NaN, infinities and numbers beyond float
            # range:
            # such numbers are stored as text.
            found[head + name] = inner if is_finite(inner) else str(inner)
    return found


def _number(text: bytes) -> Value:
    word = text.decode(errors="replace")
    for kind in (int, float):
        try:
            value = kind(word)
        except ValueError:
            continue
        return value if is_finite(value) else word
    return word
