"""Successive halving: stop underperforming instances of a step early, by their metrics.

Works on numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, TypeAlias

Stream: TypeAlias = Sequence[tuple[float, float]]
"""Values of one metric reported by an instance: pairs of step, from 1, and value, in order."""
FACTOR: Final = 2
"""Reduction factor of successive halving: at each rung, one in FACTOR instances continues."""
STOPPED: Final = "stopped"
"""Outcome of an attempt that was stopped early."""


class Goal(NamedTuple):
    """Metric for comparing instances, and whether lower values are better."""

    metric: str
    least: bool


def stream(points: Sequence[Mapping[str, object]], metric: str) -> Stream:
    """Return (step, value) pairs of one metric from a step's reports.

    A report without `step` counts as the next step.
    """
    found: list[tuple[float, float]] = []
    for point in points:
        value, step = point.get(metric), point.get("step", len(found) + 1)
        if (
            isinstance(value, (int, float))
            and isinstance(step, (int, float))
            and step > 0
            and value == value
        ):
            found.append((step, value))
    return found


def explain_stop(own: Stream, others: Sequence[Stream], least: bool) -> str:
    """Return the reason for stopping a matrix instance early, or an empty string if it continues.

    Rungs are at two, four, eight … times the first step that any instance reported.  An instance
    continues if it is in the better half of those that reached its last rung.
    """
    begins = [each[0][0] for each in (own, *others) if each]
    if not own or not begins:
        return ""
    rungs = takewhile(
        lambda rung: rung <= own[-1][0], (min(begins) * FACTOR**n for n in range(1, 64))
    )
    rung = max(rungs, default=None)
    if rung is None:
        return ""
    there = [value for each in others if (value := _at(each, rung)) is not None]
    mine = _at(own, rung)
    assert mine is not None
    better = sum(value < mine if least else value > mine for value in there)
    if better < -(-(len(there) + 1) // FACTOR):
        return ""
    return f"{mine:.4g} at step {rung:g} is below the better half of {len(there) + 1} instances"


def _at(each: Stream, rung: float) -> float | None:
    return next((value for step, value in each if step >= rung), None)
