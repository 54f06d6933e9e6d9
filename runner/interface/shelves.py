"""What drivers offer, as tables for people and as data for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from drivers.base import Offer, Wish

from ..hosts.renting import offering
from ..hosts.renting.offering import Shelf
from .tables import aligned

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
