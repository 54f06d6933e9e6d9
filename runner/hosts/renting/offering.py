"""What providers would rent for a need, and which of it would be taken.  Rents nothing."""

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
from ..link.contact import SOON, patient
from .leases import driver_of
from .totals import Pricing, Total

RUNNERS_UP: Final = 2
CONFIRM: Final = 2.0
"""US dollars above which a person is asked, where the driver's setting `confirm` does not say otherwise."""
ENDS: Final = {
    "provider": "the provider ends it at its time",
    "machine": "it ends itself at its time",
    "stops": "it ends itself at its time if its key allows, else it stops and its disk is billed on",
    "nothing": "nothing ends it when this program is dead",
}
FIRST_USE: Final = "the first host key that it shows is believed"
UNSAID: Final = (
    "totals are without egress: what would be brought home is not known before the first run"
)
VIRTUAL: Final = "what is rented is a virtual machine, which boots no image of a container"


class Shelf(NamedTuple):
    """What one driver offers for one wish, the cheapest first.  `excluded`: why it left out how many; `failed`: why it could not be asked."""

    driver: str
    wish: Wish
    offers: Sequence[Offer] = ()
    excluded: Mapping[str, int] = {}
    ends: str = ""
    failed: str = ""
    pricing: Pricing = Pricing()

    @property
    def total(self) -> float | None:
        """US dollars for a run on the first offer; None where that is not known."""
        return self.total_of(self.offers[0]).usd if self.offers else None

    def total_of(self, offer: Offer) -> Total:
        """What a run costs on one of the offers."""
        return self.pricing.total(offer, self.wish)

    def unsaid(self) -> str:
        """That totals lack what egress costs, where some offer charges for it and its size is not known; empty otherwise."""
        lacks = self.wish.home is None and any(
            offer.egress_price and self.total_of(offer).usd is not None for offer in self.offers
        )
        return UNSAID if lacks else ""

    def left_out(self) -> str:
        """What was left out and why, by count; empty when nothing was."""
        return left_out(self.excluded)


def rank_offers(shelves: Sequence[Shelf]) -> list[tuple[Shelf, Offer]]:
    """The offers of all drivers for one step, the cheapest run first; those of an unknown total come last, by their hourly price."""
    if len(shelves) == 1:
        return [(shelves[0], offer) for offer in shelves[0].offers]

    def key(each: tuple[Shelf, Offer]) -> tuple[bool, float]:
        usd = each[0].total_of(each[1]).usd
        return (True, each[1].hourly) if usd is None else (False, usd)

    return sorted(((shelf, offer) for shelf in shelves for offer in shelf.offers), key=key)


def left_out(excluded: Mapping[str, int]) -> str:
    """Why offers were left out, by count; empty when none was."""
    count = sum(excluded.values())
    return (
        f"{count} left out: {', '.join(f'{count} {why}' for why, count in excluded.items())}"
        if count
        else ""
    )


def driver_that_rents(ws: Workspace, name: str, hosts: Sequence[str] = ()) -> Driver | None:
    """The driver of that name, if what it has costs money; `hosts` instead of those in its settings.  Raises RecipeError."""
    driver = (
        driver_of(name, ws.config.driver(name), hosts, str(ws.home)) if name not in FREE else None
    )
    return driver if driver is not None and _costs(driver) else None


def _costs(driver: Driver) -> bool:
    return driver.traits.priced or driver.traits.billed


def renters(ws: Workspace) -> dict[str, Driver]:
    """Every driver whose machines cost money; one that cannot be made here is left out."""
    found = {}
    for name in sorted({*DRIVERS, *ws.config.drivers} - {*FREE}):
        with suppress(RecipeError):
            if (driver := driver_that_rents(ws, name)) is not None:
                found[name] = driver
    return found


class PricedDrivers(NamedTuple):
    """Drivers whose machines cost money, and the names of those that somebody means to use and that cannot be loaded here."""

    drivers: dict[str, Driver]
    not_installed: list[str]


