"""Leases of one run at several providers, with one list of all offers.

Each lease belongs to its provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, cast

from drivers.base import (
    Denied,
    Driver,
    DriverError,
    Host,
    Lease,
    Need,
    NoCapacity,
    Offer,
    Rejected,
    Traits,
    Unreachable,
    Wish,
)

from ...settings import Config
from ...storage.records.ledger import LeaseRow
from .needs import market_of
from .stack_leases import StackLeases

NO_IMAGES: Final = "cannot boot a container image"


class JointDriver(Driver):
    """Several drivers in the role of one."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self.drivers = drivers
        self.traits = _join_traits([driver.traits for driver in drivers.values()])

    async def aclose(self) -> None:
        """Close all drivers."""
        for driver in self.drivers.values():
            await driver.aclose()


def _join_traits(traits: Sequence[Traits]) -> Traits:
    """Return the traits of several drivers in the role of one."""
    return Traits(
        priced=True,
        ends="nothing" if any(each.ends == "nothing" for each in traits) else "machine",
        comes_up=max(each.comes_up for each in traits),
        poll=min(each.poll for each in traits),
        hosts_at_once=_sum_limits([each.hosts_at_once for each in traits]),
        images=any(each.images for each in traits),
    )


def _sum_limits(limits: Sequence[int | None]) -> int | None:
    """Return the sum of the limits, or None if one of them is None (unlimited)."""
    known = [limit for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else None


class JointLeases(StackLeases):
    """The leases of a run at several providers, by driver name, with one budget.

    If one provider refuses, another may be used.
    """

    def __init__(self, name: str, by_driver: Mapping[str, StackLeases], config: Config) -> None:
        first = next(iter(by_driver.values()))
        joint = JointDriver({name: leases.driver for name, leases in by_driver.items()})
        super().__init__(
            cast(Any, joint), name, first.ledger, first.run, first.workspace, first.on_change
        )
        self.by_driver = by_driver
        self.given_up: dict[str, str] = {}
        """Providers that get no more requests, with reasons."""
        self._solvent: set[str] = set()
        """Providers whose account has credit."""
        self._markets = {name: market_of(config.driver(name)) for name in by_driver}
        self._exclusions: dict[str, int] = {}
        for leases in by_driver.values():
            leases.budget, leases.freed = self.budget, self.freed
            if leases is not first:
                leases.ledger.close()
                leases.ledger = self.ledger

    @property
    def exclusions(self) -> Mapping[str, int]:
        return self._exclusions

    @property
    def names(self) -> Collection[str]:
        return self.by_driver.keys()

    def of_driver(self, name: str) -> StackLeases:
        return self.by_driver[name]

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers of all providers.

        A provider that fails or lacks credit is reported and given up.  Raises DriverError if no
        provider is left.
        """
        self._exclusions = {}
        names = [name for name in self.by_driver if name not in self.given_up]
        answers = await asyncio.gather(*(self._ask_provider(name, wish) for name in names))
        if len(self.given_up) == len(self.by_driver):
            reasons = [f"{name}: {why}" for name, why in self.given_up.items()]
            raise Unreachable("; ".join(reasons))
        return [
            replace(offer, driver=name)
            for name, offers in zip(names, answers, strict=True)
            for offer in offers
        ]

    async def _ask_provider(self, name: str, wish: Wish) -> Sequence[Offer]:
        """Return the offers of one provider; none after a failure, which gives up the provider.

        Raises Rejected for a wrong filter, which only the user can correct.
        """
        leases, need = self.by_driver[name], wish.need
        if need.image and not leases.driver.traits.images:
            self._exclusions[f"{name}: {NO_IMAGES}"] = 1
            return ()
        if need.market == "any":
            need = replace(need, market=self._markets[name])
        try:
            await leases.check_denial()
            if name not in self._solvent:
                await leases.call(leases.driver.solvent)
            self._solvent.add(name)
            offers = await leases.offers(wish._replace(need=need))
        except Rejected:
            raise
        except DriverError as error:
            self._give_up(name, error)
            return ()
        self._exclusions |= {f"{name}: {why}": count for why, count in leases.exclusions.items()}
        return offers

    def _give_up(self, name: str, error: DriverError) -> None:
        """Send no more requests to a provider."""
        self.given_up[name] = str(error)
        left = [each for each in self.by_driver if each not in self.given_up]
        more = f"; continuing with {', '.join(left)}" if left else ""
        self.say(f"no more requests to {name}: {error}{more}")

    async def rent(self, need: Need, offer: Offer, shares: int = 1) -> LeaseRow | None:
        """Rent an offer from its provider, as `Leases.rent`; None if the provider refuses.

        A provider that refuses is given up, so that another provider's offer is used.
        """
        try:
            return await self.by_driver[offer.driver].rent(need, offer, shares)
        except (Denied, NoCapacity, Unreachable) as error:
            self._give_up(offer.driver, error)
            return None

    async def wait_until_up(self, row: LeaseRow) -> tuple[LeaseRow, Sequence[Host]]:
        return await self.by_driver[row.driver].wait_until_up(row)

    async def release(self, row: LeaseRow, reason: str, failure: str = "") -> bool:
        return await self.by_driver[row.driver].release(row, reason, failure)

    async def renew(self, row: LeaseRow) -> LeaseRow:
        return await self.by_driver[row.driver].renew(row)

    async def await_funds_and_end(self, need: Need, offer: Offer, shares: int = 1) -> datetime:
        return await self.by_driver[offer.driver].await_funds_and_end(need, offer, shares)

    async def adopt(self) -> list[LeaseRow]:
        return [row for leases in self.by_driver.values() for row in await leases.adopt()]

    def inherit(self, row: LeaseRow) -> None:
        if row.driver in self.by_driver:
            self.by_driver[row.driver].inherit(row)

    async def repeat_releases(self) -> list[LeaseRow]:
        return [row for leases in self.by_driver.values() for row in await leases.repeat_releases()]

    async def check_denial(self) -> None:
        """Do nothing, because `offers` checks each provider."""

    def accrue(self) -> None:
        for leases in self.by_driver.values():
            leases.accrue()

    async def record_charges(self) -> None:
        for leases in self.by_driver.values():
            await leases.record_charges()

    async def is_listed(self, row: LeaseRow) -> bool:
        return await self.by_driver[row.driver].is_listed(row)

    async def find_strangers(self) -> list[Lease]:
        found = list[Lease]()
        for leases in self.by_driver.values():
            with suppress(DriverError):
                found += await leases.find_strangers()
        return found

    async def close(
        self,
        keys: Collection[str] | None = None,
        reason: str = "the run has finished",
        failure: str = "",
    ) -> list[tuple[LeaseRow, str]]:
        closed = await asyncio.gather(
            *(leases.close(keys, reason, failure) for leases in self.by_driver.values())
        )
        return [left for each in closed for left in each]
