"""Leases of one run at several providers, with one list of all offers.

Each lease belongs to its provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain
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
    may_never_end = any(each.ends == "nothing" for each in traits)
    comes_up = max(each.comes_up for each in traits)
    poll = min(each.poll for each in traits)
    hosts_at_once = _sum_limits([each.hosts_at_once for each in traits])
    images = any(each.images for each in traits)
    return Traits(
        priced=True,
        ends="nothing" if may_never_end else "machine",
        comes_up=comes_up,
        poll=poll,
        hosts_at_once=hosts_at_once,
        images=images,
    )


def _sum_limits(limits: Sequence[int | None]) -> int | None:
    """Return the sum of the limits, or None if one of them is None (unlimited)."""
    total = 0
    for limit in limits:
        if limit is None:
            return None
        total += limit
    return total


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
        names = self._remaining_names()
        answers = await asyncio.gather(*(self._ask_provider(name, wish) for name in names))
        if len(self.given_up) == len(self.by_driver):
            reasons = [f"{name}: {why}" for name, why in self.given_up.items()]
            raise Unreachable("; ".join(reasons))
        joint: list[Offer] = []
        for name, offers in zip(names, answers, strict=True):
            joint += [replace(offer, driver=name) for offer in offers]
        return joint

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
        remaining = self._remaining_names()
        more = f"; continuing with {', '.join(remaining)}" if remaining else ""
        self.say(f"no more requests to {name}: {error}{more}")

    def _remaining_names(self) -> list[str]:
        """Return the names of the providers that still get requests."""
        return [name for name in self.by_driver if name not in self.given_up]

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
        rows: list[LeaseRow] = []
        for leases in self.by_driver.values():
            rows += await leases.adopt()
        return rows

    def inherit(self, row: LeaseRow) -> None:
        if row.driver in self.by_driver:
            self.by_driver[row.driver].inherit(row)

    async def repeat_releases(self) -> list[LeaseRow]:
        rows: list[LeaseRow] = []
        for leases in self.by_driver.values():
            rows += await leases.repeat_releases()
        return rows

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
        strangers: list[Lease] = []
        for leases in self.by_driver.values():
            with suppress(DriverError):
                strangers += await leases.find_strangers()
        return strangers

    async def close(
        self,
        keys: Collection[str] | None = None,
        reason: str = "the run has finished",
        failure: str = "",
    ) -> list[tuple[LeaseRow, str]]:
        unreleased = await asyncio.gather(
            *(leases.close(keys, reason, failure) for leases in self.by_driver.values())
        )
        return list(chain.from_iterable(unreleased))
