"""What a step needs of a machine, which offers do for it, and on which market it is rented.  Pure."""

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
MOST_TAKEN: Final = 3
"""Spot machines that are taken away from a run on the market `spot` before it rents on demand."""
TAKEN_OF_ANY: Final = 2
"""The same on the market `any`."""


class Takes(NamedTuple):
    """What steps of one need take together, as far as that is known."""

    hours: float | None = None
    home: int | None = None
    """Bytes of outputs that are brought here."""
    every: float | None = None
    """Seconds between two checkpoints, the most of any step that says so."""
    on: HoursOn | None = None
    """How long they take together on a kind of GPU."""


class Spot:
    """The spot machines of a run: which it has, and how many were taken away, from this worker and from those before it."""

    def __init__(self, market: AnyMarket = "on-demand") -> None:
        self._market: AnyMarket = market
        self._names: set[str] = set()
        self.taken = 0

    @property
    def market(self) -> AnyMarket:
        """On which the next machine is rented."""
        return self._market if self.taken < self.most_taken else "on-demand"

    @property
    def most_taken(self) -> int:
        """Machines that are taken away before the run rents on demand."""
        return TAKEN_OF_ANY if self._market == "any" else MOST_TAKEN

    def add(self, place: Place) -> None:
        """Note a place that was rented on the spot market."""
        self._names.add(place.name)

    def preemptible(self, place: Place) -> bool:
        """Whether a place may be taken away before it is given back."""
        return any(member.name in self._names for member in place.members)

    def gone(self, places: Iterable[Place]) -> bool:
        """Note which of the places that are given back were taken away; whether any was."""
        taken = sum(
            place.name in self._names and bool(place.lost or place.leaving) for place in places
        )
        self.taken += taken
        return taken > 0


def need_for(spec: StepSpec, market: AnyMarket = "on-demand", *, images: bool = False) -> Need:
    """What a step needs of a machine.  `images`: a machine is a container of the step's image, where it has one."""
    wants = spec.resources
    image = spec.image or "" if images else ""
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


def why_alone(
    id: str, spec: StepSpec, name: str, traits: Traits, *, headed: bool, kept: bool, most: float
) -> str:
    """Why a step of several nodes cannot run on machines that are rented of a driver `name`; empty where it can.

    `headed`: a head leads its nodes.  `kept`: a stack keeps the machine.  `most` machines may be rented at once.
    """
    workers = spec.node_count - int(headed)
    whose = " beside the head" if headed else ""
    if spec.node_count == 1 or not traits.priced:
        return ""
    if not headed and not traits.joins:
        return f"{id} requires {spec.nodes} nodes, but {name} rents single machines, which can form a group only with a stack's `head`"
    if not headed and kept:
        return f"{id} requires {spec.nodes} nodes, but the stack keeps one machine: remove `keep` from the stack"
    if most < workers:
        return (
            f"{id} requires {workers} machines{whose}, but at most {most:g} may be rented at once"
        )
    return ""


def wish_for(need: Need, taking: Mapping[Need, Takes], filters: Mapping[str, str]) -> Wish:
    """What is asked of a driver for a need: a machine that lasts for as long as its steps take, where that is known.

    `taking`: what the steps of each need take, on any market.
    """
    takes = taking.get(replace(need, market="any"), Takes())
    return Wish(need, hours=takes.hours, home=takes.home, filters=filters)


def market_of(settings: Mapping[str, Any]) -> AnyMarket:
    """On which market the driver of these settings rents.  Raises CannotRun."""
    known: dict[object, AnyMarket] = {"on-demand": "on-demand", "spot": "spot", "any": "any"}
    found = known.get(settings.get("market", "on-demand"))
    if found is None:
        raise CannotRun(
            f'the market "{settings["market"]}" is not known',
            fix=f"set `market` to one of {', '.join(map(str, known))}",
        )
    return found


def least_of(settings: Mapping[str, Any]) -> float | None:
    """Seconds of a machine that the money must pay for, where the settings of its driver say so."""
    return float(settings["least"]) if "least" in settings else None


def covers(offer: Offer, need: Need) -> bool:
    """Whether a machine that was offered so does for a need."""
    return need.market in (offer.market, "any") and machine.enough(
        offer.resources, Wish(replace(need, market="any"))
    )
