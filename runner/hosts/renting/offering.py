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
from .totals import CostModel, Total

RUNNERS_UP: Final = 2
"""Number of offers shown beside the best one."""
CONFIRM_ABOVE: Final = 2.0
"""US dollars above which a confirmation is required, unless the driver's setting `confirm` is set.
"""
ENDS: Final = {
    "provider": "the provider terminates the machine when its rental period ends",
    "machine": "the machine terminates itself when its rental period ends",
    "stops": "the machine terminates itself when its rental period ends, if its key allows; otherwise it stops and its disk is still billed",
    "nothing": "nothing terminates the machine if recipe dies",
}
FIRST_USE: Final = "the host key is trusted on first use"
EGRESS_UNKNOWN: Final = (
    "totals exclude egress: the size of the results is unknown before the first run"
)
IS_VM: Final = "the machine is a VM, which cannot boot a container image"


class Shelf(NamedTuple):
    """One driver's offers for one wish, cheapest first."""

    driver: str
    wish: Wish
    offers: Sequence[Offer] = ()
    excluded: Mapping[str, int] = {}
    """Number of excluded offers by reason."""
    ends: str = ""
    """The end of the machines and other terms, as text."""
    failed: str = ""
    """Why the driver could not be asked; empty if it answered."""
    pricing: CostModel = CostModel()
    """The cost model that ranks the offers."""

    @property
    def total(self) -> float | None:
        """Cost of a run on the first offer in US dollars; None if unknown."""
        return self.total_of(self.offers[0]).usd if self.offers else None

    def total_of(self, offer: Offer) -> Total:
        """Return the cost of a run on an offer."""
        return self.pricing.total(offer, self.wish)

    def egress_note(self) -> str:
        """Return a note that totals exclude egress of unknown size; empty without such a charge."""
        if self.wish.home is not None:
            return ""
        for offer in self.offers:
            if offer.egress_price and self.total_of(offer).usd is not None:
                return EGRESS_UNKNOWN
        return ""

    def describe_exclusions(self) -> str:
        """Return the exclusion reasons by count; empty if nothing was excluded."""
        return describe_excluded(self.excluded)


def rank_offers(shelves: Sequence[Shelf]) -> list[tuple[Shelf, Offer]]:
    """Rank the offers of all drivers for one step by the cost of the run.

    Offers without a known cost come last, by hourly price.
    """
    offers: list[tuple[Shelf, Offer]] = []
    for shelf in shelves:
        offers += [(shelf, offer) for offer in shelf.offers]
    if len(shelves) == 1:
        return offers

    def sort_key(each: tuple[Shelf, Offer]) -> tuple[bool, float]:
        shelf, offer = each
        usd = shelf.total_of(offer).usd
        return (True, offer.hourly) if usd is None else (False, usd)

    return sorted(offers, key=sort_key)


def describe_excluded(excluded: Mapping[str, int]) -> str:
    """Return the number of excluded offers by reason; empty if nothing was excluded."""
    total = sum(excluded.values())
    if not total:
        return ""
    reasons = ", ".join(f"{count} {why}" for why, count in excluded.items())
    return f"{total} excluded: {reasons}"


def create_renter(ws: Workspace, name: str, hosts: Sequence[str] = ()) -> Driver | None:
    """Create the driver `name` if its machines cost money, otherwise return None; `hosts` overrides
    its settings.

    Raises RecipeError.
    """
    if name in FREE:
        return None
    driver = create_driver(name, ws.config.driver(name), hosts, str(ws.home))
    return driver if _costs(driver) else None


def _costs(driver: Driver) -> bool:
    return driver.traits.priced or driver.traits.billed


def find_renters(ws: Workspace) -> dict[str, Driver]:
    """Return every driver whose machines cost money, except drivers that cannot be created here."""
    renters = {}
    for name in _candidates(ws):
        with suppress(RecipeError):
            driver = create_renter(ws, name)
            if driver is not None:
                renters[name] = driver
    return renters


def _candidates(ws: Workspace) -> list[str]:
    """Return the names of all drivers that may rent machines."""
    return sorted({*DRIVERS, *ws.config.drivers} - {*FREE})


class PricedDrivers(NamedTuple):
    """Drivers whose machines cost money, and the names of configured drivers that are not
    installed.
    """

    drivers: dict[str, Driver]
    not_installed: list[str]


def priced_drivers(ws: Workspace, asked: str) -> PricedDrivers:
    """Return the drivers in `asked`: `all`, or a list of names.

    A cluster without prices is returned only by its name.

    Raises CannotRun for a named driver that rents nothing or is not installed.
    """
    if asked != "all":
        return PricedDrivers(_create_named(ws, asked.split(",")), [])
    priced: dict[str, Driver] = {}
    not_installed: list[str] = []
    for name in _candidates(ws):
        try:
            driver = create_renter(ws, name)
        except CannotRun:
            if _is_set_up(ws, name):
                not_installed.append(name)
            continue
        if driver is not None:
            priced[name] = driver
    return PricedDrivers(priced, not_installed)


