"""Runs as JSON values, for `/v1` and for run handles in Python. Times are RFC 3339. Read-only.

Texts may contain local paths. Callers that serve other users remove these paths.
"""

from __future__ import annotations

from calendar import timegm
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import CannotAsk, Invalid, NotFound, Problem
from ..execution.terms import settings_of_run
from ..planning.ids import bare
from ..planning.run_view import Failure, RunView, StepView, TrainingReport
from ..storage.records.ledger import LeaseRow, Ledger, of_user
from ..storage.records.runs import AttemptRow, RunFilter, RunPlace, RunRow
from ..storage.run_graph import RunGraph
from ..storage.workspace import Workspace
from ..survey import summaries
from ..survey.comparison import matrix_values
from . import costs
from .artifacts import outputs_of
from .metrics import last_samples, list_links, summarize_running
from .queue import wait_of
from .starting import read_start
from .values import Facts, moment

NO_TRAINING: Final = TrainingReport()
NO_FAILURE: Final = Failure(kind="", words="")
ENDS: Final[Mapping[str, str]] = {"ran": "DONE", "fresh": "FRESH", "failed": "FAILED"}
"""Step state for each counter of `StepCounts`."""
PACE: Final = ("step", "total", "percent", "eta")
"""Progress fields of a machine sample. They are left out, because the run view provides them."""
TRIED: Final = 6
"""Maximum number of values shown for an input of a sweep."""


class Page(NamedTuple):
    """A page of runs, newest first.

    `next` is the cursor of the next page, or None on the last page.
    """

    runs: list[Facts]
    next: str | None


def list_runs(
    ws: Workspace, wanted: RunFilter, limit: int, after: str = "", *, numbers: bool = True
) -> Page:
    """Return up to `limit` matching runs. Without `numbers`, leave out metrics.

    `after` is the `next` cursor of the previous page, or the ID of a run. Raises Invalid for any
    other value.
    """
    if after:
        wanted = wanted._replace(before=_place(ws, after))
    rows = ws.store.runs.page(wanted, limit + 1)
    next_ = None
    if len(rows) > limit:
        last = rows[limit - 1]
        next_ = f"{last.created!r}~{last.id}"
    return Page(list_facts(ws, rows[:limit], numbers=numbers), next_)


def _place(ws: Workspace, after: str) -> RunPlace:
    """Parse a page cursor. The cursor contains the creation time, so the run may be deleted."""
    created, tilde, run = after.partition("~")
    try:
        if tilde:
            return RunPlace(float(created), run)
        return RunPlace(_creation_time(ws, after), after)
    except ValueError:
        fix = "pass the `next` of the previous page, or a run ID"
        problem = Problem("bad-value", f'"{after}" is not the end of a page', None, fix)
        raise Invalid([problem]) from None


def _creation_time(ws: Workspace, run: str) -> float:
    """Return the creation time of a run, or for a deleted run, the time in its ID.

    Raises ValueError.
    """
    try:
        return ws.store.runs.get(run).created
    except NotFound:
        day, time = run[:8], run[9:15]
        parts = (day[:4], day[4:6], day[6:], time[:2], time[2:4], time[4:])
        return float(timegm(tuple(map(int, parts))))


def list_facts(ws: Workspace, rows: Sequence[RunRow], *, numbers: bool = True) -> list[Facts]:
    """Convert runs to list entries as JSON values. Without `numbers`, leave out metrics."""
    views = ws.run_views.summaries(rows)
    found = summaries.summarize_runs(ws, rows, summarize_running(ws, rows)) if numbers else {}
    usd = costs.of_runs(ws.environ, [row.id for row in rows])
    entries: list[Facts] = []
    for row, view in zip(rows, views, strict=True):
        entry = _list_entry(ws, row, view, found.get(row.id))
        entries.append({**entry, "cost": usd[row.id]})
    return entries


def _description(row: RunRow) -> Facts:
    """Return the user-set description of a run: name, tags, note and archived flag."""
    tags = row.data.get("tags")
    if not isinstance(tags, list):
        tags = []
    return {
        "name": str(row.data.get("name") or ""),
        "tags": list(map(str, tags)),
        "note": str(row.data.get("note") or ""),
        "archived": row.data.get("archived") is True,
    }


