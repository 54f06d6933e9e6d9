"""What runs reported, in a few numbers for each metric: read from points once, and from the index of this disk from then on."""

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
from ..language.recipe import Recipe
from ..language.values import is_number
from ..planning.ids import bare
from ..storage import metrics, run_graph
from ..storage.records.runs import FINAL, RunRow, Tried
from ..storage.workspace import Workspace
from .comparison import Cell, is_comparable, is_outcome, lower_is_better, matrix_values
from .results import Point, read_attempt_points

PATIENCE: Final = 0.3
"""Seconds in which points are read for one answer; the numbers of attempts that are left come with a later one."""
NAMES: Final = 60
"""Metrics of one attempt."""
CURVE: Final = 24
"""Values of a curve in small."""
TRIALS: Final = 300
"""Trials of a run that are listed."""
_HELD_OUT = re.compile(r"eval|val|test", re.IGNORECASE)
_TRIAL = re.compile(r"^[^/\]]*\[[^\]]*\]")


class MetricSummary(NamedTuple):
    """One metric of one or more attempts: its last value, extremes and at which of the trainer's own steps they were, and how often it was reported.

    `curve` has the values in small, at most `CURVE` of them; None stands for what is not known.
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
    """One instance of a matrix, or one trial of a sweep: its values, how it stands, and what it reported."""

    id: str
    inputs: Mapping[str, Cell]
    state: str
    metrics: Summaries


class RunNumbers(NamedTuple):
    """What a run reported, of all its steps together; and of each trial, where it has several."""

    metrics: Summaries
    trials: Sequence[TrialNumbers]
    least: Mapping[str, bool]
    """Of each metric whether less of it is better: as the recipe's `select` says, else by its name."""
    curve: tuple[str, Sequence[float]] | None
    """The metric that says most, and its curve in small."""


def summarize(said: Iterable[Point]) -> dict[str, MetricSummary]:
    """The summary of each metric of note that points have."""
    values: dict[str, list[tuple[float, float]]] = {}
    last: dict[str, metrics.Value] = {}
    for n, point in enumerate(said):
        step = point.get("step", point.get("epoch", n))
        x = float(step) if is_comparable(step) else float(n)
        for name, value in point.items():
            if not is_outcome(name) or (name not in last and len(last) >= NAMES):
                continue
            last[name] = value
            if is_number(value):
                values.setdefault(name, []).append((x, float(value)))
    found = {}
    for name, value in last.items():
        pairs = values.get(name, [])
        at_min, least = min(pairs, key=lambda pair: pair[1], default=(None, None))
        at_max, greatest = max(pairs, key=lambda pair: pair[1], default=(None, None))
        found[name] = MetricSummary(
            value, least, greatest, at_min, at_max, len(pairs), _thin_curve([y for _, y in pairs])
        )
    return found


