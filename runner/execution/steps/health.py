"""Periodic health checks of hosts, with the recipe's `health` command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final

from drivers.base import DriverError

from ...hosts.place.hooks import Hooks
from ...hosts.place.place import Place
from ...language.values import Tree
from .host_hooks import HostHooks
from .run_plan import RunPlan
from .running_attempts import RunningAttempts

PATIENCE: Final = 3
"""Number of consecutive failed checks after which the steps on a host are stopped."""


class HealthChecks:
    """Monitor that stops the attempts on a host whose health check fails."""

    def __init__(self, steps: RunPlan, running: RunningAttempts, hooks: HostHooks) -> None:
        self._steps, self._running, self._hooks = steps, running, hooks
        self._sick: set[str] = set()

    def take_sick(self, id: str) -> bool:
        """Return True if a health check stopped the step, and clear that mark."""
        was_sick = id in self._sick
        self._sick.discard(id)
        return was_sick

    @contextlib.contextmanager
    def monitor(self) -> Iterator[None]:
        """Run the health checks in the background during the block."""
        health = self._steps.plan.settings.health
        if health is None:
            yield
            return
        looks = check_hosts(self._hooks, health.run, health.every, self._stop_on)
        task = asyncio.get_running_loop().create_task(looks)
        try:
            yield
        finally:
            task.cancel()

    async def _stop_on(self, place: Place) -> None:
        there = [each for each in self._running.values() if place in each.place.members]
        self._sick |= {attempt.id for attempt in there}
        for attempt in there:
            await attempt.stop()


async def check_hosts(
    hosts: Iterable[Hooks],
    command: str | Sequence[Tree],
    every: float,
    sick: Callable[[Place], Awaitable[None]],
) -> None:
    """Run the recipe's health check on each host every `every` seconds.

    Calls `sick` with a host after `PATIENCE` failed checks in a row.
    """
    bad: dict[str, int] = {}
    while True:
        await asyncio.sleep(every)
        for hooks in [hooks for hooks in hosts if not hooks.place.lost]:
            place = hooks.place
            try:
                is_healthy = await hooks.is_healthy(command, max(every, 1.0))
            except DriverError:
                continue  # the wait for its jobs reports a broken host
            bad[place.name] = 0 if is_healthy else bad.get(place.name, 0) + 1
            if bad[place.name] == PATIENCE:
                bad[place.name] = 0
                await sick(place)
