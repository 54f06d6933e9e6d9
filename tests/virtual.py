"""Providers in virtual time: a loop whose time passes when nothing else is to be done, and each driver of rented machines with a World at its wire."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from urllib.parse import urlencode

import pytest

from drivers import cloud, web
from drivers.base import Host, Lease, Order, Unsure
from drivers.fakes import kind
from drivers.fakes.account import EPOCH, Machine
from drivers.fakes.world import Request, World
from drivers.gcp import Gcp
from drivers.prime import Prime
from drivers.runpod import Runpod
from drivers.vastai import Vastai
from drivers.web import Answer

SETTLES = 90.0
POLL = 30.0
MARKET = 8  # offers: a longer list is read for as long, and shows nothing more
OURS = "ssh-ed25519 AAAA"
"""Every public key of ours: making one takes a while, and nobody logs in."""
ENVIRON = {
    "VAST_API_KEY": "k", "RUNPOD_API_KEY": "k", "PRIME_API_KEY": "k", "CLOUDSDK_AUTH_ACCESS_TOKEN": "k", "CLOUDSDK_CORE_PROJECT": "fake",
}  # fmt: skip


class Eager(selectors.SelectSelector):
    """Waits for nothing: the time that a loop would wait is only counted."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0)


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose time is a number, and passes only when nothing else is to be done."""

    now = EPOCH
    skew = 0.0
    """Seconds by which the clock of this machine is wrong."""

    def __init__(self) -> None:
        super().__init__(Eager())
        self._clock_resolution = 1e-6  # what a number of this size tells apart

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@contextmanager
def virtual() -> Iterator[Virtual]:
    """A loop of its own time, which `time` tells, too."""
    loop = Virtual()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRON.items():
            patched.setenv(name, value)
        patched.setattr(time, "time", lambda: loop.now + loop.skew)
        patched.setattr(time, "monotonic", lambda: loop.now)
        patched.setattr(cloud, "boot", lambda *_: "")  # nothing executes it
        patched.setattr(cloud, "prove", lambda *_: "")
        patched.setattr(cloud, "public", lambda _: OURS)
        patched.setattr(cloud.InstallationKeys, "_pair", lambda *_: b"")
        try:
            yield loop
        finally:
            loop.close()


class ModelWeb(web.Web):
    """The HTTP of a driver, whose other end is a World in this process.  `look` is called after each request that had an effect."""

    def __init__(
        self, api: str, world: World[Any], luck: random.Random, look: Callable[[], None]
    ) -> None:
        super().__init__(api)
        self.world, self.luck, self.look = world, luck, look
        self.clock: Callable[[], float] = (
            asyncio.get_running_loop().time
        )  # the provider's, whatever ours says

    async def ask(
        self,
        method: str,
        path: str,
        key: str,
        body: web.Fields | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        sent = b"" if body is None else json.dumps(body).encode()
        where = self.api.removeprefix("http://model") + path
        asked = Request(
            method, where, urlencode(query or {}), {"authorization": f"Bearer {key}"}, sent
        )
        reply = self.world.handle(asked, self.clock())
        self.look()
        if reply.hold:
            await asyncio.sleep(reply.hold)
            reply = self.world.handle(asked, self.clock())
            self.look()
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        if reply.lost:
            raise Unsure("no reply")
        return self.read(web.read_answer(reply.status, reply.encode(), reply.headers))

    def read(self, answer: Answer) -> Answer:
        return answer


class VastaiModel(Vastai):
    """Each driver's machines let in as soon as the provider says that they are up, and do at their end what they do by themselves."""

    settings: ClassVar[Mapping[str, Any]] = {"api": "http://model"}

    async def hosts(self, lease: Lease) -> Any:
        return (
            (Host(),) if (await self._alive(lease)).states[:2] == ("running", "running") else None
        )


class Noticing(Host):
    """A machine of Google's: what waits there for the notice of its preemption ends with it."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    async def call(self, argv: object, stdin: object = None) -> Any:
        while not self._machine.noticed:  # noqa: ASYNC110  (a World has no events)
            await asyncio.sleep(1.0)
        yield b""


class GcpModel(Gcp):
    settings: ClassVar[Mapping[str, Any]] = {"api": "http://model/compute/v1"}

    async def hosts(self, lease: Lease) -> Any:
        if (await self._alive(lease)).status != "RUNNING":
            return None
        machines: Any = self._wire.web.world.account.machines.values()  # type: ignore[attr-defined]
        return [Noticing(each) for each in machines if each.mark.endswith(lease.key)]


class RunpodModel(Runpod):
    settings: ClassVar[Mapping[str, Any]] = {"api": "http://model"}

    async def hosts(self, lease: Lease) -> Any:
        return (Host(),) if (await self._alive(lease)).status == "RUNNING" else None


class PrimeModel(Prime):
    settings: ClassVar[Mapping[str, Any]] = {"api": "http://model", "first_use": True}

    async def hosts(self, lease: Lease) -> Any:
        found = await self._alive(lease)
        return (Host(),) if found.status == "ACTIVE" and found.ready else None

    def _private(self) -> bytes:
        return b""


MODELS: Mapping[str, type[Any]] = {
    "vastai": VastaiModel,
    "gcp": GcpModel,
    "runpod": RunpodModel,
    "prime": PrimeModel,
}


def market(name: str, seed: int, faults: Any) -> World[Any]:
    """The World of a provider, with an account that has our key."""
    world = kind(name)(seed, faults, EPOCH)
    if name == "vastai":
        world.asks = dict([*world.asks.items()][:MARKET])  # type: ignore[attr-defined]
    if name == "prime":
        world.public_keys.append(
            {"id": "key-0", "name": "ours", "publicKey": OURS, "isPrimary": True}
        )  # type: ignore[attr-defined]
    return world


def driver(name: str, web: ModelWeb, installation: str) -> Any:
    """A driver of that provider, as a new process has it, with that wire; its machines end themselves where those of the provider do."""
    return wired(_timed(name), web, installation)


def wired(of: Any, web: ModelWeb, installation: str) -> Any:
    """A driver of this class, with that wire."""
    made = of(installation=installation, settles=SETTLES + 1, poll=POLL, **of.settings)
    web.api = made._wire.web.api
    made._wire.web = web
    return made


@cache
def _timed(name: str) -> type[Any]:
    of: Any = MODELS[name]

    class Timed(of):  # type: ignore[misc]
        async def acquire(self, order: Order) -> Lease:
            if name in ITSELF:
                left = max(0.0, order.until.timestamp() - time.time())
                asyncio.get_running_loop().call_later(
                    left, _over, self._wire.web.world, name, self._installation.mark(order.key)
                )
            lease: Lease = await super().acquire(order)
            return lease

    return Timed


ITSELF: Mapping[str, Callable[[World[Any], Machine], None]] = {
    "vastai": lambda world, machine: world.account.end(machine),
    "runpod": lambda world, machine: world._stop(machine, "stopped"),  # type: ignore[attr-defined]  # its own key may not delete it
}
"""What the boot script does when its time is over.  Google ends its machines itself, and nothing ends one of Prime's."""


def _over(world: World[Any], name: str, mark: str) -> None:
    """The time of a machine that came up is over."""
    world.account.advance(asyncio.get_running_loop().time())
    for machine in world.account.alive():
        if machine.mark == mark and machine.up:
            ITSELF[name](world, machine)
