"""Runs as programs see them: what `/v1` answers and a handle in Python has, as values of JSON.  Times are RFC 3339.  Changes nothing.

Texts are as they are stored: who shows them to strangers takes the folders of this machine out of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

from ..execution.terms import settings_of_run
from ..language.values import is_number
from ..planning.ids import bare
from ..planning.run_view import Standing, Training, progress_of
from ..planning.schedule import word
from ..storage.content.files import Content
from ..storage.records.ledger import LeaseRow, Ledger, of_user
from ..storage.records.runs import FINAL, STEP_FINAL, AttemptRow, Event, RunRow
from ..storage.workspace import Workspace
from ..survey import run_graph, summaries
from ..survey.run_graph import RunGraph
from .reported import latest, links, reported

TRAININGS = 8
"""Running steps whose numbers are read for the progress of a run."""
HIDDEN = ("log", "metrics", "env_files", "secrets", "offered", "generation")
"""What events hold for workers alone."""

_Known = TypeVar("_Known")
Facts: TypeAlias = Mapping[str, Any]
"""A mapping as JSON has it; what is in it, and in which unit, say the models of `server.runs` and `server.artifacts`."""


LAST = 253402300799.0
"""The last second of the year 9999: one that was asked for in a zone to the west of Greenwich may be later, and RFC 3339 has none."""


def moment(at: float | None) -> str | None:
    """A time as RFC 3339 writes it."""
    return (
        None
        if at is None
        else datetime.fromtimestamp(min(at, LAST), UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def listed(ws: Workspace, rows: Sequence[RunRow], *, numbers: bool = True) -> list[Facts]:
    """Runs as a list of them shows them; without `numbers` what they reported is left out."""
    open_runs = [row.id for row in rows if row.state not in FINAL]
    tallies = ws.store.runs.tallies(open_runs) if open_runs else {}
    found = summaries.of_runs(ws, rows, latest(ws, rows)) if numbers else {}
    return [
        {
            **_listed(ws, row, tallies.get(row.id, {})),
            **_described(row),
            **_numbers(found.get(row.id)),
        }
        for row in rows
    ]


def _described(row: RunRow) -> Facts:
    """What people say of a run."""
    tags = row.data.get("tags")
    return {
        "name": str(row.data.get("name") or ""),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "note": str(row.data.get("note") or ""),
        "archived": row.data.get("archived") is True,
    }


def _numbers(found: summaries.Numbers | None) -> Facts:
    """What a run and its trials reported."""
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


def _listed(ws: Workspace, row: RunRow, tally: Mapping[tuple[str, str], int]) -> Facts:
    asked, labels = row.data.get("asked"), row.data.get("labels")
    preset = asked.get("preset") if isinstance(asked, dict) else None
    begun = "ACTIVE" if row.state == "QUEUED" and row.fence and row.claim else row.state
    live = begun == "ACTIVE" and ws.store.runs.live(row.id)
    leases = {lease.state for lease in _leases(ws, row.id)} if begun == "ACTIVE" else set()
    return {
        "id": row.id,
        "recipe": row.recipe,
        "state": row.state,
        "word": word(
            begun, failure=row.failure, steps=[*tally, ("WAITING", "")], leases=leases, claimed=live
        ),
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
        "created": moment(row.created),
        "not_before": moment(row.due)
        if row.due is not None and row.due > row.created + 1
        else None,
        "ended": moment(row.ended),
    }


def detail(ws: Workspace, row: RunRow, *, numbers: bool = True) -> Facts:
    """A run with all that is known of it; without `numbers` what it reported is left out."""
    graph = run_graph.recall(ws, row.id)
    steps, hosts = _in_order(graph, ws.store.runs.steps(row.id)), ws.store.runs.places([row.id])
    tries: dict[str, int] = {}
    attempts = ws.store.runs.attempts(row.id)
    for attempt in attempts:
        tries[attempt.step] = max(tries.get(attempt.step, 0), attempt.n)
    leases = _leases(ws, row.id)
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        cost = sum(spent.usd for spent in ledger.costs([lease.key for lease in leases]).values())
    progress = _progress(ws, row, graph, {id: step.state for id, step in steps.items()})
    price = sum(lease.price for lease in leases if lease.state in ("COMING", "UP"))
    return {
        **listed(ws, [row], numbers=numbers)[0],
        "seq": row.next_event - 1,
        "progress": progress,
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
        "estimate": {
            "seconds": progress["eta"],
            "cost": price * progress["eta"] / 3600 if progress["eta"] is not None else None,
        },
        "cost": cost,
        "steps": [
            {
                "id": id,
                "state": step.state,
                "reason": step.reason,
                "detail": step.detail,
                "attempts": tries.get(id, 0),
                "host": hosts.get((row.id, id), ""),
            }
            for id, step in steps.items()
        ],
        "graph": _graph(graph),
        "outputs": _outputs(ws, row, graph, attempts),
        "links": [each._asdict() for each in links(ws, row, attempts)],
    }


def _in_order(graph: RunGraph | None, by_step: Mapping[str, _Known]) -> dict[str, _Known]:
    """What is known by step, in the order of the plan."""
    places = {step: n for n, step in enumerate(graph.needs)} if graph is not None else {}
    return dict(
        sorted(by_step.items(), key=lambda item: (places.get(bare(item[0]), len(places)), item[0]))
    )


def _graph(graph: RunGraph | None) -> list[Facts]:
    if graph is None:
        return []
    fresh = Counter(bare(id) for id in graph.fresh)
    return [
        {"step": step, "needs": needs, "instances": graph.instances[step], "fresh": fresh[step]}
        for step, needs in graph.needs.items()
    ]


def _progress(
    ws: Workspace, row: RunRow, graph: RunGraph | None, states: Mapping[str, str]
) -> Facts:
    """How far a run is."""
    total = sum(graph.instances.values()) if graph is not None else None
    standing = Standing(row.state, states, graph.fresh if graph is not None else (), total)
    if row.state in FINAL:
        # A run of an early version, whose graph was not kept, has no steps but these.
        return progress_of(standing._replace(total=total or len(states)))._asdict()
    begun, now = ws.store.runs.begun(row.id), time.time()
    waiting = [id for id, state in states.items() if state not in STEP_FINAL]
    running = [id for id in waiting if states[id] == "RUNNING"]
    return progress_of(
        standing._replace(
            expected=ws.store.index.expected(row.recipe, waiting),
            elapsed={id: max(0.0, now - begun[id]) for id in running if id in begun},
            trainings=_trainings(ws, row.id, running),
        )
    )._asdict()


def _trainings(ws: Workspace, run: str, running: Sequence[str]) -> dict[str, Training]:
    """What the first steps that run reported last, as the agent of their host counts it."""
    found = {}
    for id in running[:TRAININGS]:
        for point in reported(ws, run, id, 0, "machine"):
            step, total, eta = (point.values.get(name) for name in ("step", "total", "eta"))
            if is_number(step) and is_number(total):
                found[id] = Training(step, total, float(eta) if is_number(eta) else None)
    return found


def outputs(ws: Workspace, row: RunRow) -> list[Facts]:
    """What the steps of a run made, or found made, by STEP.OUTPUT; of one that another machine carried out its results, by their names."""
    return _outputs(ws, row, run_graph.recall(ws, row.id), ws.store.runs.attempts(row.id))


def _outputs(
    ws: Workspace, row: RunRow, graph: RunGraph | None, attempts: Sequence[AttemptRow]
) -> list[Facts]:
    keys = dict(graph.fresh) if graph is not None else {}
    made = _in_order(
        graph,
        keys
        | {
            attempt.step: attempt.key
            for attempt in attempts
            if attempt.outcome == "done" and attempt.key
        },
    )
    traces = ws.store.index.traces(list(made.values()))
    contents = {
        f"{step}.{each[0]}": each[2]
        for step, key in made.items()
        if key in traces
        for each in traces[key].outputs
    }
    sizes = {each.name: each.size for each in row.outputs}
    if not contents:
        contents = {each.name: Content(each.content) for each in sorted(row.outputs)}
    tiny = ws.store.index.tiny(list(contents.values()))
    found: list[Facts] = []
    for name, content in contents.items():
        seal = ws.store.index.seal(content) if content not in tiny else None
        size = (
            len(tiny[content])
            if content in tiny
            else seal.size
            if seal is not None
            else sizes.get(name)
        )
        found.append({"name": name, "content": content, "bytes": size, "folder": content[0] == "t"})
    return found


FILES = 1000
"""Files of a folder that are listed at once."""


def artifacts(ws: Workspace, row: RunRow, name: str = "", after: str = "") -> list[Facts]:
    """The outputs of a run, or the one of that name; of a folder its files, the first of those whose paths are greater than `after`."""
    found: list[Facts] = []
    for each in outputs(ws, row):
        if name and each["name"] != name:
            continue
        content = Content(each["content"])
        stored = ws.objects.has(content)
        entries = ws.objects.manifests.entries(content) if stored and each["folder"] else ()
        files: list[Facts] = [
            {"path": entry.path, "bytes": entry.size, "content": f"{entry.kind}:{entry.value}"}
            for entry in entries
        ]
        files.sort(key=lambda file: file["path"])
        size = sum(file["bytes"] for file in files) if stored and each["folder"] else each["bytes"]
        listed = [file for file in files if file["path"] > after][:FILES]
        found.append({**each, "bytes": size, "stored": stored, "files": listed})
    return found


def event(found: Event) -> Facts:
    """An event without what it holds for workers alone."""
    return {
        "run": found.run, "seq": found.seq, "at": moment(found.at), "subject": found.subject, "id": found.id, "before": found.before,
        "after": found.after, "reason": found.reason, "data": {name: value for name, value in found.data.items() if name not in HIDDEN},
    }  # fmt: skip


def _leases(ws: Workspace, run: str) -> list[LeaseRow]:
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        return ledger.of_run(run)
