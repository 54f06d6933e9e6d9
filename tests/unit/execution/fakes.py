"""A run without an agent: steps are coroutines of a test, hosts are places of this process, and time is virtual.

The store, the plan and the owners of the run are those of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivers.base import Command, Exit, HostLost, Job
from runner.execution.resume import ClaimedRun
from runner.execution.session import preview
from runner.execution.steps.assembly import Options, assemble
from runner.execution.steps.attempt import Attempt
from runner.execution.steps.commit import GroupCommit
from runner.execution.steps.control import Handover
from runner.execution.steps.loop import Loop, Report
from runner.execution.terms import Choice
from runner.hosts.link.local_agents import note_claim
from runner.hosts.place.place import Place, Shell
from runner.hosts.pool import HostPool
from runner.planning.schedule import Move
from runner.planning.secret_values import all_given
from runner.secrets import Masker
from runner.storage.records.runs import Event, RunRow
from runner.storage.workspace import Workspace
from runner.survey.request import Request
from tests.virtual import virtual

Program = Callable[["StartedJob"], Awaitable[Exit]]
"""What a step does."""


@dataclass
class StartedJob:
    """A job of the fake agent."""

    step: str
    command: Command
    host: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Exit] | None = None

    @property
    def folder(self) -> Path:
        """Its working directory."""
        return Path(self.command.cwd)

    def print(self, text: str) -> None:
        """Write to its log."""
        assert self.command.log is not None
        with open(self.command.log, "a", encoding="utf-8") as log:
            log.write(text)

    def report(self, text: str) -> None:
        """Write to the file of its metrics."""
        with open(self.command.env["RECIPE_METRICS"], "a", encoding="utf-8") as metrics:
            metrics.write(text)


def writes(**files: str) -> Program:
    """Writes `a.txt` for an argument `a`, and ends well."""

    async def program(job: StartedJob) -> Exit:
        for name, text in files.items():
            (job.folder / f"{name}.txt").write_text(text)
        return Exit(0)

    return program


def exits(code: int, printing: str = "", **more: Any) -> Program:
    """Prints something, and ends with a code."""

    async def program(job: StartedJob) -> Exit:
        job.print(printing)
        return Exit(code, **more)

    return program


def runs_for(seconds: float, then: Program) -> Program:
    """Does something after a time, unless it is stopped."""

    async def program(job: StartedJob) -> Exit:
        try:
            async with asyncio.timeout(seconds):
                await job.stopping.wait()
        except TimeoutError:
            return await then(job)
        return Exit(None, reason="stopped")

    return program


@dataclass
class FakeAgent:
    """The agent of one host, as `Client` is for the program.

    `programs` are the steps by their ids; of several each attempt takes the next, and the last again.
    """

    root: str
    programs: Mapping[str, Sequence[Program]]
    host: str = ""
    started: list[str] = field(default_factory=list)
    jobs: dict[str, StartedJob] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    failing_for: float = 0.0
    fails: dict[str, Exception] = field(default_factory=dict)
    """What the wait for a step raises."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def adopt(self, key: str, job: StartedJob, program: Program) -> None:
        """Have a job that an earlier agent began, and what it does from now on."""
        mine = self.jobs[key] = StartedJob(job.step, job.command, self.host)
        mine.task = asyncio.ensure_future(program(mine))

    async def start(self, command: Command, key: str) -> Job:
        step = command.env["RECIPE_STEP"]
        job = self.jobs[key] = StartedJob(step, command, self.host)
        if command.log is not None:
            with open(command.log, "ab"):  # noqa: ASYNC230
                pass
        programs = self.programs.get(step, [writes()])
        program = programs[min(self.started.count(step), len(programs) - 1)]
        self.started.append(step)
        job.task = asyncio.ensure_future(program(job))
        return Job(key)

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        started = self.jobs.get(job.key)
        if started is None or started.task is None:
            return Exit(None, reason="lost")
        if (error := self.fails.get(started.step)) is not None:
            raise error
        losing = asyncio.ensure_future(self.lost.wait())
        await asyncio.wait(
            {started.task, losing},
            timeout=patience.total_seconds(),
            return_when=asyncio.FIRST_COMPLETED,
        )
        losing.cancel()
        if self.lost.is_set():
            raise HostLost(f"{self.host} is switched off")
        return started.task.result() if started.task.done() else None

    async def stop(self, job: Job, grace: timedelta) -> None:
        started = self.jobs[job.key]
        self.stopped.append(started.step)
        started.stopping.set()

    async def find_free_locks(self, locks: Sequence[str]) -> Sequence[str]:
        return locks

    async def aclose(self, lost: str = "") -> None:
        for job in self.jobs.values():
            if job.task is not None:
                job.task.cancel()


