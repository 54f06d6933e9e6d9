"""Workers and the run queue: who takes runs, which run is next, and why a run waits. Read-only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from ..execution.terms import settings_of_run
from ..planning.waiting import Taker, Wait, WaitingRun, explain_waits
from ..storage.records.runs import RunFilter, RunRow
from ..storage.records.workers import WorkerRow
from ..storage.workspace import Workspace
from .values import Facts, moment

OPEN: Final = ("QUEUED", "ACTIVE", "PAUSED")
LOOKED_AT: Final = 10_000
"""Maximum number of unfinished runs that are read."""


def list_workers(ws: Workspace) -> list[Facts]:
    """Return the workers of a workspace, oldest first, then processes such as `recipe run`.

    A dead worker is listed for one day, with its unfinished runs.
    """
    rows = _open_runs(ws)
    live = _executing_runs(ws, rows)
    workers = ws.store.runs.workers.all(str(ws.root))
    known = {worker.name for worker in workers}
    others: dict[str, None] = {}
    for row in rows:
        if row.claim and row.claim not in known:
            others[row.claim] = None
    found = [_worker(worker, _runs_claimed_by(rows, worker.name), live) for worker in workers]
    for name in others:
        found.append(_unregistered_worker(name, _runs_claimed_by(rows, name), live))
    return found


def list_queue(ws: Workspace) -> list[Facts]:
    """List the queued runs of a workspace in claim order, with the reasons why they wait."""
    rows = _open_runs(ws)
    by_id = {row.id: row for row in rows}
    found: list[Facts] = []
    for wait in _explain_waits_of(ws, rows):
        row = by_id[wait.run]
        found.append(
            {
                "run": wait.run,
                "recipe": row.recipe,
                "user": row.user,
                "priority": row.priority,
                "due": moment(row.due),
                **_wait_facts(wait),
            }
        )
    return found


def wait_of(ws: Workspace, row: RunRow) -> Facts | None:
    """Return a run's queue position and the reason why it waits, or None if it is not queued."""
    if row.state not in ("QUEUED", "ACTIVE") or ws.store.runs.live(row.id):
        return None
    # The reason depends on the runs before it, so all waits of the queue are explained.
    for wait in _explain_waits_of(ws, _open_runs(ws)):
        if wait.run == row.id:
            return _wait_facts(wait)
    return None


def _wait_facts(wait: Wait) -> Facts:
    reason = {"kind": str(wait.kind), "words": wait.words, "fix": wait.fix}
    return {"position": wait.position, "waits": reason}


def _open_runs(ws: Workspace) -> list[RunRow]:
    return ws.store.runs.page(RunFilter(states=OPEN), LOOKED_AT)


def _executing_runs(ws: Workspace, rows: Sequence[RunRow]) -> set[str]:
    """Return the IDs of the runs that a live worker executes."""
    claimed = [row.id for row in rows if row.claim]
    return set(filter(ws.store.runs.live, claimed))


def _runs_claimed_by(rows: Sequence[RunRow], name: str) -> list[str]:
    return [row.id for row in rows if row.claim == name]


def _explain_waits_of(ws: Workspace, rows: Sequence[RunRow]) -> list[Wait]:
    executing, waiting = list[RunRow](), list[RunRow]()
    live = _executing_runs(ws, rows)
    for row in rows:
        if row.id in live:
            executing.append(row)
        elif row.state != "PAUSED":
            waiting.append(row)
    busy = {row.claim for row in executing}
    workers = ws.store.runs.workers.all(str(ws.root))
    takers = [_taker(worker, busy) for worker in workers if worker.alive]
    entries = [_queue_entry(row) for row in waiting]
    return explain_waits(entries, takers, [_queue_entry(row) for row in executing], time.time())


def _taker(worker: WorkerRow, busy: set[str]) -> Taker:
    """Return which runs a worker accepts. `busy` holds the names of workers with a run."""
    at_most = {name: most for name, most in worker.at_most.items() if isinstance(most, int)}
    free = worker.name not in busy
    return Taker(worker.driver, _texts(worker.labels), at_most, worker.store, free=free)


def _queue_entry(row: RunRow) -> WaitingRun:
    # A run that was due at its creation counts as due, even if machine clocks differ.
    due = row.due
    if due is not None:
        due = max(due, row.created)
    return WaitingRun(
        row.id,
        row.priority,
        due,
        settings_of_run(row).driver,
        _texts(row.data.get("labels")),
        row.user,
        row.recipe,
        row.store,
    )


def _texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): str(each) for name, each in value.items()}


def _worker(worker: WorkerRow, runs: list[str], live: set[str]) -> Facts:
    now, alive = time.time(), worker.alive
    return {
        "worker": worker.name,
        "alive": alive,
        "idle": alive and not live.intersection(runs),
        "takes_runs": True,
        "capacity": 1,
        "driver": worker.driver,
        "labels": _texts(worker.labels),
        "at_most": dict(worker.at_most),
        "any_workspace": bool(worker.store),
        "since": moment(now - worker.age),
        "heard": moment(now - worker.silent),
        "runs": runs,
    }


def _unregistered_worker(name: str, runs: list[str], live: set[str]) -> Facts:
    """Describe a process such as `recipe run`, which executes one run and claims no others."""
    return {
        "worker": name,
        "alive": bool(live.intersection(runs)),
        "idle": False,
        "takes_runs": False,
        "capacity": 1,
        "driver": "",
        "labels": {},
        "at_most": {},
        "any_workspace": False,
        "since": None,
        "heard": None,
        "runs": runs,
    }
