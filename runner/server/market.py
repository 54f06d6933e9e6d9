"""What drivers offer, asked once a minute however many plans need it.

Plans are made in processes of their own, again and again while somebody types.  Those only look at what is known here, and say what is not:
then this process asks, which has the modules of the drivers loaded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from drivers.base import Wish

from ..errors import RecipeError
from ..hosts.renting import offering
from ..hosts.renting.offering import Shelf
from ..interface import shelves
from ..storage.workspace import Workspace
from ..survey.survey import Survey
from .answers import plain
from .planner import Planner
from .room import ServedWorkspace

P = ParamSpec("P")
T = TypeVar("T")
FRESH: Final = 60.0
"""Seconds for which an answer of a provider counts."""
Ask = tuple[str, Wish]
"""A driver, and what it is asked for."""


class Known(NamedTuple):
    """What the server knows of drivers: which of them rent, by name whether one allocates nodes of a cluster; and what they offered lately."""

    renting: Mapping[str, bool] = {}
    offered: Mapping[tuple[str, str], Shelf] = {}


class Looked(NamedTuple):
    """What drivers offer for the steps of a plan, as far as it is known, and what they have to be asked."""

    by_step: dict[str, list[Shelf]]
    missing: list[Ask]


def look_up(ws: Workspace, found: Survey, names: Iterable[str], known: Known) -> Looked:
    """Look up what drivers offer for the steps that are to run; those that rent nothing are passed over."""
    looked = Looked({}, [])
    names = [name for name in names if name in known.renting]
    by_kind = {
        kind: shelves.wishes(ws, found, "all", cluster=kind)
        for kind in {known.renting[name] for name in names}
    }
    costing = shelves.pricing_of(
        ws, [each for asked in by_kind.values() for each in asked.values()]
    )
    for name in names:
        asking = {
            step: shelves.on_market_of(ws, name, asked.wish)
            for step, asked in by_kind[known.renting[name]].items()
        }
        for step, wish in asking.items():
            shelf = known.offered.get(_key(name, wish))
            if shelf is None:
                looked.missing.append((name, wish))
                continue
            looked.by_step.setdefault(step, []).append(offering.rank_again(shelf, wish, costing))
    return looked


def _key(name: str, wish: Wish) -> tuple[str, str]:
    # What is brought home changes what an offer costs, and not what is offered.
    return name, repr(wish._replace(home=None))


class Market:
    """The offers that one server knows.  Its methods are called by many threads."""

    def __init__(self) -> None:
        self._offered: dict[tuple[str, str], tuple[float, Shelf]] = {}
        self._turn = threading.Lock()

    async def call(
        self,
        planner: Planner,
        function: Callable[Concatenate[ServedWorkspace, Known, P], tuple[T, Sequence[Ask]]],
        room: ServedWorkspace,
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Return what `function` makes of what is known, in a process of its own; drivers are asked for what it says is missing."""
        known = await run_in_threadpool(self.known, room)
        made, missing = await planner.call(function, room, known, *args, **more)
        if missing:
            await run_in_threadpool(self.ask, room, missing)
            known = known._replace(offered=self._fresh())
            made, _ = await planner.call(function, room, known, *args, **more)
        return made

    def known(self, room: ServedWorkspace) -> Known:
        """What is known now.  A driver that cannot be made here is left out."""
        with room.working() as ws:
            renters = offering.find_renters(ws)
        return Known(
            {name: driver.traits.allocates for name, driver in renters.items()}, self._fresh()
        )

    def ask(self, room: ServedWorkspace, asked: Iterable[Ask]) -> list[Shelf]:
        """Return what drivers offer, of the last minute where they were asked in it.  Why one cannot be asked is in its shelf."""
        asked = list(asked)
        with self._turn, room.working() as ws:
            fresh = self._fresh()
            missing = [each for each in asked if _key(*each) not in fresh]
            for each, shelf in zip(missing, asyncio.run(_asked(ws, missing)), strict=True):
                self._offered[_key(*each)] = time.monotonic(), shelf
            return [self._offered[_key(*each)][1] for each in asked]

    def _fresh(self) -> dict[tuple[str, str], Shelf]:
        oldest = time.monotonic() - FRESH
        for key, (at, _) in list(self._offered.items()):
            if at < oldest:
                self._offered.pop(key, None)
        return {key: shelf for key, (_, shelf) in list(self._offered.items())}


async def _asked(ws: Workspace, asked: Sequence[Ask]) -> list[Shelf]:
    """Ask all drivers at once."""
    return await asyncio.gather(*(_asked_one(ws, name, wish) for name, wish in asked))


async def _asked_one(ws: Workspace, name: str, wish: Wish) -> Shelf:
    try:
        (driver,) = offering.priced_drivers(ws, name).drivers.values()
        (shelf,) = await offering.ask_offers({name: (driver, [wish])})
    except RecipeError as error:  # no key for it, or it has no such filter
        return Shelf(name, wish, failed=plain(str(error), ws.root))
    return shelf


async def _market(request: Request) -> Market:
    return cast("Market", request.app.state.market)


InMarket = Annotated[Market, Depends(_market)]
