"""What a worker does for those who are told of runs, and nothing where nobody is: deliver the outbox beside its work."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ..logs import REMOTE, Log
from ..storage.workspace import Workspace

if TYPE_CHECKING:
    from ..reports.delivery import Delivery

LAST_WORDS: Final = 3.0
"""Seconds that a process waits at its end for what is due; the rest waits for another."""

_log = Log(REMOTE)


def log_remote(ws: Workspace, run: str, provider: str, instance: str, state: str) -> None:
    """A line of JSON in the log for a run away from this machine, or a machine of it, that is in another state."""
    if not _log.wanted:
        return
    from ..storage.letters import job_of, moment

    job = job_of(ws.store.runs.get(run), ws.environ)
    event = f"{REMOTE}.{state.lower()}"
    told = {"event": event, "at": moment(time.time()), "run": run, "job": job.id if job is not None else None, "provider": provider}
    _log.info("%s", json.dumps(told | {"instanceId": instance or None}))


def begin(ws: Workspace, run: str = "") -> Delivery | None:
    """Deliver reports from now on.  None: the settings, the environment and the `run` name no receiver."""
    if ws.letters is None and not (run and "webhooks" in ws.store.runs.get(run).data):
        return None
    from ..reports.delivery import Delivery

    delivery = Delivery(ws.own, ws.environ)
    delivery.start()
    return delivery


@contextmanager
def delivering(ws: Workspace) -> Iterator[None]:
    """Deliver reports meanwhile, and a moment longer."""
    delivery = begin(ws)
    try:
        yield
    finally:
        if delivery is not None:
            delivery.end(LAST_WORDS)
