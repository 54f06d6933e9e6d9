"""What failed rests: which failure keeps an offer, a zone or a provider from being asked, and for how long.  Pure; the ledger is what is known.

An offer that rests is taken when nothing else is left: a refused order costs nothing, and a machine that is not as sold is given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from drivers.base import Offer

from ...digest import of_value
from ...storage.records.ledger import LeaseRow

Failure: TypeAlias = Literal["taken", "failed", "lacks", "denied"]

RESTS: Final[Mapping[Failure, float]] = {
    "taken": 600.0,  # the order was refused: another has the machine, or the zone has none left
    "failed": 3600.0,  # the machine did not come up, or was gone before it was up
    "lacks": 86_400.0,  # it came up with less than was sold: that is not mended by itself
    "denied": 600.0,  # at most, where it cannot be seen that it was mended: RunPod tells its credit, and Google its billing, only at an order
}
"""Seconds for which an offer that failed so is taken last, or a provider that denied an order is sent no other with the same settings."""
ZONE: Final = 2
"""Offers of one zone that rest, from which on the whole zone does."""
TAKEN: Final = "it cannot be had"
"""How the reason begins of an order that was refused."""
FAILED: Final = "it did not come up"
"""How the reason begins for which a machine was given back that was gone, or of no use, before a step ran there."""
LACKS: Final = "it is less than was sold"
"""How the reason begins for which such a machine was given back."""
DENIED: Final = "the account is refused"
"""How the reason begins of an order that the provider refuses, whatever is asked for: it rests until the settings change, or its time is over."""
_BY_REASON: Final[Mapping[str, Failure]] = {
    TAKEN: "taken",
    FAILED: "failed",
    LACKS: "lacks",
    DENIED: "denied",
}


class Resting(NamedTuple):
    """What is taken last."""

    offers: frozenset[str]
    zones: frozenset[str]

    def has(self, offer: Offer) -> bool:
        """Whether an offer rests, by itself or with its zone."""
        return offer.id in self.offers or offer.data.get("zone") in self.zones


def resting(rows: Iterable[LeaseRow], driver: str, now: float) -> Resting:
    """What rests of a driver, by all leases that were asked for within the longest rest."""
    zones: dict[str, str] = {}
    for row in rows:
        what = failure(row) if row.driver == driver else None
        if what is not None and what != "denied" and now - (row.gone or now) < RESTS[what]:
            data = row.offer.get("data")
            zones[str(row.offer.get("id", ""))] = (
                str(data.get("zone", "")) if isinstance(data, Mapping) else ""
            )
    several = {zone for zone, count in Counter(zones.values()).items() if zone and count >= ZONE}
    return Resting(frozenset(zones), frozenset(several))


def failure(row: LeaseRow) -> Failure | None:
    """How a lease failed; None where it did not: one that was cancelled on its way up says nothing of its offer."""
    return (
        next((what for begins, what in _BY_REASON.items() if row.reason.startswith(begins)), None)
        if row.state == "GONE"
        else None
    )


def denial(settings: Mapping[str, object], account: Iterable[tuple[str, str]], why: str) -> str:
    """The reason of an order that was refused to an account: with a digest of what has to change before another is sent."""
    said = [[name, words] for name, words in account if name != "clock"]
    return f"{DENIED} ({of_value('denied/1', [sorted((name, str(value)) for name, value in settings.items()), said])[:8]}): {why}"


def denied(row: LeaseRow | None, now: float) -> bool:
    """Whether a provider rests whose last lease is `row`, unless settings or account are others than they were."""
    return (
        row is not None and failure(row) == "denied" and now - (row.gone or now) < RESTS["denied"]
    )
