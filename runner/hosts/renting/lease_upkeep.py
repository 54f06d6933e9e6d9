"""Background tasks for the leases of a run: renewal, preemption notices, and repeated releases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

from drivers.base import Driver, DriverError, Host

from ...errors import Busy
from ...storage.records.ledger import LeaseRow
from ..place.place import Place
from .inventory import Inventory
from .leases import RENEW
from .stack_leases import StackLeases

RELEASE_RETRY: Final = 20.0
"""Seconds until an unconfirmed release is repeated."""
RELEASE_WARNING: Final = 600.0
"""Seconds after which the run warns about an unconfirmed release."""
LEFTOVER_CHECK: Final = 300.0
"""Seconds between two checks for leftover machines of other runs."""
NOTICE_RETRY: Final = 5.0
"""Seconds until the next preemption check after a failed one."""


class LeaseUpkeep:
    """The background tasks for the leases of one run.

    `name` is the driver, `environ` the environment of the user.
    """

    def __init__(
        self,
        leases: StackLeases,
        inventory: Inventory,
        name: str,
        say: Callable[[str], None],
        environ: Mapping[str, str],
    ) -> None:
        self._leases, self._inventory, self._name = leases, inventory, name
        self._say, self._environ = say, environ
        self._tasks: list[asyncio.Task[None]] = []
        self._pending_since: dict[str, float] = {}
        """Monotonic time of the first repetition of a release, by lease key."""
        self._warned: set[str] = set()
        """Keys of leases with a warning about their release, and warnings about leftover machines.
        """

    def start(self) -> None:
        """Start to renew the leases and to record their cost."""
        self._run_in_background(self._renew())
        if self._leases.driver.traits.priced:
            self._run_in_background(self._clean_up())
        elif self._leases.driver.traits.billed:
            self._run_in_background(self._accrue())

    def watch(self, place: Place, host: Host, driver: Driver) -> None:
        """Start to watch a place for a preemption notice."""
        self._run_in_background(self._watch(place, host, driver))

    async def aclose(self) -> None:
        """Cancel all background tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tidy(self) -> None:
        """Release leftover leases of dead runs, and report those that cost money."""
        from . import reaper

        for words in await reaper.release_leftovers(self._leases, self._environ):
            self._say(words)

    @property
    def console(self) -> str:
        """The provider's console URL as the end of a sentence."""
        console = self._leases.driver.console
        return f": terminate it at {console}" if console else ""

    def _run_in_background(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _watch(self, place: Place, host: Host, driver: Driver) -> None:
        """Wait for the preemption notice of a place, and mark the place as leaving."""
        while not place.lost and place in self._inventory.places:
            try:
                async for _ in host.call(driver.traits.notice):
                    pass
            except DriverError:
                await asyncio.sleep(NOTICE_RETRY)
            else:
                place.leaving = f"{place.name.split()[0]} preempts the machine"
                return

    async def _renew(self) -> None:
        """Renew the leases every hour, and when another lease has freed money, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW):
                    await self._leases.freed.wait()
            self._leases.freed.clear()
            for held in self._inventory.held:
                for n, row in enumerate(held.leases):
                    # After a failure, several more attempts are possible before the lease ends.
                    with contextlib.suppress(DriverError, Busy):
                        held.leases[n] = await self._leases.renew(row)

    async def _accrue(self) -> None:
        """Record the cost of the leases until cancelled."""
        while True:
            await asyncio.sleep(RELEASE_RETRY)
            with contextlib.suppress(Busy):
                self._leases.accrue()

    async def _clean_up(self) -> None:
        """Repeat unconfirmed releases, and check for leftover machines of other runs, until
        cancelled.

        The cost of the leases is recorded too.
        """
        checked = time.monotonic()
        while True:
            await asyncio.sleep(RELEASE_RETRY)
            with contextlib.suppress(Busy):
                self._leases.accrue()
                for row in await self._leases.repeat_releases():
                    self._warn_about_slow_release(row)
            if time.monotonic() - checked >= LEFTOVER_CHECK:
                checked = time.monotonic()
                with contextlib.suppress(DriverError, Busy):
                    await self._report_leftovers()

    def _warn_about_slow_release(self, row: LeaseRow) -> None:
        """Warn once about a release that has been pending for `RELEASE_WARNING` seconds."""
        now = time.monotonic()
        pending_for = now - self._pending_since.setdefault(row.key, now)
        if pending_for >= RELEASE_WARNING and row.key not in self._warned:
            self._warned.add(row.key)
            self._say(
                f"{self._name} has not terminated the machine {row.key} for {RELEASE_WARNING / 60:g} minutes{self.console}"
            )

    async def _report_leftovers(self) -> None:
        """Release leftover leases of dead runs, and report each machine that costs money once."""
        from . import reaper

        for words in await reaper.release_leftovers(self._leases, self._environ):
            warning = words.partition(", $")[0]  # without the cost, which grows
            if warning not in self._warned:
                self._warned.add(warning)
                self._say(words)
