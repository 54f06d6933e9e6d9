"""Early-stopped steps of a plan and the metrics of the others, for successive halving."""

from __future__ import annotations

from ..digest import Digest
from ..planning.halving import STOPPED, Stream, stream
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace
from .results import attempts_of, read_attempt_points
from .survey import Survey


def stopped_attempts(ws: Workspace, found: Survey) -> dict[str, AttemptRow]:
    """Return the last attempt of each early-stopped step without a result, by step ID."""
    keys: dict[str, str] = {}
    for n in found.todo:
        key = found.verdicts[n].key
        if key is not None:
            keys[key] = found.plan.nodes[n].id
    if not keys:
        return {}
    last: dict[str, AttemptRow] = {}
    for row in ws.store.runs.latest(recipe=found.plan.recipe)[::-1]:
        for attempt in ws.store.runs.attempts(row.id):
            if attempt.key in keys:
                last[attempt.key] = attempt
    stopped: dict[str, AttemptRow] = {}
    for each, attempt in last.items():
        if attempt.outcome == STOPPED:
            stopped[keys[each]] = attempt
    return stopped


def metric_streams(ws: Workspace, found: Survey, metric: str) -> dict[str, Stream]:
    """Return the metric values of finished and early-stopped steps in order, by step ID."""
    known = dict(stopped_attempts(ws, found))
    keys: dict[str, Digest] = {}
    for n in found.made:
        key = found.verdicts[n].key
        if key is not None:
            keys[found.plan.nodes[n].id] = key
    traces = ws.store.index.traces(list(keys.values()))
    for id, key in keys.items():
        tries = attempts_of(ws, traces[key]) if key in traces else []
        if tries:
            known[id] = tries[-1]
    streams: dict[str, Stream] = {}
    for id, attempt in known.items():
        said = stream(read_attempt_points(ws, attempt) or (), metric)
        if said:
            streams[id] = said
    return streams
