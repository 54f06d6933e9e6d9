"""Event loop of a run, which calls its components and decides nothing itself.

    judge ready steps · start steps that fit · without progress, wait for one end

Order of writes, for safety against kill -9: the outputs are stored, then the trace and the step's
state change are committed together, then the attempt directory is deleted. The jobs of a killed
worker continue under their agent. Their names begin with the key, so the next run with the same key
finds the attempt and collects its result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import CannotRun, Infrastructure
from ...hosts.link.local_agents import forget_claims
from ...hosts.place.spare_dirs import SparePool
from ...hosts.pool import HostPool
from ...storage.workspace import Workspace
from ..signals import handle_signals
from .attempt import GRACE
from .bell import Bell
from .chunks import Chunks
from .commit import GroupCommit
from .control import Stopper
from .diverging import DivergedLosses
from .early import EarlyStops
from .ending import Ender
from .environments import StepEnvironments
from .failing import FailureDetails, Failures
from .groups import GROUP_SECONDS, Groups
from .health import HealthChecks
from .host_hooks import HostHooks
from .judging import Judge
from .orphans import Orphans, find_left_attempts
from .publisher import Publisher
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts
from .silence import Silences
from .starting import Starter
from .training_numbers import TrainingNumbers


@dataclass(slots=True)
class Report:
    """Final state of a run, with step counts and failures."""

    state: str
    counts: dict[str, int]
    failures: list[FailureDetails]
    abandoned: list[str] = field(default_factory=list)
    left: bool = False
    """Whether the run is unfinished and left to another worker."""


class Owners(NamedTuple):
    """Components of one run that the event loop calls, constructed by `assembly`."""

    steps: RunPlan
    schedule: RunSchedule
    running: RunningAttempts
    bell: Bell
    judge: Judge
    starter: Starter
    ender: Ender
    machines: Machines
    stopper: Stopper
    failures: Failures
    groups: Groups
    chunks: Chunks
    numbers: TrainingNumbers
    silences: Silences
    early_stops: EarlyStops
    diverged: DivergedLosses
    health: HealthChecks
    environments: StepEnvironments
    hooks: HostHooks
    orphans: Orphans
    publisher: Publisher
    scrap: SparePool


class Loop:
    """Event loop of one run.

    `tick` is called ten times a second. With `handles_signals`, the process executes this run
    alone.
    """

    def __init__(
        self,
        ws: Workspace,
        commits: GroupCommit,
        pool: HostPool,
        owners: Owners,
        tick: Callable[[], None] | None,
        *,
        handles_signals: bool,
    ) -> None:
        self.ws, self.commits, self.pool, self.owners = ws, commits, pool, owners
        self._tick, self._handles_signals = tick, handles_signals

    async def run(self) -> Report:
        """Execute the run until every step is finished, or until no more step may start.

        Raises Infrastructure if the store or the host fails.
        """
        own, stopper = self.owners, self.owners.stopper
        handlers: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._handles_signals:
            handlers = handle_signals(stopper.interrupt, stopper.terminate)
        with handlers:
            try:
                with self._time_limit():
                    await self._set_up()
                    with own.health.monitor(), own.early_stops.monitor(), self._pulse():
                        await self._turn()
            finally:
                await self._close()
            self.commits.flush()
            own.scrap.clear()
        left = stopper.is_abandoned
        return Report(
            own.schedule.result,
            own.schedule.counts,
            own.failures.final,
            sorted(own.running) if left else [],
            left,
        )

    def publish_all(self) -> None:
        """Publish the outputs of a library recipe at the end of its run."""
        self.owners.publisher.publish_all(self.owners.steps.made)
        self.commits.flush()

    async def _turn(self) -> None:
        own = self.owners
        while not self._is_over():
            # One end at a time, so that new steps run while the next end is processed.
            moved = await own.ender.end_next()
            own.machines.rent()
            moved |= own.judge.judge_ready()
            moved |= await own.starter.start_ready()
            if not moved and not own.running.has_ended:
                await own.bell.wait()
            if own.groups.landed:
                own.groups.land()
            if own.groups.due:
                own.groups.send()
        own.stopper.leave_unfinished()

    def _is_over(self) -> bool:
        schedule = self.owners.schedule
        if schedule.is_finished or schedule.result == "PAUSED":
            return True
        return self.owners.stopper.is_abandoned

    # -- before and after

    async def _set_up(self) -> None:
        """Run the setup commands on every host.

        A setup command that recipe stopped itself does not count as failed, because its steps are
        already cancelled.
        """
        own, pool = self.owners, self.pool
        here = {own.machines.stays_here(id) for id in own.steps.todo}
        places = [*pool.head.places, *pool.places] if pool.is_remote and False in here else []
        if True in here:
            places.append(pool.local_place)
        try:
            await asyncio.gather(*(own.hooks.of(place).setup() for place in places))
        except CannotRun:
            if not own.stopper.is_stopping:
                raise
        left = own.steps.left_on_hosts(self.ws.objects)
        if left:
            await asyncio.gather(*(place.folder.look_up(left) for place in places))
        own.machines.join_late()

    async def _close(self) -> None:
        own = self.owners
        kept = own.stopper.keeps_hosts and own.schedule.result == "PAUSED"
        try:
            await self._leave_hosts()
        finally:  # rented machines are released after an error, too
            await self.pool.close(leave=own.stopper.is_abandoned or kept)
        own.machines.note_moves()
        own.scrap.clear()

    async def _leave_hosts(self) -> None:
        """Run the cleanup commands and stop background work on all hosts at the end of the run."""
        own, schedule = self.owners, self.owners.schedule
        if schedule.is_finished or schedule.result == "PAUSED":
            with contextlib.suppress(Infrastructure):  # the last flush raises the error again
                self.commits.flush()
            await own.bell.settle(GRACE.total_seconds())
        own.bell.cancel_background()
        if not own.stopper.is_abandoned:
            await own.environments.end_installs()
            for hooks in own.hooks:
                for problem in await hooks.cleanup() if not hooks.place.lost else ():
                    self.commits.say(problem)
        # In other runs, a finished attempt may still have to be collected.
        if schedule.is_finished and schedule.result == "COMPLETED":
            await own.orphans.sweep()
            if not find_left_attempts(self.ws.home, self.commits.run)[0]:
                forget_claims(self.ws.home, self.commits.run)

    # -- timers

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Stop the run at its `limits.time` during the block."""
        limit = self.owners.steps.plan.settings.limits.time
        if not limit:
            yield
            return
        time_is_up = self.owners.stopper.time_is_up
        timer = asyncio.get_running_loop().call_later(limit, time_is_up, limit)
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _pulse(self) -> Iterator[None]:
        """Wake the event loop regularly during the block.

        One timer for all waits costs less than a timer for each.
        """
        timer: asyncio.TimerHandle

        def beat() -> None:
            nonlocal timer
            timer = asyncio.get_running_loop().call_later(GROUP_SECONDS, beat)
            self._beat()

        timer = asyncio.get_running_loop().call_later(GROUP_SECONDS, beat)
        try:
            yield
        finally:
            timer.cancel()

    def _beat(self) -> None:
        own = self.owners
        own.bell.wake()
        own.stopper.hand_over()
        # If the database does not answer, the next beat tries again.
        with contextlib.suppress(Infrastructure):
            own.stopper.poll_requests()
            self.commits.release_uploaded()
            own.chunks.tick()
            for id, words in own.numbers.tick().items():
                own.diverged.tell(id, own.running[id], words)
            own.silences.check()
        if self._tick:
            self._tick()
