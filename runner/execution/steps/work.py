"""What the worker of one run knows while it works: the plan, the scheduler, what runs, what was asked.  The functions beside it change it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from drivers.base import DriverError, Exit

from ...digest import Digest
from ...errors import RecipeError
from ...failures import StepFailure
from ...hosts.place.spare_dirs import Scrap
from ...hosts.pool import HostPool
from ...planning.halving import Goal
from ...planning.plan import LOCAL
from ...planning.schedule import ORPHANED, Outcome, Scheduler, State
from ...planning.step import TEMPORARY, StepSpec
from ...storage.content.files import Content
from ...storage.remote.cache import Downloads
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .. import takeover
from ..reporting import telemetry
from ..resume import Claimed
from ..tasks import tasks_of
from .attempts import Attempts, Running
from .chunks import Chunks
from .commit import GroupCommit
from .groups import GROUP_MOVES, Groups
from .orphans import Orphans
from .publisher import Publisher
from .silence import Silences
from .tidying import Tidying
from .training_numbers import TrainingNumbers

End: TypeAlias = "Exit | DriverError | RecipeError"
"""How an attempt is over."""


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


class Failure(NamedTuple):
    """A step that failed, and what is worth reading about it, masked."""

    id: str
    reason: str
    tail: bytes
    log: str
    hint: str
    left: str = ""  # the directory of what it wrote, if it wrote anything
    kind: str = "exit"  # as it is stored
    error: str = ""  # the error itself, if the log shows it, else how it ended
    allowed: bool = False  # the run may complete without it

    @property
    def began(self) -> bool:
        """Whether its command ran."""
        return self.kind not in (StepFailure.ERROR, StepFailure.UNPLACED)

    @property
    def unplaced(self) -> bool:
        """Whether no host could be had for it."""
        return self.kind == StepFailure.UNPLACED


class Handover:
    """That the process of a worker was asked to end, and how often.  A handler of signals."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, *_: object) -> None:
        self.asked += 1


