"""Metric summaries of runs, computed from the points once and then stored in the local index."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import Invalid, RecipeError
from ..language import parse
from ..language.recipe import Recipe
from ..language.values import is_number
from ..planning.ids import bare
from ..storage import metrics, run_graph
from ..storage.records.runs import FINAL, AttemptId, RunRow, StepRow
from ..storage.workspace import Workspace
from .comparison import Cell, is_comparable, is_held_out, is_outcome, lower_is_better, matrix_values
from .results import Point, read_attempt_points

PATIENCE: Final = 0.3
"""Seconds to spend on reading points per request.

Remaining attempts are summarized by later requests.
"""
NAMES: Final = 60
"""Maximum metrics of an attempt."""
CURVE: Final = 24
"""Maximum values of a thumbnail curve."""
TRIALS: Final = 300
"""Maximum listed trials of a run."""
_TRIAL = re.compile(r"^[^/\]]*\[[^\]]*\]")


class MetricSummary(NamedTuple):
    """Summary of a metric over one or more attempts: last value, extremes, their steps, and count.

    `curve` is a thumbnail with at most `CURVE` values. None means unknown.
    """

    last: metrics.Value
    min: float | None
    max: float | None
    at_min: float | None
    at_max: float | None
    n: int | None
    curve: Sequence[float] = ()


Summaries = Mapping[str, MetricSummary]


class TrialNumbers(NamedTuple):
    """A matrix instance or sweep trial, with its values, state and metrics."""

    id: str
    inputs: Mapping[str, Cell]
    state: str
    metrics: Summaries


class RunNumbers(NamedTuple):
    """Metrics of a run over all steps, and of each trial if there are several trials."""

    metrics: Summaries
    trials: Sequence[TrialNumbers]
    least: Mapping[str, bool]
    """Whether lower is better, by metric: from the recipe's `select`, else from the name."""
    curve: tuple[str, Sequence[float]] | None
    """The most important metric, and its thumbnail curve."""


def summarize(points: Iterable[Point]) -> dict[str, MetricSummary]:
    """Summarize each outcome metric of the points, at most `NAMES` metrics."""
    values: dict[str, list[tuple[float, float]]] = {}
    last: dict[str, metrics.Value] = {}
    for n, point in enumerate(points):
        step = point.get("step", point.get("epoch", n))
        x = float(step) if is_comparable(step) else float(n)
        for name, value in point.items():
            if not is_outcome(name):
                continue
            if name not in last and len(last) >= NAMES:
                continue
            last[name] = value
            if is_number(value):
                values.setdefault(name, []).append((x, float(value)))
    return {name: _summarize_one(value, values.get(name, [])) for name, value in last.items()}


def _summarize_one(last: metrics.Value, pairs: Sequence[tuple[float, float]]) -> MetricSummary:
    """Summarize one metric. `pairs` holds training steps and values."""
    if not pairs:
        return MetricSummary(last, None, None, None, None, 0, [])
    at_min, least = min(pairs, key=lambda pair: pair[1])
    at_max, greatest = max(pairs, key=lambda pair: pair[1])
    curve = _thin_curve([value for _, value in pairs])
    return MetricSummary(last, least, greatest, at_min, at_max, len(pairs), curve)


