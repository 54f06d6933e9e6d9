"""Connect a driver in the background while the run is prepared."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from drivers.base import Driver


class EarlyConnection:
    """The connection of a driver on an event loop of its own, which the run uses later.

    Rents nothing.  A connection error is raised when the driver is first used.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._loop = asyncio.new_event_loop()
        self._connecting: asyncio.Task[None] = self._loop.create_task(self._connect())
        self._over = (
            threading.Event()
        )  # an event, because a thread whose join was interrupted by a signal counts as ended
        threading.Thread(target=self._run, daemon=True).start()

    def wait_for_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop once the driver has connected or failed.

        Meanwhile, load the agent program and the transfer code.
        """
        from .link.stream import agent_program
        from .transfer import host_store as transfer  # noqa: F401

        agent_program()
        self._over.wait()
        return self._loop

    def close(self) -> None:
        """Close the driver and the loop, unless the run closed the loop."""
        if self._loop.is_closed():
            return
        if not self._over.is_set():
            self._loop.call_soon_threadsafe(self._connecting.cancel)
        self._over.wait()
        self._loop.run_until_complete(self.driver.aclose())
        self._loop.close()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._connecting)
        finally:
            self._over.set()

    async def _connect(self) -> None:
        await self.driver.connect()


@contextlib.contextmanager
def connect_ahead(driver: Driver) -> Iterator[EarlyConnection]:
    """Connect a driver in the background until the block ends."""
    made = EarlyConnection(driver)
    try:
        yield made
    finally:
        made.close()
