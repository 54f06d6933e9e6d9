"""Model: the leases, the ledger and the driver of the program itself against the World of a provider, in virtual time, under seeded faults and kills.

Two runs at one provider, each of several workers one after the other; a worker tidies at its start and every five minutes, as a run does.  In some
schedules a run has a limit of cost, in some the user may have one machine, in some the clock of this machine jumps.

After each request: whatever bears our mark is in the ledger, and not GONE there; one need has one machine; machines of others are as they were; no
machine is ended while its run is at work or may be resumed, unless its time is over.  At the end all are gone, and no run cost more than its limit.
RECIPE_SCHEDULES says how many schedules there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from drivers import cloud, vastai_wire, web
from drivers.base import DriverError, HostLost, Lease, Need, Order, Unsure, Wish
from drivers.fakes.account import EPOCH
from drivers.fakes.faults import parse
from drivers.fakes.vastai import FOREIGN
from drivers.fakes.vastai import Vastai as Market
from drivers.fakes.world import Request
from drivers.vastai import Vastai
from drivers.vastai_wire import Wire
from drivers.web import Answer
from runner.errors import CannotRun, RecipeError
from runner.hosts import reaper
from runner.hosts.leases import Leases
from runner.hosts.money import leave_at
from runner.hosts.reaper import Standing, end
from runner.storage.ledger import LeaseRow, Ledger

SCHEDULES = int(os.environ.get("RECIPE_SCHEDULES", "150"))
SETTLES = 90.0
POLL = 30.0
MARKET = 8  # offers: a longer list is read for as long, and shows nothing more
SLACK = 60.0  # seconds of a machine: a poll, and what the provider takes to end it
CHANCES = ("lost", "cut", "broken", "crashed", "throttled", "denied", "undead", "failed", "stuck", "taken")


OVER = "its run is over"
WAS_GIVEN_BACK = "it was being given back"
"""Why a lease is ended that another run had, its time aside."""


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


class ModelWire(Wire):
    """The wire, whose other end is a World in this process.  `look` is called after each request that had an effect."""

    def __init__(self, world: Market, luck: random.Random, look: Callable[[], None]) -> None:
        super().__init__("http://model")
        self.world, self.luck, self.look = world, luck, look
        self.clock: Callable[[], float] = asyncio.get_running_loop().time  # the provider's, whatever ours says

    async def ask(self, method: str, path: str, body: Mapping[str, object] | None = None, query: Mapping[str, str] | None = None) -> Answer:
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        sent = b"" if body is None else json.dumps(body).encode()
        headers = {"authorization": "Bearer k"}
        reply = self.world.handle(Request(method, path, urlencode(query or {}), headers, sent), self.clock())
        self.look()
        await asyncio.sleep(self.luck.uniform(0.01, 2.0))
        if reply.lost:
            raise Unsure("no reply")
        if isinstance(reply.body, dict):  # as it would come out of JSON again
            return vastai_wire._checked(self.read(Answer(reply.status, reply.body, f"{reply.body}"[:300], reply.headers)))
        return vastai_wire._checked(self.read(web.answered(reply.status, reply.encoded(), reply.headers)))

    def read(self, answer: Answer) -> Answer:
        return answer


class Model(Vastai):
    """The driver, whose machines let in as soon as the provider says that they run, and end themselves when their time is over."""

    def __init__(self, wire: ModelWire, installation: str) -> None:
        super().__init__(installation=installation, settles=SETTLES + 1, poll=POLL)
        self._wire = self._model = wire

    async def acquire(self, order: Order) -> Lease:
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, order.until.timestamp() - time.time()), self._over, self._installation.mark(order.key))
        return await super().acquire(order)

    def _over(self, mark: str) -> None:
        """What the boot script does, on a machine that came up."""
        world = self._model.world
        world.account.advance(asyncio.get_running_loop().time())
        for machine in world.account.alive():
            if machine.mark == mark and machine.up:
                world.account.end(machine)

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
        self.standing: dict[str, Standing] = {}
        self.limit = self.luck.choice((None, None, 0.02, 0.1))
        self.jumps = self.limit is None and self.luck.random() < 0.3
        self.few = self.luck.random() < 0.2
        self.wrong: list[str] = []

    def _foreign(self) -> list[tuple[str, str, float | None]]:
        return [(machine.id, machine.mark, machine.gone) for machine in self.world.account.machines.values() if machine.by == FOREIGN]

    def look(self) -> None:
        """What has to be true at any time."""
        states = self.ledger.states("vastai")
        if states.keys() - self.runs.keys():
            self.runs = {row.key: row.run for row in self.ledger.since(0)}
        living: dict[str, int] = {}
        for machine in self.world.account.alive():
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
        made = self.leases(Model(self.wire(self.world, self.luck, self.look), self.installation), "vastai", self.ledger, run, "/ws", self.heard)
        made.budget.limit, made.budget.limits, made.budget.least = self.limit, {"machines": 1} if self.few else {}, 60.0
        return made

    def heard(self, before: str, row: LeaseRow) -> None:
        """A lease has moved."""
        if row.state == "RELEASING" and self.standing.get(row.run) in ("live", "dead") and row.reason in (OVER, WAS_GIVEN_BACK):
            self.wrong.append(f"{row.key} of {row.run} is ended, and its run is {self.standing[row.run]}: {row.reason}")

    async def tidy(self, leases: Leases) -> None:
        """What a run does at its start, and every five minutes, with what other runs left."""
        with suppress(DriverError):
            await reaper.tidy(leases, {})

    async def work(self, run: str) -> None:
        """A worker: what an earlier one had, or a machine, is used for a while and given back."""
        leases = self.process(run)
        await self.tidy(leases)
        rows = await leases.adopt()
        while True:
            row = rows[0] if rows else None
            try:
                if row is None and not leases.budget.full:
                    for offer in (await leases.offers(Wish(Need(gpus=1))))[:3]:
                        if (row := await leases.ask(Need(gpus=1), offer)) is not None:
                            break
                if row is not None:
                    row, _host = await leases.up(row)
                    await asyncio.sleep(max(0.0, min(self.luck.uniform(1, 600), leave_at(row.asked, row.until) - time.time())))
                    await self.tidy(leases)
                    if await leases.release(row, "done"):
                        return
            except CannotRun:  # what is left of the limit does not pay for a machine
                return
            except HostLost:
                pass
            except DriverError:
                pass
            await asyncio.sleep(30)
            rows = await leases.adopt()

    async def run(self, name: str) -> None:
        """Workers of one run, one after the other, until one of them is not killed; then it is over."""
        for _ in range(self.luck.randint(0, 3)):
            await self._killed(name, self.luck.expovariate(1 / 60))
            await asyncio.sleep(self.luck.uniform(0, 300))
        await self._killed(name, 7200)
        self.standing[name] = "over"

    async def _killed(self, name: str, after: float) -> None:
        self.standing[name] = "live"
        task = asyncio.ensure_future(self.work(name))
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        with suppress(asyncio.CancelledError, DriverError, RecipeError):
            await task
        self.standing[name] = "dead"

    async def jump(self, loop: Virtual) -> None:
        """Set the clock of this machine, until cancelled: by some hours, or minutes, either way."""
        while self.jumps:
            await asyncio.sleep(self.luck.expovariate(1 / 300))
            loop.skew += self.luck.choice((1, -1)) * self.luck.choice((90.0, 3600.0, 4 * 3600.0))

    async def all(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Virtual)
        jumping = asyncio.ensure_future(self.jump(loop))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(reaper, "standing", lambda row, _environ: self.standing.get(row.run, "gone"))
            await asyncio.gather(self.run("one"), self.run("two"))
        jumping.cancel()
        self.world.faults[:] = [fault for fault in self.world.faults if fault.name in ("late", "boot", "foreign")]
        await self.finish()
        assert await self.process("").strangers() == []
        self.look()
        self.wrong += [f"{machine.mark} is left" for machine in self.world.account.alive() if machine.by != FOREIGN]
        self._cheap()

    async def finish(self) -> None:
        """End what the runs have left."""
        for row in self.ledger.living():
            assert not await end(self.process(row.run), row, "the run is over")

    def _cheap(self) -> None:
        """No run may have cost more than its limit, a little time of each of its machines aside."""
        rows = {row.key: row for row in self.ledger.since(0)}
        spent: dict[str, float] = {}
        for entry in self.world.account.settled():
            if entry.event == "billed" and (row := rows.get(entry.mark.rpartition("-")[2])) is not None:
                spent[row.run] = spent.get(row.run, 0.0) + entry.usd
        for run, usd in spent.items():
            slack = sum(row.price for row in rows.values() if row.run == run) * SLACK / 3600
            if self.limit is not None and usd > self.limit + slack:
                self.wrong.append(f"{run} cost ${usd:.4f}, and ${self.limit + slack:.4f} was allowed")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("config") / "installation")


@contextmanager
def virtual() -> Iterator[Virtual]:
    """A loop of its own time, which `time` tells, too."""
    loop = Virtual()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: loop.now + loop.skew)
        patched.setattr(cloud, "boot", lambda *_: "")  # its keys take a while, and nothing executes it
        patched.setattr(time, "monotonic", lambda: loop.now)
        try:
            yield loop
        finally:
            loop.close()


def wrong(seed: int, installation: str, kind: type[Schedule] = Schedule, **others: Any) -> list[str]:
    """What was not as it must be in a schedule."""
    with virtual() as loop:
        schedule = kind(seed, installation, **others)
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
