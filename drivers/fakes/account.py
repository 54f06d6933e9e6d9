"""One account at a provider: its machines, what happens to them in time that only the caller moves, and a ledger of what they cost.  Pure."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from .faults import Fault, Luck, amount

EPOCH: Final = 1_800_000_000.0
"""When a virtual clock begins, in seconds since 1970."""
CREDIT: Final = 100.0
BOOT: Final = 40.0


class Entry(NamedTuple):
    """One line of the ledger.  `at`, `since` are seconds since 1970; `rate` is US dollars an hour; `usd` the price of `since` to `at`."""

    at: float
    event: str  # created started stopped preempted failed destroyed billed
    machine: str
    mark: str
    by: str = ""
    what: str = ""  # of billed: gpu or disk
    rate: float = 0.0
    since: float = 0.0
    usd: float = 0.0


@dataclass(kw_only=True)
class Machine:
    """What is rented.  `rates` is what is billed now, in US dollars an hour, by what it is for; `billed` until when it has been."""

    id: str
    mark: str
    by: str
    created: float = field(init=False)
    listed: float = field(init=False)
    billed: float = field(init=False)
    up: bool = False
    gone: float | None = None
    rates: dict[str, float] = field(default_factory=dict)
    stuck: bool = False
    fails: bool = False
    impostor: bool = False
    preemptible: bool = False


M = TypeVar("M", bound=Machine)


class Account(Generic[M]):
    """`happen` carries out a transition that was due, `halt` stops what runs on a machine when nothing is left to pay for it."""

    def __init__(
        self,
        faults: Sequence[Fault],
        now: float,
        happen: Callable[[M, str], None],
        halt: Callable[[M], None],
    ) -> None:
        self.now = now
        self.machines: dict[str, M] = {}
        self.ledger: list[Entry] = []
        self._faults, self._happen, self._halt = faults, happen, halt
        self.credit = amount(faults, "balance", CREDIT)
        self._broke = False
        self._ordered = 0
        self._due: list[tuple[float, int, str, str]] = []

    # -- time --------------------------------------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let time pass until `now`: what was due happens, each at its own time."""
        self._broke = self._broke and self.credit <= 0
        self._arrive()
        while self.now < now:
            rate = sum(sum(machine.rates.values()) for machine in self.machines.values())
            empty = (
                self.now + max(0.0, self.credit) / rate * 3600
                if rate and not self._broke
                else math.inf
            )
            due = self._due[0][0] if self._due else math.inf
            till = max(self.now, min(now, empty, due))
            self.credit -= rate * (till - self.now) / 3600
            self.now = till
            if empty <= till:
                self._broke, self.credit = True, min(0.0, self.credit)
                for machine in [*self.machines.values()]:
                    if machine.gone is None and machine.up:
                        self._halt(machine)
            self._arrive()

    def _arrive(self) -> None:
        """What is due by now happens."""
        while self._due and self._due[0][0] <= self.now:
            _, _, name, what = heapq.heappop(self._due)
            if (found := self.machines.get(name)) is not None and found.gone is None:
                self._happen(found, what)

    def later(self, machine: M, seconds: float, what: str) -> None:
        """Something will happen to a machine."""
        self._ordered += 1
        heapq.heappush(self._due, (self.now + seconds, self._ordered, machine.id, what))

    # -- machines and money ------------------------------------------------------------------------------------------------------------------------

    def enter(self, machine: M, luck: Luck | None = None) -> M:
        """Enter a new machine, which is made now, with what its luck has in store."""
        machine.created = machine.listed = machine.billed = self.now
        self.machines[machine.id] = machine
        self.note("created", machine)
        if luck is not None:
            machine.listed += luck.random.uniform(
                min(1.0, amount(self._faults, "late")), amount(self._faults, "late")
            )
            machine.stuck, machine.fails, machine.impostor = (
                luck.strikes("stuck"),
                luck.strikes("failed"),
                luck.strikes("impostor"),
            )
        return machine

    def boots(self, machine: M, share: float = 1.0, what: str = "up") -> None:
        """A machine comes up after a share of what booting takes, unless it is stuck."""
        if not machine.stuck:
            self.later(machine, amount(self._faults, "boot", BOOT) * share, what)

    def interruptible(self, machine: M, luck: Luck) -> None:
        """A machine that is up may be preempted some time."""
        machine.preemptible = True
        if often := amount(self._faults, "preempted"):
            self.later(machine, luck.random.expovariate(often) * 3600, "preempted")

    def preempt(self) -> int:
        """Preempt every interruptible machine that is up.  Answers how many."""
        found = [machine for machine in self.alive() if machine.up and machine.preemptible]
        for machine in found:
            self._happen(machine, "preempted")
        return len(found)

    def exit(self) -> int:
        """The containers of all machines that are up end by themselves.  Answers how many."""
        found = [machine for machine in self.alive() if machine.up]
        for machine in found:
            self._happen(machine, "exited")
        return sum(not machine.up for machine in found)

    def bill(self, machine: M, **rates: float) -> None:
        """From now on a machine costs this, in US dollars an hour."""
        self._settle(machine)
        machine.rates = {what: rate for what, rate in rates.items() if rate}

    def end(self, machine: M, by: str = "") -> None:
        """A machine is gone, and costs nothing from now on."""
        self.bill(machine)
        machine.up, machine.gone = False, self.now
        self.note("destroyed", machine, by)

    def note(self, event: str, machine: M, by: str = "") -> None:
        self.ledger.append(
            Entry(
                self.now,
                event,
                machine.id,
                machine.mark,
                by or machine.by,
                rate=sum(machine.rates.values()),
            )
        )

    def _settle(self, machine: M) -> None:
        for what, rate in machine.rates.items():
            if machine.billed < self.now:
                usd = rate * (self.now - machine.billed) / 3600
                self.ledger.append(
                    Entry(
                        self.now,
                        "billed",
                        machine.id,
                        machine.mark,
                        machine.by,
                        what,
                        rate,
                        machine.billed,
                        usd,
                    )
                )
        machine.billed = self.now

    def settle(self) -> list[Entry]:
        """The ledger, with all that is owed until now."""
        for machine in self.machines.values():
            self._settle(machine)
        return self.ledger

    def find_living(self, name: str) -> M | None:
        """The machine of this id, unless it is gone."""
        found = self.machines.get(name)
        return None if found is None or found.gone is not None else found

    def alive(self) -> list[M]:
        """The machines that are not gone."""
        return [machine for machine in self.machines.values() if machine.gone is None]

    def list_machines(self) -> list[M]:
        """The machines that a listing shows now, in the order in which they were made."""
        return [machine for machine in self.alive() if machine.listed <= self.now]

    def is_doomed(self, machine: M, luck: Luck) -> bool:
        """Whether destroying a machine that the provider confirms has an effect."""
        return not luck.strikes("undead")

    def is_held(self, machine: M) -> bool:
        """Whether a machine is in its least billing period and cannot be destroyed."""
        return self.now < machine.created + amount(self._faults, "reserved")


def lines(entries: Sequence[Entry]) -> str:
    """A ledger as JSON lines."""
    return "".join(json.dumps(entry._asdict()) + "\n" for entry in entries)
