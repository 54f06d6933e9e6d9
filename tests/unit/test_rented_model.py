"""Model: the leases, the ledger and the driver of the program itself against the World of a provider, in virtual time, under seeded faults and kills.

After each request: whatever bears our mark is in the ledger, and not GONE there; one need has one machine; machines of others are as they were.
RECIPE_SCHEDULES says how many schedules there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from drivers import vastai_wire, web
from drivers.base import DriverError, HostLost, Lease, Need, Unsure, Wish
from drivers.fakes.faults import parse
from drivers.fakes.vastai import FOREIGN
from drivers.fakes.vastai import Vastai as Market
from drivers.fakes.world import EPOCH, Request
from drivers.vastai import Vastai
from drivers.vastai_wire import Wire
from drivers.web import Answer
from runner.errors import RecipeError
from runner.hosts.leases import Leases
from runner.hosts.reaper import end
from runner.storage.ledger import LeaseRow, Ledger

SCHEDULES = int(os.environ.get("RECIPE_SCHEDULES", "300"))
SETTLES = 90.0
MARKET = 16  # offers: a longer list is read for as long, and shows nothing more
CHANCES = ("lost", "cut", "broken", "crashed", "throttled", "denied", "undead", "failed", "stuck", "taken")


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose time is a number, and passes only when nothing else is to be done."""

    now = EPOCH

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = 1e-6  # what a number of this size tells apart

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class ModelWire(Wire):
    """The wire, whose other end is a World in this process.  `look` is called after each request that had an effect."""

    def __init__(self, world: Market, luck: random.Random, look: Callable[[], None]) -> None:
        super().__init__("http://model")
        self.world, self.luck, self.look = world, luck, look

    async def ask(self, method: str, path: str, body: Mapping[str, object] | None = None, query: Mapping[str, str] | None = None) -> Answer:
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        sent = b"" if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer k"}
        reply = self.world.handle(Request(method, path, urlencode(query or {}), headers, sent), time.time())
        self.look()
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        if reply.lost:
            raise Unsure("no reply")
        return vastai_wire._checked(self.read(web.answered(reply.status, reply.encoded(), reply.headers)))

    def read(self, answer: Answer) -> Answer:
        return answer


class Model(Vastai):
    """The driver, whose machines let in as soon as the provider says that they run."""

    def __init__(self, wire: ModelWire, installation: str) -> None:
        super().__init__(installation=installation, settles=SETTLES + 1, poll=15.0)
        self._wire = wire

    async def hosts(self, lease: Lease) -> Any:
        found = await self._alive(lease)
        return ("a host",) if found.states[:2] == ("running", "running") else None


def chances(luck: random.Random) -> list[str]:
    """Which faults a schedule has: the first that its luck decides."""
    return luck.sample(CHANCES, luck.randint(0, 4))


class Schedule:
    """Two runs at one provider, each of whose workers is killed now and then, until both are over."""

    def __init__(self, seed: int, installation: str, wire: type[ModelWire] = ModelWire, leases: type[Leases] = Leases) -> None:
        self.luck = random.Random(seed)
        chosen = chances(self.luck)
        faults = [f"{name}={self.luck.choice((0.05, 0.2))}" for name in chosen]
        self.world = Market(seed, parse(",".join([*faults, f"late={self.luck.choice((0, 30, SETTLES))}", "foreign=3", "boot=20"])), EPOCH)
        self.world.asks = dict([*self.world.asks.items()][:MARKET])
        self.theirs = self._foreign()
        self.ledger = Ledger.open(Path("/nowhere"), read_only=True)  # in memory
        self.wire, self.leases, self.installation = wire, leases, installation
        self.runs: dict[str, str] = {}  # of each lease
        self.wrong: list[str] = []

    def _foreign(self) -> list[tuple[str, str, float | None]]:
        return [(machine.id, machine.mark, machine.gone) for machine in self.world.machines.values() if machine.by == FOREIGN]

    def look(self) -> None:
        """What has to be true at any time."""
        states = self.ledger.states("vastai")
        if states.keys() - self.runs.keys():
            self.runs = {row.key: row.run for row in self.ledger.since(0)}
        living: dict[str, int] = {}
        for machine in self.world.alive():
            if machine.by == FOREIGN:
                continue
            key = machine.mark.rpartition("-")[2]
            state = states.get(key)
            if state is None or state == "GONE":
                self.wrong.append(f"{machine.mark} is alive and {state or 'unknown'}")
            elif state != "RELEASING":
                living[self.runs[key]] = living.get(self.runs[key], 0) + 1
        self.wrong += [f"{run} has {count} machines" for run, count in living.items() if count > 1]
        if self._foreign() != self.theirs:
            self.wrong.append("a machine of others was touched")

    def process(self, run: str) -> Leases:
        """The leases of a run, as a new process has them."""
        return self.leases(Model(self.wire(self.world, self.luck, self.look), self.installation), "vastai", self.ledger, run, "/ws")

    async def work(self, run: str) -> None:
        """A worker: what an earlier one had, or a machine, is used for a while and given back."""
        leases = self.process(run)
        rows = await leases.adopt()
        while True:
            row = rows[0] if rows else None
            try:
                if row is None:
                    for offer in (await leases.offers(Wish(Need(gpus=1))))[:3]:
                        if (row := await leases.ask(Need(gpus=1), offer)) is not None:
                            break
                if row is not None:
                    row, _host = await leases.up(row)
                    await asyncio.sleep(self.luck.uniform(1, 600))
                    if await leases.release(row, "done"):
                        return
            except HostLost:
                pass
            except DriverError:
                await asyncio.sleep(30)
            rows = await leases.adopt()

    async def run(self, name: str) -> None:
        """Workers of one run, one after the other, until one of them is not killed; then it is over."""
        for _ in range(self.luck.randint(0, 3)):
            await self._killed(self.work(name), self.luck.expovariate(1 / 60))
        await self._killed(self.work(name), 7200)

    async def _killed(self, work: Coroutine[None, None, None], after: float) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        with suppress(asyncio.CancelledError, DriverError, RecipeError):
            await task

    async def all(self) -> None:
        await asyncio.gather(self.run("one"), self.run("two"))
        self.world.faults[:] = [fault for fault in self.world.faults if fault.name in ("late", "boot", "foreign")]
        for row in self.ledger.living():
            leases = self.process(row.run)
            assert not await end(leases, row, "the run is over")
        assert await self.process("").strangers() == []
        self.look()
        self.wrong += [f"{machine.mark} is left" for machine in self.world.alive() if machine.by != FOREIGN]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("config") / "installation")


