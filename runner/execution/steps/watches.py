"""Look now and then at the health of hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from drivers.base import DriverError

from ...hosts.place.hooks import Hooks
from ...hosts.place.place import Place
from ...language.values import Tree

PATIENCE: Final = 3
"""Bad looks at a host in a row that end what runs there."""


async def watch(
    hosts: Iterable[Hooks],
    command: str | Sequence[Tree],
    every: float,
    sick: Callable[[Place], Awaitable[None]],
) -> None:
    """Run the recipe's health check on each host every `every` seconds, and call `sick` with one where it failed `PATIENCE` times in a row."""
    bad: dict[str, int] = {}
    while True:
        await asyncio.sleep(every)
        for hooks in [hooks for hooks in hosts if not hooks.place.lost]:
            place = hooks.place
            try:
                bad[place.name] = (
                    0
                    if await hooks.healthy(command, max(every, 1.0))
                    else bad.get(place.name, 0) + 1
                )
            except DriverError:
                continue  # who waits for its jobs says what is wrong with the host
            if bad[place.name] == PATIENCE:
                bad[place.name] = 0
                await sick(place)
