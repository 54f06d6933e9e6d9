"""The remaining money for a run's machines, from the ledger.

The cost limit of the run and the user's limits over all runs apply.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from drivers.base import Need, Offer

from ...storage.records.ledger import LeaseRow, Ledger
from .money import RELEASE_SECONDS, affordable_seconds, committed_cost, release_reserve

TERM: Final = timedelta(days=1)
"""Default lease term, prolonged every `leases.RENEW` seconds.

The term bounds the life of a machine after the loss of the worker and its workspace.
"""
MIN_SECONDS: Final = 300.0
"""Minimum seconds that the money must cover if no step has a checkpoint interval.

A shorter time is not worth the start.
"""
SHORTEST_SECONDS: Final = 1.0
"""Seconds that the money must cover in any case, also if the user sets no minimum."""
MIN_CHECKPOINTS: Final = 2
"""Checkpoints that the money must cover after the start, if steps have a checkpoint interval."""
DAY: Final = 86_400.0
"""Seconds of the period of `cost_per_day`."""
BillingEnd: TypeAlias = Callable[[LeaseRow, float], float]
"""Returns the Unix time at which the billing of a lease ends, given the present time."""


class Budget:
    """The budget of one run."""

    def __init__(self, ledger: Ledger, run: str, start_seconds: float = 0.0) -> None:
        self._ledger, self._run, self._start_seconds = ledger, run, start_seconds
        self.limit: float | None = None
        """Cost limit of the run in US dollars."""
        self.limits: Mapping[str, float] = {}
        """The settings `[limits]`, over all runs of this user."""
        self.min_seconds: float | None = None
        """Minimum seconds that the money must cover; overrides the checkpoint intervals."""
        self.checkpoint_intervals: Mapping[Need, float] = {}
        """Checkpoint interval in seconds by need (on any market), for needs whose steps have an
        interval.
        """
        self.term = TERM
        """Term of a lease."""
        self.leaving_keys: Callable[[], Collection[str]] = tuple
        """Returns the keys of UP leases that are about to be released."""
        self._ending_since: dict[str, float] = {}
        """Time at which this process first saw the pending release of a lease, by key."""

    def likely_funds(self, without: str = "") -> float:
        """Return the US dollars that probably remain of the limits.  Infinite without a limit.

        The past and possible future costs of all leases are subtracted, except those of the lease
        `without`.

        A lease in release counts until the likely time of its confirmation: see `_likely_end`.
        """
        return self._funds(self._likely_end, without)

    def guaranteed_funds(self, without: str = "") -> float:
        """Return the US dollars that remain if every lease is billed to its own end, even in
        release.
        """
        return self._funds(_own_end, without)

    def maximum_funds(self) -> float:
        """Return the US dollars that remain if all releases are confirmed now."""
        return self._funds(self._end_if_confirmed)

    def pending_releases(self) -> list[LeaseRow]:
        """Return the leases in release, or about to be released, that count against a limit.

        The confirmation of their release frees money.
        """
        if "cost_per_day" in self.limits:
            rows = self._ledger.living_leases()
        elif self.limit is not None:
            rows = self._ledger.of_run(self._run)
        else:
            rows = []
        return [row for row in rows if row.price and self._is_ending(row)]

    def _is_ending(self, row: LeaseRow) -> bool:
        if row.state in ("RELEASING", "GONE"):
            return row.state == "RELEASING"
        return row.key in self.leaving_keys()

    def _likely_end(self, row: LeaseRow, now: float) -> float:
        """Return the likely end of a lease's billing.

        The confirmation of a release takes two minutes, or as long as it has taken already, so a
        slow release reserves more and more.
        """
        if not self._is_ending(row):
            return _own_end(row, now)
        return now + max(RELEASE_SECONDS, now - self._ending_since.setdefault(row.key, now))

    def _end_if_confirmed(self, row: LeaseRow, now: float) -> float:
        return now if self._is_ending(row) else _own_end(row, now)

    def _funds(self, end: BillingEnd, without: str = "") -> float:
        """Return the US dollars that remain of the tightest limit if the leases are billed until
        `end`.
        """
        return min(self._run_funds(end, without), self._day_funds(end, without))

    def _run_funds(self, end: BillingEnd, without: str = "") -> float:
        """Return the US dollars that remain of the run's cost limit."""
        if self.limit is None:
            return math.inf
        return self.limit - self._sum_costs(self._ledger.of_run(self._run), end, without)

    def _day_funds(self, end: BillingEnd, without: str = "") -> float:
        """Return the US dollars that remain of the user's limit `cost_per_day`."""
        limit = self.limits.get("cost_per_day")
        if limit is None:
            return math.inf
        since = time.time() - DAY
        rows = {row.key: row for row in [*self._ledger.since(since), *self._ledger.living_leases()]}
        return limit - self._sum_costs(list(rows.values()), end, without, since)

    def _sum_costs(
        self, rows: Sequence[LeaseRow], end: BillingEnd, without: str, since: float = 0.0
    ) -> float:
        """Return the US dollars that leases have cost, or may cost by `end`, except the lease
        `without`.

        A living lease counts from the Unix time `since`, a GONE lease as a whole.
        """
        rows = [row for row in rows if row.key != without]
        ended = self._ledger.costs([row.key for row in rows if row.state == "GONE"])
        now, total = time.time(), 0.0
        for row in rows:
            if row.state != "GONE" and row.paid_from is not None:
                total += committed_cost(row.price, max(since, row.paid_from), end(row, now))
        return total + sum(spent.usd for spent in ended.values())

    @property
    def machine_room(self) -> float:
        """Number of machines that this user may still add by `[limits] machines`.

        Infinite without this limit.
        """
        limit = self.limits.get("machines")
        if limit is None:
            return math.inf
        return limit - sum(row.counts for row in self._ledger.living_leases())

    @property
    def is_full(self) -> bool:
        """Whether this user has the maximum number of machines of `[limits] machines`."""
        return self.machine_room <= 0

    def lease_end(self, price: float, funds: float, shares: int = 1) -> datetime:
        """Return the end of a lease that starts or is renewed now.

        The lease gets one of `shares` equal shares of `funds`, and ends after a term at the latest.
        """
        now = _clock()
        seconds = self.term.total_seconds()
        if price and funds < math.inf:
            seconds = min(affordable_seconds(funds, price, shares), seconds)
        return now + timedelta(seconds=seconds)

    def shortens_lease(self, price: float, shares: int = 1) -> bool:
        """Return whether the pending releases shorten the lease of a new machine."""
        likely = self.lease_end(price, self.likely_funds(), shares)
        guaranteed = self.lease_end(price, self.guaranteed_funds(), shares)
        return (likely - guaranteed).total_seconds() > 1.0

    def reaches_limit(self, ahead: float) -> bool:
        """Return whether the running machines reach the run's cost limit within `ahead` seconds."""
        if self.limit is None:
            return False
        rate = sum(row.price for row in self._ledger.of_run(self._run) if row.state == "UP")
        if rate <= 0:
            return False
        return self._run_funds(_own_end) <= committed_cost(rate, 0.0, ahead)

    def covers_replacement(self, row: LeaseRow, need: Need, offer: Offer) -> bool:
        """Return whether the money covers another machine after the end of this lease.

        If so, the run can continue within its limits.
        """
        reserve = committed_cost(row.price, 0.0, release_reserve(row.until - row.asked))
        return not self.explain_shortage(need, offer, funds=self.likely_funds() - reserve)

    def explain_shortage(
        self, need: Need, offer: Offer, shares: int = 1, funds: float | None = None
    ) -> str:
        """Return why the money does not cover a machine; empty if it does.

        The machine gets one of `shares` equal shares of `funds`, by default of the likely funds.
        """
        most = self.limits.get("price", math.inf)
        if offer.price > most:
            return f"the cheapest matching machine costs ${offer.price:.2f} an hour, but `[limits] price` is ${most:.2f}"
        if funds is None:
            funds = self.likely_funds()
        covered = (self.lease_end(offer.price, funds, shares) - _clock()).total_seconds()
        interval = self._checkpoint_interval(need)
        if interval is None:
            seconds = MIN_SECONDS if self.min_seconds is None else self.min_seconds
            required, parts = max(SHORTEST_SECONDS, seconds), ""
        else:
            required = self._start_seconds + MIN_CHECKPOINTS * interval
            parts = f" ({self._start_seconds:.0f} s to start, and {MIN_CHECKPOINTS} checkpoints, {interval:.0f} s apart)"
        if covered >= required:
            return ""
        share = max(0.0, funds) / shares
        return (
            f"only ${share:.4g} of `{self._tightest_limit()}` is left, "
            f"enough for {max(0.0, covered):.0f} s of {offer.id} at ${offer.price:.2f} an hour; "
            f"the step takes at least {required:.0f} s{parts}, ${required * offer.price / 3600:.2f}"
        )

    def _checkpoint_interval(self, need: Need) -> float | None:
        """Return the checkpoint interval of a need's steps; None without an interval, or if `min_seconds` overrides it."""
        if self.min_seconds is not None:
            return None
        return self.checkpoint_intervals.get(replace(need, market="any"))

    def _tightest_limit(self) -> str:
        """Return the name of the limit with the least remaining money."""
        if self._day_funds(self._likely_end) < self._run_funds(self._likely_end):
            return "[limits] cost_per_day"
        return "limits.cost"


def _own_end(row: LeaseRow, now: float) -> float:
    """Return the latest end of a lease's billing.  A machine past its end is still billed."""
    # The future of a persistent machine counts for no run, and an allocation ends with its last
    # job.
    if row.kept or row.offer.get("queued"):
        return now
    return max(row.until, now)


def _clock() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
