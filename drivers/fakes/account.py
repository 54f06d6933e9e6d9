"""One account at a provider: machines, their scheduled transitions, and a ledger of costs.

Pure code: time passes only when the caller advances it.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from .faults import Fault, Luck, amount

EPOCH: Final = 1_800_000_000.0
"""Start of a virtual clock, as a Unix time in seconds."""
CREDIT: Final = 100.0
BOOT: Final = 40.0


class Entry(NamedTuple):
    """One line of the cost ledger.

    `at` and `since` are Unix times in seconds, `rate` is US dollars per hour, `usd` the cost from
    `since` to `at`.
    """

    at: float
    event: str  # created started stopped preempted failed destroyed billed
    machine: str
    mark: str
    by: str = ""
    what: str = ""  # billed item: gpu or disk
    rate: float = 0.0
    since: float = 0.0
    usd: float = 0.0


@dataclass(kw_only=True)
class Machine:
    """A rented machine of a fake provider.

    `rates` maps billed items (gpu, disk) to current US dollars per hour.  `billed` is the Unix time
    up to which costs are in the ledger.
    """

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
    """Machines, credit and cost ledger of one account at a fake provider.

    `happen` executes a transition that is due.  `halt` stops a machine after the credit is used up.
    """

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

    # -- time --------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Advance the simulated time to `now`, executing each due transition at its own time."""
        self._broke = self._broke and self.credit <= 0
        self._arrive()
        while self.now < now:
            rate = sum(sum(machine.rates.values()) for machine in self.machines.values())
            empty = math.inf
            if rate and not self._broke:
                empty = self.now + max(0.0, self.credit) / rate * 3600
            due = self._due[0][0] if self._due else math.inf
            till = max(self.now, min(now, empty, due))
            self.credit -= rate * (till - self.now) / 3600
            self.now = till
            if empty <= till:
                self._broke, self.credit = True, min(0.0, self.credit)
                for machine in self._running():
                    self._halt(machine)
            self._arrive()

    def _arrive(self) -> None:
        """Execute the machine transitions that are due."""
        while self._due and self._due[0][0] <= self.now:
            _, _, name, what = heapq.heappop(self._due)
            found = self.find_living(name)
            if found is not None:
                self._happen(found, what)

    def later(self, machine: M, seconds: float, what: str) -> None:
        """Schedule the transition `what` of a machine, `seconds` from now."""
        self._ordered += 1
        heapq.heappush(self._due, (self.now + seconds, self._ordered, machine.id, what))

    # -- machines and money ------------------------------------------------------------------------

    def enter(self, machine: M, luck: Luck | None = None) -> M:
        """Add a machine created now, with faults drawn from `luck`."""
        machine.created = machine.listed = machine.billed = self.now
        self.machines[machine.id] = machine
        self.note("created", machine)
        if luck is not None:
            machine.listed += luck.random.uniform(
                min(1.0, amount(self._faults, "late")), amount(self._faults, "late")
            )
            machine.stuck = luck.strikes("stuck")
            machine.fails = luck.strikes("failed")
            machine.impostor = luck.strikes("impostor")
        return machine

    def boots(self, machine: M, share: float = 1.0, what: str = "up") -> None:
        """Schedule the transition `what` of a machine after a fraction of the boot time.

        A stuck machine never boots.
        """
        if not machine.stuck:
            self.later(machine, amount(self._faults, "boot", BOOT) * share, what)

    def interruptible(self, machine: M, luck: Luck) -> None:
        """Make a machine preemptible, and schedule a preemption if the fault `preempted` is set."""
        machine.preemptible = True
        often = amount(self._faults, "preempted")
        if often:
            self.later(machine, luck.random.expovariate(often) * 3600, "preempted")

    def preempt(self) -> int:
        """Preempt every running preemptible machine, and return the number of machines."""
        found = [machine for machine in self._running() if machine.preemptible]
        for machine in found:
            self._happen(machine, "preempted")
        return len(found)

    def exit(self) -> int:
        """Make the containers of all machines exit, and return the number of stopped machines."""
        found = self._running()
        for machine in found:
            self._happen(machine, "exited")
        return sum(not machine.up for machine in found)

    def bill(self, machine: M, **rates: float) -> None:
        """Set the billing rates of a machine from now on, in US dollars per hour."""
        self._settle(machine)
        machine.rates = {what: rate for what, rate in rates.items() if rate}

    def end(self, machine: M, by: str = "") -> None:
        """Terminate a machine and its billing."""
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
        """Bill all costs up to now, and return the cost ledger."""
        for machine in self.machines.values():
            self._settle(machine)
        return self.ledger

    def find_living(self, name: str) -> M | None:
        """Return the existing machine with this ID, or None if it is unknown or terminated."""
        found = self.machines.get(name)
        if found is None or found.gone is not None:
            return None
        return found

    def alive(self) -> list[M]:
        """Return the account's machines that still exist."""
        return [machine for machine in self.machines.values() if machine.gone is None]

    def _running(self) -> list[M]:
        return [machine for machine in self.alive() if machine.up]

    def list_machines(self) -> list[M]:
        """Return the machines that a listing currently shows, in creation order."""
        return [machine for machine in self.alive() if machine.listed <= self.now]

    def is_doomed(self, machine: M, luck: Luck) -> bool:
        """Return True if a destroy request takes effect, which the fault `undead` prevents."""
        return not luck.strikes("undead")

    def is_held(self, machine: M) -> bool:
        """Return True if a machine is in its minimum billing period and cannot be destroyed."""
        return self.now < machine.created + amount(self._faults, "reserved")


def lines(entries: Sequence[Entry]) -> str:
    """Format ledger entries as JSON lines."""
    return "".join(json.dumps(entry._asdict()) + "\n" for entry in entries)
