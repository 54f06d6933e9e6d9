"""The machine requirements of steps, matching offers, and the market to rent on.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from drivers import machine
from drivers.base import Market, Need, Offer, Traits, Wish

from ...errors import CannotRun
from ...planning.step import StepSpec
from .totals import HoursOn

if TYPE_CHECKING:
    from ..place.place import Place

AnyMarket: TypeAlias = Market | Literal["any"]
SPOT_PREEMPTIONS: Final = 3
"""Preemptions on the market `spot` after which a run rents on demand."""
ANY_PREEMPTIONS: Final = 2
"""Preemptions on the market `any` after which a run rents on demand."""


class StepTotals(NamedTuple):
    """The known totals of all steps with one need."""

    hours: float | None = None
    download_bytes: int | None = None
    """Bytes of outputs to download."""
    checkpoint_interval: float | None = None
    """Longest checkpoint interval of these steps in seconds."""
    hours_on: HoursOn | None = None
    """Their total time on a kind of GPU."""


class Spot:
    """The spot machines of a run, and the number of preemptions over all its workers."""

    def __init__(self, market: AnyMarket = "on-demand") -> None:
        self._market: AnyMarket = market
        self._names: set[str] = set()
        self.preemptions = 0

    @property
    def market(self) -> AnyMarket:
        """The market for the next machine."""
        return self._market if self.preemptions < self.max_preemptions else "on-demand"

    @property
    def max_preemptions(self) -> int:
        """Number of preemptions after which the run rents on demand."""
        return ANY_PREEMPTIONS if self._market == "any" else SPOT_PREEMPTIONS

    def add(self, place: Place) -> None:
        """Record a place on a spot machine."""
        self._names.add(place.name)

    def is_preemptible(self, place: Place) -> bool:
        """Return whether a place may be preempted."""
        return any(member.name in self._names for member in place.members)

    def count_preempted(self, places: Iterable[Place]) -> bool:
        """Count the preempted machines among released places; return whether there were any."""
        preempted = sum(map(self._is_preempted, places))
        self.preemptions += preempted
        return preempted > 0

    def _is_preempted(self, place: Place) -> bool:
        return place.name in self._names and bool(place.lost or place.leaving)


def need_for(spec: StepSpec, market: AnyMarket = "on-demand", *, images: bool = False) -> Need:
    """Return the machine requirements of a step.

    With `images`, a machine is a container of the step's image.
    """
    wants = spec.resources
    image = (spec.image or "") if images else ""
    return Need(
        wants.cpus,
        wants.memory,
        wants.gpus,
        wants.gpu,
        wants.gpu_memory,
        wants.disk,
        market=market,
        image=image,
    )


def why_no_group(
    id: str, spec: StepSpec, name: str, traits: Traits, *, headed: bool, kept: bool, most: float
) -> str:
    """Return why the nodes of a step cannot be machines of the driver `name`; empty if they can.

    `headed` means that the stack's head is one of the nodes, `kept` that the stack keeps a machine.
    At most `most` machines may be rented at once.
    """
    if spec.node_count == 1 or not traits.priced:
        return ""
    if not headed and not traits.joins:
        return f"{id} requires {spec.nodes} nodes, but {name} rents single machines, which can form a group only with a stack's `head`"
    if not headed and kept:
        return f"{id} requires {spec.nodes} nodes, but the stack keeps one machine: remove `keep` from the stack"
    workers = spec.node_count - int(headed)
    if most < workers:
        beside = " in addition to the head" if headed else ""
        return (
            f"{id} requires {workers} machines{beside}, but at most {most:g} may be rented at once"
        )
    return ""


def wish_for(need: Need, totals: Mapping[Need, StepTotals], filters: Mapping[str, str]) -> Wish:
    """Return the request to a driver for a need, with the known totals of its steps.

    `totals` holds the totals of each need, on any market.
    """
    known = totals.get(replace(need, market="any"), StepTotals())
    return Wish(need, hours=known.hours, home=known.download_bytes, filters=filters)


def market_of(settings: Mapping[str, Any]) -> AnyMarket:
    """Return the market of a driver's settings.  Raises CannotRun."""
    known: dict[object, AnyMarket] = {"on-demand": "on-demand", "spot": "spot", "any": "any"}
    market = known.get(settings.get("market", "on-demand"))
    if market is None:
        raise CannotRun(
            f'the market "{settings["market"]}" is not known',
            fix=f"set `market` to one of {', '.join(map(str, known))}",
        )
    return market


def min_seconds_of(settings: Mapping[str, Any]) -> float | None:
    """Return the setting `least`, the minimum seconds that the money must cover, or None."""
    return float(settings["least"]) if "least" in settings else None


def join_markets(settings: Iterable[Mapping[str, Any]]) -> AnyMarket:
    """Return `on-demand` if all drivers rent on demand, else `any`.  Raises CannotRun."""
    markets = set(map(market_of, settings))
    return "on-demand" if markets == {"on-demand"} else "any"


def join_min_seconds(settings: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the longest setting `least` of several drivers, or None if none has the setting."""
    minimums = map(min_seconds_of, settings)
    return max((seconds for seconds in minimums if seconds is not None), default=None)


def covers(offer: Offer, need: Need) -> bool:
    """Return whether an offered machine fits a need."""
    if need.market not in (offer.market, "any"):
        return False
    return machine.satisfies(offer.resources, Wish(replace(need, market="any")))
