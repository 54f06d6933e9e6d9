"""Model: one machine that a stack keeps, in the world, time and faults of test_rented_model; two runs use it, whose workers are killed now and then.

After each request, beside what holds for all leases: there is one machine, and what runs there runs for a lease that the ledger has.  One that was up
is not ended.  After a run that ended by itself it stands still, or runs until a time that the ledger has.  At the end it is taken down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

import pytest

from drivers.base import DriverError, HostLost, Lease, Need, Order, Wish
from drivers.fakes.vastai import FOREIGN
from runner.errors import Busy, RecipeError
from runner.hosts import stacks
from runner.hosts.renting.money import stop_time
from runner.hosts.renting.stack_leases import StackLeases
from runner.settings import Stack
from runner.storage.records.ledger import LeaseRow
from tests.unit.test_rented_model import SCHEDULES, Schedule, wrong
from tests.unit.test_rented_model import installation as installation  # a fixture
from tests.virtual import MODELS, ModelWeb, wired

PROVIDERS = ("vastai", "gcp", "runpod")
"""Those that keep machines; of each every third schedule."""
STACKS = {name: Stack("tiny", name, keep="stopped", auto_stop="4h") for name in PROVIDERS}
TIMES = max(1, SCHEDULES // 5)
RUNS: Mapping[str, Callable[[Any], bool]] = {
    "vastai": lambda machine: bool(machine.wanted == "running"),
    "gcp": lambda machine: machine.status in ("PROVISIONING", "STAGING", "RUNNING"),
    "runpod": lambda machine: machine.status in ("PROVISIONING", "STARTING", "RUNNING"),
}
"""Whether a machine runs, or is about to."""
ITSELF: Mapping[str, Callable[[Any, Any], None]] = {
    "vastai": lambda world, machine: world.halt(machine),
    "runpod": lambda world, machine: world._stop(machine, "stopped"),
}
"""What a machine does when its time is over.  Google stops its machines itself."""


@cache
def pausing(name: str) -> type[Any]:
    """The driver of a provider, whose machines stop themselves when their time is over."""
    of: Any = MODELS[name]

    class Pausing(of):  # type: ignore[misc]
        times: dict[str, float]
        """When that is, by a machine's mark."""

        async def acquire(self, order: Order) -> Lease:
            self.times[self._installation.mark(order.key)] = order.until.timestamp()
            lease: Lease = await super().acquire(order)
            return lease

        async def start(self, lease: Lease, until: datetime) -> None:
            await super().start(lease, until)
            mark = self._installation.mark(lease.key)
            self.times[mark] = until.timestamp()
            if name in ITSELF:
                asyncio.get_running_loop().call_later(
                    until.timestamp() - time.time(), self._over, mark
                )

        def _over(self, mark: str) -> None:
            world = self._wire.web.world
            world.account.advance(asyncio.get_running_loop().time())
            for machine in world.account.alive():
                if (
                    machine.mark == mark
                    and RUNS[name](machine)
                    and self.times[mark] <= time.time() + 1
                ):
                    ITSELF[name](world, machine)

    return Pausing


