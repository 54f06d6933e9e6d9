"""Successive halving: stop underperforming instances of a step early, by their metrics.

Works on numbers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        if not isinstance(value, (int, float)) or not isinstance(step, (int, float)):
            continue
        is_nan = value != value
        if step > 0 and not is_nan:
            found.append((step, value))
    return found


def explain_stop(own: Stream, others: Sequence[Stream], least: bool) -> str:
    """Return the reason for stopping a matrix instance early, or an empty string if it continues.

    Rungs are at two, four, eight … times the first step that any instance reported.  An instance
    continues if it is in the better half of those that reached its last rung.
    """
    if not own:
        return ""
    first = min(each[0][0] for each in (own, *others) if each)
    rung = _find_last_rung(first, own[-1][0])
    if rung is None:
        return ""
    mine = _value_at(own, rung)
    assert mine is not None
    values = [_value_at(each, rung) for each in others]
    there = [value for value in values if value is not None]
    if least:
        better = sum(value < mine for value in there)
    else:
        better = sum(value > mine for value in there)
    # Half of the instances continue, and half of an odd number is rounded up.
    if better < -(-(len(there) + 1) // FACTOR):
        return ""
    return f"{mine:.4g} at step {rung:g} is below the better half of {len(there) + 1} instances"


def _find_last_rung(first: float, reached: float) -> float | None:
    """Return the last rung that an instance at step `reached` has passed, or None."""
    rungs = [first * FACTOR**n for n in range(1, 64)]
    return max((rung for rung in rungs if rung <= reached), default=None)


def _value_at(each: Stream, rung: float) -> float | None:
    return next((value for step, value in each if step >= rung), None)
