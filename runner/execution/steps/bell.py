"""Wake-up signal for the event loop of a run, and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Bell:
    """Wake-up signal of a run's event loop, and owner of its background coroutines."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None  # set while the loop waits
        self._background: set[asyncio.Task[None]] = set()

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        self._rung = asyncio.get_running_loop().create_future()
        await self._rung
        self._rung = None

    def wake(self) -> None:
        """Wake the event loop if it is waiting."""
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    def run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background.

        Does nothing after the event loop has ended, for example after an error. The next run then
        cleans up.
        """
        try:
            task = asyncio.get_running_loop().create_task(coroutine)
        except RuntimeError:
            return coroutine.close()
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self, seconds: float) -> None:
        """Wait for the background tasks to finish, at most `seconds`."""
        nothing = asyncio.ensure_future(asyncio.sleep(0))  # `asyncio.wait` rejects an empty set
        await asyncio.wait([*self._background, nothing], timeout=seconds)

    def cancel_background(self) -> None:
        """Cancel the unfinished background tasks."""
        for task in self._background:
            task.cancel()
