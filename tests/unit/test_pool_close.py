"""A pool that is closed has closed the connections of all its places."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import pytest

from runner.hosts.pool import HostPool


@dataclass
class Closing:
    lost: str
    closed: bool = False

    async def aclose(self) -> None:
        await asyncio.sleep(0.01)
        self.closed = True


@pytest.mark.parametrize("lost", ["", "its agent was killed"])
def test_without_leases_lost_places_are_waited_for_too(lost: str) -> None:
    nothing, place = cast(Any, None), Closing(lost)
    pool = HostPool(nothing, "r", nothing, "local", _opened=[cast(Any, place)])

    async def act() -> bool:
        await pool.close()
        return place.closed

    assert asyncio.run(act())
