"""Leases with persistent machines.

A stack's machine is created once, started for a run and stopped after it.

A persistent machine has two kinds of ledger rows.  Its own row lives from before the order until
the machine is deleted, at the price of its disk. Each use, from start to stop, is a lease of a run
at the rest of the price.  Intent, effect, record and proof are the same as for any lease, with
start and stop instead of rent and release.  A machine that was never up is terminated at the end of
its first use.
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
from drivers.machine import satisfies

from ...errors import Busy, CannotRun
from ...language.units import duration
from ...settings import Stack
from ...storage.crash import crashpoint
from ...storage.records.ledger import LeaseRow
from ..link.contact import LONG, SOON
from .leases import Leases, confirm_end, lease_of, offer_of
from .money import committed_cost

FOREVER: Final = 32_503_680_000.0
"""Unix time in the year 3000, the end of a persistent machine's own lease.

Nothing ends it automatically.
"""


class StackLeases(Leases):
    """The leases of a run, or of a stack without a run."""

    kept_stack: Stack | None = None
    """The stack whose persistent machine is used; None for a stack without one."""
    keep_alive = False
    """Leave the machine running after the last use, until its lease ends."""

    def of_driver(self, _name: str) -> StackLeases:
        return self

    def use_stack(self, stack: Stack) -> None:
        """Rent for a stack.

        Raises CannotRun if its machine should be kept but the provider cannot stop machines.
        """
        self.stack = stack.id
        if not stack.keep:
            return
        self._require_pauses()
        self.kept_stack = stack
        if stack.auto_stop:
            self.budget.term = timedelta(seconds=duration(stack.auto_stop))

    def find_machine(self) -> LeaseRow | None:
        """Return the lease of the stack's persistent machine, if the machine exists or is being
        created.
        """
        for row in self.ledger.living_leases(self.name):
            if row.kept and row.stack == self.stack:
                return row
        return None

    def find_uses(self, machine: LeaseRow) -> list[LeaseRow]:
        """Return the open uses of a persistent machine, normally at most one."""
        living = self.ledger.living_leases(self.name)
        return [row for row in living if _is_use_of(row, machine)]

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers for `wish`, or only the persistent machine if it exists.

        Raises DriverError, and CannotRun if the persistent machine is too small.
        """
        stack = self.kept_stack
        if stack is None:
            return await super().offers(wish._replace(keep=False))
        machine = self.find_machine()
        if machine is None:
            return await super().offers(wish._replace(keep=True))
        offer = offer_of(machine)
        if not satisfies(offer.resources, Wish(replace(wish.need, market="any"))):
            fix = f"choose another stack, or terminate the machine with `recipe stack down {stack.name}`; the next run rents a matching one"
            raise CannotRun(
                f"the persistent machine of the stack {stack.name} ({offer.id}) has less than a step requires",
                fix=fix,
            )
        return [offer]

    async def rent(self, need: Need, offer: Offer, shares: int = 1) -> LeaseRow | None:
        """Rent an offer, or start the persistent machine.

        Raises the errors of `Leases.rent`, and Busy if a step of another run may use the machine.
        """
        if self.kept_stack is None:
            return await super().rent(need, offer, shares)
        until = await self.await_funds_and_end(need, offer, shares)
        use = self.make_intent(need, offer, until)
        use = use._replace(price=max(0.0, offer.price - offer.disk_price))
        running = await self._find_running_use()
        if running is not None:
            use = self.ledger.succeed(running, use.key, self.holder, self.run, self.workspace)
            self.on_change("", use)
            return use
        machine = self.find_machine()
        if machine is not None:
            return await self._record_and_start(use._replace(machine=machine.key), machine, until)
        return await self._order_machine(use, offer.disk_price, until)

    async def _order_machine(
        self, use: LeaseRow, disk_price: float, until: datetime
    ) -> LeaseRow | None:
        """Rent a persistent machine for its first use.

        Returns the COMING use, or None if the offer is no longer available.
        """
        key = os.urandom(8).hex()
        machine = use._replace(key=key, run="", until=FOREVER, price=disk_price, machine=key)
        use = use._replace(machine=key)
        self._note(machine, use)
        crashpoint("lease-intended")
        self.on_change("", use)
        try:
            ordered = await self.order(machine, until)
        except DriverError:
            refused = self.ledger.row(key)
            if refused.state == "GONE":
                self._move(use, "GONE", reason=refused.reason)
            raise
        if ordered is None:
            self._move(use, "GONE", reason=self.ledger.row(key).reason)
            return None
        return self._move(use, "COMING", lease=ordered.lease)

    def require_free(self) -> None:
        """Raise Busy if a step of another run may use the persistent machine.

        The machine is not stopped automatically.
        """
        machine = self.find_machine() if self.kept_stack is not None else None
        if machine is None:
            return
        for row in self.find_uses(machine):
            if row.run not in ("", self.run):
                raise Busy(
                    f"the machine of the stack is in use by run {row.run}",
                    fix=f"resume that run with `recipe resume {row.run}`, or stop the machine with `recipe reap {row.key}`",
                )

    async def _find_running_use(self) -> LeaseRow | None:
        """Return the open use of the persistent machine if the machine runs, otherwise None.

        Open uses of a machine that no longer runs are released.  Raises Busy, DriverError.
        """
        machine = self.find_machine()
        if machine is None:
            return None
        self.require_free()
        for use in self.find_uses(machine):
            use = self.ledger.take(use, self.holder)
            if use.state == "UP" and await self.ask_status(machine) == "runs":
                return use
            if not await self.release(use, "the machine no longer runs"):
                raise Busy(
                    f"the machine {machine.key} is not stopped yet",
                    fix="wait a minute, then run again",
                )
        return None

    async def _record_and_start(
        self, use: LeaseRow, machine: LeaseRow, until: datetime
    ) -> LeaseRow | None:
        """Record a use of the persistent machine, and start the machine; None if the start fails."""
        self._note(use)
        crashpoint("lease-intended")
        self.on_change("", use)
        return await self._start(use, machine, until)

    async def _start(self, use: LeaseRow, machine: LeaseRow, until: datetime) -> LeaseRow | None:
        """Start the machine of a recorded use; None if the start fails."""
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

    async def _resolve_intent(self, row: LeaseRow) -> LeaseRow:
        if not _is_use(row):
            return await super()._resolve_intent(row)
        machine = self.ledger.row(row.machine)
        if machine.state == "ASKED":
            machine = await super()._resolve_intent(self.ledger.take(machine, self.holder))
        if machine.state == "GONE":
            return self._move(row, "GONE", reason=machine.reason)
        if machine.state == "COMING":  # a machine runs from its order on
            return self._move(row, "COMING", lease=machine.lease)
        until = datetime.fromtimestamp(row.until, UTC)
        return await self._start(row, machine, until) or self.ledger.row(row.key)

    def mark_persistent(self, row: LeaseRow) -> None:
        """Record that the new machine of a use matches its offer.

        From now on, the machine outlives its uses.
        """
        if not row.machine:
            return
        machine = self.ledger.row(row.machine)
        if machine.state == "COMING":
            self._move(self.ledger.take(machine, self.holder), "UP")

    async def _end_billing(self, row: LeaseRow, reason: str) -> bool:
        """End a lease at the provider; return whether its billing has ended.

        The end of a use stops the machine, or terminates a machine that was never up.
        """
        if not _is_use(row):
            return await super()._end_billing(row, reason)
        machine = self.ledger.row(row.machine)
        if machine.state == "UP":
            return await self._stop_machine(machine)
        if machine.state == "GONE":
            return True
        return await self.release(self.ledger.take(machine, self.holder), reason)

    async def _stop_machine(self, machine: LeaseRow) -> bool:
        """Stop a machine; return whether the provider confirmed."""
        return await confirm_end(self, partial(self.driver.stop, lease_of(machine)))

    def stays_alive(self, row: LeaseRow) -> bool:
        """Return whether the machine of a lease keeps running after the run."""
        return self.keep_alive and bool(row.machine) and row.state == "UP"

    def total_cost(self, machine: LeaseRow) -> float:
        """Return the US dollars that a persistent machine and all its uses have cost so far.

        The cost of open uses is recorded.
        """
        uses = [row for row in self.ledger.since(machine.asked) if _is_use_of(row, machine)]
        for row in uses:
            if row.state not in ("ASKED", "GONE"):
                self.ledger.accrue(row)
        spent = self.ledger.costs([row.key for row in uses])
        disk = committed_cost(machine.price, machine.asked, time.time())
        return disk + sum(each.usd for each in spent.values())

    def release_hold(self, row: LeaseRow) -> None:
        """Give up this process's hold on a use.  The use continues until its end."""
        self.ledger.take(row, "")

    def hand_over(self, row: LeaseRow) -> None:
        """Leave the machine of a use running for the next run."""
        self.ledger.succeed(row, os.urandom(8).hex(), "", "", self.workspace)
        self.on_change("UP", row._replace(state="GONE", reason="the machine keeps running"))

    async def ask_status(self, machine: LeaseRow) -> Literal["runs", "stopped", "gone"]:
        """Ask the provider for the status of a persistent machine.  Raises DriverError."""
        self._require_pauses()
        return await self.call(partial(self.driver.stands, lease_of(machine)), SOON)

    def _require_pauses(self) -> None:
        """Raise CannotRun if the driver cannot stop and restart machines."""
        if not self.driver.traits.pauses:
            raise CannotRun(
                f"{self.name} cannot stop and restart machines",
                fix='remove `keep = "stopped"` from the stack',
            )


def _is_use(row: LeaseRow) -> bool:
    """Return whether a lease is one use of a persistent machine."""
    return bool(row.machine) and not row.kept


def _is_use_of(row: LeaseRow, machine: LeaseRow) -> bool:
    """Return whether a lease is a use of a persistent machine."""
    return row.machine == machine.key and not row.kept
