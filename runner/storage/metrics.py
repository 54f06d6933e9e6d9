"""Read the metrics that a step reports: JSON objects, one a line, or matches of a pattern in its log."""

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
"""Bytes of one line."""
WHOLE: Final = 64 << 20
"""Bytes of a file that is read in one go."""
PATIENCE = 1.0
"""Seconds that a pattern may take for one line."""
_HUGE: Final = 1e300
_NOT_FINITE: Final = re.compile(r"[+-]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
NOTHING: Final = Masker()
WARNING: Final = "warning"
"""The name under which a step says in `$RECIPE_METRICS` what people have to know: a text, and no number."""
MOST_WARNINGS: Final = 20
LONGEST_WARNING: Final = 500


def last(lines: Iterable[bytes]) -> dict[str, Value]:
    """The last value of every name.  A line that is not a JSON object (a torn last one, say) is passed over; nested names join with a dot."""
    found: dict[str, Value] = {}
    for line in lines:
        point = parse(line)
        if point:
            found.update(point)
    return found


def parse(line: bytes) -> dict[str, Value]:
    """One line's values; empty when it is not a JSON object, or nested without end.  A warning is none of them."""
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
    """The warnings in a file, each on one line, masked and once: `{"warning": "…"}`, equal ones counted.  At most `MOST_WARNINGS`."""
    try:
        with path.open("rb") as file:
            found = Counter(
                " ".join(masker.text(text).split())
                for line in _lines(file)
                if (text := warning_of(line))
            )
    except OSError:
        return []
    shown = [
        on_one_line(text) + (f" ({count} times)" if count > 1 else "")
        for text, count in list(found.items())[:MOST_WARNINGS]
    ]
    more = len(found) - len(shown)
    return [*shown, f"{more} more warnings: see the step's log"] if more else shown


def on_one_line(text: str) -> str:
    """A warning as it is shown: on one line, and cut where it is too long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_WARNING else f"{line[: LONGEST_WARNING - 1]}…"


def warning_of(line: bytes) -> str:
    """The warning in a line of `$RECIPE_METRICS`; empty where it has none."""
    if b'"warning"' not in line:
        return ""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    text = value.get(WARNING) if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def read(path: Path) -> dict[str, Value]:
    """The last values in a file; empty when there is none.  Raises OSError if it is no regular file."""
    try:
        with open_regular(path) as file:
            return last(_lines(file))
    except FileNotFoundError:
        return {}


def points(path: Path) -> list[dict[str, Value]]:
    """Every line that says something; none where there is no file."""
    try:
        with open_regular(path) as file:
            data = file.read(WHOLE)
            if len(data) < WHOLE and (quick := _at_once(data)) is not None:
                return quick
            file.seek(0)
            return [line for each in _lines(file) if (line := parse(each))]
    except OSError:
        return []


def _at_once(data: bytes) -> list[dict[str, Value]] | None:
    """The points of lines that are JSON objects of numbers, read in one go; None where a line is anything else."""
    lines = [line for line in data.splitlines() if line.strip()]
    try:
        found: list[dict[str, Value]] = _loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    if len(found) != len(lines):
        return None
    for point in found:
        if not isinstance(point, dict) or not point:
            return None
        for value in point.values():
            # What is no finite number, and a warning's text, are for `parse`.
            if (type(value) is not float and type(value) is not int) or not -_HUGE < value < _HUGE:
                return None
    return found


def _loads(data: bytes) -> Any:
    """Read JSON, by pydantic's reader where that is loaded, as in a server: it takes less than half of the time.  Raises ValueError."""
    fast = sys.modules.get("pydantic_core")
    return fast.from_json(data) if fast is not None else json.loads(data)


def pace(path: Path) -> tuple[list[float], float]:
    """How many seconds each step of a training took, by the metrics file that it writes, and how long ago the last was reported."""
    try:
        silent = time.time() - path.stat().st_mtime
    except OSError:
        return [], 0.0
    return [
        float(seconds)
        for line in points(path)
        if isinstance(seconds := line.get("time_step"), (int, float))
    ], silent


def mean_rate(lines: Sequence[Mapping[str, object]], name: str) -> float | None:
    """Mean of what is reported by the second for each step, the first left out where more follow: making room and compiling is in it."""
    values = [
        float(value)
        for line in lines
        if isinstance(value := line.get(name), (int, float)) and not isinstance(value, bool)
    ]
    values = values[1:] if len(values) > 1 else values
    return (
        len(values) / sum(1 / value for value in values)
        if values and all(value > 0 for value in values)
        else None
    )


def first_step(path: Path) -> int | None:
    """The first `step` that a file tells; None when it tells none."""
    try:
        with open_regular(path) as file:
            return next(
                (step for line in _lines(file) if isinstance(step := parse(line).get("step"), int)),
                None,
            )
    except OSError:
        return None


def matches(log: Path, pattern: str, masker: Masker) -> Iterator[dict[str, Value]]:
    """The named groups of `pattern` in each line of a log that has it, as numbers where they are.  Lines are masked before.

    Raises Invalid where one line takes more than `PATIENCE` seconds.
    """
    with open_regular(log) as file:
        yield from match_lines(_lines(file, masker), pattern)


def match_lines(lines: Iterable[bytes], pattern: str) -> Iterator[dict[str, Value]]:
    """The same of lines that are masked; a bar of tqdm writes many over each other, with `\\r` between.  Raises Invalid."""
    read = reader(pattern)
    for line in (piece for whole in lines for piece in whole.split(b"\r")):
        try:
            found = read(line)
        except TimeoutError:
            message = f"the metrics pattern `{pattern}` takes more than {PATIENCE:g} s for one line of the log"
            fix = "remove nested repetitions from the pattern"
            raise Invalid([Problem("pattern-too-slow", message, None, fix)]) from None
        if found:
            yield found


def reader(pattern: str) -> Callable[[bytes], dict[str, Value]]:
    """What gives the named groups of `pattern` in a line, as numbers where they are.  It raises TimeoutError after `PATIENCE` seconds."""
    import regex

    compiled = regex.compile(pattern.encode())

    def read(line: bytes) -> dict[str, Value]:
        hit = compiled.search(line[:4096], timeout=PATIENCE)
        return (
            {name: _number(text) for name, text in hit.groupdict().items() if text is not None}
            if hit
            else {}
        )

    return read


def find_divergence(point: Mapping[str, object]) -> str:
    """The loss in a point that is NaN or infinite, in words; empty where none is."""
    for name, value in point.items():
        if isinstance(value, str) and _NOT_FINITE.fullmatch(value) and _is_loss(name):
            step = point.get("step")
            at = f" at step {step}" if isinstance(step, (int, float)) else ""
            return f"{name} is {value}{at}"
    return ""


def _is_loss(name: str) -> bool:
    """Whether a metric is a loss by its name: `loss`, `eval_loss`, `train/loss`, `losses/policy`; not `loss_scale`."""
    words = re.split(r"[\W_]+", name.lower())
    return bool({"loss", "losses"} & {words[0], words[-1]}) and words[-1] != "scale"


def match(log: Path, pattern: str, masker: Masker) -> dict[str, Value]:
    """The last value of every named group of `pattern` over the lines of a log."""
    return {name: value for found in matches(log, pattern, masker) for name, value in found.items()}


def _lines(file: BinaryIO, masker: Masker = NOTHING) -> Iterator[bytes]:
    """Lines, and of one that is too long to mean anything its pieces: a log without newlines never is in memory as a whole."""
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
            # NaN, infinities and what no float can hold have no form in a key, nor a place in a
            # table or a plot: they are kept as the words they are.
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
