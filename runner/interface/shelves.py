"""What steps need of rented machines, and what drivers offer, as tables for people and as data for programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Need, Offer, Wish

from ..execution.signals import call_beside_loop
from ..hosts.renting import offering
from ..hosts.renting.needs import market_of, need_for
from ..hosts.renting.offering import Shelf, rank_offers
from ..hosts.renting.totals import History, HoursOn, Pricing
from ..storage.records.ledger import Ledger, of_user
from .tables import align

if TYPE_CHECKING:
    from ..storage.workspace import Workspace
    from ..survey.survey import Survey

THE_RUN: Final = "the run"
"""For what an allocation is."""
HEAD: Final = (
    "provider",
    "offer",
    "GPU",
    "memory",
    "region",
    "market",
    "$/h",
    "hours",
    "egress $",
    "total $",
    "reliable",
    "longest",
)


GUESSED: Final = "~: estimate, not measured by a run yet ({})"
UNKNOWN: Final = "the run time on {} is unknown; its offers are listed last"


class Asked(NamedTuple):
    """What is asked of drivers for a step, and how the cost of the run is computed."""

    wish: Wish
    on: HoursOn | None = None


def wishes(
    ws: Workspace, found: Survey, asked: str, stack: str = "", *, cluster: bool = False
) -> dict[str, Asked]:
    """What the steps that are to run need of rented machines, by the first step of each need; of a cluster, what all of them need together."""
    from ..execution.refusals import compose_wish, estimate_takes
    from ..planning.plan import LOCAL

    if cluster:
        there = [n for n in found.todo if not found.plan.nodes[n].flags & LOCAL]
        wish = compose_wish(found, lambda _spec: False, 0)
        hours = estimate_takes(ws, found, {wish.need: there})[wish.need].hours if there else None
        return {THE_RUN: Asked(wish._replace(hours=hours))} if there else {}
    market = (
        market_of(ws.config.driver(asked)) if asked != "all" and "," not in asked else "on-demand"
    )
    by_need: dict[Need, tuple[str, list[int]]] = {}
    specs = found.plan.specs()
    for n in found.todo:
        node = found.plan.nodes[n]
        works = specs[n].node_count > 1
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
    taken = estimate_takes(ws, found, {need: steps for need, (_first, steps) in by_need.items()})
    return {
        first: Asked(
            Wish(need, hours=taken[need].hours, home=taken[need].home, keep=keep), taken[need].on
        )
        for need, (first, _steps) in by_need.items()
    }


def on_market_of(ws: Workspace, driver: str, wish: Wish) -> Wish:
    """A wish on the market of a driver's settings."""
    if wish.need == Need():  # of a cluster, which has none
        return wish
    return wish._replace(need=replace(wish.need, market=market_of(ws.config.driver(driver))))


def of_driver(ws: Workspace, found: Survey, name: str) -> dict[str, Shelf]:
    """What a driver offers for the steps that are to run; nothing of one that rents nothing.

    Raises Infrastructure where it cannot be asked, Invalid.
    """
    driver = offering.driver_that_rents(ws, name)
    if driver is None:
        return {}
    asked = wishes(ws, found, name, cluster=driver.traits.allocates)
    wanted = [on_market_of(ws, name, each.wish) for each in asked.values()]
    asking = {name: (driver, wanted)}
    costing = pricing_of(ws, asked.values())
    shelves = call_beside_loop(
        lambda: asyncio.run(offering.ask_offers(asking, costing)), lambda: None
    )
    return dict(zip(asked, shelves, strict=True))


def pricing_of(ws: Workspace, asked: Iterable[Asked]) -> dict[Need, Pricing]:
    """How the cost of a run is computed, by needs on any market: by estimates, and by what the ledger says of earlier machines."""
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        history = History.of(ledger.since(0), time.time())
    return {replace(each.wish.need, market="any"): Pricing(history, each.on) for each in asked}


def lines(step: str, shelves: Sequence[Shelf], most: int) -> list[str]:
    """What drivers offer for a step, for people: one table, the cheapest run first."""
    ranked = rank_offers(shelves)
    rows = [_row(offer, shelf) for shelf, offer in ranked[:most]]
    table = align([HEAD, *rows], right={3, 6, 7, 8, 9, 10, 11}) if rows else []
    more = [f"… {len(ranked) - most} more"] if len(ranked) > most else []
    whose = f" for {step}" if step else ""
    heads = [
        f"{shelf.driver}{whose}: {len(shelf.offers)} offer(s)"
        + f"; {shelf.ends}" * bool(shelf.ends)
        for shelf in shelves
    ]
    told = [
        words
        for shelf in shelves
        for words in (shelf.unsaid(), _left_out(shelf, several=len(shelves) > 1))
        if words
    ]
    told = [*dict.fromkeys([*told, *_hours_said(ranked)])]
    if len(shelves) == 1:
        return [*heads, *table, *more, *told]
    names = ", ".join(shelf.driver for shelf in shelves if shelf.offers)
    title = (
        f"{len(ranked)} offer(s){whose}{f' of {names}' if names else ''}, the cheapest run first"
    )
    return [title, *table, *more, *heads, *told]


def _left_out(shelf: Shelf, *, several: bool) -> str:
    words = shelf.left_out()
    return f"{shelf.driver}: {words}" if words and several else words