def priced_drivers(ws: Workspace, asked: str) -> PricedDrivers:
    """Return the drivers that were asked for, as `all` or by their names; a cluster without prices only by its name.

    Raises CannotRun for one that rents nothing, and for one asked for by its name that is not installed.
    """
    if asked != "all":
        found = {
            name: driver_of(name, ws.config.driver(name), (), str(ws.home))
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
                f"the driver {free[0]} rents nothing",
                fix="`recipe offers --driver all` asks those that do",
            )
        return PricedDrivers(found, [])
    able: dict[str, Driver] = {}
    not_installed: list[str] = []
    for name in sorted({*DRIVERS, *ws.config.drivers} - {*FREE}):
        try:
            if (driver := driver_that_rents(ws, name)) is not None:
                able[name] = driver
        except CannotRun:
            if _is_set_up(ws, name):
                not_installed.append(name)
    return PricedDrivers(able, not_installed)


def _is_set_up(ws: Workspace, name: str) -> bool:
    """Whether the settings or the environment say something of a driver, which need not be installed."""
    variables = ACCOUNT_VARIABLES.get(name, ())
    return name in ws.config.drivers or any(ws.environ.get(each) for each in variables)


async def update(drivers: Mapping[str, Driver]) -> dict[str, str]:
    """Fetch the newest prices of those that offer by a list: name -> what it is now.  Raises Infrastructure where one cannot be fetched."""
    try:
        updated = {name: await driver.update() for name, driver in drivers.items()}
        return {name: words for name, words in updated.items() if words}
    except DriverError as error:
        raise Infrastructure(
            str(error), fix="`recipe offers` without --update goes by the prices that are known"
        ) from error


async def shelves(
    asking: Mapping[str, tuple[Driver, Sequence[Wish]]], pricing: Mapping[Need, Pricing] = {}
) -> list[Shelf]:
    """What each driver offers for each wish that it is asked, the cheapest run first.

    `pricing`: how the cost is computed, by needs on any market.  Raises Infrastructure when none of them could be asked, Invalid.
    """
    found = []
    for name, (driver, wishes) in asking.items():
        for wish in wishes:
            costing = pricing.get(replace(wish.need, market="any"), Pricing())
            try:
                found_there = await retry_async(partial(driver.offers, wish), patient(SOON))
                # A cluster takes its partitions in the order of its settings.
                ranks = driver.traits.priced
                offers = costing.ranked(found_there, wish) if ranks else found_there
                image = (
                    wish.need.image
                    and not driver.traits.images
                    and f"{wish.need.image} runs in a container engine there: {VIRTUAL}"
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


def priced_anew(shelf: Shelf, wish: Wish, pricing: Mapping[Need, Pricing]) -> Shelf:
    """The same offers, the cheapest run with this wish first; `pricing` as `shelves` has it."""
    costing = pricing.get(replace(wish.need, market="any"), Pricing())
    # A cluster without prices keeps the order of its settings.
    ranks = any(offer.price for offer in shelf.offers)
    offers = costing.ranked(shelf.offers, wish) if ranks else shelf.offers
    return shelf._replace(wish=wish, offers=offers, pricing=costing)


def to_confirm(
    ws: Workspace,
    found: Sequence[Shelf],
    limit: float | None,
    machines: int = 1,
    drivers: Collection[str] = (),
) -> float | None:
    """What all wishes cost together, in US dollars, with so many machines for each, where that is more than is spent without asking.

    `drivers`: those whose setting `confirm` counts beside those of `found`.
    """
    usd = sum(shelf.total or 0.0 for shelf in found) * machines
    usd = usd if limit is None else min(usd, limit)
    most = min(
        (
            float(ws.config.driver(name).get("confirm", CONFIRM))
            for name in {*drivers, *(shelf.driver for shelf in found)}
        ),
        default=CONFIRM,
    )
    return usd if usd > most else None
