"""Model: the leases, the ledger and the drivers of the program itself against the World of a provider, in virtual time, under seeded faults and kills.

Two runs at one provider, each of several workers one after the other; a worker tidies at its start and every five minutes, as a run does.  In some
schedules a run has a limit of cost, in some the user may have one machine, in some the clock of this machine jumps.

After each request: whatever bears our mark is in the ledger, and not GONE there; one need has one machine; machines of others are as they were; no
machine is ended while its run is at work or may be resumed, unless its time is over.  At the end all are gone, and no run cost more than its limit.
RECIPE_SCHEDULES says how many schedules there are.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drivers import web
from drivers.base import DriverError, HostLost, Lease, Need, Unsure, Wish
from drivers.fakes.faults import parse
from drivers.fakes.vastai import FOREIGN
from drivers.web import Answer
from runner.errors import CannotRun, RecipeError
from runner.hosts.renting import reaper
from runner.hosts.renting.leases import Leases
from runner.hosts.renting.money import stop_time
from runner.hosts.renting.reaper import RunStatus, release_orphan
from runner.storage.records.ledger import LeaseRow, Ledger
from tests.virtual import SETTLES, ModelWeb, Virtual, driver, market, virtual

SCHEDULES = int(os.environ.get("RECIPE_SCHEDULES", "300"))
SLACK = 60.0  # seconds of a machine: a poll, and what the provider takes to end it
CHANCES = (
    "lost",
    "cut",
    "broken",
    "crashed",
    "throttled",
    "denied",
    "undead",
    "failed",
    "stuck",
    "taken",
)
PROVIDERS = ("vastai", "gcp", "runpod", "prime")
"""Of which each has every fourth schedule."""


OVER = "its run is over"
WAS_GIVEN_BACK = "it was being given back"
"""Why a lease is ended that another run had, its time aside."""


def chances(luck: random.Random) -> list[str]:
    """Which faults a schedule has: the first that its luck decides."""
    return luck.sample(CHANCES, luck.randint(0, 4))


class Schedule:
    """Two runs at one provider, each of whose workers is killed now and then, until both are over."""

    def __init__(
        self,
        seed: int,
        installation: str,
        wire: type[ModelWeb] = ModelWeb,
        leases: type[Leases] = Leases,
        name: str = "",
    ) -> None:
        self.luck = random.Random(seed)
        chosen = chances(self.luck)
        faults = [f"{name}={self.luck.choice((0.05, 0.2))}" for name in chosen]
        self.name = name or PROVIDERS[seed % len(PROVIDERS)]
        self.world = market(
            self.name,
            seed,
            parse(
                ",".join(
                    [
                        *faults,
                        f"late={self.luck.choice((0, 30, SETTLES))}",
                        "foreign=3",
                        "boot=20",
                        "balance=1e6",
                    ]
                )
            ),
        )
        self.theirs = self._foreign()
        self.ledger = Ledger.open(Path("/nowhere"), read_only=True)  # in memory
        self.wire, self.leases, self.installation = wire, leases, installation
        self.runs: dict[str, str] = {}  # of each lease
        self.run_status: dict[str, RunStatus] = {}
        self.limit = self.luck.choice((None, None, 0.02, 0.1))
        self.jumps = self.limit is None and self.luck.random() < 0.3
        self.few = self.luck.random() < 0.2
        self.wrong: list[str] = []
        self.alone: dict[str, list[tuple[float, float]]] = {}  # when a run had no worker

    def _foreign(self) -> list[tuple[str, str, float | None]]:
        return [
            (machine.id, machine.mark, machine.gone)
            for machine in self.world.account.machines.values()
            if machine.by == FOREIGN
        ]

    def look(self) -> None:
        """What has to be true at any time."""
        states = self.ledger.states(self.name)
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
            elif state != "RELEASING" and not self.leaves(machine):
                living[self.runs[key]] = living.get(self.runs[key], 0) + 1
        self.wrong += [f"{run} has {count} machines" for run, count in living.items() if count > 1]
        if self._foreign() != self.theirs:
            self.wrong.append("a machine of others was touched")

    def leaves(self, _machine: Any) -> bool:
        """Whether a machine is about to be taken away, so that another may be there beside it."""
        return False

    def driver(self) -> Any:
        """The driver of a new process."""
        return driver(
            self.name,
            self.wire("http://model", self.world, self.luck, self.look),
            self.installation,
        )

    def process(self, run: str) -> Leases:
        """The leases of a run, as a new process has them."""
        made = self.leases(self.driver(), self.name, self.ledger, run, "/ws", self.heard)
        made.budget.limit, made.budget.limits, made.budget.min_seconds = (
            self.limit,
            {"machines": 1} if self.few else {},
            60.0,
        )
        return made

    def heard(self, before: str, row: LeaseRow) -> None:
        """A lease has moved."""
        if (
            row.state == "RELEASING"
            and self.run_status.get(row.run) in ("live", "dead")
            and row.reason in (OVER, WAS_GIVEN_BACK)
        ):
            self.wrong.append(
                f"{row.key} of {row.run} is ended, and its run is {self.run_status[row.run]}: {row.reason}"
            )

    async def tidy(self, leases: Leases) -> None:
        """What a run does at its start, and every five minutes, with what other runs left."""
        with suppress(DriverError):
            await reaper.release_leftovers(leases, {})

    async def work(self, run: str) -> None:
        """A worker: what an earlier one had, or a machine, is used for a while and given back."""
        leases = self.process(run)
        rows = await leases.adopt()
        await self.tidy(leases)
        while True:
            row = rows[0] if rows else None
            try:
                if row is None and not leases.budget.is_full:
                    for offer in (await leases.offers(Wish(Need(gpus=1))))[:3]:
                        if (row := await leases.rent(Need(gpus=1), offer)) is not None:
                            break
                if row is not None:
                    row, _host = await leases.wait_until_up(row)
                    await asyncio.sleep(
                        max(
                            0.0,
                            min(
                                self.luck.uniform(1, 600),
                                stop_time(row.asked, row.until) - time.time(),
                            ),
                        )
                    )
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
            await leases.repeat_releases()
            rows = await leases.adopt()

    async def run(self, name: str) -> None:
        """Workers of one run, one after the other, until one of them is not killed; then it is over."""
        for _ in range(self.luck.randint(0, 3)):
            await self._killed(name, self.luck.expovariate(1 / 60))
            died = asyncio.get_running_loop().time()
            await asyncio.sleep(self.luck.uniform(0, 300))
            self.alone.setdefault(name, []).append((died, asyncio.get_running_loop().time()))
        await self._killed(name, 7200)
        self.run_status[name] = "over"
        self.alone.setdefault(name, []).append((asyncio.get_running_loop().time(), math.inf))

    async def _killed(self, name: str, after: float) -> None:
        self.run_status[name] = "live"
        task = asyncio.ensure_future(self.work(name))
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        with suppress(asyncio.CancelledError, DriverError, RecipeError):
            await task
        self.run_status[name] = "dead"

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
            patched.setattr(
                reaper,
                "find_run_status",
                lambda row, _environ: self.run_status.get(row.run, "gone"),
            )
            await asyncio.gather(self.run("one"), self.run("two"))
        jumping.cancel()
        self.world.faults[:] = [
            fault
            for fault in self.world.faults
            if fault.name in ("late", "boot", "foreign", "balance")
        ]
        await self.finish()
        assert await self.process("").find_strangers() == []
        self.look()
        self.wrong += [
            f"{machine.mark} is left"
            for machine in self.world.account.alive()
            if machine.by != FOREIGN
        ]
        self._cheap()

    async def finish(self) -> None:
        """End what the runs have left."""
        for row in self.ledger.living_leases():
            assert not await release_orphan(self.process(row.run), row, "the run is over")

    def _cheap(self) -> None:
        """No run may have cost more than its limit, a little time of each of its machines aside."""
        rows = {row.key: row for row in self.ledger.since(0)}
        spent: dict[str, float] = {}
        for entry in self.world.account.settle():
            if (
                entry.event == "billed"
                and (row := rows.get(entry.mark.rpartition("-")[2])) is not None
            ):
                spent[row.run] = spent.get(row.run, 0.0) + entry.usd
        for run, usd in spent.items():
            slack = (
                sum(
                    row.price * (SLACK + self._nobodys(row))
                    for row in rows.values()
                    if row.run == run
                )
                / 3600
            )
            if self.limit is not None and usd > self.limit + slack:
                self.wrong.append(
                    f"{run} cost ${usd:.4f}, and ${self.limit + slack:.4f} was allowed"
                )

    def _nobodys(self, row: LeaseRow) -> float:
        """Seconds beyond its time for which a machine that does not end itself had no worker, or one that first looked what others had left."""
        if self.name != "prime":
            return 0.0
        return 2 * SETTLES + sum(
            max(0.0, min(till, row.gone or till) - max(since, row.until))
            for since, till in self.alone.get(row.run, ())
        )


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("config") / "installation")


def wrong(
    seed: int, installation: str, kind: type[Schedule] = Schedule, **others: Any
) -> list[str]:
    """What was not as it must be in a schedule."""
    with virtual() as loop:
        schedule = kind(seed, installation, **others)
        loop.run_until_complete(schedule.all())
        return schedule.wrong


@pytest.mark.longer
def test_no_schedule_of_faults_and_kills_leaks_a_machine_or_rents_two_for_one_need(
    installation: str,
) -> None:
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

    async def rent(self, *words: Any) -> Any:
        whole = self.ledger
        self.ledger = Late(whole)  # type: ignore[assignment]
        try:
            return await super().rent(*words)
        finally:
            self.ledger = whole


class Believing(ModelWeb):
    """Takes every 404 for the end of a machine."""

    def read(self, answer: Answer) -> Answer:
        return (
            answer._replace(fields={"error": "no_such_instance"})
            if answer.status == 404
            else answer
        )


class Hasty(Leases):
    """Believes one listing."""

    async def _find(self, row: LeaseRow) -> Lease | None:
        return next(
            (lease for lease in await self.call(self.driver.leases, 3) if lease.key == row.key),
            None,
        )


class Repeating(ModelWeb):
    """Orders again when the reply is lost."""

    async def ask(
        self,
        method: str,
        path: str,
        key: str,
        body: web.Fields | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        try:
            return await super().ask(method, path, key, body, query)
        except Unsure:
            if "/asks/" in path:
                free = [each for each in self.world.asks if each not in self.world.holders]  # type: ignore[attr-defined]
                return await super().ask(method, f"/api/v0/asks/{free[0]}/", key, body, query)
            if method == "POST" and path.endswith("/pods"):
                return await super().ask(method, path, key, body, query)
            raise


@pytest.mark.parametrize(
    ("bug", "fault", "providers"),
    [
        ({"leases": Forgetful}, "", PROVIDERS),
        ({"wire": Believing}, "denied", ("vastai",)),  # the others refuse a key by another status
        (
            {"leases": Hasty},
            "lost",
            ("vastai", "runpod", "prime"),
        ),  # at Google the same order is the same machine
        ({"wire": Repeating}, "lost", ("vastai", "runpod", "prime")),
    ],
)
def test_a_bug_that_leaks_machines_is_found(
    installation: str, bug: dict[str, Any], fault: str, providers: tuple[str, ...]
) -> None:
    """At each provider, by the schedules that have the fault which such a bug is about."""

    def fails(seed: int, name: str) -> bool:
        try:
            return bool(wrong(seed, installation, name=name, **bug))
        except (AssertionError, RecipeError):
            return True

    able = [seed for seed in range(SCHEDULES) if fault in ["", *chances(random.Random(seed))]]
    assert [name for name in providers if not any(fails(seed, name) for seed in able)] == []