def _numbers(found: summaries.RunNumbers | None) -> Facts:
    """Return the metrics of a run and of its sweep trials."""
    if found is None:
        return {"metrics": {}, "trials": [], "curve": None}
    curve: Facts | None = None
    if found.curve is not None:
        metric, values = found.curve
        curve = {"metric": metric, "values": values}
    trials: list[Facts] = []
    for trial in found.trials:
        trials.append({**trial._asdict(), "metrics": _metrics(trial.metrics, found.least)})
    return {"metrics": _metrics(found.metrics, found.least), "trials": trials, "curve": curve}


def _metrics(found: summaries.Summaries, least: Mapping[str, bool]) -> Facts:
    return {name: _metric(each, least[name]) for name, each in found.items()}


def _metric(found: summaries.MetricSummary, least: bool) -> Facts:
    better, step_of_best = "max", found.at_max
    if least:
        better, step_of_best = "min", found.at_min
    return {
        "last": found.last,
        "min": found.min,
        "max": found.max,
        "better": better,
        "step_of_best": step_of_best,
        "n": found.n,
    }


def _list_entry(
    ws: Workspace, row: RunRow, view: RunView, found: summaries.RunNumbers | None
) -> Facts:
    asked, labels = row.data.get("asked"), row.data.get("labels")
    asked = asked if isinstance(asked, dict) else {}
    labels = labels if isinstance(labels, dict) else {}
    preset = asked.get("preset")
    if not isinstance(preset, str):
        preset = None
    tried = _swept_values(ws, row) if "-sweep@" in row.recipe else {}
    # A run without a start time is due when it is created. The two times come from two clocks, the
    # worker's and the database's, which may differ by a second.
    not_before = None
    if row.due is not None and row.due > row.created + 1:
        not_before = moment(row.due)
    return {
        "id": row.id,
        "recipe": row.recipe,
        "state": row.state,
        "word": view.word,
        "failure": row.failure,
        "reason": row.reason,
        "request": row.request,
        "user": row.user,
        "labels": {str(name): str(value) for name, value in labels.items()},
        "priority": row.priority,
        "driver": settings_of_run(row).driver,
        "preset": preset,
        "inputs": dict(row.inputs),
        "given": _given_inputs(row, asked.get("inputs")),
        "tried": tried,
        "counts": _counts(view.counts),
        "created": moment(row.created),
        "not_before": not_before,
        "ended": moment(row.ended),
        "progress": view.progress._asdict(),
        **_description(row),
        **_numbers(found),
    }


def _given_inputs(row: RunRow, given: object) -> Facts:
    """Return the inputs that the caller set, without secrets."""
    if not isinstance(given, dict):
        return {}
    return {name: value for name, value in given.items() if name.partition(".")[0] in row.inputs}


def _counts(counts: Mapping[str, int]) -> Facts:
    """Return the number of finished steps by result."""
    ends = {name: counts.get(state, 0) for name, state in ENDS.items()}
    return {**ends, "other": sum(counts.values()) - sum(ends.values())}


def _swept_values(ws: Workspace, row: RunRow) -> Facts:
    """Return the first `TRIED` + 1 values of each swept input.

    The extra value shows that more exist.
    """
    found: dict[str, dict[str, None]] = {}
    for id in ws.store.runs.steps(row.id):
        for name, value in matrix_values(id.partition("/")[0]).items():
            found.setdefault(name, {})[value] = None
    return {name: list(values)[: TRIED + 1] for name, values in found.items()}


def read_run(ws: Workspace, row: RunRow, *, numbers: bool = True) -> Facts:
    """Return all details of a run. Without `numbers`, leave out metrics."""
    graph = ws.run_views.graph(row)
    view = ws.run_views.view(row, graph)
    attempts = ws.store.runs.attempts(row.id)
    leases = _leases(ws, row.id)
    cost = costs.of_runs(ws.environ, [row.id])[row.id]
    machines = last_samples(ws, row) if view.counts.get("RUNNING") else {}
    reported = summaries.summarize_runs(ws, [row], summarize_running(ws, [row])) if numbers else {}
    return {
        **_list_entry(ws, row, view, reported.get(row.id)),
        "sweep": _sweep(ws, row),
        "seq": row.next_event - 1,
        "provider": settings_of_run(row).driver,
        "instances": [_instance(lease) for lease in leases],
        "estimate": _estimate(view, leases),
        "cost": cost,
        "failed": _failure_facts(view.failed),
        "warnings": view.warnings,
        **(wait_of(ws, row) or {"position": None, "waits": None}),
        "training": _training(view),
        "steps": _steps(view.steps, _keys(graph, attempts), cost, machines),
        "graph": _graph(graph),
        "outputs": outputs_of(ws, row, graph, attempts),
        "links": [each._asdict() for each in list_links(ws, row, attempts)],
    }


