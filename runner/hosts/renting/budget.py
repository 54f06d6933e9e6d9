"""What the machines of a run may still cost, by the ledger: the limit of the run, and those of a user over all runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow, Ledger
from .money import affordable, committed

TERM: Final = timedelta(days=1)
"""For which a lease is asked where the setting `term` does not say, and asked again every `leases.RENEW`: how long it stays when a worker and its
workspace are gone for good."""
LEAST: Final = 300.0
"""Seconds that the money that is left must pay for, else a machine is not worth its coming up: where no step says how often it saves."""
INTERVALS: Final = 2
"""Checkpoints that must be paid for after a machine came up, where steps say how often they save."""
DAY: Final = 86_400.0
"""Seconds that `cost_per_day` is about."""


class Budget:
    """Of one run."""

    def __init__(self, ledger: Ledger, run: str, comes_up: float = 0.0) -> None:
        self._ledger, self._run, self._comes_up = ledger, run, comes_up
        self.limit: float | None = None
        """US dollars that the whole run may cost."""
        self.limits: Mapping[str, float] = {}
        """`[limits]` of the settings: over all runs of this user."""
        self.least: float | None = None
        """Seconds that must be paid for, whatever steps say."""
        self.every: Mapping[Need, float] = {}
        """Seconds between two checkpoints of the steps of a need on any market, where they say so."""
        self.term = TERM
        """For which a lease is asked."""

    def left(self, beside: str = "") -> float:
        """US dollars of the limits of the run and of a day that no lease has cost or may cost yet, that of `beside` not counted.

        Infinite without a limit.
        """
        return min(self._of_run(beside), self._of_day(beside))

    def _of_run(self, beside: str) -> float:
        return (
            math.inf
            if self.limit is None
            else self.limit - self._bound(self._ledger.of_run(self._run), beside, 0.0)
        )

    def _of_day(self, beside: str) -> float:
        if (most := self.limits.get("cost_per_day")) is None:
            return math.inf
        since = time.time() - DAY
        rows = {row.key: row for row in [*self._ledger.since(since), *self._ledger.living()]}
        return most - self._bound(list(rows.values()), beside, since)

    def _bound(self, rows: Sequence[LeaseRow], beside: str, since: float) -> float:
        """US dollars that leases have cost, or may cost by their end."""
        rows = [row for row in rows if row.key != beside]
        gone = self._ledger.costs([row.key for row in rows if row.state == "GONE"])
        now, bound = time.time(), 0.0
        for row in rows:
            if (
                row.state != "GONE" and row.paid_from is not None
            ):  # a kept machine's future is no run's
                until = (
                    now if row.kept or row.offer.get("queued") else row.until
                )  # an allocation ends when nothing runs there
                bound += committed(row.price, max(since, row.paid_from), until)
        return bound + sum(spent.usd for spent in gone.values())

    @property
    def full(self) -> bool:
        """Whether this user has as many machines as `[limits] machines` allows."""
        most = self.limits.get("machines")
        return (
            most is not None
            and sum(
                row.price > 0 and not (row.kept or row.offer.get("queued"))
                for row in self._ledger.living()
            )
            >= most
        )

    def until(self, price: float, left: float, shares: int = 1) -> datetime:
        """When a machine is to end that is rented now, or asked to stay."""
        now = _clock()
        seconds = affordable(left, price, shares) if price and left < math.inf else math.inf
        return now + timedelta(seconds=min(seconds, self.term.total_seconds()))

    def spent(self, ahead: float) -> bool:
        """Whether the limit of the run is reached when what is up stays for so many seconds more."""
        rate = (
            sum(row.price for row in self._ledger.of_run(self._run) if row.state == "UP")
            if self.limit is not None
            else 0.0
        )
        return rate > 0 and self._of_run("") <= committed(rate, 0.0, ahead)

    def pays(self, need: Need, offer: Offer, shares: int = 1) -> str:
        """Why what is left of the run's limit does not pay for a machine; empty when it does."""
        if offer.price > (most := self.limits.get("price", math.inf)):
            return f"the cheapest machine that fits costs ${offer.price:.2f} an hour, and `[limits] price` is ${most:.2f}"
        left = self.left()
        seconds = (self.until(offer.price, left, shares) - _clock()).total_seconds()
        every = self.every.get(replace(need, market="any")) if self.least is None else None
        least = (self.least or LEAST) if every is None else self._comes_up + INTERVALS * every
        if seconds >= least:
            return ""
        left, seconds = max(0.0, left) / shares, max(0.0, seconds)
        which = "limits.cost" if self._of_run("") <= self._of_day("") else "[limits] cost_per_day"
        parts = (
            f" ({self._comes_up:.0f} s to come up, and {INTERVALS} checkpoints, {every:.0f} s apart)"
            if every is not None
            else ""
        )
        wanted = f"it takes at least {least:.0f} s{parts}, ${least * offer.price / 3600:.2f}"
        return f"${left:.4g} is left for it of `{which}`, which pays for {seconds:.0f} s of {offer.id} at ${offer.price:.2f} an hour; {wanted}"


def _clock() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
