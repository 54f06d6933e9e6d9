"""Model: money, spot machines, faults and prices together, with the program's own renting, leases, budget, ledger and drivers in virtual time.

The runs of test_scheduled_model, of which each draws, independently of the others:

- five of six schedules have a limit of cost, from $0.02 to $5: from minutes of a machine to more than its term
- half of them rent on the spot market, or on any, where the provider has one; then each machine is taken away 6, 30 or 120 times an hour
- a third of them cannot destroy a machine in its first 90 or 300 seconds
- half of them have some offers with prices as text, a third some without a price that can be read
- faults, kills and a limit of machines as there

Asked beside what is asked there: no run costs more than its limit, and none is given up, or stopped by its limit, while its machines were proved to be gone,
the money paid for a machine, and there were offers.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from typing import Any

import pytest

from drivers.base import Need
from drivers.fakes.faults import Fault
from drivers.fakes.vastai import FOREIGN
from runner.hosts.pool import HostPool
from runner.hosts.renting.money import release_reserve
from tests.unit.test_rented_model import SCHEDULES, wrong
from tests.unit.test_rented_model import installation as installation  # a fixture
from tests.unit.test_scheduled_model import ScheduledRuns, Worker

LEAST = 60.0
"""Seconds of a machine that the money has to pay for, by the settings of the model."""
PRICE = re.compile(r"is left for it.* at \$([\d.]+) an hour")
HAS_SPOT = ("vastai", "gcp", "prime")


def money_of(seed: int) -> tuple[float | None, str, dict[str, float]]:
    """What a schedule draws: its limit, its market, and its faults."""
    luck = random.Random(f"money {seed}")
    limit = luck.choice((None, 0.02, 0.1, 0.5, 2.0, 5.0))
    market = luck.choice(("on-demand", "on-demand", "spot", "any"))
    often = luck.choice((6.0, 30.0, 120.0))
    faults = {
        "reserved": luck.choice((0.0, 0.0, 0.0, 0.0, 90.0, 300.0)),
        "spelled": luck.choice((0.0, 0.5)),
        "unpriced": luck.choice((0.0, 0.0, 0.3)),
    }
    return limit, market, {**faults, "preempted": 0.0 if market == "on-demand" else often}


class MoneyWorker(Worker):
    """The worker of one run, with the market of its schedule."""

    schedule: MoneyRuns

    def __init__(self, schedule: MoneyRuns, run: str, kept: Any) -> None:
        super().__init__(schedule, run, kept)
        given = {"least": LEAST, "market": schedule.market}
        self.ws.config.driver = lambda _name: given
        whole = self.stopper.money_is_spent

        def is_spent(limit: float) -> None:
            if not self.stopper.limit:
                schedule.stopped(self.host_pool)
            whole(limit)

        self.stopper.money_is_spent = is_spent  # type: ignore[method-assign]


class MoneyRuns(ScheduledRuns):
    """Two runs at one provider, with what `money_of` draws."""

    worker = MoneyWorker

    def __init__(self, seed: int, installation: str, **more: Any) -> None:
        super().__init__(seed, installation, **more)
        self.limit, self.market, faults = money_of(seed)
        if self.name not in HAS_SPOT:
            self.market = "on-demand"
        if self.limit is not None:
            self.jumps = False
        self.world.faults += [Fault(name, value) for name, value in faults.items() if value]
        self.ends: Counter[str] = Counter()

    def left(self, run: str) -> float:
        """US dollars of the limit of a run that its machines have not cost; a machine that is gone costs no more, proved or not."""
        assert self.limit is not None
        now = time.time()
        alive = {
            machine.mark.rpartition("-")[2]
            for machine in self.world.account.alive()
            if machine.by != FOREIGN
        }
        rows = self.ledger.of_run(run)
        gone = self.ledger.costs([row.key for row in rows if row.state == "GONE"])
        return (
            self.limit
            - sum(spent.usd for spent in gone.values())
            - sum(
                row.price * ((max(row.until, now) if row.key in alive else now) - row.asked) / 3600
                for row in rows
                if row.state != "GONE"
            )
        )

    def pays(self, pool: HostPool, price: float, kept: float = 0.0) -> bool:
        """Whether the money pays for a machine, with some to spare; `kept` is for the end of others."""
        seconds = max(0.0, self.left(pool.run) - kept) / price * 3600
        return seconds - min(120.0, seconds / 10) > LEAST * 1.5

    def given_up(self, pool: HostPool, need: Need, why: str) -> None:
        """A run asks for no machine any more."""
        self.world.account.advance(asyncio.get_running_loop().time())
        self.ends[why[:40]] += 1
        if (asked := PRICE.search(why)) and self.pays(pool, float(asked[1])):
            self.wrong.append(f"{pool.run} is given up with ${self.left(pool.run):.4f}: {why}")
        if "internal error" in why:
            self.wrong.append(f"{pool.run}: {why}")

    def leaves(self, machine: Any) -> bool:
        return bool(getattr(machine, "noticed", False))

    def stopped(self, pool: HostPool) -> None:
        """A run was stopped by its limit."""
        self.ends["limit"] += 1
        overdue = [row for _, row in pool.inventory.find_overdue()]
        kept = sum(row.price * release_reserve(row.until - row.asked) / 3600 for row in overdue)
        if all(self.pays(pool, row.price, kept) for row in overdue):
            self.wrong.append(f"{pool.run} is stopped with ${self.left(pool.run):.4f} left")

    async def all(self) -> None:
        schedule, refuse = self, HostPool.refuse

        def refused(pool: HostPool, need: Need, why: str) -> None:
            schedule.given_up(pool, need, why)
            refuse(pool, need, why)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(HostPool, "refuse", refused)
            await super().all()


@pytest.mark.longer
def test_no_run_passes_its_limit_or_is_given_up_while_proof_money_and_offers_are_there(
    installation: str,
) -> None:
    assert {
        seed: found for seed in range(SCHEDULES) if (found := wrong(seed, installation, MoneyRuns))
    } == {}


def test_schedules_draw_budgets_spot_faults_and_odd_prices_together() -> None:
    """How often, of a thousand: what is promised above is asked of all of them at once."""
    drawn = [money_of(seed) for seed in range(1000)]
    limited = [each for each in drawn if each[0] is not None]
    spot = [each for each in limited if each[1] != "on-demand"]
    held = [each for each in spot if each[2]["reserved"]]
    odd = [each for each in held if each[2]["spelled"] or each[2]["unpriced"]]
    counts = [len(each) for each in (limited, spot, held, odd)]
    assert all(count >= least for count, least in zip(counts, (780, 350, 100, 60), strict=True)), (
        counts
    )
