"""Cancel, pause, resume, retry and submit: the rules, once.  The command line, Python and the server call these functions.

A run whose worker lives is asked, and its worker does what is asked.  A run that no worker has is moved here, whatever its state.
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
from .submitting import Ticket, check_priority, receivers_of, submit, submit_again

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
"""Seconds between two looks at a run."""
LETTING_GO: Final = 10.0
"""Seconds that a worker has to let go of a run that it has paused, or is about to."""


def describe(ws: Workspace, run: str, said: Data) -> None:
    """Change the `name`, `tags`, `note` or `archived` of a run; None, and what says nothing, takes one away.  Raises NotFound."""
    ws.store.runs.get(run)
    changes = {name: value or None for name, value in said.items()}
    if changes:
        ws.store.runs.describe(run, changes)


def prioritize(ws: Workspace, run: str, priority: int) -> Outcome:
    """Have workers take a run earlier (a higher number) or later; of one that they have, it counts when it waits again.

    Raises NotFound, CannotAsk (final), Invalid for a number that no run may have.
    """
    check_priority(priority)
    row = ws.store.runs.get(run)
    if row.state in FINAL:
        raise _is_final(row)
    if row.priority != priority:
        ws.store.runs.prioritize(run, priority)
    return Outcome(run, row.state, True)


def cancel(ws: Workspace, run: str, *, patience: float = 0.0) -> Outcome:
    """End a run for good; its results and checkpoints stay.  Its worker is waited for up to `patience` seconds.

    Raises NotFound, CannotAsk (final), Busy, Infrastructure where a job does not end.
    """
    return _stop(ws, run, "cancel", "CANCELLED", NO_DATA, patience)


def pause(ws: Workspace, run: str, *, keep_hosts: bool = False, patience: float = 0.0) -> Outcome:
    """Stop a run so that it can be resumed.  `keep_hosts`: rented machines stay, and cost.

    Raises NotFound, CannotAsk (final, already), Busy, Infrastructure where a job does not end.
    """
    data: Data = {"keep_hosts": True} if keep_hosts else NO_DATA
    return _stop(ws, run, "pause", "PAUSED", data, patience)


def resume(ws: Workspace, run: str, *, queue: bool = True) -> Outcome:
    """Let a run continue that is paused, is asked to pause, or has lost its worker.

    Without `queue` a run that no worker has is left as it is, not done, for the caller to carry out.

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
        if not live and (row.state == "PAUSED" or is_left(row, live=live)):
            if not queue:
                return Outcome(run, row.state, False)
            if state := _give_to_workers(ws, row):
                return Outcome(run, state, True)
        elif live and row.state != "PAUSED":
            if asked:
                return Outcome(run, row.state, row.request != "resume")
            if row.request != "pause":
                raise _is_not_paused(row)
            asked = runs.request(run, "resume")
            continue
        elif not live:
            raise _is_not_paused(row)
        if time.monotonic() > deadline:
            raise _is_held(run)
        time.sleep(LOOK)


def retry(
    ws: Workspace, run: str, begin: str | None = None, *, reach: Sequence[str] | None = None
) -> Outcome:
    """Submit the request of a finished run again, as a new run with the same user, priority, labels and webhooks.

    `begin`: from this step on, whatever is cached.  `reach`: the hosts and buckets that the new run may read;
    None: those of the finished run.

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
        ticket = Ticket(
            priority=row.priority,
            labels=labels if isinstance(labels, dict) else {},
            user=row.user,
            reports_to=receivers_of(row),
            reach=own if reach is None and isinstance(own, list) else reach,
            here=True,  # as it was: its files are in this workspace
        )
        new = submit(ws, request, choice, settings_of_run(row), ticket)
    return Outcome(new.id, ws.store.runs.get(new.id).state, True)


def retried_choice(row: RunRow, begin: str | None) -> Choice:
    """Which steps the retry of a run has: from `begin` on, or those that the run was asked for."""
    return Choice(begin=stored_form(begin)) if begin else choice_of_run(row)


def is_left(row: RunRow, *, live: bool) -> bool:
    """Whether a run has begun, and its worker is gone."""
    begun = row.state == "ACTIVE" or (row.state == "QUEUED" and bool(row.claim))
    return begun and not live


def _wait_for(ws: Workspace, run: str, state: str, patience: float) -> bool:
    """Wait until the worker of a run has brought it to `state`, or to its end.  False: it has not, or it is gone."""
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
            # A worker that died in between has not read the request.
            if done or runs.live(run):
                return Outcome(run, runs.get(run).state, done)
        row = runs.get(run)
        if row.state in FINAL:
            return Outcome(run, row.state, row.state == state)
        if time.monotonic() > deadline + patience:
            raise _is_held(run)
        time.sleep(LOOK)


def _give_to_workers(ws: Workspace, row: RunRow) -> str:
    """Have the next worker continue a run that has none, and answer its state.  Empty: a worker has it, or it is over."""
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
    """Return the refusal of a run that an early version stored."""
    words = f"run {run} was stored by an early version, without its request"
    return CannotAsk(NOT_NOTED, words, run, "submit its recipe and inputs as a new run")


def _is_held(run: str) -> Busy:
    return Busy(
        f"the worker of run {run} has not released the run yet", fix="try again in a few seconds"
    )