def _thin_curve(values: Sequence[float]) -> list[float]:
    """Downsample values to the means of equal parts."""
    if not values:
        return []
    parts = min(CURVE, len(values))
    cuts = [len(values) * n // parts for n in range(parts + 1)]
    return [float(f"{sum(values[a:b]) / (b - a):.4g}") for a, b in itertools.pairwise(cuts)]


def merge_summaries(all: Iterable[Summaries]) -> dict[str, MetricSummary]:
    """Merge the summaries of several attempts or steps, given in chronological order."""
    found: dict[str, MetricSummary] = {}
    for each in all:
        for name, new in each.items():
            old = found.get(name)
            found[name] = new if old is None else _merge_two(old, new)
    return found


def _merge_two(old: MetricSummary, new: MetricSummary) -> MetricSummary:
    least, at_min = _better_extreme((old.min, old.at_min), (new.min, new.at_min), sign=1)
    greatest, at_max = _better_extreme((old.max, old.at_max), (new.max, new.at_max), sign=-1)
    count = None
    if old.n is not None or new.n is not None:
        count = (old.n or 0) + (new.n or 0)
    curve = new.curve or old.curve
    return MetricSummary(new.last, least, greatest, at_min, at_max, count, curve)


_Extreme = tuple[float | None, float | None]


def _better_extreme(old: _Extreme, new: _Extreme, *, sign: int) -> _Extreme:
    """Return the lower of two extremes if `sign` is 1, or the higher if it is -1."""
    if old[0] is None:
        return new
    if new[0] is None:
        return old
    return new if sign * new[0] < sign * old[0] else old


def summarize_runs(
    ws: Workspace, rows: Sequence[RunRow], live: Mapping[str, Mapping[str, Summaries]] | None = None
) -> dict[str, RunNumbers]:
    """Return the metrics of each run, including its up-to-date steps, by run ID.

    `live` has the summaries of running attempts, by run and step. Reading points takes at most
    `PATIENCE` seconds.
    """
    ids = [row.id for row in rows]
    steps = ws.store.runs.steps_of(ids)
    fresh = {id: fresh_keys(ws, id, steps.get(id, {})) for id in ids}
    own = ws.store.runs.finished_attempts(ids)
    cached: set[str] = set()
    for keys in fresh.values():
        cached.update(keys.values())
    makers = ws.store.runs.makers(cached)
    known = _load_summaries(ws, [*own, *makers.values()])
    by_run: dict[str, list[AttemptId]] = {}
    for tried in own:
        by_run.setdefault(tried.run, []).append(tried)
    answer = {}
    for row in rows:
        by_step = _cached_summaries(row.id, fresh[row.id], makers, known)
        for tried in by_run.get(row.id, ()):
            if known.get(tried.id):
                by_step.setdefault(tried.step, []).append(known[tried.id])
        for step, each in (live or {}).get(row.id, {}).items():
            by_step.setdefault(step, []).append(each)
        together = {step: merge_summaries(each) for step, each in by_step.items()}
        states = {each.step: each.state for each in steps.get(row.id, {}).values()}
        answer[row.id] = _run_numbers(row, together, states)
    return answer


def _cached_summaries(
    run: str,
    keys: Mapping[str, str],
    makers: Mapping[str, AttemptId],
    known: Mapping[str, Summaries],
) -> dict[str, list[Summaries]]:
    """Return the summaries of a run's up-to-date steps, from attempts of other runs."""
    by_step: dict[str, list[Summaries]] = {}
    for step, key in keys.items():
        maker = makers.get(key)
        if maker is None or maker.run == run:
            continue
        if known.get(maker.id):
            by_step[step] = [known[maker.id]]
    return by_step


def fresh_keys(ws: Workspace, run: str, steps: Mapping[str, StepRow]) -> dict[str, str]:
    """Return the cache keys of a run's up-to-date steps, by step."""
    graph = run_graph.recall(ws.home, run)
    keys = dict(graph.fresh) if graph is not None else {}
    for row in steps.values():
        if row.state == "FRESH" and row.key:
            keys[row.step] = row.key
    return keys


def _run_numbers(
    row: RunRow, by_step: Mapping[str, Summaries], states: Mapping[str, str]
) -> RunNumbers:
    merged, directions = merge_summaries(by_step.values()), read_directions(row)
    least = {name: directions.get(name, lower_is_better(name)) for name in merged}
    trials = _find_trials(by_step, states)
    shown: list[TrialNumbers] = []
    if len(trials) > 1:
        for id, steps in sorted(trials.items())[:TRIALS]:
            shown.append(_trial_numbers(id, steps, by_step, states))
    return RunNumbers(merged, shown, least, _main_curve(merged))


def _main_curve(found: Summaries) -> tuple[str, Sequence[float]] | None:
    """Return the most important metric with a curve, or None without any."""
    for name in sorted(found, key=_rank):
        if len(found[name].curve) > 1:  # one value draws no line
            return name, found[name].curve
    return None


def _find_trials(
    by_step: Mapping[str, Summaries], states: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the steps of each matrix trial, for matrices with reported metrics."""
    reporting: set[str] = set()
    for step in by_step:
        match = _TRIAL.match(step)
        if match is not None:
            reporting.add(bare(match[0]))
    trials: dict[str, list[str]] = {}
    # An instance without loaded metrics is a trial too.
    for step in dict.fromkeys((*states, *by_step)):
        match = _TRIAL.match(step)
        if match is not None and bare(match[0]) in reporting:
            trials.setdefault(match[0], []).append(step)
    return trials


def _trial_numbers(
    id: str, steps: Sequence[str], by_step: Mapping[str, Summaries], states: Mapping[str, str]
) -> TrialNumbers:
    inputs = {name: _parse_value(text) for name, text in matrix_values(id).items()}
    state = _worst([states[step] for step in steps if step in states])
    numbers = merge_summaries(by_step[step] for step in steps if step in by_step)
    return TrialNumbers(id, inputs, state, numbers)


def _parse_value(text: str) -> Cell:
    """Convert a matrix value in a step id to a number if possible."""
    try:
        number = float(text)
    except ValueError:
        return text
    if not is_comparable(number):
        return text
    return int(number) if re.fullmatch(r"-?\d+", text) else number


def _rank(metric: str) -> tuple[bool, bool]:
    """Return a sort key that ranks metrics by importance.

    The order is validation losses, other validation metrics, losses, others.
    """
    return not is_held_out(metric), not lower_is_better(metric)


def _worst(states: Collection[str]) -> str:
    order = ("FAILED", "RUNNING", "CANCELLED", "BLOCKED", "WAITING", "READY", "DONE", "FRESH")
    return next((state for state in order if state in states), "FRESH")


def _load_summaries(ws: Workspace, tries: Sequence[AttemptId]) -> dict[str, Summaries]:
    """Return metric summaries by attempt ID.

    Uses stored summaries first. Others are computed for up to `PATIENCE` seconds, and stored.
    """
    stored = ws.store.index.summaries([each.id for each in tries])
    known: dict[str, Summaries] = {}
    for id, fields in stored.items():
        known[id] = {name: MetricSummary(*each) for name, each in fields.items()}
    until = time.monotonic() + PATIENCE
    new: dict[str, Summaries] = {}
    for each in tries:
        if each.id in known or time.monotonic() > until:
            continue
        known[each.id] = new[each.id] = summarize(_read_points(ws, each))
    if new:
        rows: dict[str, dict[str, list[object]]] = {}
        for id, summaries in new.items():
            rows[id] = {name: list(each) for name, each in summaries.items()}
        ws.store.index.summarize(rows)
    return known


def _read_points(ws: Workspace, tried: AttemptId) -> Sequence[Point]:
    """Read the metric points of an attempt, or return none if regex matching is too slow."""
    for attempt in ws.store.runs.attempts(tried.run, tried.step):
        if attempt.n == tried.n:
            with suppress(Invalid):
                return read_attempt_points(ws, attempt) or ()
    return ()


def read_directions(row: RunRow) -> Mapping[str, bool]:
    """Return whether lower is better for each metric in a run recipe's `select` steps.

    Empty if the recipe file is unreadable.
    """
    path = Path(str(row.data.get("source", "")))
    try:
        return _directions(path, path.stat().st_mtime_ns)
    except (RecipeError, OSError):
        return {}


@functools.lru_cache(maxsize=500)
def _directions(path: Path, _changed: int) -> Mapping[str, bool]:
    return selected_directions(parse.load(path))


def selected_directions(recipe: Recipe) -> dict[str, bool]:
    """Return whether lower is better for each metric in a recipe's `select` steps."""
    chosen = [step.select for step in recipe.steps.values() if step.select is not None]
    return {each.metric: each.best == "min" for each in chosen}


def is_live(row: RunRow) -> bool:
    """Return True if a run may have running attempts."""
    return row.state not in FINAL and row.state != "PAUSED"
