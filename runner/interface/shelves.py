"""Find the rental offers for the steps of a run, and format them as tables or JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Need, Offer, Wish

from ..execution.refusals import compose_wish, estimate_takes
from ..execution.signals import call_beside_loop
from ..hosts.renting import offering
from ..hosts.renting.needs import AnyMarket, market_of, need_for
from ..hosts.renting.offering import Shelf, rank_offers
from ..hosts.renting.totals import CostModel, History, Hours, HoursOn, Total
from ..planning.plan import LOCAL
from ..storage.records.ledger import Ledger, of_user
from .tables import align

if TYPE_CHECKING:
    from ..storage.workspace import Workspace
    from ..survey.survey import Survey

THE_RUN: Final = "the run"
"""Label of an allocation on a cluster, which serves all steps together."""
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
_RIGHT_COLUMNS: Final = frozenset({3, 6, 7, 8, 9, 10, 11})
"""Indices of the columns with numbers in `HEAD`."""
GUESSED: Final = "~: estimate, not measured by a run yet ({})"
PARTIAL: Final = "+: without {}, whose duration is unknown"
UNKNOWN: Final = "the run time on {} is unknown; its offers are listed last"


class OfferRequest(NamedTuple):
    """A request for offers for a step: the requirements `wish`, and `on`, the estimated hours by
    GPU type.
    """

    wish: Wish
    on: HoursOn | None = None


def wishes(
    ws: Workspace, found: Survey, asked: str, stack: str = "", *, cluster: bool = False
) -> dict[str, OfferRequest]:
    """Return the machine requirements of the steps that will run, by the first step with each
    requirement.

    For a cluster, return a single requirement for all steps together.
    """
    if cluster:
        return _cluster_wish(ws, found)
    market: AnyMarket = "on-demand"
    if asked != "all" and "," not in asked:
        market = market_of(ws.config.driver(asked))
    keep = bool(stack) and bool(ws.config.stack(stack).keep)
    return _rental_wishes(ws, found, market, keep=keep)


def _cluster_wish(ws: Workspace, found: Survey) -> dict[str, OfferRequest]:
    """Return the requirement of all steps together; empty if no step may leave this machine."""
    steps = [n for n in found.todo if not found.plan.nodes[n].flags & LOCAL]
    wish = compose_wish(found, lambda _spec: False, 0)
    if not steps:
        return {}
    hours = estimate_takes(ws, found, {wish.need: steps})[wish.need].hours
    return {THE_RUN: OfferRequest(wish._replace(hours=hours))}


def _rental_wishes(
    ws: Workspace, found: Survey, market: AnyMarket, *, keep: bool
) -> dict[str, OfferRequest]:
    """Return each distinct requirement of the steps that need rented machines, by its first step."""
    specs = found.plan.specs()
    steps: dict[Need, list[int]] = {}
    for n in found.todo:
        spec = specs[n]
        needs_machine = spec.resources.gpus or spec.node_count > 1
        # `recipe` itself executes a `select` step, by comparing metrics.
        stays_here = found.plan.nodes[n].flags & LOCAL or spec.select is not None
        if stays_here or not needs_machine:
            continue
        need = need_for(spec, market, images=not found.request.current_python)
        steps.setdefault(need, []).append(n)
    taken = estimate_takes(ws, found, steps)
    wanted = {}
    for need, numbers in steps.items():
        takes = taken[need]
        wish = Wish(need, hours=takes.hours, home=takes.download_bytes, keep=keep)
        wanted[found.plan.nodes[numbers[0]].id] = OfferRequest(wish, takes.hours_on)
    return wanted


def on_market_of(ws: Workspace, driver: str, wish: Wish) -> Wish:
    """Return the wish with the market (such as spot or on-demand) from the driver's settings."""
    if wish.need == Need():  # the empty need of a cluster, which has no markets
        return wish
    return wish._replace(need=replace(wish.need, market=market_of(ws.config.driver(driver))))


def offers_of_driver(ws: Workspace, found: Survey, name: str) -> dict[str, Shelf]:
    """Return a driver's offers for the steps that will run, by step.

    Empty for a driver without rentals.

    Raises Invalid, or Infrastructure if the provider cannot be reached.
    """
    driver = offering.create_renter(ws, name)
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


def pricing_of(ws: Workspace, asked: Iterable[OfferRequest]) -> dict[Need, CostModel]:
    """Return the cost model of each need, from run time estimates and the ledger of earlier
    rentals.  Needs have the market "any".
    """
    with Ledger.open(of_user(ws.environ), read_only=True) as ledger:
        history = History.from_rows(ledger.since(0), time.time())
    return {replace(each.wish.need, market="any"): CostModel(history, each.on) for each in asked}