def _instance(lease: LeaseRow) -> Facts:
    return {
        "provider": lease.driver,
        "key": lease.key,
        "state": lease.state,
        "usd_an_hour": lease.price,
    }


def _estimate(view: RunView, leases: Sequence[LeaseRow]) -> Facts:
    """Return the estimated remaining duration of a run, and its cost at the current prices."""
    price = sum(lease.price for lease in leases if lease.state in ("COMING", "UP"))
    seconds = view.progress.eta
    cost = price * seconds / 3600 if seconds is not None else None
    return {"seconds": seconds, "cost": cost}


def _sweep(ws: Workspace, row: RunRow) -> Facts | None:
    """Return the recipe and axes of a sweep, or None if the run is not a sweep."""
    try:
        axes = read_start(ws.root, row).axes
    except CannotAsk:
        return None
    if not axes:
        return None
    tried = {name: list(values) for name, values in axes.items()}
    return {"recipe": row.recipe.replace("-sweep@", "@"), "axes": tried}


def _failure_facts(failure: Failure | None) -> Facts | None:
    if failure is None:
        return None
    return {**failure._asdict(), "lines": list(failure.lines)}


def _training(view: RunView) -> Facts | None:
    """Return the metrics of the run's training step, or None without one."""
    training, step = view.training, view.steps.get(view.trains)
    if training is None:
        return None
    eta = step.eta if step is not None else None
    return {
        "of": view.trains,
        "step": _float(training.step),
        "total": _float(training.total),
        "percent": training.percent,
        "eta": eta,
        "at": moment(training.at),
        "values": {name: float(value) for name, value in training.values.items()},
    }


def _keys(graph: RunGraph | None, attempts: Sequence[AttemptRow]) -> dict[str, str]:
    """Return the cache key of each step, from its last attempt or its cached result."""
    keys = dict(graph.fresh) if graph is not None else {}
    for attempt in attempts:
        if attempt.key:
            keys[attempt.step] = attempt.key
    return keys


def _steps(
    steps: Mapping[str, StepView],
    keys: Mapping[str, str],
    cost: float,
    machines: Mapping[str, Mapping[str, object]],
) -> list[Facts]:
    """Return the steps of a run, each with its cache key and its share of the rental cost."""
    away = {id: _rented_seconds(step) for id, step in steps.items()}
    whole = sum(away.values())
    found: list[Facts] = []
    for id, step in steps.items():
        share = round(cost * away[id] / whole, 6) if whole else 0.0
        machine = _machine(machines.get(id, {}))
        found.append({**_step(step), "key": keys.get(id, ""), "cost": share, "machine": machine})
    return found


def _rented_seconds(step: StepView) -> float:
    """Return the seconds of a step on rented machines. This machine has no name."""
    return sum(seconds for host, seconds in step.spent.items() if host)


def _machine(sample: Mapping[str, object]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in sample.items():
        if isinstance(value, (int, float)) and name not in PACE:
            numbers[name] = float(value)
    return numbers


def _step(step: StepView) -> Facts:
    failure, training = step.failure or NO_FAILURE, step.training or NO_TRAINING
    return {
        "id": step.id,
        "state": step.state,
        "reason": step.reason,
        "detail": step.detail,
        "attempts": step.attempts,
        "host": step.host,
        "began": moment(step.began),
        "ended": moment(step.ended),
        "seconds": step.seconds,
        "expected": step.expected,
        "progress": {
            "step": _float(training.step),
            "total": _float(training.total),
            "percent": step.percent,
            "eta": step.eta,
        },
        "values": {name: float(value) for name, value in training.values.items()},
        "exit": failure.exit,
        "signal": failure.signal,
        "lines": list(failure.lines),
        "fix": failure.fix,
        "warnings": list(step.warnings),
    }


def _float(value: float | None) -> float | None:
    """Convert a reported number, which may be an integer, to float."""
    return None if value is None else float(value)


def _graph(graph: RunGraph | None) -> list[Facts]:
    if graph is None:
        return []
    fresh = Counter(bare(id) for id in graph.fresh)
    return [
        {"step": step, "needs": needs, "instances": graph.instances[step], "fresh": fresh[step]}
        for step, needs in graph.needs.items()
    ]


def _leases(ws: Workspace, run: str) -> list[LeaseRow]:
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        return ledger.of_run(run)
