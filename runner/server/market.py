"""Offers of drivers, cached for one minute and shared by all plans.

Plans are computed in separate processes, often while a user types. These processes only read the
cached offers and report missing ones. The server process, which has loaded the drivers, then
queries the providers.
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
from .answers import hide_local_paths
from .planner import Planner
from .room import ServedWorkspace

P = ParamSpec("P")
T = TypeVar("T")
CACHE_SECONDS: Final = 60.0
"""Seconds for which offers are cached."""
Ask = tuple[str, Wish]
"""A driver and its query."""


class CachedOffers(NamedTuple):
    """Cached GPU offers, and the drivers that rent machines.

    `renting` tells for each of these drivers if it allocates nodes of a cluster.
    """

    renting: Mapping[str, bool] = {}
    offered: Mapping[tuple[str, str], Shelf] = {}


class MarketLookup(NamedTuple):
    """Cached offers for each step of a plan, and the driver queries still missing."""

    by_step: dict[str, list[Shelf]]
    missing: list[Ask]


def look_up(
    ws: Workspace, found: Survey, names: Iterable[str], known: CachedOffers
) -> MarketLookup:
    """Return cached offers for the steps to run, from the drivers that rent machines."""
    looked = MarketLookup({}, [])
    names = [name for name in names if name in known.renting]
    kinds = {known.renting[name] for name in names}
    by_kind = {kind: shelves.wishes(ws, found, "all", cluster=kind) for kind in kinds}
    requests: list[shelves.OfferRequest] = []
    for asking in by_kind.values():
        requests += asking.values()
    costing = shelves.pricing_of(ws, requests)
    for name in names:
        for step, request in by_kind[known.renting[name]].items():
            wish = shelves.on_market_of(ws, name, request.wish)
            shelf = known.offered.get(_key(name, wish))
            if shelf is None:
                looked.missing.append((name, wish))
                continue
            looked.by_step.setdefault(step, []).append(offering.rank_again(shelf, wish, costing))
    return looked


def _key(name: str, wish: Wish) -> tuple[str, str]:
    # Downloads after the run change the cost of an offer, but not the offers.
    return name, repr(wish._replace(home=None))


class Market:
    """Offer cache of one server. Thread-safe."""

    def __init__(self) -> None:
        self._offered: dict[tuple[str, str], tuple[float, Shelf]] = {}
        self._turn = threading.Lock()

    async def call(
        self,
        planner: Planner,
        function: Callable[Concatenate[ServedWorkspace, CachedOffers, P], tuple[T, Sequence[Ask]]],
        room: ServedWorkspace,
        *args: P.args,
        **more: P.kwargs,
    ) -> T:
        """Call `function` with the cached offers in a separate process, and return the result.

        If the function reports missing queries, query the drivers and call the function again.
        """
        known = await run_in_threadpool(self.read_cache, room)
        made, missing = await planner.call(function, room, known, *args, **more)
        if missing:
            await run_in_threadpool(self.ask, room, missing)
            known = known._replace(offered=self._drop_stale())
            made, _ = await planner.call(function, room, known, *args, **more)
        return made

    def read_cache(self, room: ServedWorkspace) -> CachedOffers:
        """Return the cached offers, without drivers that cannot be loaded."""
        with room.open_workspace() as ws:
            renters = offering.find_renters(ws)
        return CachedOffers(
            {name: driver.traits.allocates for name, driver in renters.items()}, self._drop_stale()
        )

    def ask(self, room: ServedWorkspace, asked: Iterable[Ask]) -> list[Shelf]:
        """Return offers for these driver queries, cached or new.

        Errors of a query are part of its result.
        """
        asked = list(asked)
        with self._turn, room.open_workspace() as ws:
            fresh = self._drop_stale()
            missing = [each for each in asked if _key(*each) not in fresh]
            for each, shelf in zip(missing, asyncio.run(_query_drivers(ws, missing)), strict=True):
                self._offered[_key(*each)] = time.monotonic(), shelf
            return [self._offered[_key(*each)][1] for each in asked]

    def _drop_stale(self) -> dict[tuple[str, str], Shelf]:
        oldest = time.monotonic() - CACHE_SECONDS
        for key, (at, _) in list(self._offered.items()):
            if at < oldest:
                self._offered.pop(key, None)
        return {key: shelf for key, (_, shelf) in list(self._offered.items())}


async def _query_drivers(ws: Workspace, asked: Sequence[Ask]) -> list[Shelf]:
    """Query all drivers concurrently."""
    return await asyncio.gather(*(_query_driver(ws, name, wish) for name, wish in asked))


async def _query_driver(ws: Workspace, name: str, wish: Wish) -> Shelf:
    try:
        (driver,) = offering.priced_drivers(ws, name).drivers.values()
        (shelf,) = await offering.ask_offers({name: (driver, [wish])})
    except RecipeError as error:  # missing API key, or unsupported filter
        return Shelf(name, wish, failed=hide_local_paths(str(error), ws.root))
    return shelf


async def _get_market(request: Request) -> Market:
    return cast("Market", request.app.state.market)


InMarket = Annotated[Market, Depends(_get_market)]
