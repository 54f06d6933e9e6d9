"""Remaining money for a run's machines, from the ledger.

The cost limit of the run and the user's limits over all runs apply.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow, Ledger
from .money import RELEASE_SECONDS, affordable_seconds, committed_cost, release_reserve

TERM: Final = timedelta(days=1)
"""Default lease term, prolonged every `leases.RENEW` seconds.  It bounds the life of a machine after the worker and its workspace are lost."""
MIN_SECONDS: Final = 300.0
"""Minimum seconds that the money must cover if no step has a checkpoint interval.

A shorter time is not worth the start.
"""
MIN_CHECKPOINTS: Final = 2
"""Checkpoints that the money must cover after the start, if steps have a checkpoint interval."""
DAY: Final = 86_400.0
"""Seconds of the period of `cost_per_day`."""


class Budget:
    """The budget of one run."""

    def __init__(self, ledger: Ledger, run: str, comes_up: float = 0.0) -> None:
        self._ledger, self._run, self._comes_up = ledger, run, comes_up
        self.limit: float | None = None
        """Cost limit of the run in US dollars."""
        self.limits: Mapping[str, float] = {}
        """The settings `[limits]`, over all runs of this user."""
        self.min_seconds: float | None = None
        """Minimum seconds that the money must cover; overrides the checkpoint interval."""
        self.checkpoint_intervals: Mapping[Need, float] = {}
        """Checkpoint interval in seconds of the steps of a need (with any market), if they have one."""
        self.term = TERM
        """Term of a lease."""
        self.leaving_keys: Callable[[], Collection[str]] = tuple
        """Returns the keys of UP leases that are about to be released."""
        self._ending_since: dict[str, float] = {}

    def likely_funds(self, beside: str = "") -> float:
        """Return the remaining US dollars of the limits.  Infinite without a limit.

        Amounts that a lease has used or may still use are subtracted, except for the lease `beside`.

        A lease in release counts with the likely time until its end is confirmed: see `_likely_end`.
        """
        return min(
            self._run_funds(beside, self._likely_end), self._day_funds(beside, self._likely_end)
        )

    def guaranteed_funds(self, beside: str = "") -> float:
        """Return the US dollars that remain if each lease lives to its own end, even in release.  This is the guaranteed amount."""
        return min(self._run_funds(beside, _own_end), self._day_funds(beside, _own_end))

    def maximum_funds(self) -> float:
        """Return the US dollars that remain if all releases are confirmed now.  This is the maximum."""
        return min(
            self._run_funds("", self._end_if_confirmed), self._day_funds("", self._end_if_confirmed)
        )

    def pending_releases(self) -> list[LeaseRow]:
        """Return the leases being released, or about to be, that count against a limit.

        A confirmed release frees their money.
        """
        if "cost_per_day" in self.limits:
            rows = self._ledger.living_leases()
        elif self.limit is not None:
            rows = self._ledger.of_run(self._run)
        else:
            rows = []
        return [row for row in rows if row.price and self._is_ending(row)]

    def _is_ending(self, row: LeaseRow) -> bool:
        return row.state == "RELEASING" or (row.state != "GONE" and row.key in self.leaving_keys())

    def _likely_end(self, row: LeaseRow, now: float) -> float:
        """Return the Unix time at which a lease probably stops costing money.

        The confirmation of a release takes two minutes, or as long as it has taken already, so a slow release reserves more and more.
        """
        if not self._is_ending(row):
            return _own_end(row, now)
        return now + max(RELEASE_SECONDS, now - self._ending_since.setdefault(row.key, now))

    def _end_if_confirmed(self, row: LeaseRow, now: float) -> float:
        return now if self._is_ending(row) else _own_end(row, now)

    def _run_funds(self, beside: str, end: Callable[[LeaseRow, float], float]) -> float:
        if self.limit is None:
            return math.inf
        return self.limit - self._sum_costs(self._ledger.of_run(self._run), beside, 0.0, end)

    def _day_funds(self, beside: str, end: Callable[[LeaseRow, float], float]) -> float:
        if (most := self.limits.get("cost_per_day")) is None:
            return math.inf
        since = time.time() - DAY
        rows = {row.key: row for row in [*self._ledger.since(since), *self._ledger.living_leases()]}
        return most - self._sum_costs(list(rows.values()), beside, since, end)

    def _sum_costs(
        self,
        rows: Sequence[LeaseRow],
        beside: str,
        since: float,
        end: Callable[[LeaseRow, float], float],
    ) -> float:
        """Return the US dollars that leases have cost, or may cost by their `end`."""
        rows = [row for row in rows if row.key != beside]
        gone = self._ledger.costs([row.key for row in rows if row.state == "GONE"])
        now, bound = time.time(), 0.0
        for row in rows:
            if row.state != "GONE" and row.paid_from is not None:
                bound += committed_cost(row.price, max(since, row.paid_from), end(row, now))
        return bound + sum(spent.usd for spent in gone.values())

    @property
    def machine_room(self) -> float:
        """Number of machines that this user may still add, by `[limits] machines`."""
        if (most := self.limits.get("machines")) is None:
            return math.inf
        return most - sum(row.counts for row in self._ledger.living_leases())

    @property
    def is_full(self) -> bool:
        """Whether this user has the maximum number of machines of `[limits] machines`."""
        return self.machine_room <= 0

    def lease_end(self, price: float, left: float, shares: int = 1) -> datetime:
        """Return the end of a lease that starts or is renewed now."""
        now = _clock()
        seconds = affordable_seconds(left, price, shares) if price and left < math.inf else math.inf
        return now + timedelta(seconds=min(seconds, self.term.total_seconds()))

    def shortens_lease(self, price: float, shares: int = 1) -> bool:
        """Return whether a new machine would get less time than after the pending releases are confirmed."""
        gained = self.lease_end(price, self.likely_funds(), shares) - self.lease_end(
            price, self.guaranteed_funds(), shares
        )
        return gained.total_seconds() > 1.0

    def reaches_limit(self, ahead: float) -> bool:
        """Return whether the running machines reach the run's cost limit within `ahead` seconds."""
        rate = (
            sum(row.price for row in self._ledger.of_run(self._run) if row.state == "UP")
            if self.limit is not None
            else 0.0
        )
        return rate > 0 and self._run_funds("", _own_end) <= committed_cost(rate, 0.0, ahead)

    def covers_replacement(self, row: LeaseRow, need: Need, offer: Offer) -> bool:
        """Return whether the money covers another machine after the end of this lease.

        Then the limit does not end it.
        """
        kept = committed_cost(row.price, 0.0, release_reserve(row.until - row.asked))
        return not self.explain_shortage(need, offer, left=self.likely_funds() - kept)

    def explain_shortage(
        self, need: Need, offer: Offer, shares: int = 1, left: float | None = None
    ) -> str:
        """Return why the remaining money does not cover a machine; empty if it does."""
        if offer.price > (most := self.limits.get("price", math.inf)):
            return f"the cheapest matching machine costs ${offer.price:.2f} an hour, but `[limits] price` is ${most:.2f}"
        left = self.likely_funds() if left is None else left
        seconds = (self.lease_end(offer.price, left, shares) - _clock()).total_seconds()
        every = (
            self.checkpoint_intervals.get(replace(need, market="any"))
            if self.min_seconds is None
            else None
        )
        least = (
            (self.min_seconds or MIN_SECONDS)
            if every is None
            else self._comes_up + MIN_CHECKPOINTS * every
        )
        if seconds >= least:
            return ""
        left, seconds = max(0.0, left) / shares, max(0.0, seconds)
        of_day = self._day_funds("", self._likely_end) < self._run_funds("", self._likely_end)
        which = "[limits] cost_per_day" if of_day else "limits.cost"
        parts = (
            f" ({self._comes_up:.0f} s to start, and {MIN_CHECKPOINTS} checkpoints, {every:.0f} s apart)"
            if every is not None
            else ""
        )
        wanted = f"the step takes at least {least:.0f} s{parts}, ${least * offer.price / 3600:.2f}"
        return f"only ${left:.4g} of `{which}` is left, enough for {seconds:.0f} s of {offer.id} at ${offer.price:.2f} an hour; {wanted}"


def _own_end(row: LeaseRow, now: float) -> float:
    """Return the Unix time at which a lease stops costing money at the latest.  A machine past its end still costs money."""
    if row.kept or row.offer.get("queued"):
        return now  # the future of a persistent machine counts for no run; an allocation ends with its last job
    return max(row.until, now)


def _clock() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
