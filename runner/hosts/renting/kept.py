"""Leases with machines that are kept: made once for a stack, started for a run and stopped after it.

Two rows stand for a kept machine.  Its own is there from before it is ordered until it is gone, at the price of its disk.  Each use of it, from its
start until it is stopped, is a lease of a run at the rest of the price: intent, effect, record and proof are those of any lease, with start and stop
for rent and release.  A machine that has never been up is worth nothing: with its first use it is ended instead of stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal

from drivers.base import DriverError, HostLost, Need, NoCapacity, Offer, Wish
from drivers.machine import enough

from ...errors import Busy, CannotRun
from ...language.units import duration
from ...settings import Stack
from ...storage.crash import crashpoint
from ...storage.records.ledger import LeaseRow
from ..link.contact import LONG, SOON
from .leases import Leases, is_ended, lease_of, offer_of
from .money import committed_cost

FOREVER: Final = 32_503_680_000.0
"""The end of a machine that is kept, in seconds since the epoch: nothing ends it automatically."""


class KeptLeases(Leases):
    """The leases of a run, or of a stack without one, where `keeping` on the machine that is kept for the stack."""

    keeping: Stack | None = None
    keep_alive = False
    """Leave the machine running after the last use, until its time is over."""

    def of_driver(self, _name: str) -> KeptLeases:
        return self

    def of(self, stack: Stack) -> None:
        """Rent for a stack from now on.  Raises CannotRun when its machine is to be kept and cannot be stopped."""
        self.stack = stack.id
        if not stack.keep:
            return
        self._demand_pauses()
        self.keeping = stack
        if stack.auto_stop:
            self.budget.term = timedelta(seconds=duration(stack.auto_stop))

    def machine(self) -> LeaseRow | None:
        """The machine that is kept for the stack, made or on its way."""
        return next(
            (
                row
                for row in self.ledger.living_leases(self.name)
                if row.kept and row.stack == self.stack
            ),
            None,
        )

    def uses(self, machine: LeaseRow) -> list[LeaseRow]:
        """The uses of a kept machine that are not over: one, where nothing went wrong."""
        return [
            row
            for row in self.ledger.living_leases(self.name)
            if row.machine == machine.key and not row.kept
        ]

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """What would satisfy `wish`: the kept machine alone, once there is one.  Raises DriverError, and CannotRun when that one does not do."""
        machine = self.machine() if self.keeping is not None else None
        if machine is None or self.keeping is None:
            return await super().offers(wish._replace(keep=self.keeping is not None))
        offer = offer_of(machine)
        if not enough(offer.resources, Wish(replace(wish.need, market="any"))):
            fix = f"choose another stack, or terminate the machine with `recipe stack down {self.keeping.name}`; the next run rents a matching one"
            raise CannotRun(
                f"the persistent machine of the stack {self.keeping.name} ({offer.id}) has less than a step requires",
                fix=fix,
            )
        return [offer]

    async def ask(self, need: Need, offer: Offer, shares: int = 1) -> LeaseRow | None:
        """Rent what was offered, or have the kept machine run.  Raises as Leases.ask, and Busy when a dead run's step may be on it."""
        if self.keeping is None:
            return await super().ask(need, offer, shares)
        until = await self.until(need, offer, shares)
        use = self.intent(need, offer, until)
        use = use._replace(price=max(0.0, offer.price - offer.disk_price))
        if (running := await self._running()) is not None:
            taken = self.ledger.succeed(running, use.key, self.holder, self.run, self.workspace)
            self.heard("", taken)
            return taken
        machine = self.machine()
        if machine is not None:
            return await self._started(use._replace(machine=machine.key), machine, until)
        key = os.urandom(8).hex()
        machine = use._replace(key=key, run="", until=FOREVER, price=offer.disk_price, machine=key)
        use = use._replace(machine=key)
        self._note(machine, use)
        crashpoint("lease-intended")
        self.heard("", use)
        try:
            made = await self.order(machine, until)
        except DriverError:
            if (refused := self.ledger.row(key)).state == "GONE":
                self._move(use, "GONE", reason=refused.reason)
            raise
        if made is None:
            self._move(use, "GONE", reason=self.ledger.row(key).reason)
            return None
        return self._move(use, "COMING", lease=made.lease)

    def free(self) -> None:
        """Raises Busy when a step of another run may be on the kept machine: that is not stopped automatically."""
        machine = self.machine() if self.keeping is not None else None
        for row in self.uses(machine) if machine is not None else ():
            if row.run not in ("", self.run):
                words = f"the machine of the stack is in use by run {row.run}"
                raise Busy(
                    words,
                    fix=f"resume that run with `recipe resume {row.run}`, or stop the machine with `recipe reap {row.key}`",
                )

    async def _running(self) -> LeaseRow | None:
        """The use of a machine that runs for no run, if there is one; what is left of others is ended.  Raises Busy, DriverError."""
        if (machine := self.machine()) is None:
            return None
        self.free()
        for row in self.uses(machine):
            row = self.ledger.take(row, self.holder)
            if row.state == "UP" and await self.stands(machine) == "runs":
                return row
            if not await self.release(row, "the machine no longer runs"):
                raise Busy(
                    f"the machine {machine.key} is not stopped yet",
                    fix="wait a minute, then run again",
                )
        return None

    async def _started(self, use: LeaseRow, machine: LeaseRow, until: datetime) -> LeaseRow | None:
        self._note(use)
        crashpoint("lease-intended")
        self.heard("", use)
        return await self._start(use, machine, until)

    async def _start(self, use: LeaseRow, machine: LeaseRow, until: datetime) -> LeaseRow | None:
        """Carry out the intent to have the machine run; None when it cannot."""
        try:
            await self.call(partial(self.driver.start, lease_of(machine), until), LONG)
        except NoCapacity as error:
            self._move(use, "GONE", reason=f"cannot start the persistent machine: {error}")
            return None
        except HostLost as error:
            await self.release(self.ledger.take(machine, self.holder), str(error))
            self._move(use, "GONE", reason=str(error))
            return None
        crashpoint("lease-asked")
        use = self._move(use, "COMING", lease=machine.lease)
        crashpoint("lease-recorded")
        return use

    async def _looked_for(self, row: LeaseRow) -> LeaseRow:
        if not row.machine or row.kept:
            return await super()._looked_for(row)
        machine = self.ledger.row(row.machine)
        if machine.state == "ASKED":
            machine = await super()._looked_for(self.ledger.take(machine, self.holder))
        if machine.state == "GONE":
            return self._move(row, "GONE", reason=machine.reason)
        if machine.state == "COMING":  # it runs from its order on
            return self._move(row, "COMING", lease=machine.lease)
        return await self._start(
            row, machine, datetime.fromtimestamp(row.until, UTC)
        ) or self.ledger.row(row.key)

    def measured(self, row: LeaseRow) -> None:
        """Note that the machine of a use is up as it was sold: from now on it is kept."""
        if row.machine and (machine := self.ledger.row(row.machine)).state == "COMING":
            self._move(self.ledger.take(machine, self.holder), "UP")

    async def _given_back(self, row: LeaseRow, reason: str) -> bool:
        """Whether nothing of a lease is billed any more: the end of a use stops its machine."""
        if not row.machine or row.kept:
            return await super()._given_back(row, reason)
        machine = self.ledger.row(row.machine)
        if machine.state == "UP":
            return await self._stopped(machine)
        return machine.state == "GONE" or await self.release(
            self.ledger.take(machine, self.holder), reason
        )

    async def _stopped(self, machine: LeaseRow) -> bool:
        """Whether the provider stops a machine."""
        return await is_ended(self, partial(self.driver.stop, lease_of(machine)))

    def stays_alive(self, row: LeaseRow) -> bool:
        """Whether the machine of a lease goes on running when a run has no use for it any more."""
        return self.keep_alive and bool(row.machine) and row.state == "UP"

    def cost(self, machine: LeaseRow) -> float:
        """US dollars that a kept machine has cost, with all of its uses."""
        now = time.time()
        uses = [
            row
            for row in self.ledger.since(machine.asked)
            if row.machine == machine.key and not row.kept
        ]
        for row in uses:
            if row.state not in ("ASKED", "GONE"):
                self.ledger.accrue(row)
        spent = self.ledger.costs([row.key for row in uses])
        return committed_cost(machine.price, machine.asked, now) + sum(
            each.usd for each in spent.values()
        )

    def leave(self, row: LeaseRow) -> None:
        """Let go of a use that need not end before its time."""
        self.ledger.take(row, "")

    def hand_over(self, row: LeaseRow) -> None:
        """Leave the machine of a use running, for the next run."""
        self.ledger.succeed(row, os.urandom(8).hex(), "", "", self.workspace)
        self.heard("UP", row._replace(state="GONE", reason="the machine keeps running"))

    async def stands(self, machine: LeaseRow) -> Literal["runs", "stopped", "gone"]:
        """What the provider says of a kept machine.  Raises DriverError."""
        self._demand_pauses()
        return await self.call(partial(self.driver.stands, lease_of(machine)), SOON)

    def _demand_pauses(self) -> None:
        """Raises CannotRun where machines cannot be stopped and started."""
        if not self.driver.traits.pauses:
            raise CannotRun(
                f"{self.name} cannot stop and restart machines",
                fix='remove `keep = "stopped"` from the stack',
            )
