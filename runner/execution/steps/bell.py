"""What wakes the loop of a run, and what goes on beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Bell:
    """Lets the loop wait until something happened, and runs coroutines in the background."""

    def __init__(self) -> None:
        self._rung: asyncio.Future[None] | None = None  # what the loop waits for when it is idle
        self._background: set[asyncio.Task[None]] = set()

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        self._rung = asyncio.get_running_loop().create_future()
        await self._rung
        self._rung = None

    def wake(self) -> None:
        """Have the loop look at everything again."""
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    def run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the loop.

        Ignored once the event loop has ended, as after an error: the next run tidies up.
        """
        try:
            task = asyncio.get_running_loop().create_task(coroutine)
        except RuntimeError:
            return coroutine.close()
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def settle(self, seconds: float) -> None:
        """Wait for the background tasks, at most so many seconds."""
        nothing = asyncio.ensure_future(asyncio.sleep(0))  # `wait` refuses an empty set
        await asyncio.wait([*self._background, nothing], timeout=seconds)

    def cancel_background(self) -> None:
        """Cancel the background tasks that are not done."""
        for task in self._background:
            task.cancel()
