"""Execution options of a step: retries, timeouts and process settings.

Plans copy them from the recipe. They hold no templates and are not part of the cache key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DEFAULT_PREEMPTIONS = 10
_NONE: Mapping[str, int] = {}


class StepOptions(NamedTuple):
    """Execution options of a step. Times are in seconds."""

    retries: int = 0  # after failures
    preemptions: int = DEFAULT_PREEMPTIONS
    oom: Mapping[str, int] = _NONE  # input -> divisor, if memory ran out
    timeout: float | None = None
    idle_timeout: float | None = None
    ends_on_nan: bool = False  # on_nan: stop
    nice: int = 0  # niceness, added to that of the agent
    sandbox: str = ""  # off, closed or network; empty: the settings decide

    def sandbox_where(self, settings: Mapping[str, object]) -> str:
        """Return the step's sandbox mode, `closed` or `network`, or "" for none.

        `settings` are the flags of recipe.toml, which apply if neither step nor recipe sets the
        sandbox.
        """
        by_settings = "closed" if settings.get("steps.sandbox") else ""
        return "" if self.sandbox == "off" else self.sandbox or by_settings


DEFAULTS = StepOptions()
