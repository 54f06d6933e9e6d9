"""What providers would rent for a need, and which of it would be taken.  Rents nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from drivers import DRIVERS, FREE
from drivers.base import Closing, Driver, DriverError, Excluding, Offer, Rejected, Wish

from ..errors import CannotRun, Infrastructure, Invalid, Problem
from ..retry import retry_async
from ..storage.workspace import Workspace
from .leases import SOON, driver_of, patient

RUNNERS_UP: Final = 2
CONFIRM: Final = 2.0
"""US dollars above which a person is asked, where the driver's setting `confirm` does not say otherwise."""
ENDS: Final = {
    "provider": "the provider ends it at its time",
    "machine": "it ends itself at its time",
    "stops": "it ends itself at its time if its key allows, else it stops and its disk is billed on",
    "nothing": "nothing ends it when this program is dead",
}
VIRTUAL: Final = "what is rented is a virtual machine, which boots no image of a container"


class Shelf(NamedTuple):
    """What one driver offers for one wish, the cheapest first.  `excluded`: why it left out how many; `failed`: why it could not be asked."""

    driver: str
    wish: Wish
    offers: Sequence[Offer] = ()
    excluded: Mapping[str, int] = {}
    ends: str = ""
    failed: str = ""

    @property
    def total(self) -> float | None:
        """US dollars for the first offer, as long as it is wanted; None where that is not known."""
        return None if self.wish.hours is None or not self.offers else self.offers[0].price * self.wish.hours

    def left_out(self) -> str:
        """What was left out and why, by count; empty when nothing was."""
        return left_out(self.excluded)


def left_out(excluded: Mapping[str, int]) -> str:
    """Why offers were left out, by count; empty when none was."""
    total = sum(excluded.values())
    return f"{total} left out: {', '.join(f'{count} {why}' for why, count in excluded.items())}" if total else ""


def renting(ws: Workspace, name: str, hosts: Sequence[str] = ()) -> Driver | None:
    """The driver of that name, if what it has costs money; `hosts` instead of those in its settings.  Raises RecipeError."""
    driver = driver_of(name, ws.config.driver(name), hosts, str(ws.home)) if name not in FREE else None
    return driver if driver is not None and driver.traits.priced else None


def priced(ws: Workspace, asked: str) -> dict[str, Driver]:
    """The drivers that were asked for, as `all` or by their names.  Raises CannotRun for one that rents nothing."""
    if asked != "all":
        found = {name: renting(ws, name) for name in asked.split(",")}
        if free := [name for name, driver in found.items() if driver is None]:
            raise CannotRun(f"the driver {free[0]} rents nothing", fix="`recipe offers --driver all` asks those that do")
        return {name: driver for name, driver in found.items() if driver is not None}
    able: dict[str, Driver] = {}
    for name in {*DRIVERS, *ws.config.drivers} - {*FREE}:
        try:
            if (driver := renting(ws, name)) is not None:
                able[name] = driver
        except CannotRun:
            continue  # what it needs is not installed
    return dict(sorted(able.items()))


async def shelves(drivers: Mapping[str, Driver], wishes: Sequence[Wish]) -> list[Shelf]:
    """What each driver offers for each wish.  Raises Infrastructure when none of them could be asked, Invalid."""
    found = []
    for name, driver in drivers.items():
        for wish in wishes:
            try:
                offers = await retry_async(partial(driver.offers, wish), patient(SOON))
                excluded = driver.excluded if isinstance(driver, Excluding) else {}
                image = wish.need.image and not driver.traits.images and f"{wish.need.image} runs in a container engine there: {VIRTUAL}"
                ends = "; ".join(words for words in (ENDS[driver.traits.ends], driver.traits.prices, image) if words)
                found.append(Shelf(name, wish, offers, dict(excluded), ends))
            except Rejected as error:
                raise Invalid([Problem("bad-input", str(error), fix="see docs/clouds.md, Filters")]) from error
            except DriverError as error:
                found.append(Shelf(name, wish, failed=str(error)))
        if isinstance(driver, Closing):
            await driver.aclose()
    if found and all(shelf.failed for shelf in found):
        raise Infrastructure("\n".join(dict.fromkeys(shelf.failed for shelf in found)))
    return found


def to_confirm(ws: Workspace, found: Sequence[Shelf], limit: float | None, machines: int = 1) -> float | None:
    """What all wishes cost together, in US dollars, with so many machines for each, where that is more than is spent without asking."""
    total = sum(shelf.total or 0.0 for shelf in found) * machines
    total = total if limit is None else min(total, limit)
    most = min((float(ws.config.driver(shelf.driver).get("confirm", CONFIRM)) for shelf in found), default=CONFIRM)
    return total if total > most else None
