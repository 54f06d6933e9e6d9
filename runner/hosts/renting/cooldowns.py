"""Cooldowns of offers, zones and providers after failures.  Pure functions on ledger rows.

An offer on cooldown is used when nothing else is left, because a refused order costs nothing, and a
machine that does not match its offer is released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from drivers.base import HostLost, Offer

from ...digest import of_value
from ...failures import LeaseFailure
from ...storage.records.ledger import LeaseRow

COOLDOWNS: Final[Mapping[str, float]] = {
    LeaseFailure.TAKEN: 600.0,
    LeaseFailure.FAILED: 3600.0,
    LeaseFailure.LACKS: 86_400.0,  # does not change by itself
    # An upper limit, because some providers report a lack of credit (RunPod) or billing (Google)
    # only at an order.
    LeaseFailure.DENIED: 600.0,
}
"""Cooldown in seconds by failure.

A failed offer is used last.  After a denial, the provider gets no order with the same settings and
account.
"""
ZONE_FAILURES: Final = 2
"""Number of offers on cooldown in a zone from which the whole zone is on cooldown."""


class UnusableMachine(HostLost):
    """A new machine is unusable, so that another offer must be used.

    `failure` is the kind of failure.
    """

    def __init__(self, message: str, failure: LeaseFailure) -> None:
        super().__init__(message)
        self.failure = failure


class OnCooldown(NamedTuple):
    """Offers and zones on cooldown."""

    offers: frozenset[str]
    zones: frozenset[str]

    def covers(self, offer: Offer) -> bool:
        """Return whether an offer or its zone is on cooldown."""
        return offer.id in self.offers or offer.data.get("zone") in self.zones


def find_on_cooldown(rows: Iterable[LeaseRow], driver: str, now: float) -> OnCooldown:
    """Find the offers and zones of a driver on cooldown, from all leases within the longest
    cooldown.
    """
    zones: dict[str, str] = {}  # by offer
    for row in rows:
        if row.driver == driver and _starts_cooldown(row, now):
            data = row.offer.get("data")
            zone = data.get("zone", "") if isinstance(data, Mapping) else ""
            zones[str(row.offer.get("id", ""))] = str(zone)
    failures = Counter(zones.values())
    failed = [zone for zone, count in failures.items() if zone and count >= ZONE_FAILURES]
    return OnCooldown(frozenset(zones), frozenset(failed))


def _starts_cooldown(row: LeaseRow, now: float) -> bool:
    """Return whether the offer of an ended lease is on cooldown because of its failure.

    A denial concerns all offers.
    """
    failure = failure_of(row)
    if failure in ("", LeaseFailure.DENIED):
        return False
    return now - (row.gone or now) < COOLDOWNS[failure]


def failure_of(row: LeaseRow) -> str:
    """Return the failure of an ended lease; empty without one.

    A cancellation during the start does not count against the offer.
    """
    return row.failure if row.state == "GONE" and row.failure in COOLDOWNS else ""


def account_digest(settings: Mapping[str, object], account: Iterable[tuple[str, str]]) -> str:
    """Return a digest of the settings and the account facts.

    After a denial, the digest must change before the next order, or the cooldown must end.
    """
    # The line about the clock depends on this machine, not on the account.
    facts = [[name, fact] for name, fact in account if name != "clock"]
    values = sorted((name, str(value)) for name, value in settings.items())
    return of_value("denied/1", [values, facts])[:8]


def is_denied(row: LeaseRow | None, now: float) -> bool:
    """Return whether `row`, the provider's last lease, was denied and its cooldown has not ended."""
    if row is None or failure_of(row) != LeaseFailure.DENIED:
        return False
    return now - (row.gone or now) < COOLDOWNS[LeaseFailure.DENIED]
