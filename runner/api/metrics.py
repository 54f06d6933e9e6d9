"""Metrics of a run's attempts, masked, also while they run. Unmaskable metrics are left out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ..agent.regular import open_regular
from ..errors import CannotRun, Invalid
from ..planning.ids import names
from ..secrets import Masker
from ..storage import metrics
from ..storage.records.links import TrackerLink, find_links, stored_links
from ..storage.records.runs import FINAL, AttemptRow, RunRow
from ..storage.workspace import Workspace
from ..survey import binned, rows, samples, summaries
from ..survey.binned import TIMES, Axis, Curve, Span, time_points
from ..survey.comparison import is_comparable
from ..survey.results import Point, read_attempt_points
from . import values
from .logs import AttemptLog, find_missing_secrets, find_unmaskable, list_attempt_logs, open_tail

Source = Literal["step", "machine"]
"""Source of metrics: the step, or the agent on its machine."""
AT_ONCE: Final = 8
"""Maximum number of running attempts per run whose metrics a list of runs includes."""
RUNS: Final = 60
"""Number of finished runs whose curves are cached in memory."""
LATE: Final = 2.0
"""Seconds for which the metrics of a running attempt are cached."""
KEPT: Final = 1000
"""Number of running attempts whose metrics are cached."""
RECENT: Final = 1000
"""Number of latest events that are searched for running attempts, to limit reads of long runs."""


SAMPLE: Final = 8 << 10
"""Number of trailing bytes of a sample file in which the last sample is searched."""


def last_samples(ws: Workspace, row: RunRow) -> dict[str, Point]:
    """Return the latest machine metrics of each step running on this machine, by step."""
    found: dict[str, Point] = {}
    for part in _running_attempts(ws, row):
        with suppress(OSError), open_regular(samples.samples_path(part.raw)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - SAMPLE))
            lines = file.read().splitlines()
            # The last line may be half written, and the first one cut off.
            point = next(filter(None, map(metrics.parse, reversed(lines))), None)
            if point:
                found[part.step] = point
    return found


def _running_attempts(ws: Workspace, row: RunRow) -> list[AttemptLog]:
    """Return the running attempts of a run, from its `RECENT` latest events."""
    events = ws.store.runs.events(row.id, max(0, row.next_event - RECENT))
    return [part for part in list_attempt_logs(events) if not part.ended]


class AttemptMetrics(NamedTuple):
    """Metric points of one attempt in order. `source` is the run that produced a cached result."""

    step: str
    attempt: int
    points: Iterable[Point]
    source: str = ""
    span: Span = Span()


def read_points(
    ws: Workspace, run: str, step: str, attempt: int, of: Source
) -> Iterator[values.Point]:
    """Yield metric points of attempts in order, numbered from 1 for each attempt.

    An empty `step` selects all steps, and `attempt` 0 selects all attempts.
    """
    for each in _read_attempts(ws, run, step, attempt, of):
        for n, point in enumerate(each.points, 1):
            yield values.Point(each.step, each.attempt, n, dict(point), each.source)


def _read_attempts(
    ws: Workspace, run: str, step: str, attempt: int, of: Source
) -> Iterator[AttemptMetrics]:
    """Yield the metrics of the selected attempts, one attempt at a time."""
    if not attempt:
        yield from _read_cached_attempts(ws, run, step, of)
    ended = {(each.step, each.n): each for each in ws.store.runs.attempts(run)}
    for part in list_attempt_logs(ws.store.runs.events(run)):
        if not _is_selected(part.step, step) or attempt not in (0, part.number):
            continue
        known = ended.get((part.step, part.number))
        if known is not None:
            found = _read_finished(ws, known, of)
        else:
            found = _read_running(ws, run, part, of)
        yield AttemptMetrics(part.step, part.number, found, span=_span(known))


def _is_selected(id: str, step: str) -> bool:
    """Return True if an instance ID is of this step. An empty `step` selects all steps."""
    return not step or step in names(id)


def _read_finished(ws: Workspace, attempt: AttemptRow, of: Source) -> Sequence[Point]:
    if of == "machine":
        return samples.load_samples(ws, attempt)
    return read_attempt_points(ws, attempt) or ()


def _read_running(ws: Workspace, run: str, part: AttemptLog, of: Source) -> Sequence[Point]:
    if of == "machine":
        path = samples.samples_path(part.raw)
        return rows.read_points(ws, run, part.step, part.number, path)
    return _read_live_points(ws, run, part)


def _read_cached_attempts(
    ws: Workspace, run: str, step: str, of: Source
) -> Iterator[AttemptMetrics]:
    """Yield the metrics of cached steps, from the attempts that created their results."""
    keys = summaries.fresh_keys(ws, run, ws.store.runs.steps(run))
    wanted = {id: key for id, key in keys.items() if _is_selected(id, step)}
    made = ws.store.runs.makers(wanted.values())
    for id, key in wanted.items():
        if key not in made or made[key].run == run:
            continue
        by = made[key]
        for each in ws.store.runs.attempts(by.run, by.step):
            if each.key == key:
                yield AttemptMetrics(id, each.n, _read_finished(ws, each, of), by.run, _span(each))


def _span(attempt: AttemptRow | None) -> Span:
    return Span(attempt.started, attempt.ended) if attempt is not None else Span()


class StepCurves(NamedTuple):
    """Metric curves of one step, over all its attempts.

    `source` is the run that created a cached result.
    """

    step: str
    source: str
    curves: Mapping[str, Curve]


def read_curves(ws: Workspace, run: RunRow, axis: Axis, of: Source = "step") -> list[StepCurves]:
    """Return the metric curves of each step or of its machines. Finished runs are cached."""
    key = (str(ws.root), run.id, run.next_event, axis, of)
    if key in _curves:
        _curves[key] = found = _curves.pop(key)  # move to the end: most recently used
        return found
    by_step: dict[tuple[str, str], list[Point]] = {}
    reported = _read_attempts(ws, run.id, "", 0, of)
    if axis in TIMES:
        # Host samples have `at` already.
        if of == "step":
            reported = _add_times(ws, run, reported)
        reported = _add_elapsed(reported)
    for each in reported:
        by_step.setdefault((each.step, each.source), []).extend(each.points)
    found = [
        StepCurves(step, source, binned.build_curves(said, axis))
        for (step, source), said in by_step.items()
    ]
    if run.state in FINAL:
        _curves[key] = found
        while len(_curves) > RUNS:
            with suppress(KeyError, StopIteration):  # another thread deleted the entry first
                del _curves[next(iter(_curves))]
    return found


def _add_times(
    ws: Workspace, run: RunRow, reported: Iterable[AttemptMetrics]
) -> Iterator[AttemptMetrics]:
    """Add the time `at` to metric points, and skip attempts without any known time."""
    looked = {
        (each.step, each.attempt, each.source): each.points
        for each in _read_attempts(ws, run.id, "", 0, "machine")
    }
    for each in reported:
        timed_by = looked.get((each.step, each.attempt, each.source), ())
        points = time_points([*each.points], timed_by, each.span)
        if points:
            yield each._replace(points=points)


def _add_elapsed(reported: Iterable[AttemptMetrics]) -> Iterator[AttemptMetrics]:
    """Add the time since the step's first attempt, `elapsed`, to points with a time `at`."""
    origins: dict[tuple[str, str], float] = {}
    for each in reported:
        timed: list[Point] = []
        for point in each.points:
            at = point.get("at")
            # A step can write to the sample file of its machine, so a sample may lack its time.
            if is_comparable(at):
                start = each.span.started or at
                origin = origins.setdefault((each.step, each.source), start)
                timed.append({**point, "elapsed": at - origin})
        if timed:
            yield each._replace(points=timed)


