"""How far a run is, from the states of its steps and what its trainings report.  Pure: rows and clocks are handed in as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from .schedule import FINAL, State

WELL: Final = frozenset({State.DONE, State.FRESH, State.SKIPPED})
"""States of a step that has ended and has not failed."""
ALMOST: Final = 99.9
"""Percent that a run shows at most before it has COMPLETED."""


class Training(NamedTuple):
    """What a step reported last: its own step, of how many, and the seconds that are left at the pace seen."""

    step: float
    total: float
    eta: float | None = None

    @property
    def part(self) -> float:
        """How much of it is done, from 0 to 1."""
        return min(1.0, max(0.0, self.step / self.total)) if self.total > 0 else 0.0


class Standing(NamedTuple):
    """How a run stands."""

    state: str
    states: Mapping[str, str]
    """Of each step to which something has happened, by its id."""
    fresh: Collection[str] = ()
    """Ids of steps whose results were there before the run."""
    total: int | None = None
    """All its steps; None where that is not known yet."""
    expected: Mapping[str, float] = {}
    """Seconds that a step took before, where that is known."""
    elapsed: Mapping[str, float] = {}
    """Seconds for which a RUNNING step has run."""
    trainings: Mapping[str, Training] = {}
    """What RUNNING steps reported last."""


class Progress(NamedTuple):
    """How far a run is.  `step`: steps that have ended.  `eta`: seconds, None where that is not known."""

    step: int
    total: int | None
    percent: float | None
    eta: float | None


def progress_of(run: Standing) -> Progress:
    """Return how far a run is: by the training's own numbers, else by the time that its steps took before."""
    restored = set(run.fresh) - run.states.keys()  # one that has a row is counted by its row
    ended = sum(state in FINAL for state in run.states.values()) + len(restored)
    total = None if run.total is None else max(run.total, len(run.states) + len(restored))
    over = run.state in ("COMPLETED", "FAILED", "CANCELLED")
    if run.state == "COMPLETED":
        return Progress(ended, total, 100.0, 0.0)
    left = _seconds_left(run)
    eta = 0.0 if over else _eta(run, left, total, ended)
    return Progress(ended, total, _percent(run, left, total, len(restored)), eta)


def _percent(
    run: Standing, left: Mapping[str, float | None], total: int | None, restored: int
) -> float | None:
    if not total:
        return None
    parts = {id: _part(run, id, state, left.get(id)) for id, state in run.states.items()}
    weights = {id: _weight(run, id, left.get(id)) for id in parts}
    known = [weight for weight in weights.values() if weight]
    # A step of unknown length counts as much as the others do on average.
    usual = sum(known) / len(known) if known else 1.0
    whole = usual * (total - len(parts))
    done = usual * restored
    for id, part in parts.items():
        weight = weights[id] or usual
        whole += weight
        done += weight * part
    return min(ALMOST, round(100 * done / whole, 1)) if whole else None


def _part(run: Standing, id: str, state: str, left: float | None) -> float:
    """How much of a step is done, from 0 to 1."""
    if state in WELL:
        return 1.0
    if state != State.RUNNING:
        return 0.0
    if id in run.trainings:
        return run.trainings[id].part
    elapsed = run.elapsed.get(id, 0.0)
    return elapsed / (elapsed + left) if left else 0.0


def _weight(run: Standing, id: str, left: float | None) -> float:
    """Seconds that a step takes in all; 0 where that is not known."""
    if id in run.trainings and left is not None:
        return run.elapsed.get(id, 0.0) + left
    return run.expected.get(id, 0.0)


def _seconds_left(run: Standing) -> dict[str, float | None]:
    """Seconds that each open step takes yet; None where that is not known."""
    left: dict[str, float | None] = {}
    for id, state in run.states.items():
        if state in FINAL:
            continue
        training = run.trainings.get(id)
        if training is not None and training.eta is not None:
            left[id] = training.eta
        elif id in run.expected:
            left[id] = max(0.0, run.expected[id] - run.elapsed.get(id, 0.0))
        else:
            left[id] = None
    return left


def _eta(
    run: Standing, left: Mapping[str, float | None], total: int | None, ended: int
) -> float | None:
    known = [seconds for seconds in left.values() if seconds is not None]
    if total is None or len(known) < len(left) or ended + len(left) < total:
        return None
    return sum(known)