@contextmanager
def virtual() -> Iterator[Virtual]:
    """A loop of its own time, which `time` tells, too."""
    loop = Virtual()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: loop.now)
        patched.setattr(time, "monotonic", lambda: loop.now)
        try:
            yield loop
        finally:
            loop.close()


def wrong(seed: int, installation: str, **others: Any) -> list[str]:
    """What was not as it must be in a schedule."""
    with virtual() as loop:
        schedule = Schedule(seed, installation, **others)
        loop.run_until_complete(schedule.all())
        return schedule.wrong


@pytest.mark.longer
def test_no_schedule_of_faults_and_kills_leaks_a_machine_or_rents_two_for_one_need(installation: str) -> None:
    assert {seed: found for seed in range(SCHEDULES) if (found := wrong(seed, installation))} == {}


# --- bugs that a driver or the leases might have: each is found


class Late:
    """A ledger that notes a lease at its first move."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.held = ledger, list[LeaseRow]()

    def ask(self, row: LeaseRow) -> None:
        self.held.append(row)

    def move(self, *words: Any, **more: Any) -> LeaseRow:
        while self.held:
            self.ledger.ask(self.held.pop())
        return self.ledger.move(*words, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)


class Forgetful(Leases):
    """Notes a lease only once it was rented."""

    async def ask(self, *words: Any) -> Any:
        whole = self.ledger
        self.ledger = Late(whole)  # type: ignore[assignment]
        try:
            return await super().ask(*words)
        finally:
            self.ledger = whole


class Believing(ModelWire):
    """Takes every 404 for the end of a machine."""

    def read(self, answer: Answer) -> Answer:
        return answer._replace(fields={"error": "no_such_instance"}) if answer.status == 404 else answer


class Hasty(Leases):
    """Believes one listing."""

    async def _find(self, row: LeaseRow) -> Lease | None:
        return next((lease for lease in await self._call(self.driver.leases, 3) if lease.key == row.key), None)


class Repeating(ModelWire):
    """Orders again when the reply is lost."""

    async def create(self, ask: str, order: Any) -> Answer:
        try:
            return await super().create(ask, order)
        except Unsure:
            others = [each for each in self.world.asks if str(each) != ask and each not in self.world.holders]
            return await super().create(str(others[0]), order)


@pytest.mark.parametrize(
    ("bug", "fault"), [({"leases": Forgetful}, ""), ({"wire": Believing}, "denied"), ({"leases": Hasty}, "lost"), ({"wire": Repeating}, "lost")]
)
def test_a_bug_that_leaks_machines_is_found(installation: str, bug: dict[str, Any], fault: str) -> None:
    """By the schedules that have the fault which such a bug is about."""

    def fails(seed: int) -> bool:
        try:
            return bool(wrong(seed, installation, **bug))
        except (AssertionError, RecipeError):
            return True

    assert any(fails(seed) for seed in range(SCHEDULES) if fault in ["", *chances(random.Random(seed))])
