"""Arithmetic of a machine's cost and running time.

Units are seconds, US dollars, and US dollars per hour.
"""

from __future__ import annotations

from typing import Final

RELEASE_SECONDS: Final = 120.0
"""Seconds reserved for a slow provider to end a machine, or a tenth of the time if that is less."""
DOWNLOAD_SECONDS: Final = 180.0
"""Seconds reserved to download outputs before a machine ends, or a fifth of the time if that is
less.
"""


def affordable_seconds(left: float, price: float, shares: int = 1) -> float:
    """Return the seconds that a machine can run on its share of the remaining money."""
    seconds = max(0.0, left) / shares / price * 3600
    return seconds - min(RELEASE_SECONDS, seconds / 10)


def release_reserve(term: float) -> float:
    """Return the seconds that `affordable_seconds` reserved for the end of a machine with this
    term.
    """
    return min(RELEASE_SECONDS, term / 9)


def committed_cost(price: float, asked: float, until: float) -> float:
    """Return the cost of a machine until its end."""
    return price * max(0.0, until - asked) / 3600


def stop_time(asked: float, until: float) -> float:
    """Return the Unix time at which steps on a machine must stop.

    Then enough time remains to download their outputs.
    """
    return until - min(DOWNLOAD_SECONDS, (until - asked) / 5)
