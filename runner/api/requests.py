"""Cancel, pause, resume, retry and submit runs, for the command line, Python and the server.

If the worker of a run is alive, it receives the request. Otherwise this process changes the state
of the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from ..errors import NOT_NOTED, Busy, CannotAsk
from ..execution.signals import call_beside_loop
from ..execution.terms import Choice, choice_of_run, request_of_run, settings_of_run
from ..execution.unattended import end_unattended
from ..planning.ids import stored_form
from ..storage.records.runs import FINAL, NO_DATA, RunRow, settle
from .outcomes import Outcome
from .submitting import QueueSettings, check_priority, receivers_of, submit, submit_again

if TYPE_CHECKING:
    from ..storage.records.database import Data
    from ..storage.workspace import Workspace

__all__ = [
    "cancel",
    "describe",
    "has_no_request",
    "is_left",
    "pause",
    "prioritize",
    "resume",
    "retried_choice",
    "retry",
    "submit",
]

LOOK: Final = 0.1
"""Seconds between two reads of a run's state."""
LETTING_GO: Final = 10.0
"""Seconds that a worker may take to release a run that it pauses."""


def describe(ws: Workspace, run: str, said: Data) -> None:
    """Change the `name`, `tags`, `note` or `archived` flag of a run.

    None or an empty value removes a field.

    Raises NotFound.
    """
    ws.store.runs.get(run)
    changes = {name: value or None for name, value in said.items()}
    if changes:
        ws.store.runs.describe(run, changes)


def prioritize(ws: Workspace, run: str, priority: int) -> Outcome:
    """Change the priority of a run; workers claim higher numbers first.

    For a claimed run, the priority applies when the run is queued again. Raises NotFound, CannotAsk
    (final), and Invalid for a number out of range.
    """
    check_priority(priority)
    row = ws.store.runs.get(run)
    if row.state in FINAL:
        raise _is_final(row)
    if row.priority != priority:
        ws.store.runs.prioritize(run, priority)
    return Outcome(run, row.state, True)


def cancel(ws: Workspace, run: str, *, patience: float = 0.0) -> Outcome:
    """Cancel a run and keep its results and checkpoints.

    Wait up to `patience` seconds for its worker.

    Raises NotFound, CannotAsk (final), Busy, and Infrastructure if a job does not end.
    """
    return _stop(ws, run, "cancel", "CANCELLED", NO_DATA, patience)


def pause(ws: Workspace, run: str, *, keep_hosts: bool = False, patience: float = 0.0) -> Outcome:
    """Stop a run so that it can be resumed.

    With `keep_hosts`, keep its rented machines, at their cost.

    Raises NotFound, CannotAsk (final, already), Busy, and Infrastructure if a job does not end.
    """
    data: Data = {"keep_hosts": True} if keep_hosts else NO_DATA
    return _stop(ws, run, "pause", "PAUSED", data, patience)


def resume(ws: Workspace, run: str, *, queue: bool = True) -> Outcome:
    """Resume a run that is paused, about to pause, or without a live worker.

    With `queue`, queue the run for workers. Otherwise, if no worker has the run, leave it unchanged
    and return an outcome that is not done, so that the caller can execute the run.

    Raises NotFound, CannotAsk (final, not-paused, not-noted), Busy.
    """
    runs = ws.store.runs
    deadline = time.monotonic() + LETTING_GO
    asked = False
    while True:
        row = runs.get(run)
        live = runs.live(run)
        if row.state in FINAL:
            raise _is_final(row)
        if live and row.state != "PAUSED":
            if asked:
                return Outcome(run, row.state, row.request != "resume")
            if row.request != "pause":
                raise _is_not_paused(row)
            asked = runs.request(run, "resume")
            continue
        # A live worker that has paused the run is about to release it.
        if not live:
            if row.state != "PAUSED" and not is_left(row, live=live):
                raise _is_not_paused(row)
            if not queue:
                return Outcome(run, row.state, False)
            state = _give_to_workers(ws, row)
            if state:
                return Outcome(run, state, True)
        if time.monotonic() > deadline:
            raise _is_held(run)
        time.sleep(LOOK)