_curves: dict[tuple[str, str, int, str, str], list[StepCurves]] = {}
_read: dict[str, tuple[float, summaries.Summaries]] = {}
"""Time of the last read and its metrics, by the log file of a running attempt."""


def summarize_running(
    ws: Workspace, rows: Sequence[RunRow]
) -> dict[str, dict[str, summaries.Summaries]]:
    """Return metric summaries of running attempts, by run and step, at most `AT_ONCE` per run."""
    answer: dict[str, dict[str, summaries.Summaries]] = {}
    for row in rows:
        if not summaries.is_live(row):
            continue
        going = _running_attempts(ws, row)[:AT_ONCE]
        answer[row.id] = {part.step: _summarize_attempt(ws, row.id, part) for part in going}
    return answer


def _summarize_attempt(ws: Workspace, run: str, part: AttemptLog) -> summaries.Summaries:
    """Return the metric summary of a running attempt, at most `LATE` seconds old."""
    now, known = time.monotonic(), _read.get(part.raw)
    if known is None or now - known[0] > LATE:
        if len(_read) > KEPT:
            _read.clear()
        known = _read[part.raw] = now, summaries.summarize(_read_live_points(ws, run, part))
    return known[1]


def list_links(
    ws: Workspace, row: RunRow, attempts: Sequence[AttemptRow] | None = None
) -> list[TrackerLink]:
    """Return links to external views of a run's metrics.

    Links of finished attempts are stored. For running attempts, the start of their log is searched.
    """
    if attempts is None:
        attempts = ws.store.runs.attempts(row.id)
    found = stored_links(attempts)
    if row.state not in FINAL:
        for part in _running_attempts(ws, row):
            found += find_links(part.step, _read_log_start(ws, row.id, part), {})
    return list(dict.fromkeys(found))


