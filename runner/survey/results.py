"""Metrics reported by attempts: last values and extremes, read from the store and stored attempt
files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..language.values import is_number
from ..planning.step import MetricsSpec
from ..storage import metrics
from ..storage.records.database import Json
from ..storage.records.index import Trace
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace
from . import rows
from .numbers import stored_files

Point = Mapping[str, metrics.Value]


class Metric(NamedTuple):
    """Stored values of a step's metric: last value, minimum and maximum. None means not stored."""

    last: metrics.Value
    least: float | None
    greatest: float | None


class StepMetrics(NamedTuple):
    """The metrics of a step, with all reported points.

    `points` has all reported points in order; None if no log or file is stored.
    """

    step: str
    metrics: Mapping[str, Metric]
    points: Sequence[Point] | None


def reported_metrics(ws: Workspace, attempts: Sequence[AttemptRow]) -> list[StepMetrics]:
    """Return the metrics of each step, over all given attempts in order.

    The last values are from the newest metrics rule, which may be newer than the attempt.
    """
    keys = [attempt.key for attempt in attempts if attempt.outcome == "done"]
    traces = ws.store.index.traces(list(filter(None, keys)))
    found = []
    for step, tries in group_by_step(attempts).items():
        said = _join_points([read_attempt_points(ws, attempt) for attempt in tries])
        trace = traces.get(tries[-1].key)
        last = trace.numbers if trace is not None else {}
        found.append(StepMetrics(step, summarize_points(said or (), last), said))
    return found


def peak_memory(attempts: Iterable[AttemptRow]) -> int | None:
    """Return the largest measured memory of the attempts in bytes; None without a measurement."""
    peaks = [attempt.exit.get("peak_memory") for attempt in attempts]
    return max((peak for peak in peaks if isinstance(peak, int)), default=None)


def group_by_step(attempts: Iterable[AttemptRow]) -> dict[str, list[AttemptRow]]:
    """Return the attempts of each step, in order."""
    by_step: dict[str, list[AttemptRow]] = {}
    for attempt in attempts:
        by_step.setdefault(attempt.step, []).append(attempt)
    return by_step


def _join_points(parts: Sequence[Sequence[Point] | None]) -> list[Point] | None:
    """Join the points of a step's attempts, or return None if those of the last one are gone."""
    if parts[-1] is None:
        return None
    points: list[Point] = []
    for part in parts:
        points += part or ()
    return points


def attempts_of(ws: Workspace, trace: Trace) -> list[AttemptRow]:
    """Return the locally known attempts that produced a result."""
    attempts = ws.store.runs.attempts(trace.run, trace.step)
    return [attempt for attempt in attempts if attempt.key == trace.key]


def read_attempt_points(ws: Workspace, attempt: AttemptRow) -> list[Point] | None:
    """Return all metric points of an attempt in order, or None if its log or files are gone."""
    rule = _rule(attempt)
    if rule is None:
        return []
    if rule.pattern:
        log = rows.keep_file(ws, attempt, ".log")
        if not log.exists():
            return None
        return list(metrics.matches(log, rule.pattern, metrics.NOTHING))
    if rule.in_environment:
        path = rows.keep_file(ws, attempt, ".metrics")
        return list(metrics.points(path)) if path.exists() else None
    trace = ws.store.index.trace(attempt.key)
    # Outputs are stored by key: those of another run are not what this attempt reported.
    if trace is None or trace.run != attempt.run:
        return None
    files = sorted(stored_files(ws, trace, str(rule.file)))
    if not files:
        return None
    points: list[Point] = []
    for _, path in files:
        points += metrics.points(path)
    return points


def summarize_points(said: Iterable[Point], last: Mapping[str, Any]) -> dict[str, Metric]:
    """Summarize each metric of the points. `last` overrides the last values."""
    values: dict[str, metrics.Value] = {}
    numbers: dict[str, list[float]] = {}
    for point in said:
        values |= point
        for name, value in point.items():
            if is_number(value):
                numbers.setdefault(name, []).append(value)
    ranges = {name: (min(many), max(many)) for name, many in numbers.items()}
    return {
        name: Metric(value, *ranges.get(name, (None, None)))
        for name, value in (values | {**last}).items()
    }


def in_image(attempt: AttemptRow, name: str) -> Json:
    """Return a part of the pre-image of an attempt's cache key."""
    return attempt.preimage.get(name) if isinstance(attempt.preimage, dict) else None


def in_author(attempt: AttemptRow, name: str) -> Json:
    """Return a part of the step declaration in an attempt's cache key pre-image."""
    author = in_image(attempt, "author")
    return author.get(name) if isinstance(author, dict) else None


def _rule(attempt: AttemptRow) -> MetricsSpec | None:
    """Return the metrics rule of an attempt, or None if no metrics are declared."""
    rule = in_image(attempt, "metrics") or in_author(attempt, "metrics")
    if not isinstance(rule, list):
        return None
    parts: list[str | None] = []
    for part in rule:
        text = None if part is None else str(part)
        parts.append(text)
    return MetricsSpec(*parts)