def format_offers(step: str, shelves: Sequence[Shelf], most: int) -> list[str]:
    """Format the offers of drivers for a step as one table of at most `most` rows, cheapest run
    first.
    """
    ranked = rank_offers(shelves)
    whose = f" for {step}" if step else ""
    heads = [_head(shelf, whose) for shelf in shelves]
    table = _offer_table(ranked, most)
    notes = _table_notes(shelves, ranked)
    if len(shelves) == 1:
        return [*heads, *table, *notes]
    return [_title(shelves, len(ranked), whose), *table, *heads, *notes]


def _title(shelves: Sequence[Shelf], count: int, whose: str) -> str:
    """Return the title of the offers of several drivers."""
    names = [shelf.driver for shelf in shelves if shelf.offers]
    of = f" of {', '.join(names)}" if names else ""
    return f"{count} offer(s){whose}{of}, the cheapest run first"


def _head(shelf: Shelf, whose: str) -> str:
    """Return the number of a driver's offers, and the end of its rentals."""
    ends = f"; {shelf.ends}" if shelf.ends else ""
    return f"{shelf.driver}{whose}: {len(shelf.offers)} offer(s){ends}"


def _offer_table(ranked: Sequence[tuple[Shelf, Offer]], most: int) -> list[str]:
    """Return the table of the first `most` offers, and the number of the others."""
    rows = [_row(offer, shelf) for shelf, offer in ranked[:most]]
    table = align([HEAD, *rows], _RIGHT_COLUMNS) if rows else []
    hidden = len(ranked) - most
    return [*table, f"… {hidden} more"] if hidden > 0 else table


def _table_notes(shelves: Sequence[Shelf], ranked: Sequence[tuple[Shelf, Offer]]) -> list[str]:
    """Return the distinct notes on egress, excluded offers and run times."""
    notes = []
    for shelf in shelves:
        notes += [shelf.egress_note(), _left_out(shelf, several=len(shelves) > 1)]
    notes += _time_notes(ranked)
    return list(filter(None, dict.fromkeys(notes)))


def _left_out(shelf: Shelf, *, several: bool) -> str:
    words = shelf.describe_exclusions()
    if words and several:
        return f"{shelf.driver}: {words}"
    return words


def _time_notes(ranked: Sequence[tuple[Shelf, Offer]]) -> list[str]:
    """Return the notes on run times: the basis of estimates, and the GPUs without an estimate if
    others have one.
    """
    bases: set[str] = set()
    unknown: set[str] = set()
    without: set[str] = set()
    has_known = False
    for shelf, offer in ranked:
        hours = shelf.total_of(offer).hours
        if hours is None:
            unknown.add(offer.resources.gpu or "machines without a GPU")
            continue
        has_known = True
        without.update(hours.without)
        if hours.guessed:
            bases.add(hours.basis)
    notes = []
    if bases:
        notes.append(GUESSED.format("; ".join(sorted(bases))))
    if without:
        notes.append(PARTIAL.format(", ".join(sorted(without))))
    if unknown and has_known:
        notes.append(UNKNOWN.format(", ".join(sorted(unknown))))
    return notes


def _row(offer: Offer, shelf: Shelf) -> tuple[str, ...]:
    """Return the cells of an offer below `HEAD`; a question mark for an unknown number."""
    have, total = offer.resources, shelf.total_of(offer)
    nodes = f", {offer.nodes} nodes" if offer.nodes > 1 else ""
    gpus = f"{have.gpus} x {have.gpu}" if have.gpus else "none"
    hours, more = "?", ""  # without hours, the total is unknown too
    if total.hours is not None:
        guessed = "~" if total.hours.guessed else ""
        more = "+" if total.hours.without else ""
        hours = f"{guessed}{total.hours.hours:.1f}{more}"
    return (
        offer.driver,
        f"{offer.id}{nodes}",
        gpus,
        f"{(have.gpu_memory or 0) / 1e9:.0f} GB",
        offer.region,
        offer.market,
        f"{offer.price:.3f}",
        hours,
        _number(_egress_usd(offer, shelf.wish, total), "{:.2f}"),
        _number(total.usd, "{:.2f}") + more,
        _number(offer.reliability, "{:.3f}"),
        _number(offer.longest, "{:.0f} h"),
    )


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else form.format(value)


def _egress_usd(offer: Offer, wish: Wish, total: Total) -> float | None:
    """Return the cost of downloading the results; None if charged and of unknown size."""
    if offer.egress_price and wish.home is None:
        return None
    return total.egress


