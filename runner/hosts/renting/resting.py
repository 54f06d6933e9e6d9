"""What failed rests: which failure keeps an offer, a zone or a provider from being asked, and for how long.  Pure; the ledger is what is known.

An offer that rests is taken when nothing else is left: a refused order costs nothing, and a machine that is not as sold is given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from drivers.base import HostLost, Offer

from ...digest import of_value
from ...failures import LeaseFailure
from ...storage.records.ledger import LeaseRow

RESTS: Final[Mapping[str, float]] = {
    LeaseFailure.TAKEN: 600.0,
    LeaseFailure.FAILED: 3600.0,
    LeaseFailure.LACKS: 86_400.0,  # that is not mended by itself
    # At most, where it cannot be seen that it was mended: RunPod tells its credit, and Google its billing, only at an order.
    LeaseFailure.DENIED: 600.0,
}
"""Seconds for which an offer that failed so is taken last, or a provider that denied an order is sent no other with the same settings."""
ZONE: Final = 2
"""Offers of one zone that rest, from which on the whole zone does."""


class NotAsSold(HostLost):
    """A machine that was rented just now is of no use: another offer is taken.  `failure` says why."""

    def __init__(self, message: str, failure: LeaseFailure) -> None:
        super().__init__(message)
        self.failure = failure


class Resting(NamedTuple):
    """What is taken last."""

    offers: frozenset[str]
    zones: frozenset[str]

    def has(self, offer: Offer) -> bool:
        """Whether an offer rests, by itself or with its zone."""
        return offer.id in self.offers or offer.data.get("zone") in self.zones


def find_resting(rows: Iterable[LeaseRow], driver: str, now: float) -> Resting:
    """What rests of a driver, by all leases that were asked for within the longest rest."""
    zones: dict[str, str] = {}
    for row in rows:
        what = failure(row) if row.driver == driver else ""
        if what in ("", LeaseFailure.DENIED):
            continue
        if now - (row.gone or now) < RESTS[what]:
            data = row.offer.get("data")
            zones[str(row.offer.get("id", ""))] = (
                str(data.get("zone", "")) if isinstance(data, Mapping) else ""
            )
    several = {zone for zone, count in Counter(zones.values()).items() if zone and count >= ZONE}
    return Resting(frozenset(zones), frozenset(several))


def failure(row: LeaseRow) -> str:
    """How a lease failed that is over.  Empty: one that was cancelled on its way up says nothing of its offer."""
    return row.failure if row.state == "GONE" and row.failure in RESTS else ""


def account_digest(settings: Mapping[str, object], account: Iterable[tuple[str, str]]) -> str:
    """Return a digest of all that may have to change before a provider that denied an order is sent another."""
    said = [[name, words] for name, words in account if name != "clock"]
    values = sorted((name, str(value)) for name, value in settings.items())
    return of_value("denied/1", [values, said])[:8]


def is_denied(row: LeaseRow | None, now: float) -> bool:
    """Whether a provider rests whose last lease is `row`, unless settings or account are others than they were."""
    if row is None or failure(row) != LeaseFailure.DENIED:
        return False
    return now - (row.gone or now) < RESTS[LeaseFailure.DENIED]
