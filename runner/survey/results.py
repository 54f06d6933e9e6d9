"""What attempts reported: their metrics, the last value of each and the extremes of all.  Read from the store and from what is kept of them."""

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
    """One metric of one step: its last value, and the least and greatest number that was reported; None where no number is kept."""

    last: metrics.Value
    least: float | None
    greatest: float | None


class StepMetrics(NamedTuple):
    """What one step reported.  `points` has what it said each time, in order; None: no log or file of it is kept."""

    step: str
    metrics: Mapping[str, Metric]
    points: Sequence[Point] | None


def reported_metrics(ws: Workspace, attempts: Sequence[AttemptRow]) -> list[StepMetrics]:
    """The metrics of each step among these attempts, all of its attempts together, in the order in which they are given.

    The last values are those of the rule by which they were read last, also if it is newer than the attempt.
    """
    by_step: dict[str, list[AttemptRow]] = {}
    for attempt in attempts:
        by_step.setdefault(attempt.step, []).append(attempt)
    traces = ws.store.index.traces(
        [attempt.key for attempt in attempts if attempt.outcome == "done" and attempt.key]
    )
    found = []
    for step, tries in by_step.items():
        parts = [read_attempt_points(ws, attempt) for attempt in tries]
        said = None if parts[-1] is None else [point for part in parts for point in part or ()]
        trace = traces.get(tries[-1].key)
        found.append(
            StepMetrics(
                step, summarize_points(said or (), trace.numbers if trace is not None else {}), said
            )
        )
    return found


def attempts_of(ws: Workspace, trace: Trace) -> list[AttemptRow]:
    """Those that made a result, where they are known here."""
    return [
        attempt
        for attempt in ws.store.runs.attempts(trace.run, trace.step)
        if attempt.key == trace.key
    ]


def read_attempt_points(ws: Workspace, attempt: AttemptRow) -> list[Point] | None:
    """Everything that an attempt reported, in order; None where what it is read from is not kept."""
    rule = _rule(attempt)
    if rule is None:
        return []
    if rule.pattern or rule.in_environment:
        path = rows.keep_file(ws, attempt, ".log" if rule.pattern else ".metrics")
        if not path.exists():
            return None
        return (
            list(metrics.matches(path, rule.pattern, metrics.NOTHING))
            if rule.pattern
            else list(metrics.points(path))
        )
    trace = ws.store.index.trace(attempt.key)
    files = (
        sorted(stored_files(ws, trace, str(rule.file)))
        if trace is not None and trace.run == attempt.run
        else []
    )
    return [point for _, path in files for point in metrics.points(path)] if files else None


def summarize_points(said: Iterable[Point], last: Mapping[str, Any]) -> dict[str, Metric]:
    """One entry for each name that was reported; `last` are the last values where more is known of them than was `said`."""
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
    """A part of what the key of an attempt was made from."""
    return attempt.preimage.get(name) if isinstance(attempt.preimage, dict) else None


def in_author(attempt: AttemptRow, name: str) -> Json:
    """A part of what its recipe said of the step."""
    author = in_image(attempt, "author")
    return author.get(name) if isinstance(author, dict) else None


def _rule(attempt: AttemptRow) -> MetricsSpec | None:
    """How an attempt reported its metrics; None: it reports none."""
    rule = in_image(attempt, "metrics") or in_author(attempt, "metrics")
    return (
        MetricsSpec(*(None if part is None else str(part) for part in rule))
        if isinstance(rule, list)
        else None
    )
