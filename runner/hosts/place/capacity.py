"""What a place has of processors, memory and GPUs, and what steps have taken of it.  Asks its agent which GPUs other runs hold."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from drivers.base import Unreachable

if TYPE_CHECKING:
    from drivers.devices import Device

SOONEST_LOOK, LATEST_LOOK = 0.1, 1.0
"""Seconds between looks whether another run has given a GPU back: at first, and after a while."""
LONGEST_QUESTION = 5.0
"""Seconds that such a look may take."""


class Pick(NamedTuple):
    """GPUs for one attempt.  Without any: seconds until the next look, and how many were held by others at this one, if there was one."""

    devices: tuple[Device, ...]
    again: float
    others: int


class Capacity:
    """Of one host.  `slots`: how many steps may run there, None for as many as fit; `free`: which of these GPUs no run holds, by their locks."""

    def __init__(
        self,
        machine: Mapping[str, float],
        devices: Callable[[], Sequence[Device]],
        slots: int | None,
        free: Callable[[Sequence[str]], Awaitable[Sequence[str]]],
    ) -> None:
        self.machine, self.slots = machine, slots
        self._devices, self._free = devices, free
        self._running = 0
        self._used: dict[str, float] = {}
        self._given: set[Device] = set()
        self._crowded: dict[
            int, float
        ] = {}  # GPUs that could not be had at once -> the time of the next look
        self._pause = SOONEST_LOOK

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that a program sees here which is given none."""
        return tuple(self._devices())

    @property
    def processors(self) -> int:
        """Whole processors, at least one."""
        return max(1, int(self.machine["cpus"]))

    def share(self, rank: int, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The share of one node in the GPUs that were picked here."""
        return tuple(devices)

    def has(self, name: str) -> float:
        """How much there is of cpus, gpus, or memory in bytes.  GPUs are not listed before somebody asks for them."""
        return float(len(self.devices)) if name == "gpus" else self.machine[name]

    def seen(self, share: int | None) -> Mapping[str, int]:
        """`host` in templates, for a step that asks for so many GPUs, None where it says nothing about them."""
        return _Seen(self, share)

    def could(self, wants: Mapping[str, float]) -> bool:
        """Whether a step that takes so many cpus, gpus and bytes of memory could ever run here."""
        return all(amount <= self.has(name) for name, amount in wants.items())

    def has_room(self, wants: Mapping[str, float]) -> bool:
        """Whether it may start here now."""
        if not self.could(wants) or (self.slots is not None and self._running >= self.slots):
            return False
        if self._crowded.get(int(wants.get("gpus", 0)), 0.0) > time.monotonic():
            return False
        return all(
            self._used.get(name, 0.0) + amount <= self.has(name) + 1e-9
            for name, amount in wants.items()
        )

    @property
    def busy(self) -> bool:
        """Whether a step runs here."""
        return self._running > 0

    async def pick(self, count: int, but: Sequence[Device] = ()) -> Pick:
        """GPUs for a step that asks for so many: some that no run holds now, or none, and when to look again.  Raises DriverError.

        `but`: those that other nodes of the step are given already, which may be the same cards.
        """
        now = time.monotonic()
        if (again := self._crowded.get(count, 0.0)) > now:
            return Pick((), again - now, 0)
        ours = [device for device in others(self.devices, but) if device not in self._given]
        free: Sequence[str] = ()
        with contextlib.suppress(
            Unreachable, TimeoutError
        ):  # there will be another look; what runs there says what is wrong
            async with asyncio.timeout(LONGEST_QUESTION):
                free = await self._free([device.lock for device in ours])
        found = tuple(device for device in ours if device.lock in free)
        if len(found) >= count:
            self._crowded.clear()
            self._pause = SOONEST_LOOK
            return Pick(found[:count], 0.0, 0)
        pause, self._pause = self._pause, min(LATEST_LOOK, self._pause * 2)
        self._crowded[count] = now + pause
        return Pick((), pause, len(ours) - len(found))

    def enter(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        self._running += 1
        self._given.update(devices)
        for name, amount in wants.items():
            self._used[name] = self._used.get(name, 0.0) + amount

    def leave(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        self._running -= 1
        self._given.difference_update(devices)
        if devices:
            self._crowded.clear()
        for name, amount in wants.items():
            self._used[name] -= amount


def others(devices: Sequence[Device], taken: Sequence[Device]) -> list[Device]:
    """Those of these that are none of the cards that are taken.  Without a UUID, names of several hosts say nothing of each other."""
    known = {device.uuid for device in taken if device.uuid}
    return [device for device in devices if device.uuid not in known]


class _Seen(Mapping[str, int]):
    def __init__(self, capacity: Capacity, share: int | None) -> None:
        self._capacity, self._share = capacity, share

    def __getitem__(self, name: str) -> int:
        if name == "gpus":
            return len(self._capacity.devices) if self._share is None else self._share
        if name == "cpus":
            return self._capacity.processors
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("gpus", "cpus"))

    def __len__(self) -> int:
        return 2