def _read_log_start(ws: Workspace, run: str, part: AttemptLog) -> bytes:
    """Return the start of a growing log with secrets masked, or b"" if masking is impossible."""
    with suppress(CannotRun):
        if find_missing_secrets(ws, run, part):
            return b""
        tail = open_tail(ws, run, part)
        if tail is not None:
            with closing(tail):
                return tail.read()
    return b""


def _read_live_points(ws: Workspace, run: str, part: AttemptLog) -> Sequence[Point]:
    """Return the metrics of a running attempt, or nothing if secrets cannot be masked."""
    elsewhere = rows.is_elsewhere(ws, run)
    if part.pattern and elsewhere:
        printed_lines = rows.read_log(ws, run, part.step, part.number).splitlines()
        return _collect_points(metrics.match_lines(printed_lines, part.pattern))
    if elsewhere:
        return rows.read_points(ws, run, part.step, part.number, Path(f"{part.raw[:-4]}.metrics"))
    if find_unmaskable(ws, part):
        return ()
    try:
        masker = Masker(part.secrets_to_mask(ws))
        if part.pattern:
            return _collect_points(_read_log_points(part, masker))
        data = masker.mask(Path(f"{part.raw[:-4]}.metrics").read_bytes())
    except (OSError, CannotRun):
        return ()
    return list(filter(None, map(metrics.parse, data.splitlines())))


_logs: dict[str, tuple[int, list[Point]]] = {}
"""Read offset and metric points of growing logs, to continue reading there."""
LOGS: Final = 64
"""Maximum number of entries in `_logs`."""


def _read_log_points(part: AttemptLog, masker: Masker) -> Iterator[Point]:
    """Return the points in the complete lines of a growing log."""
    offset, found = _logs.pop(part.raw, (0, []))
    with open_regular(part.raw) as file:
        if os.fstat(file.fileno()).st_size < offset:
            offset, found = 0, []
        file.seek(offset)
        data = file.read().replace(b"\r", b"\n")
    whole, newline, _ = data.rpartition(b"\n")
    lines = map(masker.mask, whole.split(b"\n")) if newline else ()
    found = [*found, *metrics.match_lines(lines, part.pattern)]
    _logs[part.raw] = offset + len(whole) + len(newline), found
    while len(_logs) > LOGS:
        _logs.pop(next(iter(_logs)), None)
    return iter(found)


def _collect_points(found: Iterator[Point]) -> Sequence[Point]:
    """Collect metric points, or return none if regex matching exceeds its time limit.

    The step's end reports this.
    """
    with suppress(Invalid):
        return [*found]
    return ()
