"""What a run would cost on an offer: its time there, coming up, what preemptions lose, what leaves the machine.  Pure: the ledger's rows are given.

Sums are US dollars, times hours.
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
"""Hours until a machine is up that is billed from its order on, where none of its provider has come up yet."""
PRIOR: Final = 20.0
"""Hours of spot machines, taken away as often as `TAKEN_AWAY` says, that count beside those in the ledger."""
LATEST: Final = 20
"""Machines of one provider whose time to come up counts."""


class Hours(NamedTuple):
    """How long the steps of one need take on one kind of GPU.  `basis` says what that is from; `guessed`: no run measured it."""

    hours: float
    basis: str = ""
    guessed: bool = False


HoursOn: TypeAlias = Callable[[str, int | None], Hours | None]
"""The hours on a GPU, by its name and bytes of memory as a provider has them; None where they are not known."""


class Total(NamedTuple):
    """What a run costs on an offer.  Without `hours` only `egress` is known."""

    hours: Hours | None
    boot: float
    lost: float
    egress: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class History:
    """What the ledger says of machines that were rented, by their providers."""

    comes_up: Mapping[str, float] = field(default_factory=dict)
    taken: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """How many spot machines were taken away, and how many hours all of them were up."""

    @classmethod
    def of(cls, rows: Iterable[LeaseRow], now: float) -> History:
        """Read leases, the oldest first."""
        waits: dict[str, list[float]] = defaultdict(list)
        taken: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for row in rows:
            if not row.price or row.up is None or row.machine or row.offer.get("queued"):
                continue
            waits[row.driver].append((row.up - row.asked) / 3600)
            if row.offer.get("market") == "spot":
                count, hours = taken[row.driver]
                gone = now if row.gone is None else row.gone
                taken[row.driver] = (
                    count + (row.failure == LeaseFailure.TAKEN_AWAY),
                    hours + max(0.0, gone - row.up) / 3600,
                )
        return cls(
            {driver: median(found[-LATEST:]) for driver, found in waits.items()}, dict(taken)
        )

    def boot(self, offer: Offer) -> float:
        """Hours that a machine is paid for before it is up."""
        return 0.0 if offer.queued else self.comes_up.get(offer.driver, COMES_UP)

    def taken_away(self, offer: Offer) -> float:
        """How often an hour a machine is taken away."""
        if offer.market != "spot":
            return 0.0
        count, hours = self.taken.get(offer.driver, (0, 0.0))
        return (PRIOR * TAKEN_AWAY + count) / (PRIOR + hours)


@dataclass(frozen=True, slots=True)
class Pricing:
    """How the cost of a run is computed.  Without a history nothing is counted for coming up."""

    history: History | None = None
    on: HoursOn | None = None
    """Hours by the kind of GPU; without it, those of the wish count everywhere."""

    @property
    def history_of(self) -> History:
        """What is known of earlier machines, or that nothing is."""
        return self.history or History()

    def total(self, offer: Offer, wish: Wish) -> Total:
        """What a run with this wish costs there."""
        out = egress(offer, wish.home)
        hours = self._hours(offer, wish)
        if hours is None:
            return Total(None, 0.0, 0.0, out, None)
        history = self.history_of
        boot = history.boot(offer) * offer.price if self.history is not None else 0.0
        lost = offer.price * hours.hours * history.taken_away(offer) * LOST
        return Total(hours, boot, lost, out, offer.price * hours.hours + boot + lost + out)

    def _hours(self, offer: Offer, wish: Wish) -> Hours | None:
        have = offer.resources
        found = self.on(have.gpu or "", have.gpu_memory) if self.on is not None else None
        return found if found is not None or wish.hours is None else Hours(wish.hours)

    def ranked(self, offers: Sequence[Offer], wish: Wish) -> list[Offer]:
        """The same, the cheapest run first.

        Those of which the time is not known come last, by their prices with what preemptions lose
        where several providers or markets offer, else in the order in which they were offered.
        """
        usd = [self.total(offer, wish).usd for offer in offers]
        several = len({(offer.driver, offer.market) for offer in offers}) > 1

        def key(n: int) -> tuple[bool, float]:
            total, offer = usd[n], offers[n]
            if total is None:
                lost = self.history_of.taken_away(offer) * LOST
                return True, offer.price * (1 + lost) if several else 0.0
            return False, total

        return [offers[n] for n in sorted(range(len(offers)), key=key)]


def egress(offer: Offer, home: int | None) -> float:
    """US dollars for so many bytes that leave a machine; 0 where their number is not known."""
    return offer.egress_price * (home or 0) / 1e9
