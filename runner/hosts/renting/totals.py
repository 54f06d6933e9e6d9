"""The cost of a run on an offer, with running time, start, preemptions and egress.

Pure functions on ledger rows.

Costs are US dollars, times are hours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple, TypeAlias

from drivers.base import LOST, TAKEN_AWAY, Offer, Wish

from ...failures import LeaseFailure
from ...storage.records.ledger import LeaseRow

COMES_UP: Final = 0.05
"""Default hours until a machine is up, while it is already billed."""
PRIOR_HOURS: Final = 20.0
"""Weight of the default preemption rate `TAKEN_AWAY` beside the ledger's experience, in hours of
spot machines.
"""
RECENT_MACHINES: Final = 20
"""Number of recent machines of a provider whose start times count."""


class Hours(NamedTuple):
    """The time of one need's steps on one kind of GPU.

    `basis` names the source of the time.  `guessed` means that no run measured the time.
    """

    hours: float
    basis: str = ""
    guessed: bool = False
    without: tuple[str, ...] = ()
    """Steps of unknown duration, which the hours do not include."""


HoursOn: TypeAlias = Callable[[str, int | None], Hours | None]
"""Returns the hours on a GPU, by the provider's GPU name and memory in bytes; None if unknown."""


class Total(NamedTuple):
    """The cost of a run on an offer, in US dollars except for `hours`.

    Without `hours`, only `egress` is known.
    """

    hours: Hours | None
    boot: float
    """Cost until the machine is up."""
    lost: float
    """Likely cost of preemptions, for repeated work and the start of the next machine."""
    egress: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class History:
    """Experience with rented machines by provider, from the ledger."""

    start_hours: Mapping[str, float] = field(default_factory=dict)
    """Median hours until a machine was up."""
    preemptions: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Number of preempted spot machines, and the total hours of all spot machines."""

    @classmethod
    def from_rows(cls, rows: Iterable[LeaseRow], now: float) -> History:
        """Read ledger rows, oldest first.

        Only paid machines that came up count, without queued machines and uses of persistent
        machines.
        """
        starts: dict[str, list[float]] = defaultdict(list)
        preemptions: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for row in rows:
            if not row.price or row.up is None:
                continue
            if row.machine or row.offer.get("queued"):
                continue
            starts[row.driver].append((row.up - row.asked) / 3600)
            if row.offer.get("market") == "spot":
                count, hours = preemptions[row.driver]
                count += row.failure == LeaseFailure.TAKEN_AWAY
                end = now if row.gone is None else row.gone
                preemptions[row.driver] = count, hours + max(0.0, end - row.up) / 3600
        recent = {driver: median(found[-RECENT_MACHINES:]) for driver, found in starts.items()}
        return cls(recent, dict(preemptions))

    def boot_hours(self, offer: Offer) -> float:
        """Return the billed hours until a machine is up."""
        return 0.0 if offer.queued else self.start_hours.get(offer.driver, COMES_UP)

    def preemption_rate(self, offer: Offer) -> float:
        """Return the preemptions per hour of an offered machine."""
        if offer.market != "spot":
            return 0.0
        count, hours = self.preemptions.get(offer.driver, (0, 0.0))
        return (PRIOR_HOURS * TAKEN_AWAY + count) / (PRIOR_HOURS + hours)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model of a run.  Without a history, the start of a machine costs nothing."""

    history: History | None = None
    hours_on: HoursOn | None = None
    """Hours by kind of GPU; without it, the hours of the wish count for every GPU."""

    @property
    def known_history(self) -> History:
        """The history, or an empty one."""
        return self.history or History()

    def total(self, offer: Offer, wish: Wish) -> Total:
        """Return the cost of a run with this wish on an offer."""
        egress = egress_cost(offer, wish.home)
        hours = self._hours(offer, wish)
        if hours is None:
            return Total(None, 0.0, 0.0, egress, None)
        boot = 0.0
        if self.history is not None:
            boot = self.history.boot_hours(offer) * offer.price
        work = offer.price * hours.hours
        lost = work * self.known_history.preemption_rate(offer) * LOST
        return Total(hours, boot, lost, egress, work + boot + lost + egress)

    def _hours(self, offer: Offer, wish: Wish) -> Hours | None:
        """Return the hours of a run on the offer's GPU, or the hours of the wish if those are
        unknown.
        """
        hours = None
        if self.hours_on is not None:
            hours = self.hours_on(offer.resources.gpu or "", offer.resources.gpu_memory)
        if hours is None and wish.hours is not None:
            hours = Hours(wish.hours)
        return hours

    def rank(self, offers: Sequence[Offer], wish: Wish) -> list[Offer]:
        """Return the offers, the cheapest run first.

        Offers of unknown duration come last, in the given order.  With several providers or
        markets, the price with expected preemptions decides instead.
        """
        totals = [self.total(offer, wish).usd for offer in offers]
        differ = len({(offer.driver, offer.market) for offer in offers}) > 1

        def sort_key(n: int) -> tuple[bool, float]:
            total = totals[n]
            if total is not None:
                return False, total
            if not differ:
                return True, 0.0
            lost = self.known_history.preemption_rate(offers[n]) * LOST
            return True, offers[n].price * (1 + lost)

        return [offers[n] for n in sorted(range(len(offers)), key=sort_key)]


def egress_cost(offer: Offer, size: int | None) -> float:
    """Return the egress cost of `size` bytes in US dollars; 0 if their number is unknown."""
    return offer.egress_price * (size or 0) / 1e9
