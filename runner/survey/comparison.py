"""Compare results of a recipe: its instances and runs, their different inputs, their metrics, and
the best one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard
from urllib.parse import unquote

from ..errors import Invalid, RecipeError
from ..language import parse
from ..language.values import is_finite, is_number
from ..planning.halving import STOPPED
from ..planning.ids import bare
from ..planning.run_view import TOTALS
from ..storage.records.index import Trace
from ..storage.records.runs import AttemptRow, RunRow
from ..storage.run_graph import recall
from ..storage.workspace import Workspace
from .results import (
    Metric,
    Point,
    attempts_of,
    in_author,
    in_image,
    read_attempt_points,
    summarize_points,
)

Cell = str | int | float | bool | None

BESIDE: Final = frozenset(
    {
        *TOTALS,
        "step",
        "epoch",
        "lr",
        "learning_rate",
        "grad_norm",
        "samples_per_second",
        "tokens_per_second",
        "memory_gb",
        "gpu",
    }
)
"""Metrics about the training process, not about its outcome."""
_LESS = re.compile(r"loss|perplexity|ppl|err|wer|cer|mse|mae|nll|fid", re.IGNORECASE)
_HELD_OUT = re.compile(r"eval|val|test", re.IGNORECASE)
_MATRIX = re.compile(r"\[([^]]*)\]")
OWN: Final = ("best", "step", "run", "label", "made", "state", "reason", "time", "where")
"""Columns of every result in addition to inputs and metrics."""


class Result(NamedTuple):
    """The result of a step instance under one cache key, or its failure.

    `values`: inputs and matrix values. `where`: empty for this machine.
    """

    step: str
    run: str
    made: float
    state: str  # DONE, STOPPED early, or FAILED
    reason: str
    seconds: float | None
    where: str
    label: str  # name and tags of the run
    values: Mapping[str, Cell]
    metrics: Mapping[str, Metric]


class Criterion(NamedTuple):
    """The comparison metric, and whether lower values are better."""

    metric: str
    least: bool

    @property
    def words(self) -> str:
        extreme = "lowest" if self.least else "highest"
        return f"the {extreme} {self.metric}"


def collect_results(
    ws: Workspace, recipe: str, keys: Collection[str] | None = None
) -> list[Result]:
    """Return all locally known results of a recipe's runs, newest last.

    A result is a step instance that reported metrics, or failed while reporting any. Several runs
    with one key give one result, of the run that created it last. Cached results from another
    recipe or machine count too. With `keys`, return only results under these keys.
    """
    runs = _RunsOfRecipe(ws, recipe)
    if keys is not None:
        runs.keep_only(keys)
    traces = ws.store.index.traces(runs.list_keys())
    results = [*runs.cached_results(traces), *runs.executed_results(traces)]
    return sorted(results, key=lambda result: result.made)


class _RunsOfRecipe:
    """The runs of one recipe, with their attempts, up-to-date steps and inputs."""

    def __init__(self, ws: Workspace, recipe: str) -> None:
        self._ws = ws
        self._rows = {row.id: row for row in ws.store.runs.latest(recipe=recipe)[::-1]}
        self._places = ws.store.runs.places(list(self._rows))
        # By step and key. An attempt without a key is listed by its run.
        self._attempts: dict[tuple[str, str], list[AttemptRow]] = {}
        self._inputs_read: set[str] = set()
        for id in self._rows:
            for attempt in ws.store.runs.attempts(id):
                place = attempt.step, attempt.key or attempt.run
                self._attempts.setdefault(place, []).append(attempt)
                self._inputs_read |= _inputs_read(attempt)
        self._fresh = self._find_fresh() - self._attempts.keys()

    def _find_fresh(self) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for id in self._rows:
            graph = recall(self._ws.home, id)
            if graph is not None:
                found |= set(graph.fresh.items())
        return found

    def keep_only(self, keys: Collection[str]) -> None:
        """Keep only the attempts and up-to-date steps under these cache keys."""
        self._attempts = {each: many for each, many in self._attempts.items() if each[1] in keys}
        self._fresh = {each for each in self._fresh if each[1] in keys}

    def list_keys(self) -> list[str]:
        """Return the cache keys of all attempts and up-to-date steps."""
        return [key for _, key in (*self._attempts, *self._fresh)]

    def cached_results(self, traces: Mapping[str, Trace]) -> list[Result]:
        """Return the results of the up-to-date steps that reported metrics."""
        results = []
        for step, key in self._fresh:
            if key in traces:
                result, _ = find_result(self._ws, step, traces[key])
                if _has_numbers(result):
                    results.append(result)
        return results

    def executed_results(self, traces: Mapping[str, Trace]) -> list[Result]:
        """Return the results of the executed steps that reported metrics, or failed before."""
        results = []
        for (step, key), many in self._attempts.items():
            result = self._result_of_attempts(step, many, traces.get(key))
            # A failed attempt of a training step is a result even before its first metric.
            has_failed = result.state == "FAILED" and _reports(_deciding_attempt(many))
            if has_failed or _has_numbers(result):
                results.append(result)
        return results

    def _result_of_attempts(
        self, step: str, attempts: Sequence[AttemptRow], trace: Trace | None
    ) -> Result:
        """Return the result for one cache key from its attempts in the deciding run."""
        row = self._rows[_deciding_attempt(attempts).run]
        given = {name: value for name, value in row.inputs.items() if name in self._inputs_read}
        own = [each for each in attempts if each.run == row.id]
        result, _ = attempt_result(self._ws, step, own, trace, given)
        return result._replace(where=self._places.get((row.id, step), ""), label=_label(row))


def _deciding_attempt(attempts: Sequence[AttemptRow]) -> AttemptRow:
    """Return the last successful attempt, or else the last attempt."""
    for attempt in reversed(attempts):
        if attempt.outcome == "done":
            return attempt
    return attempts[-1]


def _has_numbers(result: Result) -> bool:
    return any(is_comparable(metric.last) for metric in result.metrics.values())


def attempt_result(
    ws: Workspace,
    step: str,
    tries: Sequence[AttemptRow],
    trace: Trace | None,
    given: Mapping[str, object],
) -> tuple[Result, Sequence[Point]]:
    """Return the result for one cache key from its attempts, with all reported metric points.

    `given` are inputs of the run. Values that the step itself read take precedence.
    """
    last = _deciding_attempt(tries)
    done = last.outcome == "done"
    points: list[Point] = []
    for each in tries:
        with suppress(Invalid):  # a slow pattern: the last values are still known
            points += read_attempt_points(ws, each) or ()
    seconds = (last.ended or 0) - (last.started or 0)
    numbers: Mapping[str, Any] = {}
    if done and trace is not None:
        numbers = trace.numbers
        # The result under this key may be of another run, and so is its duration.
        if trace.run == last.run:
            seconds = trace.seconds
    values = {**given, **matrix_values(step), **_own_values(last)}
    result = Result(
        step=step,
        run=last.run,
        made=last.ended or 0.0,
        state=_state_of(last),
        reason=last.reason,
        seconds=round(seconds, 3),
        where="",
        label="",
        values={name: _cell(value) for name, value in values.items()},
        metrics=summarize_points(points, numbers),
    )
    return result, points


def _state_of(attempt: AttemptRow) -> str:
    if attempt.outcome == "done":
        return "DONE"
    return "STOPPED" if attempt.outcome == STOPPED else "FAILED"


def find_result(ws: Workspace, step: str, trace: Trace) -> tuple[Result, Sequence[Point]]:
    """Return the result and metric points for a step's cache key, from any run.

    Uses the attempts if they are known locally, else the trace.
    """
    tries = attempts_of(ws, trace)
    if tries:
        return attempt_result(ws, step, tries, trace, {})
    result = Result(
        step=step,
        run=trace.run,
        made=trace.made_at,
        state="DONE",
        reason="",
        seconds=round(trace.seconds, 3),
        where="",
        label="",
        values={**matrix_values(step)},
        metrics=summarize_points((), trace.numbers),
    )
    return result, ()


def _label(row: RunRow) -> str:
    """Return the name and tags of a run, as set at its start."""
    name = str(row.data.get("name", ""))
    tags = row.data.get("tags")
    words = [name] if name else []
    if isinstance(tags, list):
        words += [f"#{tag}" for tag in tags]
    return " ".join(words)


def _reads(attempt: AttemptRow) -> Mapping[str, object]:
    """Return the values read by the step's templates, by name."""
    reads = in_author(attempt, "reads")
    return reads if isinstance(reads, dict) else {}


