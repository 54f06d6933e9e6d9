"""What the worker of one run knows while it works: the plan, the scheduler, what runs, what was asked.  The functions beside it change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...hosts.place.spare_dirs import Scrap
from ...hosts.pool import HostPool
from ...planning.halving import Goal
from ...planning.schedule import Scheduler
from ...storage.remote.cache import Downloads
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .. import takeover
from ..reporting import telemetry
from ..resume import Claimed
from ..tasks import tasks_of
from .adjusting import SmallerInputs, count_out_of_memory
from .attempts import Attempts
from .bell import Bell
from .chunks import Chunks
from .commit import GroupCommit
from .control import Handover, Stopper
from .failing import Cause, Failures
from .groups import GROUP_MOVES, Groups
from .host_hooks import HostHooks
from .orphans import Orphans
from .publisher import Publisher
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts
from .silence import Silences
from .tidying import Tidying
from .training_numbers import TrainingNumbers


@dataclass(frozen=True, slots=True)
class Options:
    jobs: int
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    contended: bool = False  # another run stored something since this one began to look
    stop_early: Goal | None = None  # instances that fall behind in this are stopped
    machines: int = 0  # rented for one need at most; 0: one


class Work:
    """One run, from its first judgement to its last move."""

    def __init__(
        self,
        ws: Workspace,
        survey: Survey,
        commits: GroupCommit,
        host_pool: HostPool,
        options: Options,
        claimed: Claimed,
        tick: Callable[[], None] | None,
        handover: Handover | None = None,
    ) -> None:
        self.handover = handover
        self.ws, self.survey, self.commits, self.host_pool, self.options, self.tick = (
            ws,
            survey,
            commits,
            host_pool,
            options,
            tick,
        )
        self.folder = f"{ws.home}/attempts"
        self.bell = Bell()
        self.steps = RunPlan(survey, claimed.states)
        self.contended = options.contended
        """Whether another run has stored something since this one began to look."""
        if not self.contended:
            ws.traces.rely(survey.plan.recipe, commits.keys.alone)

        self.running = RunningAttempts(self.bell)
        self.refused: dict[str, Cause] = {}  # steps that cannot even be judged
        self.held: dict[
            str, set[str]
        ] = {}  # steps that wait for others which were found to have to run again
        self.named: dict[
            str, int
        ] = {}  # attempts of each key, or step without one, that were prepared: no two have one name
        self.early: dict[str, str] = {}  # steps that are stopped early, and why
        self.sick: set[str] = set()  # steps on a host whose health check failed
        self.unwatched: Counter[str] = (
            Counter()
        )  # of each step: attempts that ended because their agent was killed
        self.queued_for: set[str] = set()  # places whose GPUs others hold, as people know
        self.coming: set[str] = set()  # contents that stayed on a host, and are on their way here

        self.inherited = (
            takeover.attempts(ws, claimed.id) if claimed.resumed and ws.delivers else {}
        )
        """Attempts that a worker of another machine began on hosts that this one may reach."""
        beside = self.bell.run_in_background
        self.orphans = Orphans(ws, commits, host_pool)
        self.hooks = HostHooks(self.steps, commits.run, commits.fence)
        self.scrap = Scrap(self.folder, f"{commits.run}.{commits.fence}", GROUP_MOVES)
        self.attempts = Attempts(
            ws, survey, commits, host_pool, self.hooks, self.scrap, self.steps.made
        )
        self.publisher = Publisher(
            ws, survey, commits, self.scrap, overwrite=options.overwrite, link=options.link
        )
        self.tidying = Tidying(
            ws,
            commits,
            self.scrap,
            survey.plan.recipe,
            beside,
            failures_kept=self.orphans.any_failed,
        )
        self.chunks = Chunks(
            ws, commits, self.running, beside, telemetry(ws, commits.run, survey, commits.say)
        )
        self.silences = Silences(ws, commits, host_pool)
        self.groups = Groups(commits, self.running, self.bell.wake)
        self.numbers = TrainingNumbers(survey, self.groups, self.running)
        self.downloads = (
            Downloads(ws.remote_cache, self.bell.wake, commits.say)
            if ws.remote_cache is not None
            else None
        )
        todo = self.steps.todo
        scheduler = Scheduler(
            tasks_of(survey.plan, todo, todo, commits.expected),
            self._capacity(),
            jobs=options.jobs,
            keep_going=options.keep_going,
            states=claimed.states,
            attempts=claimed.spent,
        )
        self.schedule = RunSchedule(scheduler, self.groups)
        self.schedule.take_over(claimed.states)
        tries = ws.store.runs.attempts(claimed.id) if claimed.resumed else ()
        self.smaller_inputs = SmallerInputs(ws, self.steps, commits, count_out_of_memory(tries))
        self.failures = Failures(self.steps, self.schedule, commits, self.smaller_inputs)
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
        self.machines = Machines(
            ws,
            host_pool,
            self.steps,
            self.schedule,
            self.groups,
            commits,
            self.running,
            self.hooks,
            self.orphans,
            self.stopper,
            self.bell,
            most_for_a_need=options.machines,
        )
        ws.objects.tiny.inherit()

    def add(self, ids: set[str]) -> None:
        """These steps are to run, too."""
        self.steps.add(ids)
        self.schedule.extend(tasks_of(self.steps.plan, ids, self.steps.todo, self.commits.expected))

    def _capacity(self) -> dict[str, float]:
        wanted = [spec.resources for spec in self.survey.plan.specs()]
        named = {pool for wants in wanted for pool in wants.pools}
        sizes = self.host_pool.machine(
            name
            for name in ("cpus", "memory", "gpus")
            if any(name in wants.room for wants in wanted)
        )
        return {**sizes, **dict.fromkeys(named, 1.0), **self.options.pools}