class KeptSchedule(Schedule):
    """Two runs of one stack, one after the other; a worker of the second waits for as long as the first may be resumed."""

    leases: type[StackLeases]

    def __init__(
        self,
        seed: int,
        installation: str,
        wire: type[ModelWeb] = ModelWeb,
        leases: type[StackLeases] = StackLeases,
    ) -> None:
        super().__init__(seed, installation, wire, leases, PROVIDERS[seed % len(PROVIDERS)])
        self.limit, self.jumps, self.few = None, False, False
        self.times: dict[str, float] = {}
        self.stack = asyncio.Lock()
        self.down = False

    def process(self, run: str) -> StackLeases:
        driver = wired(
            pausing(self.name),
            self.wire("http://model", self.world, self.luck, self.look),
            self.installation,
        )
        driver.times = self.times
        made = self.leases(driver, self.name, self.ledger, run, "/ws", self.heard)
        made.budget.min_seconds = 60.0
        made.use_stack(STACKS[self.name])
        made.keep_alive = self.luck.random() < 0.3
        return made

    def look(self) -> None:
        super().look()
        rows = {row.key: row for row in self.ledger.living_leases()}
        used = {row.machine for row in rows.values() if not row.kept}
        for machine in self.world.account.alive():
            row = rows.get(machine.mark.rpartition("-")[2])
            if (
                machine.by != FOREIGN
                and RUNS[self.name](machine)
                and row is not None
                and row.state == "UP"
                and row.key not in used
            ):
                self.wrong.append(f"{machine.mark} runs for nobody")

    def heard(self, before: str, row: LeaseRow) -> None:
        super().heard(before, row)
        if (
            row.kept
            and before == "UP"
            and not self.down
            and any(each.mark.endswith(row.key) for each in self.world.account.alive())
        ):
            self.wrong.append(f"{row.key} is kept, and was {row.state}: {row.reason}")

    async def work(self, run: str) -> None:
        """A worker: once the stack is free, its machine is made or started, used for a while, and stopped or left running."""
        while True:
            async with self.stack:
                leases = self.process(run)
                await self.tidy(leases)
                with suppress(DriverError, HostLost, Busy):
                    if await self.use(leases):
                        return
            await asyncio.sleep(30)

    async def use(self, leases: StackLeases) -> bool:
        """Whether the machine was used and is not needed any more.  Raises DriverError, Busy."""
        rows = await leases.adopt()
        row = rows[0] if rows else None
        if row is None:
            for offer in (await leases.offers(Wish(Need(gpus=1))))[:3]:
                if (row := await leases.rent(Need(gpus=1), offer)) is not None:
                    break
            else:
                return False
        assert row is not None
        row, _host = await leases.wait_until_up(row)
        leases.mark_persistent(row)
        await asyncio.sleep(
            max(0.0, min(self.luck.uniform(1, 600), stop_time(row.asked, row.until) - time.time()))
        )
        await self.tidy(leases)
        if leases.stays_alive(row):
            leases.hand_over(row)
            return True
        return await leases.release(row, "done")

    async def finish(self) -> None:
        """What a user does at last."""
        self.down = True
        assert await stacks.terminate_machine(self.process(""))


@pytest.mark.longer
def test_no_schedule_of_faults_and_kills_loses_a_kept_machine_or_leaves_it_running(
    installation: str,
) -> None:
    assert {
        seed: found for seed in range(TIMES) if (found := wrong(seed, installation, KeptSchedule))
    } == {}


class Forgetful(StackLeases):
    """Starts its machine before it is noted for whom."""

    async def _record_and_start(
        self, use: LeaseRow, machine: LeaseRow, until: datetime
    ) -> LeaseRow | None:
        await self.call(lambda: self.driver.start(Lease(**machine.lease), until), 3)  # type: ignore[arg-type]
        return await super()._record_and_start(use, machine, until)


class Wasteful(StackLeases):
    """Ends the machine with its use."""

    async def _stop_machine(self, machine: LeaseRow) -> bool:
        return await super(StackLeases, self).release(
            self.ledger.take(machine, self.holder), "done"
        )


class Trusting(StackLeases):
    """Takes the request to stop for its effect."""

    async def _stop_machine(self, machine: LeaseRow) -> bool:
        return True


@pytest.mark.parametrize("bug", [Forgetful, Wasteful, Trusting])
def test_a_bug_that_loses_kept_machines_is_found(installation: str, bug: type[StackLeases]) -> None:
    def fails(seed: int) -> bool:
        try:
            return bool(wrong(seed, installation, KeptSchedule, leases=bug))
        except (AssertionError, RecipeError):
            return True

    assert any(map(fails, range(TIMES)))
