"""Long requests, such as cancel and pause. They continue in the background after the response."""

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
"""Maximum number of seconds before a request is answered."""
GOES_ON: Final = "stopping its jobs, which have up to 30 seconds"
Asked: TypeAlias = Callable[[Workspace, str], Outcome]

_log = logging.getLogger("uvicorn.error")


class BackgroundRequests:
    """Long requests that are running on this server. Use only in the event loop."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], asyncio.Future[Outcome]] = {}

    async def ask(self, room: Room, run: str, verb: str, request: Asked) -> Outcome:
        """Send a request such as cancel to a run, and wait up to `WAIT` seconds for the outcome.

        If it takes longer than `WAIT`, return an outcome that is not done.

        The request then continues in the background. A repeated request waits for the first one.
        The run is claimed in the meantime, so no worker takes it. Raises the errors of the request.
        """
        pending = self._pending.get((run, verb)) or self._begin(room, run, verb, request)
        done, _ = await asyncio.wait({pending}, timeout=WAIT)
        if done:
            return pending.result()
        pending.add_done_callback(lambda late: _log_late_error(late, run, verb))
        return await run_in_threadpool(_read_outcome, room, run)

    def _begin(self, room: Room, run: str, verb: str, request: Asked) -> asyncio.Future[Outcome]:
        loop = asyncio.get_running_loop()
        pending: asyncio.Future[Outcome] = loop.create_future()
        self._pending[run, verb] = pending
        pending.add_done_callback(lambda _: self._pending.pop((run, verb)))

        def work() -> None:
            settle: Callable[[], None]
            try:
                with room.borrow_workspace() as ws:
                    outcome = request(ws, run_of(ws, run).id)
                settle = lambda: pending.set_result(outcome)  # noqa: E731
            except Exception as error:
                failed = error
                settle = lambda: pending.set_exception(failed)  # noqa: E731
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(settle)

        # A daemon thread, so the server can exit without waiting. The claim is then released, and
        # the run is NEEDS_RECOVERY as before.
        threading.Thread(target=work, name=f"{verb} {run}", daemon=True).start()
        return pending


def _read_outcome(room: Room, run: str) -> Outcome:
    with room.borrow_workspace() as ws:
        return Outcome(run, ws.store.runs.get(run).state, False, [GOES_ON])


def _log_late_error(pending: asyncio.Future[Outcome], run: str, verb: str) -> None:
    """Log the error of a request that failed after its response was sent."""
    if pending.cancelled():
        return
    error = pending.exception()
    if error is not None:
        _log.error("%s of run %s, which was answered before, failed: %s", verb, run, error)


async def _get_requests(request: Request) -> BackgroundRequests:
    found: BackgroundRequests = request.app.state.asking
    return found


InRequests = Annotated[BackgroundRequests, Depends(_get_requests)]
