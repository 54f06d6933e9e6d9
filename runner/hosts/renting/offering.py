"""Offers of providers for a need, ranked by the cost of the run.  Rents nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from drivers import ACCOUNT_VARIABLES, DRIVERS, FREE
from drivers.base import Driver, DriverError, Need, Offer, Rejected, Wish

from ...errors import CannotRun, Infrastructure, Invalid, Problem, RecipeError
from ...retry import retry_async
from ...storage.workspace import Workspace
from ..link.contact import SOON, retry_policy
from .leases import create_driver
from .totals import Pricing, Total

RUNNERS_UP: Final = 2
CONFIRM_ABOVE: Final = 2.0
"""US dollars above which a confirmation is required, unless the driver's setting `confirm` is set."""
ENDS: Final = {
    "provider": "the provider terminates the machine when its lease expires",
    "machine": "the machine terminates itself when its lease expires",
    "stops": "the machine terminates itself when its lease expires, if its key allows; otherwise it stops and its disk is still billed",
    "nothing": "nothing terminates the machine if recipe dies",
}
FIRST_USE: Final = "the host key is trusted on first use"
EGRESS_UNKNOWN: Final = (
    "totals exclude egress: the size of the results is unknown before the first run"
)
IS_VM: Final = "the machine is a VM, which cannot boot a container image"


class Shelf(NamedTuple):
    """One driver's offers for one wish, cheapest first.  `excluded` counts reasons for exclusion; `failed` says why the driver could not be asked."""

    driver: str
    wish: Wish
    offers: Sequence[Offer] = ()
    excluded: Mapping[str, int] = {}
    ends: str = ""
    failed: str = ""
    pricing: Pricing = Pricing()

    @property
    def total(self) -> float | None:
        """Cost of a run on the first offer in US dollars; None if unknown."""
        return self.total_of(self.offers[0]).usd if self.offers else None

    def total_of(self, offer: Offer) -> Total:
        """Return the cost of a run on an offer."""
        return self.pricing.total(offer, self.wish)

    def egress_note(self) -> str:
        """Return a note that totals exclude egress of unknown size; empty without such a charge."""
        lacks = self.wish.home is None and any(
            offer.egress_price and self.total_of(offer).usd is not None for offer in self.offers
        )
        return EGRESS_UNKNOWN if lacks else ""

    def describe_exclusions(self) -> str:
        """Return the exclusion reasons by count; empty if nothing was excluded."""
        return describe_excluded(self.excluded)


def rank_offers(shelves: Sequence[Shelf]) -> list[tuple[Shelf, Offer]]:
    """Rank the offers of all drivers for one step by the cost of the run.

    Offers without a known cost come last, by hourly price.
    """
    if len(shelves) == 1:
        return [(shelves[0], offer) for offer in shelves[0].offers]

    def key(each: tuple[Shelf, Offer]) -> tuple[bool, float]:
        usd = each[0].total_of(each[1]).usd
        return (True, each[1].hourly) if usd is None else (False, usd)

    return sorted(((shelf, offer) for shelf in shelves for offer in shelf.offers), key=key)


def describe_excluded(excluded: Mapping[str, int]) -> str:
    """Return the exclusion reasons by count; empty if nothing was excluded."""
    count = sum(excluded.values())
    return (
        f"{count} excluded: {', '.join(f'{count} {why}' for why, count in excluded.items())}"
        if count
        else ""
    )


def create_renter(ws: Workspace, name: str, hosts: Sequence[str] = ()) -> Driver | None:
    """Return the driver of that name if its machines cost money; `hosts` overrides its settings.  Raises RecipeError."""
    driver = (
        create_driver(name, ws.config.driver(name), hosts, str(ws.home))
        if name not in FREE
        else None
    )
    return driver if driver is not None and _costs(driver) else None


def _costs(driver: Driver) -> bool:
    return driver.traits.priced or driver.traits.billed


def find_renters(ws: Workspace) -> dict[str, Driver]:
    """Return every driver whose machines cost money, except drivers that cannot be created here."""
    found = {}
    for name in sorted({*DRIVERS, *ws.config.drivers} - {*FREE}):
        with suppress(RecipeError):
            if (driver := create_renter(ws, name)) is not None:
                found[name] = driver
    return found


class PricedDrivers(NamedTuple):
    """Drivers whose machines cost money, and the names of configured drivers that are not installed."""

    drivers: dict[str, Driver]
    not_installed: list[str]


