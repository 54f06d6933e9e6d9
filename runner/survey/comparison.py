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
    """Every result with metrics, or failed step that reports some, of the runs of a recipe that are known here; the newest last.

    With `keys` only those of steps with these keys.

    What several runs made or found under one key is one result: that of the run that made it last.  What they found fresh that was made by another
    recipe, or elsewhere, is a result of theirs, too.
    """
    rows = ws.store.runs.latest(recipe=recipe)[::-1]
    inputs, labels = {row.id: row.inputs for row in rows}, {row.id: _label(row) for row in rows}
    places = ws.store.runs.places(list(inputs))
    tries: dict[tuple[str, str], list[AttemptRow]] = {}
    read: set[str] = set()
    for row in rows:
        for attempt in ws.store.runs.attempts(row.id):
            tries.setdefault((attempt.step, attempt.key or attempt.run), []).append(attempt)
            read |= {
                name.removeprefix("inputs.")
                for name in _reads(attempt)
                if name.startswith("inputs.")
            }
    fresh = {
        each
        for row in rows
        if (graph := recall(ws.home, row.id)) is not None
        for each in graph.fresh.items()
    } - tries.keys()
    if keys is not None:
        tries = {each: many for each, many in tries.items() if each[1] in keys}
        fresh = {each for each in fresh if each[1] in keys}
    traces = ws.store.index.traces([key for _, key in (*tries, *fresh)])
    found = [found_result(ws, step, traces[key])[0] for step, key in fresh if key in traces]
    found = [
        result
        for result in found
        if any(is_comparable(metric.last) for metric in result.metrics.values())
    ]
    for (step, key), many in tries.items():
        last = next((each for each in reversed(many) if each.outcome == "done"), many[-1])
        given = {name: value for name, value in inputs[last.run].items() if name in read}
        result, _ = attempt_result(
            ws, step, [each for each in many if each.run == last.run], traces.get(key), given
        )
        result = result._replace(where=places.get((last.run, step), ""), label=labels[last.run])
        if any(is_comparable(metric.last) for metric in result.metrics.values()) or (
            result.state == "FAILED" and _reports(last)
        ):
            found.append(result)
    return sorted(found, key=lambda result: result.made)


def attempt_result(
    ws: Workspace,
    step: str,
    tries: Sequence[AttemptRow],
    trace: Trace | None,
    given: Mapping[str, object],
) -> tuple[Result, Sequence[Point]]:
    """What attempts of one key gave, and everything that they reported.  `given`: inputs of its run; what the step itself read goes before them."""
    last = next((each for each in reversed(tries) if each.outcome == "done"), tries[-1])
    done = last.outcome == "done"
    said: list[Point] = []
    for each in tries:
        with suppress(
            Invalid
        ):  # its pattern takes too long: its last values are known, and the other results are shown
            said += read_attempt_points(ws, each) or ()
    metrics = summarize_points(said, trace.numbers if trace is not None and done else {})
    seconds = (
        trace.seconds
        if done and trace is not None and trace.run == last.run
        else (last.ended or 0) - (last.started or 0)
    )
    own = {
        name.partition(".")[2]: value
        for name, value in _reads(last).items()
        if name.startswith(("inputs.", "matrix."))
    }
    values = {name: _cell(value) for name, value in {**given, **matrix_values(step), **own}.items()}
    state, made = (
        "DONE" if done else "STOPPED" if last.outcome == STOPPED else "FAILED",
        last.ended or 0.0,
    )
    return Result(
        step, last.run, made, state, last.reason, round(seconds, 3), "", "", values, metrics
    ), said


def found_result(ws: Workspace, step: str, trace: Trace) -> tuple[Result, Sequence[Point]]:
    """What a step found under its key, made by whatever run: by its attempts where they are known here, else by what is remembered of it."""
    if tries := attempts_of(ws, trace):
        return attempt_result(ws, step, tries, trace, {})
    metrics = summarize_points((), trace.numbers)
    return Result(
        step,
        trace.run,
        trace.made_at,
        "DONE",
        "",
        round(trace.seconds, 3),
        "",
        "",
        {**matrix_values(step)},
        metrics,
    ), ()


def _label(row: RunRow) -> str:
    """The name and the tags that a run was begun with."""
    tags = row.data.get("tags")
    return " ".join(
        [
            *filter(None, [str(row.data.get("name", ""))]),
            *(f"#{tag}" for tag in (tags if isinstance(tags, list) else ())),
        ]
    )


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
    """By what to compare results of one step: its `select`, else a metric of data held out, else a loss, else the first metric."""
    names = metric_names(found)
    for step in dict.fromkeys(bare(result.step) for result in found):
        if (given := chosen.get(step)) is not None and given.metric in names:
            return given
    held_out = [name for name in names if _HELD_OUT.search(name)]
    name = next(
        (
            name
            for name in (
                *filter(lower_is_better, held_out),
                *held_out,
                *filter(lower_is_better, names),
                *names,
            )
        ),
        "",
    )
    return Criterion(name, lower_is_better(name)) if name else None


def last_number(result: Result, metric: str) -> float | None:
    """The last number of a metric; None where there is none."""
    last = result.metrics[metric].last if metric in result.metrics else None
    return float(last) if is_comparable(last) else None


def find_best(found: Sequence[Result], by: Criterion | None) -> Result | None:
    """The best of the results that are whole."""
    ranked = (
        []
        if by is None
        else [
            result
            for result in rank(found, by)
            if result.state == "DONE" and last_number(result, by.metric) is not None
        ]
    )
    return ranked[0] if ranked else None


def rank(found: Sequence[Result], by: Criterion) -> list[Result]:
    """The best first; then those without that number, and last what failed."""

    def place(result: Result) -> tuple[bool, bool, float]:
        number = last_number(result, by.metric)
        return result.state != "DONE", number is None, (number or 0.0) * (1 if by.least else -1)

    return sorted(found, key=place)


def as_row(result: Result, *, is_best: bool) -> dict[str, Cell]:
    """A result as one row: its own columns, inputs by name, and of each metric the last value and the best that was reported (`min loss`, `max acc`).

    A metric that is called as an input or a column is `metrics.NAME`.  `made` is in seconds since 1970, `time` in seconds.
    """
    made, took = result.made, result.seconds
    own: dict[str, Cell] = dict(
        zip(
            OWN,
            (
                is_best,
                result.step,
                result.run,
                result.label,
                made,
                result.state,
                result.reason,
                took,
                result.where,
            ),
            strict=True,
        )
    )
    row = own | {
        (f"inputs.{name}" if name in own else name): each for name, each in result.values.items()
    }
    for name, metric in result.metrics.items():
        word = f"metrics.{name}" if name in row else name
        row[word] = metric.last
        row[best_column(word)] = metric.least if lower_is_better(name) else metric.greatest
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
    found: Sequence[Result], chosen: Mapping[str, Criterion], sort: str | None, least: bool | None
) -> Comparison:
    by = choose_criterion(found, chosen)
    if sort is not None and any(
        sort in result.metrics and sort not in result.values for result in found
    ):
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


def _order(cell: Cell) -> tuple[int, float, str]:
    """Numbers by size, then words, then nothing."""
    if is_comparable(cell):
        return 0, float(cell), ""
    return (2, 0.0, "") if cell is None else (1, 0.0, str(cell))
