"""Put the owners of a run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...hosts.place.spare_dirs import Scrap
from ...hosts.pool import HostPool
from ...planning.halving import Goal
from ...planning.plan import Plan
from ...planning.schedule import Scheduler
from ...storage.remote.cache import Downloads
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .. import takeover
from ..reporting import telemetry
from ..resume import Claimed
from ..tasks import tasks_of
from .adjusting import SmallerInputs, count_out_of_memory
from .attempt_records import AttemptRecords
from .bell import Bell
from .carrying import Carrier
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
from .groups import GROUP_MOVES, Groups
from .growth import PlanGrowth
from .health import HealthChecks
from .host_hooks import HostHooks
from .host_outputs import HostOutputs
from .inputs import InputStager
from .judging import Judge
from .loop import Loop, Owners
from .orphans import Orphans
from .placement import Placement
from .preparing import Preparer
from .publisher import Publisher
from .reattaching import Reattacher
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts
from .shared_states import SharedStates
from .silence import Silences
from .starting import Starter
from .tidying import Tidying
from .training_numbers import TrainingNumbers


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is worked on."""

    jobs: int
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    contended: bool = False
    """Another run stored something since this one began to look."""
    stop_early: Goal | None = None
    """Instances that fall behind in this are stopped."""
    machines: int = 0
    """Rented for one need at most; 0: one."""


def assemble(
    ws: Workspace,
    survey: Survey,
    commits: GroupCommit,
    pool: HostPool,
    options: Options,
    claimed: Claimed,
    tick: Callable[[], None] | None,
    handover: Handover | None = None,
) -> Loop:
    """The loop of a claimed run.  What an earlier worker began is noted at once."""
    if not options.contended:
        ws.traces.rely(survey.plan.recipe, commits.keys.alone)
    resumed, folder = claimed.resumed, f"{ws.home}/attempts"
    earlier = ws.store.runs.attempts(claimed.id) if resumed else ()
    inherited = takeover.attempts(ws, claimed.id) if resumed and ws.delivers else {}

    bell = Bell()
    in_background = bell.run_in_background
    steps = RunPlan(survey, claimed.states)
    running = RunningAttempts(bell)
    groups = Groups(commits, running, bell.wake)
    orphans = Orphans(ws, commits, pool)
    scheduler = Scheduler(
        tasks_of(survey.plan, steps.todo, steps.todo, commits.expected),
        _capacity_of(survey.plan, pool, options.pools),
        jobs=options.jobs,
        keep_going=options.keep_going,
        states=claimed.states,
        attempts=claimed.spent,
    )
    schedule = RunSchedule(scheduler, groups)
    schedule.take_over(claimed.states)
    ws.objects.tiny.inherit()

    hooks = HostHooks(steps, commits.run, commits.fence)
    scrap = Scrap(folder, f"{commits.run}.{commits.fence}", GROUP_MOVES)
    stopper = Stopper(ws, steps, schedule, commits, running, hooks, bell, handover)
    machines = Machines(
        ws,
        pool,
        steps,
        schedule,
        groups,
        commits,
        running,
        hooks,
        orphans,
        stopper,
        bell,
        most_for_a_need=options.machines,
    )
    smaller_inputs = SmallerInputs(ws, steps, commits, count_out_of_memory(earlier))
    failures = Failures(steps, schedule, commits, smaller_inputs)
    publisher = Publisher(
        ws, survey, commits, scrap, overwrite=options.overwrite, link=options.link
    )
    growth = PlanGrowth(ws, steps, schedule, commits, running, publisher)
    downloads = None
    if ws.remote_cache is not None:
        downloads = Downloads(ws.remote_cache, bell.wake, commits.say)
    judge = Judge(ws, steps, schedule, commits, publisher, smaller_inputs, growth, pool, downloads)
    host_outputs = HostOutputs(ws.objects, steps, pool, machines, judge, bell)

    environments = StepEnvironments(ws, steps, commits, pool, hooks)
    stager = InputStager(ws, steps, commits, environments)
    commands = CommandBuilder(ws, steps, commits, environments)
    preparer = Preparer(ws, steps, commits, pool, environments, stager, commands, scrap)
    shared_states = SharedStates(ws, commits)
    starter = Starter(
        steps,
        schedule,
        commits,
        judge,
        Placement(steps, schedule, commits, pool, host_outputs, machines, failures),
        KeyClaims(ws, schedule, commits, orphans, judge, contended=options.contended),
        StateClaims(ws, preparer, orphans, shared_states, inherited),
        Reattacher(steps, orphans, preparer, stager, machines, inherited),
        preparer,
        publisher,
        Carrier(running, shared_states),
        failures,
        machines,
        stopper,
        bell,
        ws.environ,
        folder,
    )

    early_stops = EarlyStops(ws, steps, schedule, commits, running, bell, options.stop_early)
    health = HealthChecks(steps, running, hooks)
    diverged = DivergedLosses(ws, commits, groups, running, bell)
    numbers = TrainingNumbers(survey, groups, running)
    sink = telemetry(ws, commits.run, survey, commits.say)
    chunks = Chunks(ws, commits, running, in_background, sink)
    tidying = Tidying(
        ws,
        commits,
        scrap,
        survey.plan.recipe,
        in_background,
        failures_kept=orphans.any_failed,
    )
    ender = Ender(
        ws,
        steps,
        schedule,
        commits,
        running,
        failures,
        machines,
        orphans,
        publisher,
        smaller_inputs,
        growth,
        early_stops,
        diverged,
        environments,
        Diagnosis(pool, environments, stopper, early_stops, health, diverged, commits.masker),
        FailureHints(ws, steps, environments),
        AttemptRecords(ws.objects, commits, environments, numbers, chunks, tidying),
        tidying,
        scrap,
        bell,
    )
    owners = Owners(
        steps=steps,
        schedule=schedule,
        running=running,
        bell=bell,
        judge=judge,
        starter=starter,
        ender=ender,
        machines=machines,
        stopper=stopper,
        failures=failures,
        groups=groups,
        chunks=chunks,
        numbers=numbers,
        silences=Silences(ws, commits, pool),
        early_stops=early_stops,
        diverged=diverged,
        health=health,
        environments=environments,
        hooks=hooks,
        orphans=orphans,
        publisher=publisher,
        scrap=scrap,
    )
    return Loop(ws, commits, pool, owners, tick, handles_signals=handover is None)


def _capacity_of(plan: Plan, pool: HostPool, pools: Mapping[str, float]) -> dict[str, float]:
    """What steps may take at once: of this machine, and of the pools that the recipe names."""
    wanted = [spec.resources for spec in plan.specs()]
    named = {name for wants in wanted for name in wants.pools}
    sizes = pool.machine(
        name for name in ("cpus", "memory", "gpus") if any(name in wants.room for wants in wanted)
    )
    return {**sizes, **dict.fromkeys(named, 1.0), **pools}
