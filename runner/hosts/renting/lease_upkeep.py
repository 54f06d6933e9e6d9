"""What is done for leases beside a run: they are renewed, watched, and asked for again until they are given back."""

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

AGAIN: Final = 20.0
"""Seconds until a machine that was not given back is given back once more."""
ALARM: Final = 600.0
"""Seconds after which the run warns of one that is there still."""
LOOK: Final = 300.0
"""Seconds between two looks at what other runs left, while a run goes on."""
NOTICED: Final = 5.0
"""Seconds until a machine is asked again whether it is taken away, when it did not answer."""


class LeaseUpkeep:
    """The tasks beside one run that see to its leases.  `name` is the driver's, `environ` what the program of a hook gets."""

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

    def begin(self) -> None:
        """Keep the leases from now on, and what costs money in sight."""
        self._beside(self._renew())
        if self._leases.driver.traits.priced:
            self._beside(self._tend())
        elif self._leases.driver.traits.billed:
            self._beside(self._accrue())

    def watch(self, place: Place, host: Host, driver: Driver) -> None:
        """Notice when a place of a driver is about to be taken away."""
        self._beside(self._watch(place, host, driver))

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def tidy(self) -> None:
        """End what dead runs left; say what they left that costs money."""
        from . import reaper

        for words in await reaper.tidy(self._leases, self._environ):
            self._say(words)

    @property
    def console(self) -> str:
        """Where a person can end a lease, as the end of a sentence."""
        console = self._leases.driver.console
        return f": terminate it at {console}" if console else ""

    def _beside(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _watch(self, place: Place, host: Host, driver: Driver) -> None:
        """Wait until a place is about to be taken away, or gone."""
        while not place.lost and place in self._inventory.places:
            try:
                async for _ in host.call(driver.traits.notice):
                    pass
            except DriverError:
                await asyncio.sleep(NOTICED)
            else:
                place.leaving = f"{place.name.split()[0]} preempts the machine"
                return

    async def _renew(self) -> None:
        """Keep the leases, until cancelled: each hour, and when the money of another has become free."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW):
                    await self._leases.freed.wait()
            self._leases.freed.clear()
            for held in self._inventory.held:
                for n, row in enumerate(held.leases):
                    with contextlib.suppress(
                        DriverError, Busy
                    ):  # there is time for many tries before it ends
                        held.leases[n] = await self._leases.renew(row)

    async def _accrue(self) -> None:
        """Note what the leases cost, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN)
            with contextlib.suppress(Busy):
                self._leases.accrue()

    async def _tend(self) -> None:
        """Ask again for what is not given back yet, and look what other runs left, until cancelled."""
        said: set[str] = set()
        began: dict[str, float] = {}
        looked = time.monotonic()
        while True:
            await asyncio.sleep(AGAIN)
            with contextlib.suppress(Busy):
                self._leases.accrue()
                for row in await self._leases.again():
                    if (
                        time.monotonic() - began.setdefault(row.key, time.monotonic()) >= ALARM
                        and row.key not in said
                    ):
                        said.add(row.key)
                        self._say(
                            f"{self._name} has not terminated the machine {row.key} for {ALARM / 60:g} minutes{self.console}"
                        )
            if time.monotonic() - looked >= LOOK:
                looked = time.monotonic()
                from . import reaper

                with contextlib.suppress(DriverError, Busy):
                    for words in await reaper.tidy(self._leases, self._environ):
                        if (warning := words.partition(", $")[0]) not in said:
                            said.add(warning)
                            self._say(words)
