"""What a request answers: how its run stands now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """How a run stands after a request."""

    run: str
    """The run that continues: a new one after a retry."""
    state: str
    done: bool
    """False: the worker of the run was asked, and had not answered yet."""
    said: Sequence[str] = ()
    """What may still run on other machines."""