def _thin_curve(values: Sequence[float]) -> list[float]:
    """The means of equal parts."""
    parts = min(CURVE, len(values))
    cuts = [len(values) * n // parts for n in range(parts + 1)] if parts else []
    return [float(f"{sum(values[a:b]) / (b - a):.4g}") for a, b in itertools.pairwise(cuts)]


def merge_summaries(all: Iterable[Summaries]) -> dict[str, MetricSummary]:
    """Summaries of several attempts or steps as one, the later ones last."""
    found: dict[str, MetricSummary] = {}
    for each in all:
        for name, new in each.items():
            old = found.get(name)
            found[name] = new if old is None else _merge_two(old, new)
    return found


def _merge_two(old: MetricSummary, new: MetricSummary) -> MetricSummary:
    least, at_min = _better_extreme((old.min, old.at_min), (new.min, new.at_min), sign=1)
    greatest, at_max = _better_extreme((old.max, old.at_max), (new.max, new.at_max), sign=-1)
    n = (old.n or 0) + (new.n or 0) if old.n is not None or new.n is not None else None
    return MetricSummary(new.last, least, greatest, at_min, at_max, n, new.curve or old.curve)


_Extreme = tuple[float | None, float | None]


def _better_extreme(old: _Extreme, new: _Extreme, *, sign: int) -> _Extreme:
    if old[0] is None or new[0] is None:
        return new if old[0] is None else old
    return new if sign * new[0] < sign * old[0] else old


def summarize_runs(
    ws: Workspace, rows: Sequence[RunRow], live: Mapping[str, Mapping[str, Summaries]] | None = None
) -> dict[str, RunNumbers]:
    """What each run reported or found; `live` is that of attempts under way, by run and step.  Reads points for up to `PATIENCE` seconds."""
    ids = [row.id for row in rows]
    steps = ws.store.runs.steps_of(ids)
    graphs = {row.id: run_graph.recall(ws.home, row.id) for row in rows}
    fresh = {id: dict(graph.fresh) if graph is not None else {} for id, graph in graphs.items()}
    for id, found in steps.items():
        fresh[id] |= {
            row.step: row.key for row in found.values() if row.state == "FRESH" and row.key
        }
    keys = {key for found in fresh.values() for key in found.values()}
    own = ws.store.runs.tried(ids)
    made = ws.store.runs.makers(keys)
    known = _load_summaries(ws, [*own, *made.values()])
    answer = {}
    for row in rows:
        by_step: dict[str, list[Summaries]] = {}
        for step, key in fresh[row.id].items():
            if key in made and made[key].run != row.id and (each := known.get(made[key].id)):
                by_step[step] = [each]
        for tried in own:
            if tried.run == row.id and (each := known.get(tried.id)):
                by_step.setdefault(tried.step, []).append(each)
        for step, each in (live or {}).get(row.id, {}).items():
            by_step.setdefault(step, []).append(each)
        together = {step: merge_summaries(each) for step, each in by_step.items()}
        states = {each.step: each.state for each in steps.get(row.id, {}).values()}
        answer[row.id] = _numbers(row, together, states)
    return answer


def _numbers(
    row: RunRow, by_step: Mapping[str, Summaries], states: Mapping[str, str]
) -> RunNumbers:
    reporting = {bare(match[0]) for step in by_step if (match := _TRIAL.match(step))}
    trials: dict[str, list[str]] = {}
    for step in [*states, *(step for step in by_step if step not in states)]:
        # One whose numbers were not read yet is a trial, too.
        if (match := _TRIAL.match(step)) and bare(match[0]) in reporting:
            trials.setdefault(match[0], []).append(step)
    shown = []
    if len(trials) > 1:
        for id, steps in sorted(trials.items())[:TRIALS]:
            numbers = merge_summaries(by_step[step] for step in steps if step in by_step)
            inputs = {name: _parse_value(text) for name, text in matrix_values(id).items()}
            ends = [states[step] for step in steps if step in states]
            shown.append(TrialNumbers(id, inputs, _worst(ends), numbers))
    found, least = merge_summaries(by_step.values()), directions(row)
    which = {name: least.get(name, lower_is_better(name)) for name in found}
    curve = next((name for name in sorted(found, key=_rank) if len(found[name].curve) > 1), None)
    return RunNumbers(found, shown, which, (curve, found[curve].curve) if curve else None)


def _parse_value(text: str) -> Cell:
    """A value of an id, which is text there, as a number where it is one."""
    try:
        number = float(text)
    except ValueError:
        return text
    return (
        text
        if not is_comparable(number)
        else int(number)
        if re.fullmatch(r"-?\d+", text)
        else number
    )


def _rank(metric: str) -> tuple[bool, bool]:
    """What says most first: a loss on data held out, then what else is held out, then a loss."""
    return not _HELD_OUT.search(metric), not lower_is_better(metric)


def _worst(states: Collection[str]) -> str:
    order = ("FAILED", "RUNNING", "CANCELLED", "BLOCKED", "WAITING", "READY", "DONE", "FRESH")
    return next((state for state in order if state in states), "FRESH")


def _load_summaries(ws: Workspace, tries: Sequence[Tried]) -> dict[str, Summaries]:
    """Summaries by the ids of attempts: those that the index has, and others as far as there is time to read their points."""
    found = ws.store.index.summaries([each.id for each in tries])
    known: dict[str, Summaries] = {
        id: {name: MetricSummary(*each) for name, each in of.items()} for id, of in found.items()
    }
    until, new = time.monotonic() + PATIENCE, {}
    for each in tries:
        if each.id in known or time.monotonic() > until:
            continue
        said: Sequence[Point] | None = ()
        with suppress(Invalid):  # its pattern takes too long: it has no numbers
            full = next(
                (a for a in ws.store.runs.attempts(each.run, each.step) if a.n == each.n), None
            )
            said = read_attempt_points(ws, full) if full is not None else ()
        known[each.id] = new[each.id] = summarize(said or ())
    if new:
        ws.store.index.summarize(
            {id: {name: list(s) for name, s in of.items()} for id, of in new.items()}
        )
    return known


def directions(row: RunRow) -> Mapping[str, bool]:
    """Of metrics that a `select` of the run's recipe names whether the least is best; nothing where its file cannot be read."""
    path = Path(str(row.data.get("source", "")))
    try:
        return _directions(path, path.stat().st_mtime_ns)
    except (RecipeError, OSError):
        return {}


@functools.lru_cache(maxsize=500)
def _directions(path: Path, _changed: int) -> Mapping[str, bool]:
    from ..language import parse

    return selected_directions(parse.load(path))


def selected_directions(recipe: Recipe) -> dict[str, bool]:
    """Of the metrics that `select` steps of a recipe compare, whether the least is best."""
    chosen = [step.select for step in recipe.steps.values() if step.select is not None]
    return {each.metric: each.best == "min" for each in chosen}


def is_live(row: RunRow) -> bool:
    """Whether attempts of a run may be under way."""
    return row.state not in FINAL and row.state != "PAUSED"
