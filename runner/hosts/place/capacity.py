"""The processors, memory and GPUs of a place, and their use by steps.

The agent knows which GPUs other runs hold.
"""

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
"""Seconds between checks whether another run has released a GPU: the first and the longest pause.
"""
LONGEST_QUESTION = 5.0
"""Timeout of such a check in seconds."""


class GpuPick(NamedTuple):
    """GPUs for one attempt.

    Without GPUs, the seconds until the next check, and the number of GPUs that other runs hold.
    """

    devices: tuple[Device, ...]
    again: float
    others: int


class Capacity:
    """The capacity of one host.

    `slots` limits concurrent steps, None for no limit.  `free` returns those of the given GPU locks
    that no run holds.
    """

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
        ] = {}  # number of GPUs that were unavailable -> time of the next check
        self._pause = SOONEST_LOOK

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that a program on the host sees by default."""
        return tuple(self._devices())

    @property
    def processors(self) -> int:
        """Number of whole processors, at least one."""
        return max(1, int(self.machine["cpus"]))

    def share(self, rank: int, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return one node's part of the picked GPUs."""
        return tuple(devices)

    def total_of(self, name: str) -> float:
        """Return the total of `cpus`, `gpus`, or `memory` in bytes.

        GPUs are listed on first use.
        """
        return float(len(self.devices)) if name == "gpus" else self.machine[name]

    def template_host(self, share: int | None) -> Mapping[str, int]:
        """Return the template variable `host` for a step that requests `share` GPUs, None for no
        request.
        """
        return _TemplateHost(self, share)

    def fits(self, wants: Mapping[str, float]) -> bool:
        """Return whether the host is large enough for a step: its cpus, gpus and bytes of memory."""
        return all(amount <= self.total_of(name) for name, amount in wants.items())

    def has_room(self, wants: Mapping[str, float]) -> bool:
        """Return whether a step may start now."""
        if not self.fits(wants):
            return False
        if self.slots is not None and self._running >= self.slots:
            return False
        if self._crowded.get(int(wants.get("gpus", 0)), 0.0) > time.monotonic():
            return False
        return all(
            self._used.get(name, 0.0) + amount <= self.total_of(name) + 1e-9
            for name, amount in wants.items()
        )

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._running > 0

    async def pick(self, count: int, but: Sequence[Device] = ()) -> GpuPick:
        """Pick `count` GPUs that no run holds, or return the time of the next check.

        Raises DriverError.

        `but` are GPUs of the step's other nodes, which may be the same cards.
        """
        now = time.monotonic()
        next_check = self._crowded.get(count, 0.0)
        if next_check > now:
            return GpuPick((), next_check - now, 0)
        devices = remove_taken(self.devices, but)
        candidates = [device for device in devices if device not in self._given]
        free: Sequence[str] = ()
        # The next check tries again, and the job itself reports a lost host.
        with contextlib.suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(LONGEST_QUESTION):
                free = await self._free([device.lock for device in candidates])
        available = tuple(device for device in candidates if device.lock in free)
        if len(available) >= count:
            self._crowded.clear()
            self._pause = SOONEST_LOOK
            return GpuPick(available[:count], 0.0, 0)
        pause, self._pause = self._pause, min(LATEST_LOOK, self._pause * 2)
        self._crowded[count] = now + pause
        return GpuPick((), pause, len(candidates) - len(available))

    def reserve(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        """Reserve a slot, resources and GPUs for a step."""
        self._running += 1
        self._given.update(devices)
        for name, amount in wants.items():
            self._used[name] = self._used.get(name, 0.0) + amount

    def release(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        """Release the reservation of a finished step."""
        self._running -= 1
        self._given.difference_update(devices)
        if devices:
            self._crowded.clear()
        for name, amount in wants.items():
            self._used[name] -= amount


def remove_taken(devices: Sequence[Device], taken: Sequence[Device]) -> list[Device]:
    """Return the devices that are not in `taken`.

    Devices without a UUID are never equal across hosts.
    """
    known = {device.uuid for device in taken if device.uuid}
    return [device for device in devices if device.uuid not in known]


class _TemplateHost(Mapping[str, int]):
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
