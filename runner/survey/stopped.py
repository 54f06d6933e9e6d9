"""Early-stopped steps of a plan and the metrics of the others, for successive halving."""

from __future__ import annotations

from ..planning.halving import STOPPED, Stream, stream
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace
from .results import attempts_of, read_attempt_points
from .survey import Survey


def stopped_attempts(ws: Workspace, found: Survey) -> dict[str, AttemptRow]:
    """Return the last attempt of each early-stopped step without a result, by step ID."""
    keys: dict[str, str] = {
        verdict.key: found.plan.nodes[n].id
        for n in found.todo
        if (verdict := found.verdicts[n]).key is not None
    }
    last: dict[str, AttemptRow] = {}
    for row in ws.store.runs.latest(recipe=found.plan.recipe)[::-1] if keys else ():
        last |= {
            attempt.key: attempt
            for attempt in ws.store.runs.attempts(row.id)
            if attempt.key in keys
        }
    return {keys[key]: attempt for key, attempt in last.items() if attempt.outcome == STOPPED}


def metric_streams(ws: Workspace, found: Survey, metric: str) -> dict[str, Stream]:
    """Return the metric values of finished and early-stopped steps in order, by step ID."""
    known = dict(stopped_attempts(ws, found))
    keys = {
        found.plan.nodes[n].id: key
        for n in found.made
        if (key := found.verdicts[n].key) is not None
    }
    traces = ws.store.index.traces(list(keys.values()))
    for id, trace in ((id, traces[key]) for id, key in keys.items() if key in traces):
        if tries := attempts_of(ws, trace):
            known[id] = tries[-1]
    return {
        id: said
        for id, attempt in known.items()
        if (said := stream(read_attempt_points(ws, attempt) or (), metric))
    }