def describe_choice(found: Mapping[str, Sequence[Shelf]]) -> list[str]:
    """Return the lines of `recipe plan` about rentals: the chosen offer of each step and its
    runners-up.
    """
    lines: list[str] = []
    for step, shelves in found.items():
        lines += _describe_rental(step, shelves)
    return lines


def _describe_rental(step: str, shelves: Sequence[Shelf]) -> Iterator[str]:
    """Yield the chosen offer of a step and its runners-up, then the notes of each driver."""
    ranked = rank_offers(shelves)[: 1 + offering.RUNNERS_UP]
    for place, (shelf, offer) in enumerate(ranked):
        verb = "allocates" if offer.queued else "rents"
        head = f"{'':9}else" if place else f"{verb} for {step}"
        yield f"{head}: {_describe_offer(offer, shelf)}"
    for shelf in shelves:
        # Beside the offers of other drivers, only a failure of a driver is worth a line.
        if not shelf.offers and (shelf.failed or not ranked):
            yield f"rents for {step}: {_explain_no_offers(shelf)}"
        for note in _shelf_notes(shelf, several=len(shelves) > 1):
            yield f"{'':9}{note}"
    for note in _time_notes(ranked):
        yield f"{'':9}{note}"


def _explain_no_offers(shelf: Shelf) -> str:
    return shelf.failed or f"{shelf.driver} has no matching machine"


def _shelf_notes(shelf: Shelf, *, several: bool) -> list[str]:
    """Return the notes on unsaid facts, excluded offers and the end of a rental."""
    ends = shelf.ends
    if several and ends:
        ends = f"{shelf.driver}: {ends}"
    notes = [shelf.egress_note(), _left_out(shelf, several=several), ends]
    return list(filter(None, notes))


def _describe_offer(offer: Offer, shelf: Shelf) -> str:
    """Return the driver, the machine, the hourly price and, if known, the cost of the run."""
    row, total = dict(zip(HEAD, _row(offer, shelf), strict=True)), shelf.total_of(offer)
    kind = f"{offer.id}, {row['GPU']} of {row['memory']}, {offer.region}, {offer.market}"
    if offer.queued:
        kind = row["offer"]
    cost = ""
    if total.usd is not None:
        cost = f", {row['hours']} h, ${row['total $']}"
        if total.egress > 0:
            cost += f" with ${total.egress:.2f} of egress"
    return f"{offer.driver} {kind}, ${row['$/h']} an hour{cost}"


def rank_for_programs(step: str, shelves: Sequence[Shelf]) -> list[dict[str, object]]:
    """Return the offers of all drivers for a step as JSON data, with their rank among all offers."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, (shelf, offer) in enumerate(rank_offers(shelves), 1):
        ranks[shelf.driver, offer.id] = rank
    return [as_json(step, shelf, ranks) for shelf in shelves]


def as_json(
    step: str, shelf: Shelf, ranks: Mapping[tuple[str, str], int] = {}
) -> dict[str, object]:
    """Return the offers of a driver for a step as JSON data.

    `ranks` maps driver and offer id to the rank among all drivers, from 1.
    """
    offers = []
    for number, offer in enumerate(shelf.offers, 1):
        rank = ranks.get((shelf.driver, offer.id), number)
        offers.append(_offer_json(offer, shelf, rank))
    return {
        "driver": shelf.driver,
        "step": step,
        "hours": shelf.wish.hours,
        "bytes_home": shelf.wish.home,
        "ends": shelf.ends,
        "left_out": dict(shelf.excluded),
        "failed": shelf.failed,
        "offers": offers,
    }


def _offer_json(offer: Offer, shelf: Shelf, rank: int) -> dict[str, object]:
    total = shelf.total_of(offer)
    return {
        "id": offer.id,
        "rank": rank,
        "gpu": offer.resources.gpu,
        "gpus": offer.resources.gpus,
        "gpu_memory": offer.resources.gpu_memory,
        "region": offer.region,
        "market": offer.market,
        "usd_an_hour": offer.price,
        "usd_an_hour_of_disk": offer.disk_price,
        "usd_a_gb_of_egress": offer.egress_price,
        "usd_of_egress": _egress_usd(offer, shelf.wish, total),
        **_hours_json(total.hours),
        "usd_of_boot": total.boot,
        "usd_of_preemptions": total.lost,
        "usd": total.usd,
        "reliability": offer.reliability,
        "longest_hours": offer.longest,
        "fetched": offer.fetched,
    }


def _hours_json(hours: Hours | None) -> dict[str, object]:
    if hours is None:
        return {"hours": None, "hours_from": "", "hours_guessed": False, "hours_without": []}
    return {
        "hours": hours.hours,
        "hours_from": hours.basis,
        "hours_guessed": hours.guessed,
        "hours_without": list(hours.without),
    }