def _hours_said(ranked: Sequence[tuple[Shelf, Offer]]) -> list[str]:
    """What the hours are from where no run measured them, and of which GPUs they are not known though they are of others."""
    totals = [(shelf.total_of(offer), offer.resources.gpu) for shelf, offer in ranked]
    bases = {total.hours.basis for total, _ in totals if total.hours and total.hours.guessed}
    unknown = {gpu or "machines without a GPU" for total, gpu in totals if total.hours is None}
    return [
        *([GUESSED.format("; ".join(sorted(bases)))] if bases else ()),
        *(
            [UNKNOWN.format(", ".join(sorted(unknown)))]
            if unknown and any(total.hours for total, _ in totals)
            else ()
        ),
    ]


def _row(offer: Offer, shelf: Shelf) -> tuple[str, ...]:
    have, total, wish = offer.resources, shelf.total_of(offer), shelf.wish
    hours = total.hours
    return (
        offer.driver,
        offer.id + f", {offer.nodes} nodes" * (offer.nodes > 1),
        f"{have.gpus or 0} x {have.gpu}" if have.gpus else "none",
        f"{(have.gpu_memory or 0) / 1e9:.0f} GB",
        offer.region,
        offer.market,
        f"{offer.price:.3f}",
        "?" if hours is None else f"{'~' * hours.guessed}{hours.hours:.1f}",
        "?" if offer.egress_price and wish.home is None else f"{total.egress:.2f}",
        "?" if total.usd is None else f"{total.usd:.2f}",
        "?" if offer.reliability is None else f"{offer.reliability:.3f}",
        "?" if offer.longest is None else f"{offer.longest:.0f} h",
    )


def describe_choice(found: Mapping[str, Sequence[Shelf]]) -> list[str]:
    """Which machine a run would rent for each step, and which come next, as `recipe plan` shows it."""
    lines = []
    for step, shelves in found.items():
        ranked = rank_offers(shelves)[: 1 + offering.RUNNERS_UP]
        for place, (shelf, offer) in enumerate(ranked):
            row, total = _row(offer, shelf), shelf.total_of(offer)
            cost = (
                f", {row[7]} h, ${total.usd:.2f}"
                + f" with ${total.egress:.2f} of egress" * (total.egress > 0)
                if total.usd is not None
                else ""
            )
            what = (
                f"{'allocates' if offer.queued else 'rents'} for {step}"
                if not place
                else f"{'':9}else"
            )
            kind = (
                row[1]
                if offer.queued
                else f"{offer.id}, {row[2]} of {row[3]}, {offer.region}, {offer.market}"
            )
            lines.append(f"{what}: {offer.driver} {kind}, ${row[6]} an hour{cost}")
        several = len(shelves) > 1
        for shelf in shelves:
            if not shelf.offers and (not ranked or shelf.failed):
                lines.append(
                    f"rents for {step}: {shelf.failed or f'{shelf.driver} has no matching machine'}"
                )
            ends = f"{shelf.driver}: {shelf.ends}" if several and shelf.ends else shelf.ends
            lines += [
                f"{'':9}{words}"
                for words in (shelf.unsaid(), _left_out(shelf, several=several), ends)
                if words
            ]
    return lines


def rank_for_programs(step: str, shelves: Sequence[Shelf]) -> list[dict[str, object]]:
    """What all drivers offer for a step, for programs, each offer with its place among those of all."""
    ranks = {
        (shelf.driver, offer.id): rank
        for rank, (shelf, offer) in enumerate(rank_offers(shelves), 1)
    }
    return [as_json(step, shelf, ranks) for shelf in shelves]


def as_json(
    step: str, shelf: Shelf, ranks: Mapping[tuple[str, str], int] = {}
) -> dict[str, object]:
    """What a driver offers for a step, for programs.  `ranks`: of offers among those of all drivers, by driver and id, from 1."""
    wish = shelf.wish
    offers = [
        {
            "id": offer.id,
            "rank": ranks.get((shelf.driver, offer.id), number),
            "gpu": offer.resources.gpu,
            "gpus": offer.resources.gpus,
            "gpu_memory": offer.resources.gpu_memory,
            "region": offer.region,
            "market": offer.market,
            "usd_an_hour": offer.price,
            "usd_an_hour_of_disk": offer.disk_price,
            "usd_a_gb_of_egress": offer.egress_price,
            "usd_of_egress": None if offer.egress_price and wish.home is None else total.egress,
            "hours": total.hours.hours if total.hours else None,
            "hours_from": total.hours.basis if total.hours else "",
            "hours_guessed": bool(total.hours and total.hours.guessed),
            "usd_of_boot": total.boot,
            "usd_of_preemptions": total.lost,
            "usd": total.usd,
            "reliability": offer.reliability,
            "longest_hours": offer.longest,
            "fetched": offer.fetched,
        }
        for number, offer in enumerate(shelf.offers, 1)
        for total in (shelf.total_of(offer),)
    ]
    return {
        "driver": shelf.driver, "step": step, "hours": wish.hours, "bytes_home": wish.home, "ends": shelf.ends, "left_out": dict(shelf.excluded),
        "failed": shelf.failed, "offers": offers,
    }  # fmt: skip