def _inputs_read(attempt: AttemptRow) -> set[str]:
    names: set[str] = set()
    for name in _reads(attempt):
        if name.startswith("inputs."):
            names.add(name.removeprefix("inputs."))
    return names


def _own_values(attempt: AttemptRow) -> dict[str, object]:
    """Return the inputs and matrix values that the step itself read, by name."""
    values: dict[str, object] = {}
    for name, value in _reads(attempt).items():
        if name.startswith(("inputs.", "matrix.")):
            values[name.partition(".")[2]] = value
    return values


def _reports(attempt: AttemptRow) -> bool:
    """Return True if a step declares metrics."""
    return bool(in_image(attempt, "metrics") or in_author(attempt, "metrics"))


def matrix_values(step: str) -> dict[str, str]:
    """Parse the matrix values in a step ID, such as rank and lr in `s[rank=4]/train[lr=1]`."""
    values: dict[str, str] = {}
    for inside in _MATRIX.findall(step):
        for pair in inside.split(","):
            name, equals, value = pair.partition("=")
            if equals:
                values[name] = unquote(value)
    return values


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def is_comparable(value: object) -> TypeGuard[int | float]:
    """Return True if a metric is a finite number."""
    return is_number(value) and is_finite(value)


def lower_is_better(metric: str) -> bool:
    """Return True if lower values of a metric are better, judging by its name."""
    return _LESS.search(metric) is not None


