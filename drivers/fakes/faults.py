"""Faults of a fake provider as data, such as `throttled=0.1,lost@create=once,late=90`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from ..base import suggest

CHANCES: Final = {
    "cut": "the connection is closed before the request has any effect",
    "lost": "the request takes effect, then the connection is closed",
    "throttled": "too many requests",
    "broken": "a server error before the request has any effect",
    "crashed": "a server error after the request has taken effect",
    "denied": "the key is refused",
    "taken": "the offer is gone, or there is no capacity, when a machine is created",
    "dearer": "the price has risen by a tenth when a machine is created",
    "undead": "destroying is confirmed, and the machine lives on",
    "spelled": "a price is text, such as $0.83/hr, 19.92 USD per day or 83 cents (not gcp, which names none)",
    "unpriced": "a price is null, negative or no number (not gcp)",
    "stuck": "a machine never comes up",
    "failed": "a machine cannot boot",
    "fewer": "a machine has one GPU less than was sold",
    "impostor": "a machine shows another host key than the one that it was given (`--hosts real`; not prime, which is given none)",
    "wedged": "nvidia-smi of a machine does not end (`--hosts real`)",
    "loose": "a search returns one offer that its filters exclude",
}
"""Faults whose value is a probability from 0 to 1, or `once`."""
AMOUNTS: Final = {
    "boot": "seconds until a machine is up (default 40)",
    "late": "a new machine is missing from listings for up to this many seconds",
    "pace": "requests closer together than the provider's own limits times this are refused",
    "preempted": "how often an hour an interruptible machine is preempted",
    "balance": "US dollars in the account (default 100)",
    "foreign": "machines of somebody else that are in the account from the start",
    "reserved": "seconds after its creation in which a machine cannot be destroyed",
    "restless": "1: a page of a listing begins at a number of rows, so it shifts when a row vanishes",
    "quota": "searches a day, then none until midnight UTC (vastai); GPUs of a kind in a region (gcp, default 8)",
    "team": "1: the key is of a team, so keys of an account are refused (vastai)",
    "swept": "seconds after which keys that a machine wrote itself are removed from it (vastai, `--hosts real`)",
    "takes": "seconds until an insertion is done or has failed (gcp, default 4; twice that to stop or delete)",
    "notice": "seconds between the notice of a preemption and its end (gcp, default 30)",
    "unreachable": "1: a listing over all zones does not reach the first of them (gcp)",
}
"""Faults whose value is an amount."""


class Fault(NamedTuple):
    """One fault of a fake provider.

    An empty `operation` stands for all operations.  With `once`, the fault happens a single time.
    """

    name: str
    value: float
    operation: str = ""
    once: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'@' * bool(self.operation)}{self.operation}={'once' if self.once else f'{self.value:g}'}"


def parse(text: str, operations: Sequence[str] = ()) -> tuple[Fault, ...]:
    """Parse `NAME[@OPERATION]=VALUE` items, separated by commas.

    `operations` are the known operations.  Raises ValueError with a message for the user.
    """
    return tuple(_one(word.strip(), operations) for word in text.split(",") if word.strip())


def _one(word: str, operations: Sequence[str]) -> Fault:
    left, equals, value = word.partition("=")
    name, _, operation = left.partition("@")
    known = [*CHANCES, *AMOUNTS]
    if name not in known:
        raise ValueError(f'there is no fault "{name}"{suggest(name, known)}')
    if operation and operations and operation not in operations:
        raise ValueError(
            f'there is no operation "{operation}" (known: {", ".join(sorted(operations))})'
        )
    if operation and name in AMOUNTS:
        raise ValueError(f"{name} holds for the whole provider: write {name}=AMOUNT")
    if value == "once" and name in CHANCES:
        return Fault(name, 1.0, operation, once=True)
    try:
        number = float(value) if equals else 1.0
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (name in CHANCES and number > 1):
        raise ValueError(
            f"{word}: "
            + (
                "write a chance from 0 to 1, or `once`"
                if name in CHANCES
                else "write a number of at least 0"
            )
        )
    return Fault(name, number, operation)


def amount(faults: Sequence[Fault], name: str, default: float = 0.0) -> float:
    """Return the amount of the fault `name`, or `default` if the fault is not set."""
    return next((fault.value for fault in faults if fault.name == name), default)


class Luck:
    """The faults of one request, drawn from a seed.

    Equal requests to Worlds in equal states have the same faults.
    """

    def __init__(self, faults: list[Fault], seed: str, operation: str) -> None:
        self._faults = faults
        self._operation = operation
        self.random = Random(seed)

    def price(self, usd: float) -> object:
        """Return an hourly price as the provider writes it, which may be distorted by a fault."""
        if self.strikes("unpriced"):
            return self.random.choice((None, -usd, "", "n/a", "1,5", f"{usd} EUR"))
        if self.strikes("spelled"):
            texts = f"{usd}", f"${usd}/hr", f"{usd * 24:.8f} USD per day", f"{usd * 100:.8f} cents"
            return self.random.choice(texts)
        return usd

    def strikes(self, name: str) -> bool:
        """Draw whether a fault happens now.  A fault with `once` is then removed."""
        for fault in self._faults:
            if (
                fault.name == name
                and fault.operation in ("", self._operation)
                and (fault.once or self.random.random() < fault.value)
            ):
                if fault.once:
                    self._faults.remove(fault)
                return True
        return False
