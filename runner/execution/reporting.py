"""Delivery of webhooks and logs while a worker executes runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ..errors import Invalid, Problem
from ..failures import RunFailure
from ..logs import REMOTE, Log
from ..planning.schedule import Move
from ..storage.records.runs import FINAL, RunState
from ..storage.workspace import Workspace

if TYPE_CHECKING:
    from ..reports.delivery import Delivery
    from ..survey.survey import Survey
    from .telemetry import Telemetry

LAST_WORDS: Final = 3.0
"""Timeout for pending webhook deliveries at process exit, in seconds.

Another process delivers the rest.
"""

_log = Log(REMOTE)
NO_RUN: Final[Mapping[str, object]] = {}


def log_remote(
    ws: Workspace, run: str, provider: str, instance: str, state: str, step: str = ""
) -> None:
    """Log a state change of a remote run, step or machine.

    `instance` is the provider's ID of the machine; if empty, the IDs of the run's rented machines
    are logged.
    """
    if not _log.wanted:
        return
    from ..storage.records.letters import job_of

    job = job_of(ws.store.runs.get(run), ws.environ)
    facts = {"run": run, "job": job.id if job is not None else run, "provider": provider}
    facts |= {"step": step} if step else {}
    _log.event(state.lower(), **facts, instanceId=instance or _instances(ws, run) or None)


def _instances(ws: Workspace, run: str) -> str:
    """Return the provider IDs of a run's machines, separated by commas.

    If the run has no machine now, return the IDs of its earlier machines.
    """
    from ..storage.records.ledger import Ledger, of_user

    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        rows = [row for row in ledger.of_run(run) if row.lease.get("id")]
    there = [row for row in rows if row.state != "GONE"]
    return ",".join(dict.fromkeys(str(row.lease["id"]) for row in there or rows))


def start_delivery(ws: Workspace, data: Mapping[str, object] = NO_RUN) -> Delivery | None:
    """Start the webhook delivery thread, or return None if no webhook endpoint is configured.

    Endpoints come from the settings, the environment and the run's `data`.
    """
    if ws.letters is None and "webhooks" not in data:
        return None
    from ..reports.delivery import Delivery

    delivery = Delivery(ws.own, ws.environ)
    delivery.start()
    return delivery


def reserve_points(ws: Workspace, run: str, fence: int = 0) -> str:
    """Ask the `[hooks] spend` program to pay for a run; return its refusal, or "".

    A refused run becomes FAILED. `fence` is this worker's claim; without a claim, the run is
    claimed first, and if another worker has claimed the run, that worker ends it.
    """
    if not ws.spend:
        return ""
    from ..reports import points

    words = points.refusal(ws, run)
    if not words:
        return ""
    runs = ws.store.runs
    fence = fence or runs.claim(run, f"process {os.getpid()}") or 0
    if fence:
        row = runs.get(run)
        if row.state not in FINAL:
            failed = RunState("FAILED", words, RunFailure.POINTS)
            data = {"detail": words, "failure": failed.failure}
            move = Move("run", run, row.state, failed.state, words, data)
            runs.group(run, fence, [move], run_state=failed, answers=row.request)
        if (letter := runs.outbox.of(run, points.RESERVE)) is not None:
            runs.outbox.mark_delivered(letter)
    return words


def points_refused(run: str, words: str) -> Invalid:
    """Return the error for a run that the `[hooks] spend` program refused."""
    return Invalid(
        [
            Problem(
                RunFailure.POINTS,
                f"the spend hook rejected run {run}: {words}",
                fix="see the hook program in recipe.toml, `[hooks] spend`",
            )
        ]
    )


def telemetry(
    ws: Workspace, run: str, found: Survey, say: Callable[[str], None]
) -> Telemetry | None:
    """Return the sender of a run's metrics and logs, or None if no platform is configured."""
    letters = ws.letters
    if letters is None or not (letters.metrics_url or letters.backend or letters.alerts_url):
        return None
    from .telemetry import Telemetry

    return Telemetry(ws, letters, run, found, say)


@contextmanager
def deliveries(ws: Workspace) -> Iterator[None]:
    """Deliver webhooks in the background during the block, and shortly after it.

    Delivery stops at most `LAST_WORDS` seconds after the block.
    """
    delivery = start_delivery(ws)
    try:
        yield
    finally:
        if delivery is not None:
            delivery.end(LAST_WORDS)
