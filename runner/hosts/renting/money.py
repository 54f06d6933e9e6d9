"""How long the money lasts: pure arithmetic in seconds, US dollars, and US dollars per hour."""

from __future__ import annotations

from typing import Final

ENDING: Final = 120.0
"""Seconds reserved for a slow provider to end a machine, or a tenth of the time if that is less."""
SAVING: Final = 180.0
"""Seconds reserved to download outputs before a machine ends, or a fifth of the time if that is less."""


def affordable(left: float, price: float, shares: int = 1) -> float:
    """Return the seconds that a machine can run on its share of the remaining money."""
    seconds = max(0.0, left) / shares / price * 3600
    return seconds - min(ENDING, seconds / 10)


def kept_back(term: float) -> float:
    """Return the seconds that `affordable` reserved for the end of a machine with this term."""
    return min(ENDING, term / 9)


def committed_cost(price: float, asked: float, until: float) -> float:
    """Return the cost of a machine until its end."""
    return price * max(0.0, until - asked) / 3600


def leave_at(asked: float, until: float) -> float:
    """Return the Unix time at which steps on a machine must stop.

    Then enough time remains to download their outputs.
    """
    return until - min(SAVING, (until - asked) / 5)
