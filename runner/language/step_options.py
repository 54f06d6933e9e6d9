"""The options of a step: how often and how long it is tried, and how its processes run.

A plan takes them from its recipe as they are.  They hold no templates and are no part of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DEFAULT_PREEMPTIONS = 10
_NONE: Mapping[str, int] = {}


class StepOptions(NamedTuple):
    """The options of a step.  Times are in seconds."""

    retries: int = 0  # after failures
    preemptions: int = DEFAULT_PREEMPTIONS
    oom: Mapping[str, int] = _NONE  # input -> divisor, if memory ran out
    timeout: float | None = None
    idle_timeout: float | None = None
    ends_on_nan: bool = False  # on_nan: stop
    nice: int = 0  # niceness, added to that of the agent
    sandbox: str = ""  # off, closed or network; empty: the settings decide

    def sandbox_where(self, settings: Mapping[str, object]) -> str:
        """Return the sandbox of the step, `closed` or `network`; empty for none.

        `settings` are the flags of recipe.toml, which count if neither step nor recipe says it.
        """
        by_settings = "closed" if settings.get("steps.sandbox") else ""
        return "" if self.sandbox == "off" else self.sandbox or by_settings


DEFAULTS = StepOptions()
