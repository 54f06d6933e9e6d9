"""The result of a request about a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """The state of a run after a request, such as cancel or pause."""

    run: str
    """The run that continues. A retry creates a new run."""
    state: str
    done: bool
    """False if the request was sent to the run's worker and is not done yet."""
    said: Sequence[str] = ()
    """Warnings about jobs that may still run on other machines."""
