"""Setup, health and cleanup commands of a recipe, on every host of a run."""

from __future__ import annotations

from collections.abc import Iterator

from ...hosts.place.hooks import Hooks
from ...hosts.place.place import Place
from .run_plan import RunPlan


class HostHooks:
    """Setup, health and cleanup commands by host, created at first use."""

    def __init__(self, steps: RunPlan, run: str, fence: int) -> None:
        self._steps, self._run, self._fence = steps, run, fence
        self._hooks: dict[str, Hooks] = {}

    def __iter__(self) -> Iterator[Hooks]:
        return iter(self._hooks.values())

    def of(self, place: Place) -> Hooks:
        """Return the setup, health and cleanup commands of one host."""
        if place.name not in self._hooks:
            plan = self._steps.plan
            self._hooks[place.name] = Hooks(
                place, self._run, self._fence, plan.settings, plan.inputs
            )
        return self._hooks[place.name]
