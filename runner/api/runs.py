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
    next_ = f"{rows[limit - 1].created!r}~{rows[limit - 1].id}" if len(rows) > limit else None
    return Page(list_facts(ws, rows[:limit], numbers=numbers), next_)


def _place(ws: Workspace, after: str) -> RunPlace:
    """Parse a page cursor. The cursor contains the creation time, so the run may be deleted."""
    created, tilde, run = after.partition("~")
    try:
        return (
            RunPlace(float(created), run) if tilde else RunPlace(_creation_time(ws, after), after)
        )
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
    return [
        {**_list_entry(ws, row, view, found.get(row.id)), "cost": usd[row.id]}
        for row, view in zip(rows, views, strict=True)
    ]


def _description(row: RunRow) -> Facts:
    """Return the user-set description of a run: name, tags, note and archived flag."""
    tags = row.data.get("tags")
    return {
        "name": str(row.data.get("name") or ""),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "note": str(row.data.get("note") or ""),
        "archived": row.data.get("archived") is True,
    }


def _numbers(found: summaries.RunNumbers | None) -> Facts:
    """Return the metrics of a run and of its sweep trials."""
    if found is None:
        return {"metrics": {}, "trials": [], "curve": None}
    curve = found.curve and {"metric": found.curve[0], "values": found.curve[1]}
    trials = [
        {**each._asdict(), "metrics": _metrics(each.metrics, found.least)} for each in found.trials
    ]
    return {"metrics": _metrics(found.metrics, found.least), "trials": trials, "curve": curve}


def _metrics(found: summaries.Summaries, least: Mapping[str, bool]) -> Facts:
    return {
        name: {
            "last": each.last,
            "min": each.min,
            "max": each.max,
            "better": "min" if least[name] else "max",
            "step_of_best": each.at_min if least[name] else each.at_max,
            "n": each.n,
        }
        for name, each in found.items()
    }


def _list_entry(
    ws: Workspace, row: RunRow, view: RunView, found: summaries.RunNumbers | None
) -> Facts:
    asked, labels = row.data.get("asked"), row.data.get("labels")
    asked = asked if isinstance(asked, dict) else {}
    preset, given = asked.get("preset"), asked.get("inputs")
    return {
        "id": row.id,
        "recipe": row.recipe,
        "state": row.state,
        "word": view.word,
        "failure": row.failure,
        "reason": row.reason,
        "request": row.request,
        "user": row.user,
        "labels": {str(name): str(value) for name, value in labels.items()}
        if isinstance(labels, dict)
        else {},
        "priority": row.priority,
        "driver": settings_of_run(row).driver,
        "preset": preset if isinstance(preset, str) else None,
        "inputs": dict(row.inputs),
        "given": _given_inputs(row, given),
        "tried": _swept_values(ws, row) if "-sweep@" in row.recipe else {},
        "counts": _counts(view.counts),
        "created": moment(row.created),
        "not_before": moment(row.due)
        if row.due is not None and row.due > row.created + 1
        else None,
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
    eta = view.progress.eta
    price = sum(lease.price for lease in leases if lease.state in ("COMING", "UP"))
    return {
        **_list_entry(ws, row, view, reported.get(row.id)),
        "sweep": _sweep(ws, row),
        "seq": row.next_event - 1,
        "provider": settings_of_run(row).driver,
        "instances": [
            {
                "provider": lease.driver,
                "key": lease.key,
                "state": lease.state,
                "usd_an_hour": lease.price,
            }
            for lease in leases
        ],
        "estimate": {"seconds": eta, "cost": price * eta / 3600 if eta is not None else None},
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


def _sweep(ws: Workspace, row: RunRow) -> Facts | None:
    """Return the recipe and axes of a sweep, or None if the run is not a sweep."""
    try:
        axes = read_start(ws.root, row).axes
    except CannotAsk:
        return None
    tried = {name: list(values) for name, values in axes.items()}
    return {"recipe": row.recipe.replace("-sweep@", "@"), "axes": tried} if tried else None


def _failure_facts(failure: Failure | None) -> Facts | None:
    return {**failure._asdict(), "lines": list(failure.lines)} if failure is not None else None


def _training(view: RunView) -> Facts | None:
    """Return the metrics of the run's training step, or None without one."""
    training, step = view.training, view.steps.get(view.trains)
    if training is None:
        return None
    return {
        "of": view.trains,
        "step": _float(training.step),
        "total": _float(training.total),
        "percent": training.percent,
        "eta": step.eta if step is not None else None,
        "at": moment(training.at),
        "values": {name: float(value) for name, value in training.values.items()},
    }


def _keys(graph: RunGraph | None, attempts: Sequence[AttemptRow]) -> dict[str, str]:
    """Return the cache key of each step, from its last attempt or its cached result."""
    fresh = dict(graph.fresh) if graph is not None else {}
    return fresh | {each.step: each.key for each in attempts if each.key}


def _steps(
    steps: Mapping[str, StepView],
    keys: Mapping[str, str],
    cost: float,
    machines: Mapping[str, Mapping[str, object]],
) -> list[Facts]:
    """Return the steps of a run, each with its cache key and its share of the rental cost."""
    away = {
        id: sum(seconds for host, seconds in step.spent.items() if host)
        for id, step in steps.items()
    }
    whole = sum(away.values())
    return [
        {
            **_step(step),
            "key": keys.get(id, ""),
            "cost": round(cost * away[id] / whole, 6) if whole else 0.0,
            "machine": {
                name: float(value)
                for name, value in machines.get(id, {}).items()
                if isinstance(value, (int, float)) and name not in PACE
            },
        }
        for id, step in steps.items()
    ]


def _step(step: StepView) -> Facts:
    failure, training = step.failure, step.training or NO_TRAINING
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
        "exit": failure.exit if failure is not None else None,
        "signal": failure.signal if failure is not None else None,
        "lines": list(failure.lines) if failure is not None else [],
        "fix": failure.fix if failure is not None else "",
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
