"""Requests that may take longer than their client waits: they are answered first, and done then."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Final, TypeAlias

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from ..api.outcomes import Outcome
from ..storage.workspace import Workspace
from .room import Room, run_of

WAIT: Final = 3.0
"""Seconds for which a request is waited for before it is answered."""
GOES_ON: Final = "stopping its jobs, which have up to 30 seconds"
Asked: TypeAlias = Callable[[Workspace, str], Outcome]

_log = logging.getLogger("uvicorn.error")


class Asking:
    """The requests of one server that are being done.  Used by its event loop alone."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], asyncio.Future[Outcome]] = {}

    async def ask(self, room: Room, run: str, verb: str, request: Asked) -> Outcome:
        """Ask something of a run; not done where it takes longer than `WAIT`, and goes on.  Raises as the request does.

        The same request again waits for the first. Meanwhile the run is claimed, so no worker takes it.
        """
        pending = self._pending.get((run, verb)) or self._begin(room, run, verb, request)
        done, _ = await asyncio.wait({pending}, timeout=WAIT)
        if done:
            return pending.result()
        pending.add_done_callback(lambda late: _told(late, run, verb))
        return await run_in_threadpool(_standing, room, run)

    def _begin(self, room: Room, run: str, verb: str, request: Asked) -> asyncio.Future[Outcome]:
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[Outcome] = loop.create_future()
        self._pending[run, verb] = pending
        pending.add_done_callback(lambda _: self._pending.pop((run, verb)))

        def work() -> None:
            settle: Callable[[], None]
            try:
                with room.reading() as ws:
                    outcome = request(ws, run_of(ws, run).id)
                settle = lambda: pending.set_result(outcome)  # noqa: E731
            except Exception as error:
                failed = error
                settle = lambda: pending.set_exception(failed)  # noqa: E731
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(settle)

        # No thread that the server waits for when it stops: then the claim is free, and the run NEEDS_RECOVERY as before.
        threading.Thread(target=work, name=f"{verb} {run}", daemon=True).start()
        return pending


def _standing(room: Room, run: str) -> Outcome:
    with room.reading() as ws:
        return Outcome(run, ws.store.runs.get(run).state, False, [GOES_ON])


def _told(pending: asyncio.Future[Outcome], run: str, verb: str) -> None:
    """What became of a request whose client was answered before: an error is for the log."""
    if not pending.cancelled() and (error := pending.exception()) is not None:
        _log.error("%s of run %s, which was answered before, failed: %s", verb, run, error)


async def _asking(request: Request) -> Asking:
    found: Asking = request.app.state.asking
    return found


InAsking = Annotated[Asking, Depends(_asking)]
