"""Successive halving: which instance of a step is stopped early, by what all of them reported until then.  Decides from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, TypeAlias

Stream: TypeAlias = Sequence[tuple[float, float]]
"""What an instance reported of one metric: the step, from 1, and the value; in order."""
FACTOR: Final = 2
"""Between two rungs, and the share that goes on: the better half."""
STOPPED: Final = "stopped"
"""The outcome of an attempt that was stopped early."""


class Goal(NamedTuple):
    """By which metric instances are compared, and whether less of it is better."""

    metric: str
    least: bool


def stream(points: Sequence[Mapping[str, object]], metric: str) -> Stream:
    """One metric of what an instance reported; by its `step`, or by the count of reports where it tells none."""
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


def behind(own: Stream, others: Sequence[Stream], least: bool) -> str:
    """Why an instance is stopped, in words; empty where it goes on.

    Rungs are at twice the first step that any instance reported, at four times it, and so on.  An instance goes on if, at the last rung that it
    reached, it belongs to the better half of those that reached it too.
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
