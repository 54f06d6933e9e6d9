"""Construction of a run's event loop and its components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...hosts.place.spare_dirs import SparePool
from ...hosts.pool import HostPool
from ...planning.halving import Goal
from ...planning.plan import Plan
from ...planning.schedule import Scheduler
from ...planning.step import NOTHING
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .. import takeover
from ..reporting import telemetry
from ..resume import ClaimedRun
from ..tasks import tasks_of
from .adjusting import SmallerInputs, count_out_of_memory
from .attempt_executor import AttemptExecutor
from .attempt_records import AttemptRecords
from .bell import Bell
from .chunks import Chunks
from .claims import KeyClaims, StateClaims
from .commands import CommandBuilder
from .commit import GroupCommit
from .control import Handover, Stopper
from .diagnosis import Diagnosis
from .diverging import DivergedLosses
from .early import EarlyStops
from .ending import Ender
from .environments import StepEnvironments
from .failing import Failures
from .failure_hints import FailureHints
from .failure_recorder import FailureRecorder
from .groups import GROUP_MOVES, Groups
from .growth import PlanGrowth
from .health import HealthChecks
from .host_hooks import HostHooks
from .host_outputs import HostOutputs
from .inputs import InputStager
from .judging import Judge
from .launching import Launcher
from .loop import Loop, Owners
from .orphans import Orphans
from .placement import Placement
from .preparing import Preparer
from .publisher import Publisher
from .reattaching import Reattacher
from .renting import SIZES, Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts
from .shared_states import SharedStates
from .silence import Silences
from .start_records import StartRecords
from .starting import Starter
from .success_recorder import SuccessRecorder
from .tidying import AttemptCleanup
from .training_numbers import TrainingNumbers


class Options(NamedTuple):
    """Options of a run's event loop, such as the limit of parallel steps and failure handling."""

    jobs: int
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = NOTHING
    contended: bool = False
    """Whether another run has stored results since this run's survey."""
    stop_early: Goal | None = None
    """Metric for early stopping of underperforming instances."""
    machines: int = 0
    """Maximum number of rented machines per resource request; 0 means one."""


def assemble(
    ws: Workspace,
    survey: Survey,
    commits: GroupCommit,
    pool: HostPool,
    options: Options,
    claimed: ClaimedRun,
    tick: Callable[[], None] | None,
    handover: Handover | None = None,
) -> Loop:
    """Construct the event loop of a claimed run, and record the steps of an earlier worker."""
    if not options.contended:
        ws.traces.rely(survey.plan.recipe, commits.keys.alone)
    made = _Assembly(ws, survey, commits, pool, options, claimed, handover)
    owners = made.owners()
    return Loop(ws, commits, pool, owners, tick, handles_signals=handover is None)


