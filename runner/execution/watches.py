"""Look now and then at the health of hosts, and at the room that checkpoints take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

from drivers.base import DriverError

from ..hosts.hooks import Hooks
from ..hosts.sites import Site
from ..language.values import Tree
from ..planning.step import StateSpec
from .attempts import Running

CARE: Final = 60.0
"""Seconds between looks at the checkpoints of what runs here."""
PATIENCE: Final = 3
"""Bad looks at a host in a row that end what runs there."""


async def care(running: Mapping[str, Running], states: Callable[[Running], Sequence[StateSpec]], say: Callable[[str], None]) -> None:
    """Delete old checkpoints while their trainers write here; a host with a disk of its own has a checkpoint sync for that."""
    from ..hosts.checkpoint_sync import CheckpointPruner

    janitors: dict[str, list[CheckpointPruner]] = {}
    while True:
        await asyncio.sleep(CARE)
        for each in [each for each in running.values() if each.state is not None and each.errand is None]:
            folders = [(each.state.folder(state.name), state.checkpoint, state.keep) for state in states(each) if each.state is not None]
            for janitor in janitors.setdefault(each.name, [CheckpointPruner(*folder) for folder in folders]):
                _, words = await asyncio.to_thread(janitor.look)
                if words:
                    say(f"{each.node.id}: {words}")


async def watch(hosts: Collection[Hooks], command: str | Sequence[Tree], every: float, sick: Callable[[Site], Awaitable[None]]) -> None:
    """Run the recipe's health check on each host every `every` seconds, and call `sick` with one where it failed `PATIENCE` times in a row."""
    bad: dict[str, int] = {}
    while True:
        await asyncio.sleep(every)
        for hooks in [hooks for hooks in hosts if not hooks.site.lost]:
            site = hooks.site
            try:
                bad[site.name] = 0 if await hooks.healthy(command, max(every, 1.0)) else bad.get(site.name, 0) + 1
            except DriverError:
                continue  # who waits for its jobs says what is wrong with the host
            if bad[site.name] == PATIENCE:
                bad[site.name] = 0
                await sick(site)