def is_outcome(metric: str) -> bool:
    """Return True if a metric describes the outcome of training."""
    return metric not in BESIDE and not metric.startswith("time_")


def is_held_out(metric: str) -> bool:
    """Return True if a metric is of validation or test data, judging by its name."""
    return _HELD_OUT.search(metric) is not None


def find_differing_inputs(found: Sequence[Result]) -> list[str]:
    """Return the inputs and matrix values that differ between results."""
    names: dict[str, None] = {}
    for result in found:
        names |= dict.fromkeys(result.values)
    return [name for name in names if _differs(found, name)]


def _differs(found: Iterable[Result], name: str) -> bool:
    # As JSON, because 1, 1.0 and true are equal in Python.
    return len({json.dumps(result.values.get(name)) for result in found}) > 1


def list_metric_names(found: Iterable[Result]) -> list[str]:
    """Return the names of the results' outcome metrics, in the reported order."""
    names: dict[str, None] = {}
    for result in found:
        for name, metric in result.metrics.items():
            if is_outcome(name) and is_comparable(metric.last):
                names[name] = None
    return list(names)


def read_criteria(ws: Workspace, recipe: str) -> dict[str, Criterion]:
    """Return the comparison criteria of a recipe's `select` steps, by compared step.

    They are read from the current recipe file, and empty if it is unreadable.
    """
    for row in ws.store.runs.latest(recipe=recipe, last=1):
        with suppress(RecipeError, OSError):
            source = parse.load(Path(str(row.data.get("source", ""))))
            criteria: dict[str, Criterion] = {}
            for step in source.steps.values():
                if step.select is not None:
                    least = step.select.best == "min"
                    criteria[step.select.step] = Criterion(step.select.metric, least)
            return criteria
    return {}


def choose_criterion(found: Sequence[Result], chosen: Mapping[str, Criterion]) -> Criterion | None:
    """Choose the comparison criterion for the results of one step, or None without a metric.

    Prefers the step's `select`, then a validation metric, a loss, or the first metric.
    """
    names = list_metric_names(found)
    for step in dict.fromkeys(bare(result.step) for result in found):
        given = chosen.get(step)
        if given is not None and given.metric in names:
            return given
    held_out = [name for name in names if is_held_out(name)]
    by_preference = (
        *filter(lower_is_better, held_out),
        *held_out,
        *filter(lower_is_better, names),
        *names,
    )
    if not by_preference:
        return None
    return Criterion(by_preference[0], lower_is_better(by_preference[0]))


def last_number(result: Result, metric: str) -> float | None:
    """Return the last value of a metric if it is a number, or else None."""
    if metric not in result.metrics:
        return None
    last = result.metrics[metric].last
    return float(last) if is_comparable(last) else None