class _Assembly:
    """Builder of a run's components, each after the components that it calls."""

    def __init__(
        self,
        ws: Workspace,
        survey: Survey,
        commits: GroupCommit,
        pool: HostPool,
        options: Options,
        claimed: ClaimedRun,
        handover: Handover | None,
    ) -> None:
        self.ws, self.survey, self.commits, self.pool, self.options = (
            ws,
            survey,
            commits,
            pool,
            options,
        )
        self.folder = f"{ws.home}/attempts"
        resumed = claimed.resumed
        earlier = ws.store.runs.attempts(claimed.id) if resumed else ()
        # Must precede the search for orphans, because it creates their directories here.
        self.inherited = takeover.adopt_attempts(ws, claimed.id) if resumed and ws.delivers else {}
        self.bell = Bell()
        self.steps = RunPlan(survey, claimed.states)
        self.running = RunningAttempts(self.bell)
        self.groups = Groups(commits, self.running, self.bell.wake)
        self.orphans = Orphans(ws, commits, pool)
        self.scrap = SparePool(self.folder, f"{commits.run}.{commits.fence}", GROUP_MOVES)
        self.schedule = self._schedule(claimed)
        self.hooks = HostHooks(self.steps, commits.run, commits.fence)
        self.environments = StepEnvironments(ws, self.steps, commits, pool, self.hooks)
        self.smaller_inputs = SmallerInputs(ws, self.steps, commits, count_out_of_memory(earlier))
        self.failures = Failures(self.steps, self.schedule, commits, self.smaller_inputs)
        self.publisher = Publisher(
            ws, survey, commits, self.scrap, overwrite=options.overwrite, link=options.link
        )
        self.growth = PlanGrowth(
            ws, self.steps, self.schedule, commits, self.running, self.publisher
        )
        self.stopper = Stopper(
            ws,
            self.steps,
            self.schedule,
            commits,
            self.running,
            self.hooks,
            self.bell,
            handover,
        )
        self.machines = self._machines()
        self.judge = self._judge()
        self.early_stops = EarlyStops(
            ws,
            self.steps,
            self.schedule,
            commits,
            self.running,
            self.bell,
            options.stop_early,
        )
        self.health = HealthChecks(self.steps, self.running, self.hooks)
        self.diverged = DivergedLosses(ws, commits, self.groups, self.running, self.bell)
        self.numbers = TrainingNumbers(survey, self.groups, self.running)
        self.chunks = Chunks(
            ws,
            commits,
            self.running,
            self.bell.run_in_background,
            telemetry(ws, commits.run, survey, commits.say),
        )

    def owners(self) -> Owners:
        """Return the components that the event loop calls."""
        return Owners(
            steps=self.steps,
            schedule=self.schedule,
            running=self.running,
            bell=self.bell,
            judge=self.judge,
            starter=self._starter(),
            ender=self._ender(),
            machines=self.machines,
            stopper=self.stopper,
            failures=self.failures,
            groups=self.groups,
            chunks=self.chunks,
            numbers=self.numbers,
            silences=Silences(self.ws, self.commits, self.pool),
            early_stops=self.early_stops,
            diverged=self.diverged,
            health=self.health,
            environments=self.environments,
            hooks=self.hooks,
            orphans=self.orphans,
            publisher=self.publisher,
            scrap=self.scrap,
        )

    def _schedule(self, claimed: ClaimedRun) -> RunSchedule:
        todo, options = self.steps.todo, self.options
        scheduler = Scheduler(
            tasks_of(self.survey.plan, todo, todo, self.commits.expected),
            _capacity_of(self.survey.plan, self.pool, options.pools),
            jobs=options.jobs,
            keep_going=options.keep_going,
            states=claimed.states,
            attempts=claimed.spent,
        )
        schedule = RunSchedule(scheduler, self.groups)
        schedule.take_over(claimed.states)
        self.ws.objects.tiny.inherit()
        return schedule

    def _machines(self) -> Machines:
        return Machines(
            self.ws,
            self.pool,
            self.steps,
            self.schedule,
            self.groups,
            self.commits,
            self.running,
            self.hooks,
            self.orphans,
            self.stopper,
            self.bell,
            most_for_a_need=self.options.machines,
            fixed_pools=self.options.pools,
        )

    def _judge(self) -> Judge:
        cache, downloads = self.ws.remote_cache, None
        if cache is not None:
            from ...storage.remote.cache import Downloads

            downloads = Downloads(cache, self.bell.wake, self.commits.say)
        return Judge(
            self.ws,
            self.steps,
            self.schedule,
            self.commits,
            self.publisher,
            self.smaller_inputs,
            self.growth,
            self.pool,
            downloads,
        )

    def _starter(self) -> Starter:
        ws, steps, schedule, commits = self.ws, self.steps, self.schedule, self.commits
        stager = InputStager(ws, steps, commits, self.environments)
        commands = CommandBuilder(ws, steps, commits, self.environments)
        preparer = Preparer(
            ws, steps, commits, self.pool, self.environments, stager, commands, self.scrap
        )
        host_outputs = HostOutputs(
            ws.objects, steps, self.pool, self.machines, self.judge, self.bell
        )
        shared_states = SharedStates(ws, commits)
        placement = Placement(
            steps, schedule, commits, self.pool, host_outputs, self.machines, self.failures
        )
        keys = KeyClaims(
            ws,
            schedule,
            commits,
            self.orphans,
            self.judge,
            contended=self.options.contended,
        )
        launcher = Launcher(
            commits,
            StartRecords(schedule, commits, ws.environ, self.folder),
            placement,
            self.publisher,
            Reattacher(steps, self.orphans, preparer, stager, self.machines, self.inherited),
            preparer,
            AttemptExecutor(schedule, self.running, shared_states),
            self.failures,
            self.machines,
            self.stopper,
            self.bell,
        )
        return Starter(
            steps,
            schedule,
            commits,
            self.judge,
            placement,
            keys,
            StateClaims(ws, preparer, self.orphans, shared_states, self.inherited),
            launcher,
            self.failures,
            self.machines,
        )

    def _ender(self) -> Ender:
        ws, commits = self.ws, self.commits
        tidying = AttemptCleanup(
            ws,
            commits,
            self.scrap,
            self.survey.plan.recipe,
            self.bell.run_in_background,
            failures_kept=self.orphans.any_failed,
        )
        diagnosis = Diagnosis(
            self.pool,
            self.environments,
            self.stopper,
            self.early_stops,
            self.health,
            self.diverged,
            commits.masker,
        )
        records = AttemptRecords(
            ws.objects, commits, self.environments, self.numbers, self.chunks, tidying
        )
        hints = FailureHints(ws, self.steps, self.environments)
        failures = FailureRecorder(
            self.steps,
            self.schedule,
            commits,
            self.failures,
            self.orphans,
            hints,
            records,
            tidying,
        )
        successes = SuccessRecorder(
            ws,
            self.steps,
            self.schedule,
            commits,
            self.publisher,
            self.smaller_inputs,
            self.growth,
            self.diverged,
            records,
            tidying,
            failures,
        )
        return Ender(
            commits,
            self.running,
            self.machines,
            self.environments,
            self.early_stops,
            diagnosis,
            successes,
            failures,
        )


def _capacity_of(plan: Plan, pool: HostPool, pools: Mapping[str, float]) -> dict[str, float]:
    """Return the capacity of this machine and of the resource pools in the recipe."""
    requested: set[str] = set()
    recipe_pools: set[str] = set()
    for spec in plan.specs():
        requested |= spec.resources.room.keys()
        recipe_pools |= spec.resources.pools.keys()
    sizes = pool.total_capacity(name for name in SIZES if name in requested)
    # A pool without a size in the settings admits one step at a time.
    return {**sizes, **dict.fromkeys(recipe_pools, 1.0), **pools}
