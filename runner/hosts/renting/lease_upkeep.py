"""Background tasks for the leases of a run: renewal, preemption notices, and repeated releases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

from drivers.base import Driver, DriverError, Host

from ...errors import Busy
from ..place.place import Place
from .inventory import Inventory
from .kept import KeptLeases
from .leases import RENEW

RELEASE_RETRY: Final = 20.0
"""Seconds until an unconfirmed release is repeated."""
RELEASE_WARNING: Final = 600.0
"""Seconds after which the run warns about an unconfirmed release."""
LEFTOVER_CHECK: Final = 300.0
"""Seconds between two checks for leftover machines of other runs."""
NOTICE_RETRY: Final = 5.0
"""Seconds until the next preemption check after a failed one."""


class LeaseUpkeep:
    """The background tasks for the leases of one run.  `name` is the driver, `environ` the environment of the user."""

    def __init__(
        self,
        leases: KeptLeases,
        inventory: Inventory,
        name: str,
        say: Callable[[str], None],
        environ: Mapping[str, str],
    ) -> None:
        self._leases, self._inventory, self._name, self._say, self._environ = (
            leases,
            inventory,
            name,
            say,
            environ,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to renew the leases and to record their cost."""
        self._run_in_background(self._renew())
        if self._leases.driver.traits.priced:
            self._run_in_background(self._tend())
        elif self._leases.driver.traits.billed:
            self._run_in_background(self._accrue())

    def watch(self, place: Place, host: Host, driver: Driver) -> None:
        """Start to watch a place for a preemption notice."""
        self._run_in_background(self._watch(place, host, driver))

    async def aclose(self) -> None:
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
        """Wait until a place is preempted or lost."""
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
        """Renew the leases until cancelled: every hour, and when another lease has freed money."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW):
                    await self._leases.freed.wait()
            self._leases.freed.clear()
            for held in self._inventory.held:
                for n, row in enumerate(held.leases):
                    with contextlib.suppress(
                        DriverError, Busy
                    ):  # several attempts are possible before the lease ends
                        held.leases[n] = await self._leases.renew(row)

    async def _accrue(self) -> None:
        """Record the cost of the leases until cancelled."""
        while True:
            await asyncio.sleep(RELEASE_RETRY)
            with contextlib.suppress(Busy):
                self._leases.accrue()

    async def _tend(self) -> None:
        """Repeat unconfirmed releases, and check for leftover machines of other runs, until cancelled."""
        said: set[str] = set()
        began: dict[str, float] = {}
        looked = time.monotonic()
        while True:
            await asyncio.sleep(RELEASE_RETRY)
            with contextlib.suppress(Busy):
                self._leases.accrue()
                for row in await self._leases.repeat_releases():
                    if (
                        time.monotonic() - began.setdefault(row.key, time.monotonic())
                        >= RELEASE_WARNING
                        and row.key not in said
                    ):
                        said.add(row.key)
                        self._say(
                            f"{self._name} has not terminated the machine {row.key} for {RELEASE_WARNING / 60:g} minutes{self.console}"
                        )
            if time.monotonic() - looked >= LEFTOVER_CHECK:
                looked = time.monotonic()
                from . import reaper

                with contextlib.suppress(DriverError, Busy):
                    for words in await reaper.release_leftovers(self._leases, self._environ):
                        if (warning := words.partition(", $")[0]) not in said:
                            said.add(warning)
                            self._say(words)
