"""Results to compare: instances and runs of one recipe, the inputs in which they differ, what they reported, and which is best."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard
from urllib.parse import unquote

from ..errors import Invalid, RecipeError
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
"""Metrics that say how a training went on, and not what came of it."""
_LESS = re.compile(r"loss|perplexity|ppl|err|wer|cer|mse|mae|nll|fid", re.IGNORECASE)
_HELD_OUT = re.compile(r"eval|val|test", re.IGNORECASE)
_MATRIX = re.compile(r"\[([^]]*)\]")
OWN: Final = ("best", "step", "run", "label", "made", "state", "reason", "time", "where")
"""Columns that every result has, beside its inputs and metrics."""


class Result(NamedTuple):
    """What one instance of a step gave under one key, or how it failed.  `values`: its inputs and matrix values.  `where`: empty for this machine."""

    step: str
    run: str
    made: float
    state: str  # DONE, STOPPED early, or FAILED
    reason: str
    seconds: float | None
    where: str
    label: str  # the name and tags of its run
    values: Mapping[str, Cell]
    metrics: Mapping[str, Metric]


class Criterion(NamedTuple):
    """By which metric results are compared, and whether the least or the greatest is best."""

    metric: str
    least: bool

    @property
    def words(self) -> str:
        return f"the {'lowest' if self.least else 'highest'} {self.metric}"


def collect_results(
    ws: Workspace, recipe: str, keys: Collection[str] | None = None
) -> list[Result]:
    """Return the results of the runs of a recipe that are known here, the newest last.

    A result is a step instance that reported metrics, or that failed and reports some. What
    several runs made or found under one key is one result, that of the run that made it last.
    What they found fresh that another recipe made, or another machine, counts too. With `keys`,
    only results under these keys are returned.
    """
    runs = _RunsOfRecipe(ws, recipe)
    attempts, fresh = runs.attempts, runs.fresh
    if keys is not None:
        attempts = {each: many for each, many in attempts.items() if each[1] in keys}
        fresh = {each for each in fresh if each[1] in keys}
    traces = ws.store.index.traces([key for _, key in (*attempts, *fresh)])
    results = []
    for step, key in fresh:
        if key in traces:
            result, _ = found_result(ws, step, traces[key])
            if _has_numbers(result):
                results.append(result)
    for (step, key), many in attempts.items():
        result = runs.result_of_attempts(step, many, traces.get(key))
        if _has_numbers(result) or (result.state == "FAILED" and _reports(_deciding(many))):
            results.append(result)
    return sorted(results, key=lambda result: result.made)


class _RunsOfRecipe:
    """The runs of one recipe: what they tried, what they found fresh, and their inputs."""

    def __init__(self, ws: Workspace, recipe: str) -> None:
        self._ws = ws
        self._rows = {row.id: row for row in ws.store.runs.latest(recipe=recipe)[::-1]}
        self._places = ws.store.runs.places(list(self._rows))
        # By step and key. An attempt without a key stands for itself, by its run.
        self.attempts: dict[tuple[str, str], list[AttemptRow]] = {}
        self._inputs_read: set[str] = set()
        for id in self._rows:
            for attempt in ws.store.runs.attempts(id):
                self.attempts.setdefault((attempt.step, attempt.key or attempt.run), []).append(
                    attempt
                )
                self._inputs_read |= {
                    name.removeprefix("inputs.")
                    for name in _reads(attempt)
                    if name.startswith("inputs.")
                }
        self.fresh = self._find_fresh() - self.attempts.keys()

    def _find_fresh(self) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for id in self._rows:
            graph = recall(self._ws.home, id)
            if graph is not None:
                found |= set(graph.fresh.items())
        return found

    def result_of_attempts(
        self, step: str, attempts: Sequence[AttemptRow], trace: Trace | None
    ) -> Result:
        """Return what the attempts of one key gave in the run that decides."""
        row = self._rows[_deciding(attempts).run]
        given = {name: value for name, value in row.inputs.items() if name in self._inputs_read}
        own = [each for each in attempts if each.run == row.id]
        result, _ = attempt_result(self._ws, step, own, trace, given)
        return result._replace(where=self._places.get((row.id, step), ""), label=_label(row))


def _deciding(attempts: Sequence[AttemptRow]) -> AttemptRow:
    """Return the last attempt that was done, or else the last."""
    return next((each for each in reversed(attempts) if each.outcome == "done"), attempts[-1])


def _has_numbers(result: Result) -> bool:
    return any(is_comparable(metric.last) for metric in result.metrics.values())


def attempt_result(
    ws: Workspace,
    step: str,
    tries: Sequence[AttemptRow],
    trace: Trace | None,
    given: Mapping[str, object],
) -> tuple[Result, Sequence[Point]]:
    """Return what the attempts of one key gave, and all points that they reported.

    `given` are inputs of the run; values that the step itself read take precedence.
    """
    last = _deciding(tries)
    done = last.outcome == "done"
    points: list[Point] = []
    for each in tries:
        with suppress(Invalid):  # a pattern that takes too long: its last values are known
            points += read_attempt_points(ws, each) or ()
    numbers = trace.numbers if trace is not None and done else {}
    if done and trace is not None and trace.run == last.run:
        seconds = trace.seconds
    else:
        seconds = (last.ended or 0) - (last.started or 0)
    state = "FAILED"
    if done:
        state = "DONE"
    elif last.outcome == STOPPED:
        state = "STOPPED"
    own = {
        name.partition(".")[2]: value
        for name, value in _reads(last).items()
        if name.startswith(("inputs.", "matrix."))
    }
    values = {**given, **matrix_values(step), **own}
    result = Result(
        step=step,
        run=last.run,
        made=last.ended or 0.0,
        state=state,
        reason=last.reason,
        seconds=round(seconds, 3),
        where="",
        label="",
        values={name: _cell(value) for name, value in values.items()},
        metrics=summarize_points(points, numbers),
    )
    return result, points


def found_result(ws: Workspace, step: str, trace: Trace) -> tuple[Result, Sequence[Point]]:
    """Return the result that a step found under its key, whatever run made it.

    It is told by its attempts if they are known here, or else by its trace.
    """
    if tries := attempts_of(ws, trace):
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
    """Return the name and the tags that a run was begun with."""
    name = str(row.data.get("name", ""))
    tags = row.data.get("tags")
    words = [name] if name else []
    if isinstance(tags, list):
        words += [f"#{tag}" for tag in tags]
    return " ".join(words)


def _reads(attempt: AttemptRow) -> Mapping[str, object]:
    """The values that a step's templates read, by their names there."""
    reads = in_author(attempt, "reads")
    return reads if isinstance(reads, dict) else {}