def _create_named(ws: Workspace, names: Sequence[str]) -> dict[str, Driver]:
    """Create the named drivers.  Raises CannotRun if one of them rents nothing."""
    created: dict[str, Driver] = {}
    for name in names:
        if name not in FREE:
            created[name] = create_driver(name, ws.config.driver(name), (), str(ws.home))
    for name in names:
        driver = created.get(name)
        if driver is None or not (_costs(driver) or driver.traits.allocates):
            raise CannotRun(
                f"the driver {name} does not rent machines",
                fix="list all offers with `recipe offers --driver all`",
            )
    return created


def _is_set_up(ws: Workspace, name: str) -> bool:
    """Return whether the settings or the environment configure a driver, installed or not."""
    variables = ACCOUNT_VARIABLES.get(name, ())
    return name in ws.config.drivers or any(ws.environ.get(each) for each in variables)


async def update_prices(drivers: Mapping[str, Driver]) -> dict[str, str]:
    """Fetch the newest price lists: driver name -> status.

    Raises Infrastructure if a list cannot be fetched.
    """
    try:
        statuses = {name: await driver.update() for name, driver in drivers.items()}
        return {name: status for name, status in statuses.items() if status}
    except DriverError as error:
        raise Infrastructure(
            str(error), fix="run `recipe offers` without `--update` to use the stored prices"
        ) from error


async def ask_offers(
    asking: Mapping[str, tuple[Driver, Sequence[Wish]]], pricing: Mapping[Need, CostModel] = {}
) -> list[Shelf]:
    """Ask each driver for offers for each of its wishes, cheapest run first.

    `pricing` maps needs (with any market) to cost models.  Raises Infrastructure if no driver could
    be asked, and Invalid for a wrong filter.
    """
    shelves = []
    for name, (driver, wishes) in asking.items():
        for wish in wishes:
            costing = pricing.get(replace(wish.need, market="any"), CostModel())
            shelves.append(await _ask_driver(name, driver, wish, costing))
        await driver.aclose()
    if shelves and all(shelf.failed for shelf in shelves):
        raise Infrastructure("\n".join(dict.fromkeys(shelf.failed for shelf in shelves)))
    return shelves


async def _ask_driver(name: str, driver: Driver, wish: Wish, costing: CostModel) -> Shelf:
    """Return a driver's offers for one wish.  Raises Invalid for a wrong filter."""
    try:
        offers = await retry_async(partial(driver.offers, wish), retry_policy(SOON))
    except Rejected as error:
        raise Invalid(
            [Problem("bad-input", str(error), fix="see docs/clouds.md, Filters")]
        ) from error
    except DriverError as error:
        return Shelf(name, wish, failed=str(error))
    if driver.traits.priced:  # the partitions of a cluster keep the order of its settings
        offers = costing.rank(offers, wish)
    ends = "; ".join(_describe_terms(driver, wish.need))
    return Shelf(name, wish, offers, dict(driver.excluded), ends, pricing=costing)


def _describe_terms(driver: Driver, need: Need) -> list[str]:
    """Return the terms of a driver's machines: their end, the host key, the origin of prices, and
    the place of the image.
    """
    terms = [ENDS[driver.traits.ends]]
    if driver.traits.identity == "first_use":
        terms.append(FIRST_USE)
    if driver.traits.prices:
        terms.append(driver.traits.prices)
    if need.image and not driver.traits.images:
        terms.append(f"{need.image} runs in a container engine on the machine: {IS_VM}")
    return terms


def rank_again(shelf: Shelf, wish: Wish, pricing: Mapping[Need, CostModel]) -> Shelf:
    """Rank the offers of a shelf for another wish; `pricing` maps needs to cost models, as for `ask_offers`."""
    costing = pricing.get(replace(wish.need, market="any"), CostModel())
    offers = shelf.offers
    # A cluster without prices keeps the order of its settings.
    if any(offer.price for offer in offers):
        offers = costing.rank(offers, wish)
    return shelf._replace(wish=wish, offers=offers, pricing=costing)


def cost_to_confirm(
    ws: Workspace,
    found: Sequence[Shelf],
    limit: float | None,
    machines: int = 1,
    drivers: Collection[str] = (),
) -> float | None:
    """Return the total cost in US dollars if the cost requires a confirmation; otherwise None.

    The cost covers all wishes, with `machines` machines each, and is at most `limit`.

    `drivers` are more drivers whose setting `confirm` counts.
    """
    usd = sum(shelf.total or 0.0 for shelf in found) * machines
    if limit is not None:
        usd = min(usd, limit)
    names = {*drivers, *(shelf.driver for shelf in found)}
    limits = [float(ws.config.driver(name).get("confirm", CONFIRM_ABOVE)) for name in names]
    return usd if usd > min(limits, default=CONFIRM_ABOVE) else None
