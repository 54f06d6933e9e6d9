"""Model: runs of several steps whose worker decides as the program does: Scheduler, HostPool, renting, leases, ledger and drivers of the program itself.

They rent at all four providers, in the worlds, time, faults and kills of test_rented_model; what is asked of leases there is asked here.  Only this is
the model's own: a step is a time for which its machine has to be up, and its end is seen at the next look; it goes on while its worker is dead, as
under an agent; and what starts where is chosen in a few lines.

Beside that: a step that ended well never begins again, none runs twice at once, no machine is given back for want of work while a step runs there,
and a worker that is not killed comes to an end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.base import Exit, HostLost, Lease, Need, Offer
from drivers.devices import Device
from runner.errors import RecipeError
from runner.execution.steps import renting
from runner.execution.steps.attempt import Attempt
from runner.execution.steps.bell import Bell
from runner.execution.steps.control import Stopper
from runner.execution.steps.renting import Machines
from runner.execution.steps.run_schedule import RunSchedule
from runner.execution.steps.running_attempts import RunningAttempts
from runner.failures import StepFailure
from runner.hosts import pool as pools
from runner.hosts.place.place import Place, Shell
from runner.hosts.pool import HostPool
from runner.hosts.renting.inventory import Inventory
from runner.hosts.renting.leases import OnChange
from runner.hosts.renting.stack_leases import StackLeases
from runner.planning.schedule import LIMIT, ORPHANED, AttemptOutcome, Move, Scheduler, State, Task
from runner.planning.step import ResourceSpec, StepSpec
from runner.storage.records.ledger import LeaseRow
from tests.unit.test_rented_model import SCHEDULES, Schedule, wrong
from tests.unit.test_rented_model import installation as installation  # a fixture

LONGEST = 7000.0
"""Seconds in which a worker that is not killed is done, whatever happens."""
LOOK = 5.0
"""Seconds between two looks of a worker at its machines."""
SPEC = StepSpec("", "s", {}, resources=ResourceSpec(gpus=1))
CARDS = 8
"""GPUs of every machine, as far as the model goes: what an offer has beyond what a step needs is used by nobody."""


class Rented(Place):
    """A machine of a World."""

    def __init__(self, name: str, lease: Lease, machine: Any) -> None:
        host = SimpleNamespace(find_free_locks=None, aclose=_nothing)
        stub: Any = SimpleNamespace()
        room = {"cpus": 8.0, "memory": float("inf")}
        super().__init__(
            stub, name, host, room, lambda: [Device(n, "") for n in range(CARDS)], Shell("", "", {})
        )  # type: ignore[arg-type]
        self.lease, self.machine = lease, machine

    def paths(self, attempt: Any) -> Any:
        return SimpleNamespace(cwd="")

    async def stop(self, job: Any, grace: timedelta) -> None:
        """A step saves, and ends."""
        job.stopped = True

    async def wait(self, job: Any, patience: timedelta) -> Exit | None:
        """Its end, or that of its machine."""
        return Exit(0) if job.stopped or job.over else None


@dataclass
class Job:
    """A step on a machine: begun once, it continues while no worker lives."""

    step: str
    machine: Any
    ends: float
    stopped: bool = False
    over: bool = False


@dataclass
class Kept:
    """What of a run outlives its workers: its steps, what it began, and how long each takes."""

    tasks: list[Task]
    takes: dict[str, float]
    states: dict[str, State] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)


async def _nothing(*_: object) -> None:
    pass


class Connector:
    """In the place of what connects."""

    schedule: ScheduledRuns

    def __init__(self, *_: object) -> None:
        pass

    def local_place(self, _local: object) -> Any:
        return SimpleNamespace(
            name="local",
            capacity=SimpleNamespace(slots=1, processors=1),
            aclose=_nothing,
            fits=lambda _wants: True,
            lost="",
            leaving="",
        )

    async def create_place(
        self, offer: Offer, lease: Lease, _host: object, _traits: object, **_more: object
    ) -> Rented:
        return Rented(f"{offer.driver} {lease.id}", lease, self.schedule.machine(lease))


def _told(heard: OnChange, *words: Any) -> StackLeases:
    """Leases of which the model hears, too."""
    made = StackLeases(*words)
    inner = made.on_change

    def both(before: str, row: LeaseRow) -> None:
        heard(before, row)
        inner(before, row)

    made.on_change = both
    return made


class _NoHooks:
    """A recipe without setup, health and cleanup commands."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def of(self, _place: Place) -> Any:
        return SimpleNamespace(setup=_nothing)