def _reports(attempt: AttemptRow) -> bool:
    """Whether a step says how it reports metrics."""
    return bool(in_image(attempt, "metrics") or in_author(attempt, "metrics"))


def matrix_values(step: str) -> dict[str, str]:
    """The matrix values in a stored id, as text: of `s[rank=4]/train[lr=1]` rank and lr."""
    pairs = (pair.partition("=") for inside in _MATRIX.findall(step) for pair in inside.split(","))
    return {name: unquote(value) for name, equals, value in pairs if equals}


def _cell(value: object) -> Cell:
    return (
        value
        if value is None or isinstance(value, (str, int, float, bool))
        else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )


def is_comparable(value: object) -> TypeGuard[int | float]:
    """Whether a metric is a number that can be compared."""
    return is_number(value) and is_finite(value)


def lower_is_better(metric: str) -> bool:
    """Whether less of a metric is better, by its name."""
    return _LESS.search(metric) is not None


def is_outcome(metric: str) -> bool:
    """Whether a metric says what came of a training."""
    return metric not in BESIDE and not metric.startswith("time_")


def differing_inputs(found: Sequence[Result]) -> list[str]:
    """The inputs and matrix values that are not the same in all results."""
    names = dict.fromkeys(name for result in found for name in result.values)
    return [
        name for name in names if len({json.dumps(result.values.get(name)) for result in found}) > 1
    ]


def metric_names(found: Iterable[Result]) -> list[str]:
    """The metrics that say what came of it, as they were reported."""
    named = dict.fromkeys(
        name
        for result in found
        for name, metric in result.metrics.items()
        if is_comparable(metric.last)
    )
    return [name for name in named if is_outcome(name)]


