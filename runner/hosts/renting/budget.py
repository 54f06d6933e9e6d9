"""What the machines of a run may still cost, by the ledger: the limit of the run, and those of a user over all runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow, Ledger
from .money import ENDING, affordable, committed_cost, kept_back

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
        self.leaving: Callable[[], Collection[str]] = tuple
        """Keys of leases that are UP, and whose machine is about to be given back."""
        self._ending_since: dict[str, float] = {}

    def left(self, beside: str = "") -> float:
        """US dollars of the limits of the run and of a day that no lease has cost or may cost yet, that of `beside` not counted.

        A lease that is being given back holds back its price for the time that the proof of its end may take: see `_likely_end`.  Infinite without a
        limit.
        """
        return min(self._of_run(beside, self._likely_end), self._of_day(beside, self._likely_end))

    def certain(self, beside: str = "") -> float:
        """The same where each lease lives up to its own end, also one that is being given back: so much cannot be lacking, whatever comes."""
        return min(self._of_run(beside, _own_end), self._of_day(beside, _own_end))

    def at_best(self) -> float:
        """The same where each lease that is being given back is proved to be gone this moment: more cannot be there, whatever comes."""
        return min(self._of_run("", self._proved_now), self._of_day("", self._proved_now))

    def ending(self) -> list[LeaseRow]:
        """The leases that are being given back, or about to be, and count against a limit: their proof gives money free."""
        if "cost_per_day" in self.limits:
            rows = self._ledger.living_leases()
        elif self.limit is not None:
            rows = self._ledger.of_run(self._run)
        else:
            rows = []
        return [row for row in rows if row.price and self._is_ending(row)]

    def _is_ending(self, row: LeaseRow) -> bool:
        return row.state == "RELEASING" or (row.state != "GONE" and row.key in self.leaving())

    def _likely_end(self, row: LeaseRow, now: float) -> float:
        """When a lease is likely to cost nothing any more.

        The proof that a machine is gone takes two minutes, or as long as it was waited for already: one that lives on holds back more and more.
        """
        if not self._is_ending(row):
            return _own_end(row, now)
        return now + max(ENDING, now - self._ending_since.setdefault(row.key, now))

    def _proved_now(self, row: LeaseRow, now: float) -> float:
        return now if self._is_ending(row) else _own_end(row, now)

    def _of_run(self, beside: str, end: Callable[[LeaseRow, float], float]) -> float:
        if self.limit is None:
            return math.inf
        return self.limit - self._bound(self._ledger.of_run(self._run), beside, 0.0, end)

    def _of_day(self, beside: str, end: Callable[[LeaseRow, float], float]) -> float:
        if (most := self.limits.get("cost_per_day")) is None:
            return math.inf
        since = time.time() - DAY
        rows = {row.key: row for row in [*self._ledger.since(since), *self._ledger.living_leases()]}
        return most - self._bound(list(rows.values()), beside, since, end)

    def _bound(
        self,
        rows: Sequence[LeaseRow],
        beside: str,
        since: float,
        end: Callable[[LeaseRow, float], float],
    ) -> float:
        """US dollars that leases have cost, or may cost by their `end`."""
        rows = [row for row in rows if row.key != beside]
        gone = self._ledger.costs([row.key for row in rows if row.state == "GONE"])
        now, bound = time.time(), 0.0
        for row in rows:
            if row.state != "GONE" and row.paid_from is not None:
                bound += committed_cost(row.price, max(since, row.paid_from), end(row, now))
        return bound + sum(spent.usd for spent in gone.values())

    @property
    def room(self) -> float:
        """How many more machines this user may have, by `[limits] machines`."""
        if (most := self.limits.get("machines")) is None:
            return math.inf
        return most - sum(row.counts for row in self._ledger.living_leases())

    @property
    def full(self) -> bool:
        """Whether this user has as many machines as `[limits] machines` allows."""
        return self.room <= 0

    def until(self, price: float, left: float, shares: int = 1) -> datetime:
        """When a machine is to end that is rented now, or asked to stay."""
        now = _clock()
        seconds = affordable(left, price, shares) if price and left < math.inf else math.inf
        return now + timedelta(seconds=min(seconds, self.term.total_seconds()))

    def curtails(self, price: float, shares: int = 1) -> bool:
        """Whether a machine that is rented now would have less time than after the proof that others are gone."""
        gained = self.until(price, self.left(), shares) - self.until(price, self.certain(), shares)
        return gained.total_seconds() > 1.0

    def spent(self, ahead: float) -> bool:
        """Whether the limit of the run is reached when what is up stays for so many seconds more."""
        rate = (
            sum(row.price for row in self._ledger.of_run(self._run) if row.state == "UP")
            if self.limit is not None
            else 0.0
        )
        return rate > 0 and self._of_run("", _own_end) <= committed_cost(rate, 0.0, ahead)

    def outlasts(self, row: LeaseRow, need: Need, offer: Offer) -> bool:
        """Whether the money pays for another machine like that of a lease after its time: then it is not the limit that ends it."""
        kept = committed_cost(row.price, 0.0, kept_back(row.until - row.asked))
        return not self.pays(need, offer, left=self.left() - kept)

    def pays(self, need: Need, offer: Offer, shares: int = 1, left: float | None = None) -> str:
        """Why what is left of the run's limit does not pay for a machine; empty when it does."""
        if offer.price > (most := self.limits.get("price", math.inf)):
            return f"the cheapest matching machine costs ${offer.price:.2f} an hour, but `[limits] price` is ${most:.2f}"
        left = self.left() if left is None else left
        seconds = (self.until(offer.price, left, shares) - _clock()).total_seconds()
        every = self.every.get(replace(need, market="any")) if self.least is None else None
        least = (self.least or LEAST) if every is None else self._comes_up + INTERVALS * every
        if seconds >= least:
            return ""
        left, seconds = max(0.0, left) / shares, max(0.0, seconds)
        of_day = self._of_day("", self._likely_end) < self._of_run("", self._likely_end)
        which = "[limits] cost_per_day" if of_day else "limits.cost"
        parts = (
            f" ({self._comes_up:.0f} s to start, and {INTERVALS} checkpoints, {every:.0f} s apart)"
            if every is not None
            else ""
        )
        wanted = f"the step takes at least {least:.0f} s{parts}, ${least * offer.price / 3600:.2f}"
        return f"only ${left:.4g} of `{which}` is left, enough for {seconds:.0f} s of {offer.id} at ${offer.price:.2f} an hour; {wanted}"


def _own_end(row: LeaseRow, now: float) -> float:
    """When a lease costs nothing any more at the latest, as far as that is known: one that is there past its time costs on."""
    if row.kept or row.offer.get("queued"):
        return (
            now  # a kept machine's future is no run's; an allocation ends when nothing runs there
        )
    return max(row.until, now)


def _clock() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