class Shared:
    """The ledger in memory, which no worker closes."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


class Worker:
    """The worker of one run, from its claim on."""

    def __init__(self, schedule: ScheduledRuns, run: str, kept: Kept) -> None:
        self.schedule, self.kept = schedule, kept
        config = SimpleNamespace(
            driver=lambda _name: {"least": 60.0},
            limits={"machines": 1} if schedule.few else {},
            stacks={},
        )
        ws: Any = SimpleNamespace(
            config=config, environ={}, home=Path("/nowhere"), root=Path("/ws"), delivers=False
        )
        ws.objects = None
        local: Any = SimpleNamespace(aclose=_nothing)
        self.ws = ws
        self.host_pool = HostPool(
            ws, run, local, schedule.name, limit=schedule.limit, driver=schedule.driver()
        )
        node = SimpleNamespace(id="", upstream=(), outputs=(), flags=0)
        steps: Any = SimpleNamespace(
            todo=set(kept.takes),
            node=lambda _id: node,
            spec=lambda _id: SPEC,
            is_local=lambda _id: False,
            survey=SimpleNamespace(request=SimpleNamespace(current_python=False)),
            left_on_hosts=lambda _objects: set(),
        )
        hooks: Any = _NoHooks()
        commits: Any = SimpleNamespace(say=lambda _words: None, run=run)
        orphans: Any = SimpleNamespace(
            places=lambda: {
                place for place in self.host_pool.inventory.places if self._left(place) is not None
            }
        )
        self.bell = Bell()
        self.running = RunningAttempts(self.bell)
        self.moves = RunSchedule(
            Scheduler(kept.tasks, {}, jobs=4, keep_going=False, states=kept.states), self
        )
        self.stopper = Stopper(ws, steps, self.moves, commits, self.running, hooks, self.bell, None)
        self.machines = Machines(
            ws,
            self.host_pool,
            steps,
            self.moves,
            self,
            commits,
            self.running,
            hooks,
            orphans,
            self.stopper,
            self.bell,
            most_for_a_need=0,
        )

    def record(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.subject == "step":
                self.kept.states[move.id] = State(move.after)

    async def work(self) -> None:
        """As `worker` and `loop` do: open, take over, judge, start, rent, and give everything back."""
        wanted = {Need(gpus=1): pools.StepTotals()}
        await self.host_pool.open(want=1)
        await self.host_pool.find_offered(wanted)
        for id, state in [*self.kept.states.items()]:
            if state is State.RUNNING:
                self.moves.end(id, AttemptOutcome(False, ORPHANED))
        while not self.moves.is_finished:
            while self.running.has_ended:
                self._end(*self.running.next_end())
            self.machines.rent()
            for id in self.moves.ready():
                self.moves.judge(id, "run", "")
            for id in self.moves.startable():
                if not self._start(id):
                    break  # a failure: what may be started is another question now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self.bell.wait()
        await self.bell.settle(30.0)
        self.bell.cancel_background()
        await self.host_pool.close()

    def _left(self, place: Any, step: str = "") -> Job | None:
        """What an earlier worker began there, and nobody has seen the end of."""
        watched = [attempt.task.job for attempt in self.running.values()]
        return next(
            (
                job
                for job in self.kept.jobs
                if job.machine is place.machine
                and step in ("", job.step)
                and not job.over
                and job not in watched
            ),
            None,
        )

    def _start(self, id: str) -> bool:
        """Start a step where there is room for it.  False: it failed, for there will never be any."""
        places: Sequence[Any] = self.host_pool.places_of(SPEC, local=False)
        fit = sorted(
            (place for place in places if place.has_room({"gpus": 1.0})),
            key=lambda place: self._left(place, id) is None,
        )
        if not fit:
            if not self.machines.are_coming and not self.host_pool.may_get_place(SPEC):
                self.moves.start(id)
                self.moves.end(id, AttemptOutcome(False, StepFailure.UNPLACED))
                return False
            return True
        place = fit[0]
        if (job := self._left(place, id)) is None:
            now = asyncio.get_running_loop().time()
            self.schedule.begins(self.kept, id, now)
            job = Job(id, place.machine, now + self.kept.takes[id])
            self.kept.jobs.append(job)
        self.moves.start(id)
        node: Any = SimpleNamespace(id=id)
        attempt = Attempt(0, node, SPEC, None, {}, place)
        attempt.directory = None  # type: ignore[assignment]
        attempt.task = SimpleNamespace(job=job, states=())  # type: ignore[assignment]
        self.running.add(id, attempt)
        self.bell.run_in_background(self._carry(id, place, job))
        return True

    async def _carry(self, id: str, place: Rented, job: Job) -> None:
        """Until the step is over, or its machine."""
        while True:
            now = asyncio.get_running_loop().time()
            self.schedule.world.account.advance(now)
            if not self.schedule.lives(job):
                return self.running.note_end(id, HostLost("its machine is gone"))
            if job.stopped or now >= job.ends:
                job.over = True
                return self.running.note_end(id, None)  # type: ignore[arg-type]
            await asyncio.sleep(min(LOOK, max(0.01, job.ends - now)))

    def _end(self, id: str, end: Any) -> None:
        attempt: Any = self.running.pop(id)
        job = attempt.task.job
        if end is not None:
            job.over = True
            self.machines.lose(attempt.place, end)
            outcome = AttemptOutcome(False, "lost", str(end))
        elif job.stopped and asyncio.get_running_loop().time() < job.ends:
            outcome = AttemptOutcome(
                False, LIMIT if self.stopper.limit else "preempted", saved=True
            )
        else:
            outcome = AttemptOutcome(True)
        self.moves.end(id, outcome)
        self.moves.rest(id, 1.0)


class ScheduledRuns(Schedule):
    """Two runs at one provider, each of a few steps."""

    worker: type[Worker] = Worker

    def __init__(self, seed: int, installation: str, **more: Any) -> None:
        super().__init__(seed, installation, **more)
        self.steps: dict[str, Kept] = {}

    def machine(self, lease: Lease) -> Any:
        """What of the World a lease is."""
        return next(
            each for each in self.world.account.machines.values() if each.mark.endswith(lease.key)
        )

    def lives(self, job: Job) -> bool:
        return job.machine.gone is None and job.machine.up

    def heard(self, before: str, row: LeaseRow) -> None:
        super().heard(before, row)
        if (
            before == "UP"
            and row.state == "RELEASING"
            and row.reason.startswith(("no remaining step", "the machine was idle"))
        ):
            jobs = [
                job
                for kept in self.steps.values()
                for job in kept.jobs
                if job.machine.mark.endswith(row.key)
            ]
            busy = [
                job.step for job in jobs if not job.over and not job.stopped and self.lives(job)
            ]
            self.wrong += [
                f"{row.key} is given back while {step} runs there: {row.reason}" for step in busy
            ]

    def begins(self, kept: Kept, step: str, now: float) -> None:
        """A step is begun: it may not have ended well before, nor run elsewhere on a machine that is ours still."""
        self.world.account.advance(now)
        states = self.ledger.states(self.name)
        if kept.states.get(step) is State.DONE:
            self.wrong.append(f"{step} begins again, and had ended well")
        for job in kept.jobs:
            mine = states.get(job.machine.mark.rpartition("-")[2]) not in ("RELEASING", "GONE")
            if job.step == step and not job.over and mine and self.lives(job):
                self.wrong.append(f"{step} begins, and runs already on {job.machine.mark}")

    async def work(self, run: str) -> None:
        if run not in self.steps:
            names = [f"s{n}" for n in range(self.luck.randint(1, 4))]
            tasks = [
                Task(
                    id,
                    required=tuple(before for before in names[:n] if self.luck.random() < 0.5),
                    retries=2,
                )
                for n, id in enumerate(names)
            ]
            self.steps[run] = Kept(tasks, {id: self.luck.uniform(5, 400) for id in names})
        worker = self.worker(self, run, self.steps[run])
        began = asyncio.get_running_loop().time()
        try:
            await worker.work()
        except asyncio.CancelledError:
            if asyncio.get_running_loop().time() - began > LONGEST:
                self.wrong.append(f"{run} did not end: {self.steps[run].states}")
            raise
        except RecipeError:
            await worker.host_pool.close(leave=True)
        finally:
            worker.bell.cancel_background()
            for task in worker.host_pool._upkeep._tasks:
                task.cancel()

    async def all(self) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Connector, "schedule", self, raising=False)
            patched.setattr(pools, "Connector", Connector)
            patched.setattr(pools, "check_as_sold", _nothing)
            patched.setattr(pools, "StackLeases", partial(_told, self.heard))
            patched.setattr(pools.Ledger, "open", lambda *_: Shared(self.ledger))
            patched.setattr(renting, "log_remote", lambda *_: None)
            await super().all()


@pytest.mark.longer
def test_no_schedule_of_faults_and_kills_runs_a_step_twice_or_leaks_a_machine(
    installation: str,
) -> None:
    assert {
        seed: found
        for seed in range(SCHEDULES)
        if (found := wrong(seed, installation, ScheduledRuns))
    } == {}


class Blind(Inventory):
    """Does not see what is there."""

    def count_machines(self, need: Need) -> int:
        return self.coming.count(need)


class Ruthless(Inventory):
    """Gives back what has nothing queued, whatever runs there."""

    def find_spare(self, needs: Any, awaited: Any = ()) -> Any:
        return [
            (held.place, "the machine was idle") for held in self.held if not any(needs.values())
        ]


@pytest.mark.parametrize("bug", [Blind, Ruthless])
def test_a_bug_of_renting_is_found(
    installation: str, monkeypatch: pytest.MonkeyPatch, bug: type[Inventory]
) -> None:
    monkeypatch.setattr(pools, "Inventory", bug)

    def fails(seed: int) -> bool:
        try:
            return bool(wrong(seed, installation, ScheduledRuns))
        except (AssertionError, RecipeError):
            return True

    assert any(map(fails, range(SCHEDULES)))
