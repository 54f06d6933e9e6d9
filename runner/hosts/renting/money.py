"""How long a machine can be paid for: pure sums.  Seconds, US dollars, and US dollars an hour."""

from __future__ import annotations

from typing import Final

ENDING: Final = 120.0
"""Seconds, or a tenth of the time where that is less, that are kept back for a provider that is slow to end a machine."""
SAVING: Final = 180.0
"""Seconds, or a fifth of the time where that is less, in which a run brings home what it made before its machine ends."""


def affordable(left: float, price: float, shares: int = 1) -> float:
    """Seconds for which a machine can run on its share of the money that is left."""
    seconds = max(0.0, left) / shares / price * 3600
    return seconds - min(ENDING, seconds / 10)


def kept_back(term: float) -> float:
    """Seconds that `affordable` kept back for the end of a machine of so many seconds."""
    return min(ENDING, term / 9)


def committed_cost(price: float, asked: float, until: float) -> float:
    """What a machine costs by its end."""
    return price * max(0.0, until - asked) / 3600


def leave_at(asked: float, until: float) -> float:
    """When a run stops what is on a machine, to bring it home in time."""
    return until - min(SAVING, (until - asked) / 5)