@dataclass(slots=True)
class Control:
    """What was asked of the run while it works: by signals and by its own limits."""

    interrupts: int = 0
    """1: start nothing new.  2: stop what runs.  3: leave it running and go."""
    request: str = ""
    """What was asked for in the store and is being done: `cancel`, `pause`, `resume`."""
    looked: int = -1
    """The version of the store at the last look for a request."""
    limit: str = ""
    """Which of its `limits` the run reached, in words."""
    keep_hosts: bool = False
    """The pause that was asked for keeps the machines, for the resume."""
    handing_over: bool = False
    """The worker ends, and another goes on with the run: nothing new is started here."""
    left: bool = False
    """What runs, if anything does, is left to the worker that resumes the run."""
    stopping: bool = False
    """What runs is being stopped, and what is just being started has to be."""
    disturbed: bool = False
    """A failure or a request came: which steps may start is another question than it was."""

    @property
    def abandoned(self) -> bool:
        """Leave everything as it is, and go."""
        return self.interrupts > 2 or self.left


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
        self.plan, self.facts = survey.plan, survey.facts
        self.made = dict(survey.made)
        self.todo = {self.plan.nodes[n].id for n in survey.todo} | claimed.states.keys()
        self.verdicts = {id: survey.verdicts[self.plan.index[id]] for id in self.todo}
        self.control = Control()
        self.contended = options.contended
        """Whether another run has stored something since this one began to look."""
        if not self.contended:
            ws.traces.rely(survey.plan.recipe, commits.keys.alone)

        self.running: dict[str, Running] = {}
        self.resting: dict[str, float] = {}  # step -> the time at which it may be tried again
        self.refused: dict[
            str, tuple[str, str, str]
        ] = {}  # steps that cannot even be judged: reason, words, fix
        self.held: dict[
            str, set[str]
        ] = {}  # steps that wait for others which were found to have to run again
        self.named: dict[
            str, int
        ] = {}  # attempts of each key, or step without one, that were prepared: no two have one name
        self.early: dict[str, str] = {}  # steps that are stopped early, and why
        self.diverged: dict[str, str] = {}  # attempts with a loss that is no number, in words
        self.sick: set[str] = set()  # steps on a host whose health check failed
        self.unwatched: Counter[str] = (
            Counter()
        )  # of each step: attempts that ended because their agent was killed
        self.queued_for: set[str] = set()  # places whose GPUs others hold, as people know
        self.smaller: dict[
            str, dict[str, int]
        ] = {}  # of steps that ran out of memory: the inputs that were divided, as they are now
        self.asked: dict[str, Digest | None] = {}  # of these: the keys that they had at first
        self.short: Counter[str] = (
            Counter()
        )  # of each step: attempts under earlier workers that ran out of memory, until it is judged
        if claimed.resumed:
            tries = ws.store.runs.attempts(claimed.id)
            self.short.update(
                each.step for each in tries if (each.outcome, each.reason) == ("failed", "oom")
            )
        self.coming: set[str] = set()  # contents that stayed on a host, and are on their way here
        self.replacing = 0  # hosts that are being replaced, or asked for
        self.rented_at = 0.0  # the last look at which machines are needed
        self.failures: list[Failure] = []
        self.ended: deque[tuple[str, End]] = deque()

        self._bell: asyncio.Future[None] | None = (
            None  # what the loop waits for when it has nothing to do
        )
        self._beside: set[asyncio.Task[None]] = set()
        self._consumers: dict[int, list[str]] | None = None

        self.inherited = (
            takeover.attempts(ws, claimed.id) if claimed.resumed and ws.delivers else {}
        )
        """Attempts that a worker of another machine began on hosts that this one may reach."""
        self.orphans = Orphans(ws, commits, host_pool)
        self.scrap = Scrap(self.folder, f"{commits.run}.{commits.fence}", GROUP_MOVES)
        self.attempts = Attempts(ws, survey, commits, host_pool, self.scrap, self.made)
        self.publisher = Publisher(
            ws, survey, commits, self.scrap, overwrite=options.overwrite, link=options.link
        )
        self.tidying = Tidying(
            ws,
            commits,
            self.scrap,
            self.plan.recipe,
            self.beside,
            failures_kept=self.orphans.any_failed,
        )
        self.chunks = Chunks(
            ws, commits, self.running, self.beside, telemetry(ws, commits.run, survey, commits.say)
        )
        self.silences = Silences(ws, commits, host_pool)
        self.groups = Groups(commits, self.running, self.wake)
        self.numbers = TrainingNumbers(survey, self.groups, self.running)
        self.downloads = (
            Downloads(ws.remote_cache, self.wake, commits.say)
            if ws.remote_cache is not None
            else None
        )
        tasks = tasks_of(self.plan, self.todo, self.todo, commits.expected)
        self.scheduler = Scheduler(
            tasks,
            self._capacity(),
            jobs=options.jobs,
            keep_going=options.keep_going,
            states=claimed.states,
            attempts=claimed.spent,
        )
        for move in self.scheduler.opening:
            commits.move(move)
        self._take_over(claimed.states)
        ws.objects.tiny.inherit()

    def _take_over(self, states: Mapping[str, State]) -> None:
        """What the worker before us had begun, or chosen to run, is judged again: each attempt is looked for when its step is started."""
        for id, state in states.items():
            if state is State.RUNNING:
                self.groups.record(self.scheduler.end(id, Outcome(False, ORPHANED)))
            elif state in (State.DONE, State.FRESH):
                self.groups.record(self.scheduler.gone(id, "it has to be made again"))
            if self.scheduler.state(id) is State.QUEUED:
                self.groups.record(self.scheduler.adopt(id, "its worker is gone"))

    def spec(self, id: str) -> StepSpec:
        """What a step does, by its id."""
        return self.plan.specs()[self.plan.index[id]]

    def stays(self, id: str) -> bool:
        """Whether a step runs on this machine whatever others there are."""
        n = self.plan.index[id]
        return bool(self.plan.nodes[n].flags & LOCAL) or self.host_pool.stays(self.plan.specs()[n])

    def stayed(self) -> set[str]:
        """`temporary` outputs of earlier runs that are not here: a host may have them still."""
        found: set[str] = set()
        for node in [self.plan.nodes[self.plan.index[id]] for id in self.todo]:
            names = {name for name, _, flags in node.outputs if flags & TEMPORARY}
            key = self.verdicts[node.id].key
            trace = self.facts.traces.get(key) if names and key is not None else None
            if trace is not None:
                found |= {
                    content
                    for name, _, content in trace.outputs
                    if name in names and not self.ws.objects.has(Content(content))
                }
        return found

    def consumers(self, n: int) -> Sequence[str]:
        """The steps of this run that need step `n`."""
        if self._consumers is None:
            self._consumers = {}
            for id in self.todo:
                for need in self.plan.needs(self.plan.index[id]):
                    self._consumers.setdefault(need, []).append(id)
        return self._consumers.get(n, ())

    def add(self, ids: set[str]) -> None:
        """These steps are to run, too."""
        self.todo |= ids
        self._consumers = None
        self.groups.record(
            self.scheduler.extend(tasks_of(self.plan, ids, self.todo, self.commits.expected))
        )

    # -- waiting

    async def rest(self) -> None:
        """Wait until something calls `wake`."""
        self._bell = asyncio.get_running_loop().create_future()
        await self._bell
        self._bell = None

    def wake(self) -> None:
        """Have the loop look at everything again."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def ends(self, id: str, end: End) -> None:
        """An attempt is over: the loop looks at it when it is its turn."""
        self.ended.append((id, end))
        self.wake()

    def beside(self, doing: Coroutine[Any, Any, None]) -> None:
        """Do something while the loop does other things; nothing once the loop is over, as after an error: the next run tidies up."""
        try:
            task = asyncio.get_running_loop().create_task(doing)
        except RuntimeError:
            return doing.close()
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def settle(self, seconds: float) -> None:
        """Wait for what is done beside the loop; at most so long."""
        await asyncio.wait(
            [*self._beside, asyncio.ensure_future(asyncio.sleep(0))], timeout=seconds
        )

    def leave(self) -> None:
        """Cancel what is still done beside the loop."""
        for task in self._beside:
            task.cancel()

    def _capacity(self) -> dict[str, float]:
        wanted = [spec.resources for spec in self.plan.specs()]
        named = {pool for wants in wanted for pool in wants.pools}
        sizes = self.host_pool.machine(
            name
            for name in ("cpus", "memory", "gpus")
            if any(name in wants.room for wants in wanted)
        )
        return {**sizes, **dict.fromkeys(named, 1.0), **self.options.pools}
