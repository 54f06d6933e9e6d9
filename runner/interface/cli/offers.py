"""`recipe offers`: list rentable GPU offers for a recipe or for given requirements."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

from drivers import DRIVERS, install_line
from drivers.base import Driver, Need, Wish

from ...errors import CannotRun
from ...execution.session import preview
from ...execution.terms import Choice
from ...hosts.renting import offering
from ...hosts.renting.any_driver import driver_names
from ...hosts.renting.offering import Shelf
from ...storage.workspace import Workspace
from ..pairs import filters
from ..shelves import (
    OfferRequest,
    format_offers,
    on_market_of,
    pricing_of,
    rank_for_programs,
    wishes,
)
from .flags import JSON_HELP, add_request, add_where, request_of, take_stack
from .targets import open_for_run

SHOWN: Final = 15


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    updates = "; for gcp, also download current list prices"
    add_request(parser, also_updates=updates, all_drivers=True)
    add_where(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "This command rents nothing.\n\n"
        "Examples:\n  recipe offers --where gpu=4090\n  recipe offers sft "
        "dataset=data.jsonl --driver vastai --json"
    )


def run(args: argparse.Namespace) -> int:
    found = _ask_offers(args)
    by_step: dict[str, list[Shelf]] = {}
    for step, shelf in found:
        by_step.setdefault(step, []).append(shelf)
    if args.json:
        ranked = (rank_for_programs(step, shelves) for step, shelves in by_step.items())
        rows = list(chain.from_iterable(ranked))
        print(json.dumps(rows, indent=2))
        return 0
    if not found:
        print("no step in this plan requires a rented machine")
    for step, shelves in by_step.items():
        _print_offers(step, shelves)
    return 0


def _ask_offers(args: argparse.Namespace) -> list[tuple[str, Shelf]]:
    """Return the offers for the steps of a recipe; without a recipe, the offers for one GPU."""
    where = filters(args.where)
    take_stack(args)
    asked = args.driver
    if not args.stack:
        # `request_of` refuses `all` and lists of drivers.
        args.driver = "local"
    with Workspace.open(args.workspace, read_only=True) as ws:
        asked = ",".join(driver_names(ws.config, asked))
    if args.recipe is None and args.file is None:
        with Workspace.open(args.workspace, read_only=True) as ws:
            if args.stack:
                ws.on(args.stack)
            return _ask_drivers(args, ws, asked, _request_any_card, where)
    request = request_of(args)
    with open_for_run(args.workspace, request) as ws:
        if args.stack:
            ws.on(args.stack)
        survey = preview(ws, request, Choice())

        def request_offers(cluster: bool) -> dict[str, OfferRequest]:
            return wishes(ws, survey, asked, args.stack, cluster=cluster)

        return _ask_drivers(args, ws, asked, request_offers, where)


def _request_any_card(cluster: bool) -> dict[str, OfferRequest]:
    """Return the requirements without a recipe: one GPU, or none for a cluster."""
    if cluster:
        return {"": OfferRequest(Wish())}
    return {"": OfferRequest(Wish(Need(gpus=1)))}


def _print_offers(step: str, shelves: Sequence[Shelf]) -> None:
    """Print the offers for a step, and a warning for each provider that failed to answer."""
    answered = [shelf for shelf in shelves if not shelf.failed]
    if answered:
        print("\n".join(format_offers(step, answered, SHOWN)))
    for shelf in shelves:
        if shelf.failed:
            warning = f"cannot get offers from {shelf.driver}: {shelf.failed}"
            print(f"warning: {warning}", file=sys.stderr)


def _ask_drivers(
    args: argparse.Namespace,
    ws: Workspace,
    asked: str,
    wanted: Callable[[bool], Mapping[str, OfferRequest]],
    where: Mapping[str, str],
) -> list[tuple[str, Shelf]]:
    """Return the offers of each driver for each step, as pairs of step and shelf.

    `wanted` returns the requirements by step, given True for a cluster and False for other drivers.
    Raises CannotRun.
    """
    drivers = _find_drivers(ws, asked)
    if args.update:
        _update_prices(drivers, is_required=args.recipe is None and args.file is None)
    kinds = {driver.traits.allocates for driver in drivers.values()}
    by_kind = {kind: wanted(kind) for kind in kinds}
    steps: list[str] = []
    asking: dict[str, tuple[Driver, list[Wish]]] = {}
    for name, driver in drivers.items():
        requests = by_kind[driver.traits.allocates]
        steps += requests
        own = [on_market_of(ws, name, each.wish) for each in requests.values()]
        asking[name] = (driver, [wish._replace(filters=where) for wish in own])
    requested = chain.from_iterable(requests.values() for requests in by_kind.values())
    pricing = pricing_of(ws, requested)
    shelves = asyncio.run(offering.ask_offers(asking, pricing))
    return list(zip(steps, shelves, strict=True))


def _find_drivers(ws: Workspace, asked: str) -> Mapping[str, Driver]:
    """Return the installed drivers in `asked` that rent machines, and report the others.

    Raises CannotRun without drivers.
    """
    drivers, not_installed = offering.priced_drivers(ws, asked)
    extras = [name for name in not_installed if name in DRIVERS]
    if not drivers:
        install = install_line(*(extras or ["vastai"]))
        others = "; or gcp, prime, runpod in its place" if not_installed else ""
        raise CannotRun("no driver that rents machines is installed", fix=f"{install}{others}")
    if not_installed:
        print(
            f"recipe: skipped drivers that are not installed: {', '.join(not_installed)} "
            f"({install_line(*extras)})",
            file=sys.stderr,
        )
    return drivers


def _update_prices(drivers: Mapping[str, Driver], *, is_required: bool) -> None:
    """Fetch the drivers' price lists.

    Raises CannotRun if an update is required and no driver has a list.
    """
    statuses = asyncio.run(offering.update_prices(drivers))
    if not statuses and is_required:
        raise CannotRun(
            f"{', '.join(drivers)}: has no price list to update; prices are always current",
            fix="remove `--update`",
        )
    for name, words in statuses.items():
        print(f"recipe: {name}: {words}", file=sys.stderr)