def retry(
    ws: Workspace, run: str, begin: str | None = None, *, reach: Sequence[str] | None = None
) -> Outcome:
    """Submit the request of a finished run as a new run with the same user, priority, labels and
    webhooks.

    `begin` is the first step to rerun regardless of the cache. `reach` lists the hosts and buckets
    that the new run may read. None keeps those of the finished run.

    Raises NotFound, CannotAsk (not-final, not-noted), Invalid, Infrastructure.
    """
    row = ws.store.runs.get(run)
    if row.state not in FINAL:
        raise CannotAsk("not-final", f"run {run} has not finished (state: {row.state})", run)
    choice = retried_choice(row, begin)
    if row.bundle:
        new = submit_again(ws, row, choice, reach)
    else:
        request = request_of_run(row)
        if request is None:
            raise has_no_request(run)
        labels, own = row.data.get("labels"), row.data.get("reach")
        if not isinstance(labels, dict):
            labels = {}
        if reach is None and isinstance(own, list):
            reach = own
        ticket = QueueSettings(
            priority=row.priority,
            labels=labels,
            user=row.user,
            reports_to=receivers_of(row),
            reach=reach,
            here=True,  # the files of the finished run are in this workspace
        )
        new = submit(ws, request, choice, settings_of_run(row), ticket)
    return Outcome(new.id, ws.store.runs.get(new.id).state, True)


def retried_choice(row: RunRow, begin: str | None) -> Choice:
    """Return the step selection of a retry: from step `begin` on, or as in the finished run."""
    return Choice(begin=stored_form(begin)) if begin else choice_of_run(row)


def is_left(row: RunRow, *, live: bool) -> bool:
    """Return True if a run has started and its worker has died."""
    was_claimed = row.state == "QUEUED" and bool(row.claim)
    begun = row.state == "ACTIVE" or was_claimed
    return begun and not live


def _wait_for(ws: Workspace, run: str, state: str, patience: float) -> bool:
    """Wait until a run reaches `state` or finishes.

    Return False on timeout or if its worker died.
    """
    deadline = time.monotonic() + patience
    while True:
        row = ws.store.runs.get(run)
        if row.state in FINAL or row.state == state:
            return True
        if time.monotonic() >= deadline or not ws.store.runs.live(run):
            return False
        time.sleep(LOOK)


def _stop(
    ws: Workspace,
    run: str,
    verb: str,
    state: Literal["CANCELLED", "PAUSED"],
    data: Data,
    patience: float,
) -> Outcome:
    runs = ws.store.runs
    row = runs.get(run)
    if row.state in FINAL:
        raise _is_final(row)
    if row.state == state:
        raise CannotAsk("already", f"run {run} is already {state}", run)
    said: list[str] = []
    deadline = time.monotonic() + LETTING_GO
    while True:
        if not runs.live(run):
            if call_beside_loop(lambda: end_unattended(ws, run, state, said.append), bool):
                return Outcome(run, runs.get(run).state, True, said)
        elif runs.request(run, verb, data):
            done = _wait_for(ws, run, state, patience)
            # If the worker died in the meantime, it has not read the request.
            if done or runs.live(run):
                return Outcome(run, runs.get(run).state, done)
        row = runs.get(run)
        if row.state in FINAL:
            return Outcome(run, row.state, row.state == state)
        if time.monotonic() > deadline + patience:
            raise _is_held(run)
        time.sleep(LOOK)


def _give_to_workers(ws: Workspace, row: RunRow) -> str:
    """Queue a run that no worker has claimed, and return its state.

    Return "" if a worker has claimed the run or the run has finished.
    """
    runs = ws.store.runs
    if request_of_run(row) is None:
        raise has_no_request(row.id)
    fence = runs.claim(row.id, f"process {os.getpid()}")
    if fence is None:
        return ""
    state = "QUEUED"
    try:
        state = settle(runs, row.id, fence, state, "resumed")
    finally:
        if state == "QUEUED":
            runs.release(row.id, fence, due=time.time())
    return state


def _is_final(row: RunRow) -> CannotAsk:
    return CannotAsk("final", f"run {row.id} is already {row.state}", row.id)


def _is_not_paused(row: RunRow) -> CannotAsk:
    stands = "is running" if row.state == "ACTIVE" else f"is {row.state}"
    return CannotAsk("not-paused", f"run {row.id} {stands}, and no pause was requested", row.id)


def has_no_request(run: str) -> CannotAsk:
    """Return the error for a run of an early recipe version that stored no request."""
    words = f"run {run} was stored by an early version, without its request"
    return CannotAsk(NOT_NOTED, words, run, "submit its recipe and inputs as a new run")


def _is_held(run: str) -> Busy:
    return Busy(
        f"the worker of run {run} has not released the run yet", fix="try again in a few seconds"
    )
