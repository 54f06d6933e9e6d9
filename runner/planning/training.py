"""Find the training step of a run, whose metrics represent the whole run.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ReportingStep(NamedTuple):
    """Step that reports metrics, with the evidence that it trains a model."""

    id: str
    keeps_checkpoints: bool = False
    """Whether the step declares a `state` with checkpoints."""
    total: float | None = None
    """Number of training steps from its inputs, or None if unknown."""
    expected: float = 0.0
    """Duration in an earlier run in seconds, or 0 if unknown."""

    @property
    def trains(self) -> bool:
        """Return whether the step trains a model, rather than reporting on data or a model."""
        return self.keeps_checkpoints or self.total is not None


def find_training(steps: Iterable[ReportingStep]) -> str:
    """Return the id of the training step, or an empty string if no step reports metrics.

    Checkpoints are the strongest evidence, then a number of training steps, then the longest
    duration.  The first of equal steps in plan order wins.
    """
    chosen = max(
        steps,
        key=lambda step: (step.keeps_checkpoints, step.total is not None, step.expected),
        default=None,
    )
    return chosen.id if chosen is not None else ""