def priced_drivers(ws: Workspace, asked: str) -> PricedDrivers:
    """Return the drivers in `asked`: `all`, or a list of names; a cluster without prices only by its name.

    Raises CannotRun for a named driver that rents nothing or is not installed.
    """
    if asked != "all":
        found = {
            name: create_driver(name, ws.config.driver(name), (), str(ws.home))
            for name in asked.split(",")
            if name not in FREE
        }
        free = [
            name
            for name in asked.split(",")
            if name in FREE or not (_costs(found[name]) or found[name].traits.allocates)
        ]
        if free:
            raise CannotRun(
                f"the driver {free[0]} does not rent machines",
                fix="list all offers with `recipe offers --driver all`",
            )
        return PricedDrivers(found, [])
    able: dict[str, Driver] = {}
    not_installed: list[str] = []
    for name in sorted({*DRIVERS, *ws.config.drivers} - {*FREE}):
        try:
            if (driver := create_renter(ws, name)) is not None:
                able[name] = driver
        except CannotRun:
            if _is_set_up(ws, name):
                not_installed.append(name)
    return PricedDrivers(able, not_installed)


def _is_set_up(ws: Workspace, name: str) -> bool:
    """Return whether the settings or the environment configure a driver, installed or not."""
    variables = ACCOUNT_VARIABLES.get(name, ())
    return name in ws.config.drivers or any(ws.environ.get(each) for each in variables)


async def update_prices(drivers: Mapping[str, Driver]) -> dict[str, str]:
    """Fetch the newest price lists: driver name -> status.  Raises Infrastructure if a list cannot be fetched."""
    try:
        updated = {name: await driver.update() for name, driver in drivers.items()}
        return {name: words for name, words in updated.items() if words}
    except DriverError as error:
        raise Infrastructure(
            str(error), fix="run `recipe offers` without `--update` to use the stored prices"
        ) from error


async def ask_offers(
    asking: Mapping[str, tuple[Driver, Sequence[Wish]]], pricing: Mapping[Need, Pricing] = {}
) -> list[Shelf]:
    """Ask each driver for offers for each of its wishes, cheapest run first.

    `pricing` maps needs (with any market) to cost models.  Raises Infrastructure if no driver could be asked, Invalid.
    """
    found = []
    for name, (driver, wishes) in asking.items():
        for wish in wishes:
            costing = pricing.get(replace(wish.need, market="any"), Pricing())
            try:
                found_there = await retry_async(partial(driver.offers, wish), retry_policy(SOON))
                # The partitions of a cluster keep the order of its settings.
                ranks = driver.traits.priced
                offers = costing.rank(found_there, wish) if ranks else found_there
                image = (
                    wish.need.image
                    and not driver.traits.images
                    and f"{wish.need.image} runs in a container engine on the machine: {IS_VM}"
                )
                trusted = FIRST_USE if driver.traits.identity == "first_use" else ""
                ends = "; ".join(
                    words
                    for words in (ENDS[driver.traits.ends], trusted, driver.traits.prices, image)
                    if words
                )
                found.append(
                    Shelf(name, wish, offers, dict(driver.excluded), ends, pricing=costing)
                )
            except Rejected as error:
                raise Invalid(
                    [Problem("bad-input", str(error), fix="see docs/clouds.md, Filters")]
                ) from error
            except DriverError as error:
                found.append(Shelf(name, wish, failed=str(error)))
        await driver.aclose()
    if found and all(shelf.failed for shelf in found):
        raise Infrastructure("\n".join(dict.fromkeys(shelf.failed for shelf in found)))
    return found


def rank_again(shelf: Shelf, wish: Wish, pricing: Mapping[Need, Pricing]) -> Shelf:
    """Rank the offers of a shelf again for another wish; `pricing` is the same as for `shelves`."""
    costing = pricing.get(replace(wish.need, market="any"), Pricing())
    # A cluster without prices keeps the order of its settings.
    ranks = any(offer.price for offer in shelf.offers)
    offers = costing.rank(shelf.offers, wish) if ranks else shelf.offers
    return shelf._replace(wish=wish, offers=offers, pricing=costing)


def cost_to_confirm(
    ws: Workspace,
    found: Sequence[Shelf],
    limit: float | None,
    machines: int = 1,
    drivers: Collection[str] = (),
) -> float | None:
    """Return the total cost in US dollars if it requires a confirmation; otherwise None.

    The cost covers all wishes, with `machines` machines each.

    `drivers` are more drivers whose setting `confirm` counts.
    """
    usd = sum(shelf.total or 0.0 for shelf in found) * machines
    usd = usd if limit is None else min(usd, limit)
    most = min(
        (
            float(ws.config.driver(name).get("confirm", CONFIRM_ABOVE))
            for name in {*drivers, *(shelf.driver for shelf in found)}
        ),
        default=CONFIRM_ABOVE,
    )
    return usd if usd > most else None