class FakePlace(Place):
    """A host of this process."""

    def __init__(self, ws: Workspace, agent: FakeAgent, cpus: float = 4.0) -> None:
        machine = {"cpus": cpus, "memory": 2.0**34, "gpus": 0.0}
        shell = Shell("/usr/bin/python3", "/usr/bin:/bin", {})
        host: Any = agent
        super().__init__(ws, agent.host or "local", host, machine, lambda: (), shell)


class FakePool(HostPool):
    """The hosts of a driver without leases: those that a test names, one after the other."""

    def prepare(self, here: Place, places: Sequence[Place], spares: Sequence[Place] = ()) -> None:
        """Have these at once, and each spare when one is lost."""
        self.local_place, self._own, self._spares = here, [*places], [*spares]
        self.closed: list[bool] = []

    @property
    def places(self) -> list[Place]:
        return (
            [place for place in self._own if not place.lost]
            if self.is_remote
            else [self.local_place]
        )

    @property
    def has_late(self) -> bool:
        return False

    async def replace(self, lost: Place) -> Sequence[Place]:
        self.lost.append(f"{lost.name}: {lost.lost}")
        found, self._spares = self._spares[:1], self._spares[1:]
        self._own += found
        return found

    async def close(self, *, leave: bool = False) -> None:
        self.closed.append(leave)
        for place in [self.local_place, *self._own]:
            await place.aclose()


class Heard:
    """What people and listeners are told."""

    def __init__(self) -> None:
        self.moves: list[Event] = []
        self.words: list[str] = []

    def events(self, batch: Sequence[Event]) -> None:
        self.moves += batch

    def say(self, text: str) -> None:
        self.words.append(text)


@dataclass
class Journal:
    """Notes moves in a list, for owners that are tested alone."""

    moves: list[Move] = field(default_factory=list)

    def record(self, moves: Sequence[Move]) -> None:
        self.moves += moves

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(move.id, str(move.after)) for move in self.moves]


@contextlib.contextmanager
def _real() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


