"""Which step of a run is its training: the one whose numbers a platform, and who asks for progress, take for those of the run.  Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reporting(NamedTuple):
    """A step that reports metrics, and what says whether it trains."""

    id: str
    keeps_checkpoints: bool = False
    """It declares a `state` with checkpoints."""
    total: float | None = None
    """How many training steps it takes, by its inputs; None where they do not say."""
    expected: float = 0.0
    """Seconds that it took before; 0 where that is not known."""

    @property
    def trains(self) -> bool:
        """Whether it is a training, and not a step that reports numbers about data or a model."""
        return self.keeps_checkpoints or self.total is not None


def training_of(steps: Iterable[Reporting]) -> str:
    """Return the id of the training among the steps of a plan, in its order; empty where none reports.

    Checkpoints say it most clearly, then a number of training steps, then the longest time.  Of equals the first is taken.
    """
    chosen = max(
        steps,
        key=lambda step: (step.keeps_checkpoints, step.total is not None, step.expected),
        default=None,
    )
    return chosen.id if chosen is not None else ""