def read_criteria(ws: Workspace, recipe: str) -> dict[str, Criterion]:
    """By step, what the `select` steps of a recipe compare, as its file says now; nothing where that cannot be read."""
    from ..language import parse

    for row in ws.store.runs.latest(recipe=recipe, last=1):
        with suppress(RecipeError, OSError):
            chosen = [
                step.select
                for step in parse.load(Path(str(row.data.get("source", "")))).steps.values()
                if step.select is not None
            ]
            return {each.step: Criterion(each.metric, each.best == "min") for each in chosen}
    return {}


def choose_criterion(found: Sequence[Result], chosen: Mapping[str, Criterion]) -> Criterion | None:
    """Return by what to compare the results of one step; None if they report nothing to compare.

    That is its `select`, or else a metric of held-out data, a loss, or the first metric.
    """
    names = metric_names(found)
    for step in dict.fromkeys(bare(result.step) for result in found):
        if (given := chosen.get(step)) is not None and given.metric in names:
            return given
    held_out = [name for name in names if _HELD_OUT.search(name)]
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
    """The last number of a metric; None where there is none."""
    last = result.metrics[metric].last if metric in result.metrics else None
    return float(last) if is_comparable(last) else None


def find_best(found: Sequence[Result], by: Criterion | None) -> Result | None:
    """Return the best of the results that are done and have the metric; None if there is none."""
    if by is None:
        return None
    for result in rank(found, by):
        if result.state == "DONE" and last_number(result, by.metric) is not None:
            return result
    return None


def rank(found: Sequence[Result], by: Criterion) -> list[Result]:
    """The best first; then those without that number, and last what failed."""

    def place(result: Result) -> tuple[bool, bool, float]:
        number = last_number(result, by.metric)
        return result.state != "DONE", number is None, (number or 0.0) * (1 if by.least else -1)

    return sorted(found, key=place)


def as_row(result: Result, *, is_best: bool) -> dict[str, Cell]:
    """Return a result as one row of a table.

    It has the columns `OWN`, inputs by name, and of each metric the last value and the best that
    was reported (`min loss`, `max acc`). A metric that is named as an input or a column is
    `metrics.NAME`. `made` is in seconds since 1970, `time` in seconds.
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
        row[f"inputs.{name}" if name in OWN else name] = value
    for name, metric in result.metrics.items():
        column = f"metrics.{name}" if name in row else name
        row[column] = metric.last
        row[best_column(column)] = metric.least if lower_is_better(name) else metric.greatest
    return row


def best_column(metric: str) -> str:
    """The column of the best value of a metric."""
    return f"{'min' if lower_is_better(metric) else 'max'} {metric}"


class Comparison(NamedTuple):
    """The results of one step in order, by what they were compared, and which is best."""

    results: Sequence[Result]
    by: Criterion | None
    best: Result | None

    def has(self, name: str) -> bool:
        """Whether some result has a column, input or metric of this name."""
        return name in OWN or any(
            name in result.values or name in result.metrics for result in self.results
        )

    def flat(self) -> list[dict[str, Cell]]:
        return [as_row(result, is_best=result is self.best) for result in self.results]


def compare(
    found: Iterable[Result],
    chosen: Mapping[str, Criterion],
    *,
    sort: str | None = None,
    least: bool | None = None,
) -> list[Comparison]:
    """The results of each step compared: by the metric `sort`, or else as `wish` has it.  In the order of `sort` if that is an input or a column."""
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
    by = choose_criterion(found, chosen)
    if sort is not None and _is_metric(found, sort):
        by = next(
            (given for given in chosen.values() if given.metric == sort),
            Criterion(sort, lower_is_better(sort)),
        )
    if by is not None and least is not None:
        by = by._replace(least=least)
    ordered = rank(found, by) if by is not None else list(found)
    if sort is not None and (by is None or by.metric != sort):
        ordered.sort(key=lambda result: _order(as_row(result, is_best=False).get(sort)))
    return Comparison(ordered, by, find_best(found, by))


def _is_metric(found: Sequence[Result], name: str) -> bool:
    return any(name in result.metrics and name not in result.values for result in found)


def _order(cell: Cell) -> tuple[int, float, str]:
    """Numbers by size, then words, then nothing."""
    if is_comparable(cell):
        return 0, float(cell), ""
    return (2, 0.0, "") if cell is None else (1, 0.0, str(cell))