def find_best(found: Sequence[Result], by: Criterion | None) -> Result | None:
    """Return the best finished result by a criterion, or None."""
    if by is None:
        return None
    for result in rank(found, by):
        if result.state == "DONE" and last_number(result, by.metric) is not None:
            return result
    return None


def rank(found: Sequence[Result], by: Criterion) -> list[Result]:
    """Sort results from best to worst, followed by results without the metric and failed results."""
    sign = 1 if by.least else -1

    def place(result: Result) -> tuple[bool, bool, float]:
        number = last_number(result, by.metric)
        return result.state != "DONE", number is None, sign * (number or 0.0)

    return sorted(found, key=place)


def as_row(result: Result, *, is_best: bool) -> dict[str, Cell]:
    """Convert a result to a table row.

    The row has the columns `OWN`, the inputs by name, and the last and best value of each metric
    (`min loss`, `max acc`). A metric with the name of an input or column is called `metrics.NAME`.
    `made` is in seconds since the epoch, `time` in seconds.
    """
    row: dict[str, Cell] = {
        "best": is_best,
        "step": result.step,
        "run": result.run,
        "label": result.label,
        "made": result.made,
        "state": result.state,
        "reason": result.reason,
        "time": result.seconds,
        "where": result.where,
    }
    for name, value in result.values.items():
        column = f"inputs.{name}" if name in OWN else name
        row[column] = value
    for name, metric in result.metrics.items():
        column = f"metrics.{name}" if name in row else name
        row[column] = metric.last
        row[best_column(column)] = metric.least if lower_is_better(name) else metric.greatest
    return row


def best_column(metric: str) -> str:
    """Return the column name for a metric's best value, such as `min loss`."""
    extreme = "min" if lower_is_better(metric) else "max"
    return f"{extreme} {metric}"


class Comparison(NamedTuple):
    """The sorted results of one step, the comparison criterion, and the best result."""

    results: Sequence[Result]
    by: Criterion | None
    best: Result | None

    def has(self, name: str) -> bool:
        """Return True if any result has a column, input or metric with this name."""
        if name in OWN:
            return True
        return any(name in result.values or name in result.metrics for result in self.results)

    def flat(self) -> list[dict[str, Cell]]:
        return [as_row(result, is_best=result is self.best) for result in self.results]


def compare(
    found: Iterable[Result],
    chosen: Mapping[str, Criterion],
    *,
    sort: str | None = None,
    least: bool | None = None,
) -> list[Comparison]:
    """Compare the results of each step by the metric `sort`, or else by the chosen criteria.

    If `sort` is an input or column, only the order changes.
    """
    groups: dict[str, list[Result]] = {}
    for result in found:
        groups.setdefault(bare(result.step), []).append(result)
    return [_compare_step(many, chosen, sort, least) for many in groups.values()]


def _compare_step(
    found: Sequence[Result],
    chosen: Mapping[str, Criterion],
    sort: str | None,
    least: bool | None,
) -> Comparison:
    by = _criterion_of_metric(sort, found, chosen) or choose_criterion(found, chosen)
    if by is not None and least is not None:
        by = by._replace(least=least)
    ordered = rank(found, by) if by is not None else list(found)
    is_ranked = by is not None and by.metric == sort
    if sort is not None and not is_ranked:
        ordered.sort(key=lambda result: _sort_key(as_row(result, is_best=False).get(sort)))
    return Comparison(ordered, by, find_best(found, by))


def _criterion_of_metric(
    name: str | None, found: Sequence[Result], chosen: Mapping[str, Criterion]
) -> Criterion | None:
    """Return the comparison criterion for a metric, or None if no result has the metric.

    A `select` step with this metric decides whether lower values are better.
    """
    if name is None or not _is_metric(found, name):
        return None
    for given in chosen.values():
        if given.metric == name:
            return given
    return Criterion(name, lower_is_better(name))


def _is_metric(found: Sequence[Result], name: str) -> bool:
    return any(name in result.metrics and name not in result.values for result in found)


def _sort_key(cell: Cell) -> tuple[int, float, str]:
    """Return a sort key for a table cell: numbers first, then text, then missing values."""
    if is_comparable(cell):
        return 0, float(cell), ""
    if cell is None:
        return 2, 0.0, ""
    return 1, 0.0, str(cell)
