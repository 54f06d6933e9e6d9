"""Faults of a fake provider as data, such as `throttled=0.1,lost@create=once,late=90`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final, NamedTuple

from ..base import suggest

CHANCES: Final = {
    "cut": "the fake closes the connection before the request has any effect",
    "lost": "the request takes effect, then the fake closes the connection without a reply",
    "throttled": 'the fake rejects the request with "too many requests"',
    "broken": "the fake answers with a server error, and the request has no effect",
    "crashed": "the request takes effect, and the fake answers with a server error",
    "denied": "the fake rejects the account key",
    "taken": "creating a machine fails, because the offer no longer exists or the provider has no capacity",
    "dearer": "when a machine is created, its price is 10 % higher than in the offer",
    "undead": "the fake confirms a destroy request, but the machine continues to run",
    "spelled": "a price is text, such as $0.83/hr, 19.92 USD per day or 83 cents (not gcp, which returns no prices)",
    "unpriced": "a price is null, negative or not a number (not gcp)",
    "stuck": "a machine never becomes ready",
    "failed": "a machine cannot boot",
    "fewer": "a machine has one GPU less than its offer",
    "impostor": "a machine shows a different host key than recipe gave it (`--hosts real`, not prime)",
    "wedged": "nvidia-smi hangs on a machine (`--hosts real`)",
    "loose": "a search returns one offer that does not match its filters",
}
"""Faults whose value is a probability from 0 to 1, or `once`."""
AMOUNTS: Final = {
    "boot": "seconds until a machine is ready (default 40)",
    "late": "a new machine is missing from listings for up to this many seconds",
    "pace": "factor of the provider's own minimum time between two requests; faster requests are rejected",
    "preempted": "number of preemptions of a spot machine per hour",
    "balance": "US dollars in the account (default 100)",
    "foreign": "number of machines of other users in the account at the start",
    "reserved": "seconds after its creation during which a machine cannot be destroyed",
    "restless": "1: the pages of a listing shift when a machine is deleted, because a page starts at a row number",
    "quota": "maximum number of searches per day, until midnight UTC (vastai); maximum number of GPUs of a type per region (gcp, default 8)",
    "team": "1: the API key belongs to a team, so SSH keys of the account are rejected (vastai)",
    "swept": "seconds until SSH keys that a program on the machine added are removed (vastai, `--hosts real`)",
    "takes": "duration of an insert operation in seconds; stopping or deleting takes twice as long (gcp, default 4)",
    "notice": "seconds from the preemption notice to the preemption (gcp, default 30)",
    "unreachable": "1: a listing of all zones does not include the first zone (gcp)",
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
        name = f"{self.name}@{self.operation}" if self.operation else self.name
        value = "once" if self.once else f"{self.value:g}"
        return f"{name}={value}"


def parse(text: str, operations: Sequence[str] = ()) -> tuple[Fault, ...]:
    """Parse comma-separated faults of the form `NAME[@OPERATION]=VALUE`.

    `operations` are the known operations.  Raises ValueError with a message for the user.
    """
    words = [word.strip() for word in text.split(",")]
    return tuple(_parse_fault(word, operations) for word in words if word)


def _parse_fault(word: str, operations: Sequence[str]) -> Fault:
    left, equals, value = word.partition("=")
    name, _, operation = left.partition("@")
    _check_names(name, operation, operations)
    if value == "once" and name in CHANCES:
        return Fault(name, 1.0, operation, once=True)
    number = _parse_value(value) if equals else 1.0
    if name in CHANCES and not 0 <= number <= 1:
        raise ValueError(f"{word}: write a chance from 0 to 1, or `once`")
    if not 0 <= number < math.inf:
        raise ValueError(f"{word}: write a number of at least 0")
    return Fault(name, number, operation)


def _check_names(name: str, operation: str, operations: Sequence[str]) -> None:
    """Check that a fault and its operation exist.  Raises ValueError with a message for the user."""
    known = [*CHANCES, *AMOUNTS]
    if name not in known:
        raise ValueError(f'there is no fault "{name}"{suggest(name, known)}')
    if not operation:
        return
    if operations and operation not in operations:
        raise ValueError(
            f'there is no operation "{operation}" (known: {", ".join(sorted(operations))})'
        )
    if name in AMOUNTS:
        raise ValueError(f"{name} holds for the whole provider: write {name}=AMOUNT")


def _parse_value(text: str) -> float:
    """Return a number, or NaN for any other text: NaN is in no range of allowed values."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def amount(faults: Sequence[Fault], name: str, default: float = 0.0) -> float:
    """Return the configured value of the fault `name`, or `default` if the fault is not set."""
    return next((fault.value for fault in faults if fault.name == name), default)


class Luck:
    """Random draw of the faults of one request, from a seed.

    Equal requests to Worlds in equal states have the same faults.
    """

    def __init__(self, faults: list[Fault], seed: str, operation: str) -> None:
        self._faults = faults
        self._operation = operation
        self.random = Random(seed)

    def price(self, usd: float) -> object:
        """Return an hourly price in the provider's notation, possibly distorted by a fault."""
        if self.strikes("unpriced"):
            return self.random.choice((None, -usd, "", "n/a", "1,5", f"{usd} EUR"))
        if self.strikes("spelled"):
            texts = f"{usd}", f"${usd}/hr", f"{usd * 24:.8f} USD per day", f"{usd * 100:.8f} cents"
            return self.random.choice(texts)
        return usd

    def strikes(self, name: str) -> bool:
        """Draw whether a fault happens now. A fault with `once` is removed after it happens."""
        for fault in self._faults:
            if fault.name != name or fault.operation not in ("", self._operation):
                continue
            if fault.once:
                self._faults.remove(fault)
                return True
            if self.random.random() < fault.value:
                return True
        return False