class SimulatedRun:
    """One run of a recipe in a folder, with programs in place of its commands.

    `hosts` are the names of other machines that it has, `spares` those that replace lost ones.
    """

    def __init__(
        self,
        root: Path,
        recipe: str,
        programs: Mapping[str, Program | Sequence[Program]],
        *,
        hosts: Sequence[str] = (),
        spares: Sequence[str] = (),
        choice: Choice | None = None,
        inputs: Mapping[str, Any] | None = None,
        options: Options | None = None,
        handover: Handover | None = None,
        then: Callable[[SimulatedRun], Awaitable[None]] | None = None,
        in_real_time: bool = False,
    ) -> None:
        """`then` is carried out beside the run.  `in_real_time`: for what threads do for it."""
        self.in_real_time = in_real_time
        (root / "recipe.yaml").write_text(f"recipe: t@1\nsummary: A test\n{recipe}")
        self.root, self.hosts, self.spares, self.options = root, hosts, spares, options
        self.programs = {
            id: [*found] if isinstance(found, Sequence) else [found]
            for id, found in programs.items()
        }
        self.choice, self.inputs, self.then = choice or Choice(), inputs or {}, then
        self.handover = handover
        self.heard = Heard()
        self.agents: dict[str, FakeAgent] = {}
        self.loop: Loop | None = None
        self.pool: FakePool | None = None
        self.run_id = ""
        self.before: Callable[[SimulatedRun], Awaitable[None]] | None = None
        """Carried out when the hosts are open."""

    def run(self) -> Report:
        """Work until the run ends."""
        clock = _real() if self.in_real_time else virtual()
        with Workspace.open(self.root) as ws, clock as loop:
            ws.share(None)
            try:
                return loop.run_until_complete(self._run(ws))
            finally:  # jobs that were left, and who waits for them
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                if left:
                    loop.run_until_complete(asyncio.wait(left))

    async def _run(self, ws: Workspace) -> Report:
        survey = preview(ws, Request("./recipe.yaml", self.inputs), self.choice)
        claimed = self._claim(ws, survey.plan.recipe)
        masker = Masker(all_given(survey.plan, ws.environ))
        commits = GroupCommit(
            ws,
            claimed.id,
            claimed.fence,
            survey.plan.recipe,
            self.heard,
            {},
            self.heard.say,
            masker,
        )
        self.pool = pool = self._pool(ws, claimed.id)
        note_claim(Path(ws.home), claimed.id, claimed.fence, self.agents[""].root)
        if self.before is not None:
            await self.before(self)
        commits.add_move(Move("run", claimed.id, "QUEUED", "ACTIVE", ""))
        options = self.options or Options(jobs=4)
        self.loop = assemble(
            ws, survey, commits, pool, options, claimed, None, self.handover or Handover()
        )
        beside = asyncio.ensure_future(self.then(self)) if self.then is not None else None
        try:
            return await self.loop.run()
        finally:
            commits.keys.close()
            if ws.remote_cache is not None:
                ws.remote_cache.finish(self.heard.say)
            if beside is not None:
                beside.cancel()

    def _claim(self, ws: Workspace, recipe: str) -> ClaimedRun:
        number = len(ws.store.runs.latest())
        self.run_id = f"20260101-00000{number}-abcdef"
        ws.store.runs.submit(RunRow(self.run_id, recipe, "p", {}, str(self.root)))
        fence = ws.store.runs.claim(self.run_id, "test")
        assert fence is not None
        return ClaimedRun(self.run_id, fence)

    def _pool(self, ws: Workspace, run: str) -> FakePool:
        local = self._agent("")
        client: Any = local
        pool = FakePool(ws, run, client, "fake" if self.hosts else "local", say=self.heard.say)
        places = [FakePlace(ws, self._agent(name)) for name in self.hosts]
        spares = [FakePlace(ws, self._agent(name)) for name in self.spares]
        pool.prepare(FakePlace(ws, local), places, spares)
        return pool

    def _agent(self, name: str) -> FakeAgent:
        root = str(self.root / ".recipe" / "local" / "agent")
        agent = FakeAgent(root, self.programs, name)
        self.agents[name] = agent
        return agent

    # -- what a test asks

    @property
    def own(self) -> Any:
        """The owners of the run, while it is worked on."""
        assert self.loop is not None
        return self.loop.owners

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait for something in virtual time."""
        while not is_so():  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)

    @property
    def started(self) -> list[str]:
        """The steps in the order in which attempts began, on any host."""
        return [event.id for event in self.steps if event.after == "RUNNING"]

    @property
    def steps(self) -> list[Event]:
        return [event for event in self.heard.moves if event.subject == "step"]

    def states_of(self, id: str) -> list[str]:
        """Where a step stood, one after the other."""
        return [event.after for event in self.steps if event.id == id]

    def last_of(self, id: str) -> Event:
        return [event for event in self.steps if event.id == id][-1]

    def attempt_of(self, id: str) -> Attempt:
        found: Attempt = self.own.running[id]
        return found
