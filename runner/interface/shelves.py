"""What steps need of rented machines, and what drivers offer, as tables for people and as data for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from drivers.base import Need, Offer, Wish

from ..hosts.renting import offering
from ..hosts.renting.needs import market_of, need_for
from ..hosts.renting.offering import Shelf
from .tables import aligned

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


def wishes(
    ws: Workspace, found: Survey, asked: str, stack: str = "", *, cluster: bool = False
) -> dict[str, Wish]:
    """What the steps that are to run need of rented machines, by the first step of each need; of a cluster, what all of them need together."""
    from ..execution.refusals import demand, takes
    from ..planning.plan import LOCAL

    if cluster:
        there = [n for n in found.todo if not found.plan.nodes[n].flags & LOCAL]
        wish = demand(found, lambda _spec: False, 0)
        hours = takes(ws, found, {wish.need: there})[wish.need].hours if there else None
        return {THE_RUN: wish._replace(hours=hours)} if there else {}
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
        first: Wish(need, hours=taken[need].hours, home=taken[need].home, keep=keep)
        for need, (first, _steps) in by_need.items()
    }


def lines(step: str, shelf: Shelf, most: int) -> list[str]:
    """What a driver offers for a step, for people."""
    head = f"{shelf.driver}{f' for {step}' if step else ''}: {len(shelf.offers)} offer(s)"
    rows = [_row(offer, shelf.wish) for offer in shelf.offers[:most]]
    table = aligned([HEAD, *rows], right={3, 6, 7, 8, 9, 10, 11}) if rows else []
    more = [f"… {len(shelf.offers) - most} more"] if len(shelf.offers) > most else []
    return [
        head + (f"; {shelf.ends}" if shelf.ends else ""),
        *table,
        *more,
        *(words for words in (shelf.unsaid(), shelf.left_out()) if words),
    ]


def _row(offer: Offer, wish: Wish) -> tuple[str, ...]:
    have, usd = offer.resources, offering.total(offer, wish)
    return (
        offer.driver,
        offer.id + f", {offer.nodes} nodes" * (offer.nodes > 1),
        f"{have.gpus or 0} x {have.gpu}" if have.gpus else "none",
        f"{(have.gpu_memory or 0) / 1e9:.0f} GB",
        offer.region,
        offer.market,
        f"{offer.price:.3f}",
        "?" if wish.hours is None else f"{wish.hours:.1f}",
        "?"
        if offer.egress_price and wish.home is None
        else f"{offering.egress(offer, wish.home):.2f}",
        "?" if usd is None else f"{usd:.2f}",
        "?" if offer.reliability is None else f"{offer.reliability:.3f}",
        "?" if offer.longest is None else f"{offer.longest:.0f} h",
    )


def chosen(found: Mapping[str, Shelf]) -> list[str]:
    """Which machine a run would rent for each step, and which come next, as `recipe plan` shows it."""
    lines = []
    for step, shelf in found.items():
        for place, offer in enumerate(shelf.offers[: 1 + offering.RUNNERS_UP]):
            row = _row(offer, shelf.wish)
            usd, extra = offering.total(offer, shelf.wish), offering.egress(offer, shelf.wish.home)
            cost = (
                f", {shelf.wish.hours:.1f} h, ${usd:.2f}"
                + f" with ${extra:.2f} of egress" * (extra > 0)
                if usd is not None
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
        if not shelf.offers:
            lines.append(
                f"rents for {step}: {shelf.failed or f'{shelf.driver} offers no machine that does'}"
            )
        lines += [
            f"{'':9}{words}" for words in (shelf.unsaid(), shelf.left_out(), shelf.ends) if words
        ]
    return lines


def as_json(step: str, shelf: Shelf) -> dict[str, object]:
    """What a driver offers for a step, for programs."""
    wish = shelf.wish
    offers = [
        {
            "id": offer.id,
            "gpu": offer.resources.gpu,
            "gpus": offer.resources.gpus,
            "gpu_memory": offer.resources.gpu_memory,
            "region": offer.region,
            "market": offer.market,
            "usd_an_hour": offer.price,
            "usd_an_hour_of_disk": offer.disk_price,
            "usd_a_gb_of_egress": offer.egress_price,
            "usd_of_egress": None
            if offer.egress_price and wish.home is None
            else offering.egress(offer, wish.home),
            "usd": offering.total(offer, wish),
            "reliability": offer.reliability,
            "longest_hours": offer.longest,
            "fetched": offer.fetched,
        }
        for offer in shelf.offers
    ]
    return {
        "driver": shelf.driver, "step": step, "hours": wish.hours, "bytes_home": wish.home, "ends": shelf.ends, "left_out": dict(shelf.excluded),
        "failed": shelf.failed, "offers": offers,
    }  # fmt: skip
