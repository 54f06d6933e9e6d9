"""`recipe offers`: what could be rented now, for any step or for those of a recipe, and what of it would be taken."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers import DRIVERS, install_line
from drivers.base import Need, Wish

from ...errors import CannotRun
from ...execution.session import look
from ...execution.terms import Choice
from ...hosts.renting import offering
from ...hosts.renting.needs import market_of, need_for
from ...hosts.renting.offering import Shelf
from ...hosts.renting.several import names_of
from ...hosts.renting.totals import History, HoursOn, Pricing
from ...storage.records.ledger import Ledger, of_user
from ...storage.workspace import Workspace
from ..pairs import filters
from ..shelves import as_json, lines, ranking
from .chosen import begun
from .flags import JSON_HELP, add_request, add_where, request_of, take_stack

if TYPE_CHECKING:
    from ...survey.survey import Survey

SHOWN: Final = 15
THE_RUN: Final = "the run"
"""For what an allocation is."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_request(parser, also_updates="; for gcp, also download current list prices")
    parser.set_defaults(driver="all")
    add_where(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "This command rents nothing.\n\n"
        "Examples:\n  recipe offers --where gpu=4090\n  recipe offers sft "
        "dataset=data.jsonl --driver vastai --json"
    )


def run(args: argparse.Namespace) -> int:
    where = filters(args.where)
    take_stack(args)
    asked, args.driver = args.driver, args.driver if args.stack else "local"
    with Workspace.open(args.workspace, read_only=True) as ws:
        asked = ",".join(names_of(ws.config, asked))
    if args.recipe is None and args.file is None:
        with Workspace.open(args.workspace, read_only=True) as ws:
            if args.stack:
                ws.on(args.stack)
            card = Wish(Need(gpus=1))
            found = _asked(
                args, ws, asked, lambda cluster: {"": Asked(Wish() if cluster else card)}, where
            )
    else:
        request = request_of(args)
        with begun(args.workspace, request) as ws:
            if args.stack:
                ws.on(args.stack)
            survey = look(ws, request, Choice())
            found = _asked(
                args,
                ws,
                asked,
                lambda cluster: wishes(ws, survey, asked, args.stack, cluster=cluster),
                where,
            )
    by_step: dict[str, list[Shelf]] = {}
    for step, shelf in found:
        by_step.setdefault(step, []).append(shelf)
    if args.json:
        print(
            json.dumps([shown for each in by_step.items() for shown in _as_json(*each)], indent=2)
        )
        return 0
    if not found:
        print("no step that is to run needs a rented machine")
    for step, shelves in by_step.items():
        asked_ones = [shelf for shelf in shelves if not shelf.failed]
        if asked_ones:
            print("\n".join(lines(step, asked_ones, SHOWN)))
        for shelf in shelves:
            if shelf.failed:
                print(f"warning: {shelf.driver} was not asked: {shelf.failed}", file=sys.stderr)
    return 0


def _as_json(step: str, shelves: Sequence[Shelf]) -> list[dict[str, object]]:
    ranks = {
        (shelf.driver, offer.id): rank for rank, (shelf, offer) in enumerate(ranking(shelves), 1)
    }
    return [as_json(step, shelf, ranks) for shelf in shelves]


class Asked(NamedTuple):
    """What is asked of drivers for a step, and how the cost of the run is computed."""

    wish: Wish
    on: HoursOn | None = None


def wishes(
    ws: Workspace, found: Survey, asked: str, stack: str = "", *, cluster: bool = False
) -> dict[str, Asked]:
    """What the steps that are to run need of rented machines, by the first step of each need; of a cluster, what all of them need together."""
    from ...execution.refusals import demand, takes
    from ...planning.plan import LOCAL

    if cluster:
        there = [n for n in found.todo if not found.plan.nodes[n].flags & LOCAL]
        wish = demand(found, lambda _spec: False, 0)
        hours = takes(ws, found, {wish.need: there})[wish.need].hours if there else None
        return {THE_RUN: Asked(wish._replace(hours=hours))} if there else {}
    market = (
        market_of(ws.config.driver(asked)) if asked != "all" and "," not in asked else "on-demand"
    )
    headed = bool(stack) and ws.config.stack(stack).head is not None
    by_need: dict[Need, tuple[str, list[int]]] = {}
    specs = found.plan.specs()
    for n in found.todo:
        node = found.plan.nodes[n]
        works = headed and specs[n].node_count > 1
        if (
            node.flags & LOCAL
            or not (specs[n].resources.gpus or works)
            or specs[n].select is not None
        ):
            continue
        by_need.setdefault(
            need_for(specs[n], market, images=not found.request.current_python), (node.id, [])
        )[1].append(n)
    keep = bool(stack) and bool(ws.config.stack(stack).keep)
    taken = takes(ws, found, {need: steps for need, (_first, steps) in by_need.items()})
    return {
        first: Asked(
            Wish(need, hours=taken[need].hours, home=taken[need].home, keep=keep), taken[need].on
        )
        for need, (first, _steps) in by_need.items()
    }


def _asked(
    args: argparse.Namespace,
    ws: Workspace,
    asked: str,
    wanted: Callable[[bool], Mapping[str, Asked]],
    where: Mapping[str, str],
) -> list[tuple[str, Shelf]]:
    """What each driver offers; `wanted` has the wishes for a cluster, and those for any other."""
    drivers, not_installed = offering.priced(ws, asked)
    if not_installed:
        print(
            f"recipe: not asked, because they are not installed: {', '.join(not_installed)} "
            f"({install_line(*(name for name in not_installed if name in DRIVERS))})",
            file=sys.stderr,
        )
    if args.update:
        lists = asyncio.run(offering.update(drivers))
        if not lists and args.recipe is None and args.file is None:
            raise CannotRun(
                f"{', '.join(drivers)}: prices are asked for each time, there is no list to update",
                fix="leave out --update",
            )
        for name, words in lists.items():
            print(f"recipe: {name}: {words}", file=sys.stderr)
    by_kind = {
        kind: wanted(kind) for kind in {driver.traits.allocates for driver in drivers.values()}
    }
    steps = [step for driver in drivers.values() for step in by_kind[driver.traits.allocates]]
    asking = {
        name: (
            driver,
            [
                each.wish._replace(filters=where)
                for each in by_kind[driver.traits.allocates].values()
            ],
        )
        for name, driver in drivers.items()
    }
    costing = pricing(ws, [each for wanted in by_kind.values() for each in wanted.values()])
    return list(zip(steps, asyncio.run(offering.shelves(asking, costing)), strict=True))


def on_market_of(ws: Workspace, driver: str, wish: Wish) -> Wish:
    """A wish on the market of a driver's settings."""
    if wish.need == Need():  # of a cluster, which has none
        return wish
    return wish._replace(need=replace(wish.need, market=market_of(ws.config.driver(driver))))


def pricing(ws: Workspace, asked: Iterable[Asked]) -> dict[Need, Pricing]:
    """How the cost of a run is computed, by needs on any market: by estimates, and by what the ledger says of earlier machines."""
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        history = History.of(ledger.since(0), time.time())
    return {replace(each.wish.need, market="any"): Pricing(history, each.on) for each in asked}
