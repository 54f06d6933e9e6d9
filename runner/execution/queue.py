"""What `recipe submit` stores and `recipe worker` takes: a run of a request, carried out by whichever worker of the workspace claims it first."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ..digest import of_value
from ..errors import Infrastructure, RecipeError
from ..hosts import client
from ..planning.schedule import Move
from ..storage.runs import Offer, RunRow, Stale, Submitted
from ..storage.workspace import Workspace
from ..survey import run_graph
from ..survey.survey import Request, compiled, storable
from .refusals import check, preflight
from .results import sizes
from .resume import Claimed, as_it_stood, poisoned
from .session import look
from .terms import Choice, Listener, Overview, Settings, Since, Summary, asked, choice_of_run, new_id, noted, request_of_run, settings_of_run
from .unattended import end_claimed
from .work import Handover
from .worker import work

LOOK: Final = 1.0
"""Seconds between two looks whether something was stored."""
SAFETY: Final = 4.0
"""Seconds after which a worker looks for runs though nothing was stored: one is due by now, or its worker died."""


class Ticket(NamedTuple):
    """When and where a submitted run is carried out."""

    priority: int = 0
    not_before: float | None = None  # seconds since the epoch
    idempotency: str = ""  # the submitter's own name for the request: the same one again is the same run
    labels: Mapping[str, str] = {}
    user: str = ""
    run: str = ""  # the id of the new run; empty: one that is made now


def submit(ws: Workspace, request: Request, choice: Choice, settings: Settings, ticket: Ticket) -> Submitted:
    """Store a run for the workers of this workspace.  Raises NotFound, Invalid with every problem of its inputs."""
    from ..language.library import find

    source = find(request.recipe, ws.root)
    plan = compiled(ws, source, request, {})
    data = {"source": str(source), "asked": asked(storable(ws, plan, request)), **noted(choice, settings)}
    data |= {"user": ticket.user} if ticket.user else {}
    data |= {"labels": dict(ticket.labels), "body": of_value("body", [data, ticket.priority, ticket.not_before, dict(ticket.labels)])}
    now = time.time()
    row = RunRow(ticket.run or new_id(), plan.recipe, plan.digest, plan.inputs, str(ws.root), created=now, data=data)
    row = row._replace(priority=ticket.priority, due=max(now, ticket.not_before or now), idempotency=ticket.idempotency)
    return ws.store.runs.submit(row)


def serve(root: Path, offer: Offer, listener: Callable[[], Listener], handover: Handover, environ: Mapping[str, str], *, once: bool) -> None:
    """Carry out runs of the workspace at `root` until the process is asked to end; `once`: until no run is due.  `environ` has their secrets."""
    who = f"{socket.gethostname()} process {os.getpid()}"
    while not handover.asked:
        with Workspace.open(root, environ=environ) as ws:  # one for each run: what it learned of files is that run's
            claimed = _next(ws, who, offer, handover, once=once)
            if claimed is not None:
                _carry_out(ws, claimed, listener(), handover)
            elif once:
                return


def _next(ws: Workspace, who: str, offer: Offer, handover: Handover, *, once: bool) -> Submitted | None:
    """The next run, claimed: waits for one, but not `once`."""
    while not handover.asked:
        seen = ws.store.runs.news()
        claimed = ws.store.runs.claim_next(who, offer)
        if claimed is not None or once:
            return claimed
        deadline = time.monotonic() + SAFETY
        while not handover.asked and time.monotonic() < deadline and ws.store.runs.news() == seen:
            until = time.monotonic() + LOOK
            while not handover.asked and time.monotonic() < until:
                time.sleep(LOOK / 5)  # a signal does not end a sleep
    return None


def _carry_out(ws: Workspace, claimed: Submitted, listener: Listener, handover: Handover) -> None:
    """Work on a claimed run.  What is wrong with the run ends it; an error of ours leaves it to the next worker, as a death would."""
    fence = claimed.fence
    try:
        while not _worked(ws, ws.store.runs.get(claimed.id), fence, listener, handover):
            fence = ws.store.runs.claim(claimed.id, f"process {os.getpid()}") or 0
    except Stale:
        listener.say(f"run {claimed.id} was taken over by another worker, because this one was silent for too long")
    except RecipeError as error:
        listener.say(f"run {claimed.id} failed: {error}" + (f"\n  fix: {error.fix}" if error.fix else ""))
        _ended(ws, ws.store.runs.get(claimed.id), fence, "FAILED", str(error))
    except Exception:
        print(f"recipe: an internal error ended the work on run {claimed.id}", file=sys.stderr)
        traceback.print_exc()
        time.sleep(LOOK)


def _worked(ws: Workspace, row: RunRow, fence: int, listener: Listener, handover: Handover) -> bool:
    """False: the run paused and is to be resumed at once."""
    if row.request in ("cancel", "pause"):
        end_claimed(ws, row, fence, "CANCELLED" if row.request == "cancel" else "PAUSED", listener.say)
        return True
    if poisoned(ws, row, fence):
        return True
    request, choice, settings = request_of_run(row), choice_of_run(row), settings_of_run(row)
    if request is None:
        raise Infrastructure(f"run {row.id} did not note what it was asked for", fix="`recipe submit` with its recipe and inputs")
    since = Since(time.monotonic(), ws.store.database.version())
    local = client.here(ws.home / "local")
    ws.share(settings.store or None)
    found = look(ws, request, choice)
    if not found.todo and not ws.store.runs.steps(row.id):
        total, fresh = sizes(found)
        run_graph.remember(ws, row.id, found)
        listener.begin(Overview(row.id, row.recipe, total, fresh, (), {}, settings.jobs, str(ws.root)))
        _ended(ws, row, fence, "COMPLETED", "")
        listener.end(Summary("COMPLETED", {"FRESH": fresh}, since.seconds, run=row.id))
        return True
    preflight(ws, found, settings)
    check(ws, found, settings, listener)
    stood = as_it_stood(ws, found, row, fence) if row.fence > 1 else Claimed(row.id, fence)
    if stood is None:
        words = f"run {row.id} cannot go on: a step of it failed, or its recipe is another one by now"
        raise Infrastructure(words, fix=f"`recipe retry {row.id}` runs it anew")
    return work(ws, local, found, stood, settings, listener, since, handover=handover) is not None


def _ended(ws: Workspace, row: RunRow, fence: int, state: str, reason: str) -> None:
    """Store the end of a run that is still open."""
    if row.fence == fence and row.claim:
        ws.store.runs.group(row.id, fence, [Move("run", row.id, row.state, state, reason)], run_state=(state, reason), answers=row.request)
