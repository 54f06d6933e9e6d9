"""The one loop: Scheduler ⇄ Hosts ⇄ Store.  The only place where what a driver says becomes moves; decides nothing itself.

    judge what is ready · start what fits · when neither moved, wait for one end

Order against kill -9: an output is stored, then its trace and the step's move are committed together, then its attempt directory goes.  A worker
that dies leaves its jobs to their supervisor; the next run with the same key finds the attempt by its name, which is the key's and takes its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivers.base import DriverError, Exit, HostLost, Job, NearHost

from ..digest import Digest
from ..errors import CannotRun, Infrastructure, RecipeError
from ..hosts.hooks import INSTALL
from ..hosts.leases import HostPool
from ..hosts.scrap import Scrap
from ..hosts.sites import SOONEST_LOOK, Away, Errand, Site
from ..hosts.staging import Attempt, OutputProblem, undeclared
from ..logs import Log
from ..planning import judge as judging
from ..planning.fingerprint import World
from ..planning.ids import readable
from ..planning.judge import FORCED, FRESH, NOTHING, RESTORE, Made, Verdict
from ..planning.plan import LOCAL, SELECT, STATEFUL, UNCACHED, Node
from ..planning.schedule import BUSY, LIMIT, Move, Outcome, Scheduler, State
from ..planning.secret_values import all_given
from ..planning.step import TEMPORARY, StateSpec, StepSpec
from ..secrets import tokenlike
from ..storage import metrics
from ..storage.crash import crashpoint
from ..storage.files import Content, no_space
from ..storage.locks import Lock
from ..storage.objects import delete
from ..storage.remote_cache import Downloads
from ..storage.workspace import Workspace
from ..survey.survey import Survey, compiled, expansions, look
from . import attempt_result, hints
from .attempts import Attempts, Running, clear_up, holds
from .commit import GroupCommit
from .groups import GROUP_MOVES, GROUP_SECONDS, Groups
from .orphans import Orphans, clear
from .publisher import Publisher
from .signals import signals
from .successors import BRISK, Successors
from .tasks import tasks_of
from .tidying import Tidying
from .watches import PATIENCE, care, watch

if TYPE_CHECKING:
    from drivers.base import Command
    from drivers.devices import Device

    from ..storage import checkpoints

GRACE = timedelta(seconds=10)
UNWATCHED = 3
"""Times that a step's supervisor here is killed in one run before that counts as the step's failure."""
FOREVER = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Options:
    jobs: int
    keep_going: bool = False
    overwrite: bool = False
    link: bool = False
    pools: Mapping[str, float] = field(default_factory=dict)
    contended: bool = False  # another run stored something since this one began to look


class Failure(NamedTuple):
    """A step that failed, and what is worth reading about it, masked."""

    id: str
    reason: str
    tail: bytes
    log: str
    hint: str
    began: bool = True  # false: its command never ran
    left: str = ""  # the directory of what it wrote, if it wrote anything


@dataclass(slots=True)
class Report:
    """How a run ended."""

    state: str
    counts: dict[str, int]
    failures: list[Failure]
    abandoned: list[str] = field(default_factory=list)


class _Taken(Exception):
    """The GPUs that there seemed to be are another run's by now."""


_log = Log("loop")


class Executor:
    """One run, from its first judgement to its last move."""

    def __init__(
        self, ws: Workspace, survey: Survey, commits: GroupCommit, host_pool: HostPool, options: Options, listener: Callable[[], None] | None
    ) -> None:
        self.ws, self.survey, self.commits, self.host_pool, self.options = ws, survey, commits, host_pool, options
        self.host = host_pool.here.host
        self._attempts = f"{ws.home}/attempts"
        self.plan, self.facts = survey.plan, survey.facts
        self.made = dict(survey.made)
        self.todo = {self.plan.nodes[n].id for n in survey.todo}
        self.running: dict[str, Running] = {}
        self.resting: dict[str, float] = {}
        self.failures: list[Failure] = []
        self.ended: deque[tuple[str, Exit | DriverError | RecipeError]] = deque()
        self._bell: asyncio.Future[None] | None = None  # what the loop waits for when it has nothing to do
        self._next = Successors(self.host) if isinstance(self.host, NearHost) else None
        self._waits: set[asyncio.Task[None]] = set()
        self._interrupts = 0
        self._abandoned = False
        self._named: dict[str, int] = {}  # attempts of each key, or step without one, that were prepared: no two have one name
        self._sick: set[str] = set()
        self._unwatched: Counter[str] = Counter()  # of each step: attempts that ended because their supervisor here was killed
        self._out_of_time = False
        self._stopping = False
        self._replacing = 0
        self._refused: dict[str, tuple[str, str, str]] = {}
        self._disturbed = False
        self._contended = options.contended
        if not self._contended:
            ws.traces.rely(survey.plan.recipe, commits.keys.alone)
        self._heart: asyncio.TimerHandle | None = None
        self.left = Orphans(ws, commits, host_pool)
        self._scrap = Scrap(self._attempts, commits.run[-6:], GROUP_MOVES)
        self.attempts = Attempts(ws, survey, commits, host_pool, self._scrap, self.made)
        self.publisher = Publisher(ws, survey, commits, self._scrap, overwrite=options.overwrite, link=options.link)
        self.tidying = Tidying(ws, commits, self._scrap, self.plan.recipe, self._beside, failures_kept=self.left.any_failed)
        self.groups = Groups(commits, self.running, self._wake)
        self._tick = listener
        self._downloads = Downloads(ws.remote_cache, self._wake, commits.say) if ws.remote_cache is not None else None
        self._queued_for: set[str] = set()  # places whose GPUs others hold, as people know
        self._held: dict[str, set[str]] = {}  # steps that wait for others which were found to have to run again
        self._verdicts = {self.plan.nodes[n].id: survey.verdicts[n] for n in survey.todo}
        tasks = tasks_of(self.plan, self.todo, self.todo, self.commits.expected)
        self.scheduler = Scheduler(tasks, self._capacity(), jobs=options.jobs, keep_going=options.keep_going)
        for move in self.scheduler.opening:
            commits.move(move)
        ws.objects.inherit()

    # -- the loop --------------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> Report:
        """Until every step is final, or nothing may start any more.  Raises Infrastructure when the store or the host fails."""
        with signals(self._interrupt, self._terminate):
            looks: list[asyncio.Task[None]] = []
            limit = self.plan.settings.limits.time
            clock = asyncio.get_running_loop().call_later(limit, self._time_is_up, limit) if limit else None
            try:
                await self._set_up()
                looks = self._look_after()
                self._pulse()
                while not self.scheduler.finished and not self._abandoned:
                    # One end at a time: what takes its place runs while the next is looked at.
                    moved = bool(self.ended)
                    if moved:
                        await self._over(*self.ended.popleft())
                    if self._next is not None:
                        self._next.take_back(self.running, all=self.scheduler.held or self.scheduler.room > 0)
                    if not (self._judge_ready() | await self._start_ready() | await self._look_ahead() | moved | bool(self.ended)):
                        await self._rest()
                    if self.groups.landed:
                        self.groups.land()
                    if self.groups.due:
                        self.groups.send()
            finally:
                if self._heart is not None:
                    self._heart.cancel()
                for prepared in self._next if self._next is not None and not self._abandoned else ():
                    clear_up(prepared, self._scrap, self.ws.objects)
                for look in looks:
                    look.cancel()
                if clock is not None:
                    clock.cancel()
                if self.scheduler.finished:
                    with contextlib.suppress(Infrastructure):  # raised again below
                        self.commits.flush()
                    await asyncio.wait([*self._waits, asyncio.ensure_future(asyncio.sleep(0))], timeout=GRACE.total_seconds())
                for task in self._waits:
                    task.cancel()
                if not self._abandoned:
                    await self.attempts.end_installs()
                    for hooks in self.attempts.hooks:
                        for problem in await hooks.cleanup() if not hooks.site.lost else ():
                            self.commits.say(problem)
                if self.scheduler.finished and self.scheduler.result == "COMPLETED":  # else a step that ended well may still wait to be collected
                    await self.left.sweep()
                await self.host_pool.close()
                self._scrap.clear()
            self.commits.flush()
            self._scrap.clear()
        counts = {str(state): count for state, count in self.scheduler.counts.items() if count}
        return Report(self.scheduler.result, counts, self.failures, sorted(self.running) if self._abandoned else [])

    async def _set_up(self) -> None:
        """Make every host ready.  A setup that we stopped ourselves has not failed: its steps are cancelled already, with the true reason."""
        here = {bool(self.plan.nodes[self.plan.index[id]].flags & LOCAL) or not self.host_pool.away for id in self.todo}
        sites = [*(self.host_pool.sites if self.host_pool.away and False in here else ()), *([self.host_pool.here] if True in here else ())]
        try:
            await asyncio.gather(*(self.attempts.hooks_of(site).setup() for site in sites))
        except CannotRun:
            if not self._stopping:
                raise
        if stayed := self._stayed():
            await asyncio.gather(*(site.look_for(stayed) for site in sites if isinstance(site, Away)))

    def _stayed(self) -> set[str]:
        """`temporary` outputs of earlier runs that are not here: a host may have them still."""
        found: set[str] = set()
        for node in [self.plan.nodes[self.plan.index[id]] for id in self.todo]:
            names = {name for name, _, flags in node.outputs if flags & TEMPORARY}
            key = self._verdicts[node.id].key
            trace = self.facts.traces.get(key) if names and key is not None else None
            if trace is not None:
                found |= {content for name, _, content in trace.outputs if name in names and not self.ws.objects.has(Content(content))}
        return found

    def _look_after(self) -> list[asyncio.Task[None]]:
        """Ask after the hosts' health now and then, if the recipe says how, and after the room that checkpoints take."""
        looks = []
        if health := self.plan.settings.health:
            looks.append(watch(self.attempts.hooks, health.run, health.every, self._end_sick))
        if any(self.plan.nodes[self.plan.index[id]].flags & STATEFUL for id in self.todo):
            looks.append(care(self.running, self._states, self.commits.say))
        return [asyncio.get_running_loop().create_task(look) for look in looks]

    def _states(self, running: Running) -> Sequence[StateSpec]:
        return self.plan.specs()[self.plan.index[running.node.id]].state

    async def _end_sick(self, site: Site) -> None:
        """Stop what runs on a host whose health check failed."""
        there = [running for running in self.running.values() if running.site is site]
        self._sick |= {running.node.id for running in there}
        for running in there:
            await self._stop(running)

    async def _rest(self) -> None:
        """Wait for an end, or until the next group, try or look at the screen is due."""
        self._bell = asyncio.get_running_loop().create_future()
        await self._bell
        self._bell = None

    def _pulse(self) -> None:
        """End the wait for an end now and then; one timer for all waits costs less than one each."""
        self._wake()
        if self._tick:
            self._tick()
        self._heart = asyncio.get_running_loop().call_later(GROUP_SECONDS, self._pulse)

    # -- judging ---------------------------------------------------------------------------------------------------------------------------------

    def _judge_ready(self) -> bool:
        moved = False
        for id in self.scheduler.ready():
            if self._downloads is not None and (self._downloads.awaited(id) or self._behind(id)):
                continue
            n = self.plan.index[id]
            try:
                verdict = self._verdict(n)
            except RecipeError as error:
                self._refuse(id, "when", str(error), error.fix)
                moved = True
                continue
            self._verdicts[id] = verdict
            if self._downloads is not None and self._sent_for(self._downloads, id, n, verdict):
                moved = True
                continue
            if verdict.answer in ("fresh", "restore"):
                assert verdict.made is not None
                if not self._settle(n, verdict.made):
                    again = Verdict("run", verdict.key, ("its stored output is gone",), None)
                    if self._downloads is None or not self._sent_for(self._downloads, id, n, again):
                        self.groups.record(self.scheduler.judge(id, "run", "its stored output is gone"))
                    moved = True
                    continue
                if verdict.answer == "restore":
                    try:
                        self.publisher.publish(n, verdict.made)
                    except RecipeError as error:
                        self._refuse(id, "publish", str(error), error.fix)
                        moved = True
                        continue
                moves = self.scheduler.judge(id, "fresh", "; ".join(verdict.reasons))
                self.groups.record(self._with_data(moves, id, {"restored": True}) if verdict.answer == "restore" else moves)
                self._grow()
            elif verdict.answer == "skip":
                self.made[n] = NOTHING
                self.groups.record(self.scheduler.judge(id, "skip", "; ".join(verdict.reasons)))
            elif self.plan.nodes[n].flags & SELECT:
                self._refuse(id, "select", "; ".join(verdict.reasons))
            else:
                self.groups.record(self.scheduler.judge(id, "run", "; ".join(verdict.reasons)))
            moved = True
        return moved

    def _refuse(self, id: str, reason: str, words: str, fix: str = "") -> None:
        """A step that cannot even be judged fails, when it is its turn."""
        self._refused[id] = reason, words, fix
        self.groups.record(self.scheduler.judge(id, "run", ""))

    def _verdict(self, n: int) -> Verdict:
        id = self.plan.nodes[n].id
        verdict = judging.judge(self.plan, n, self.facts, self.made, force=self.survey.forces(id), targets=self.survey.places)
        if verdict.reasons == FORCED and verdict.key in self.commits.made:  # this run has made it anew already
            return judging.judge(self.plan, n, self.facts, self.made, targets=self.survey.places)
        return verdict

    def _is_made(self, n: int) -> bool:
        """Whether a step that was to run need not any more."""
        verdict = self._verdict(n)
        return verdict.answer in (FRESH, RESTORE) and verdict.made is not None and self._can_be_taken(n, verdict.made)

    def _can_be_taken(self, n: int, made: Made) -> bool:
        taken = [made.outputs[name] for name in self._taken(n) if name in made.outputs]
        return all(self.ws.objects.has(Content(content)) or any(holds(site, content) for site in self.host_pool.sites) for content in taken)

    def _settle(self, n: int, made: Made) -> bool:
        """Note what a step left, if the steps that need it can have it."""
        if not self._can_be_taken(n, made):
            return False
        self.made[n] = made
        return True

    def _taken(self, n: int) -> set[str]:
        """The outputs of a step that others of this run take."""
        return {u.output for id in self._below.get(n, ()) for u in self.plan.nodes[self.plan.index[id]].upstream if u.producer == n}

    def _sent_for(self, deliveries: Downloads, id: str, n: int, verdict: Verdict) -> bool:
        """Whether the shared store is asked for something that this step needs, or what made it runs again: it is judged anew when that is there."""
        node, contents = self.plan.nodes[n], dict[str, int]()
        if verdict.made is not None:
            shown = [output for output, path in self.survey.places.get(n, ()) if self.facts.there.get(path) != verdict.made.outputs.get(output)]
            contents = {verdict.made.outputs[name]: n for name in {*shown, *self._taken(n)} if name in verdict.made.outputs}
        elif verdict.answer == "run":
            contents = {self.made[u.producer].outputs[u.output]: u.producer for u in node.upstream if u.output in self.made[u.producer].outputs}
        missing = [Content(content) for content in contents if not self.ws.objects.has(Content(content))]
        if deliveries.ask(id, node, verdict, missing):
            return True
        lost = {contents[content] for content in missing} if verdict.made is None else set()
        for producer in lost:
            self._revive(self.plan.nodes[producer].id)
        self._held[id] = {self.plan.nodes[producer].id for producer in lost}
        return bool(lost)

    def _revive(self, id: str) -> None:
        """What a step made cannot be had any more: it is judged again, and runs."""
        if id in self.todo:
            if self.scheduler.state(id) in (State.FRESH, State.DONE):
                self.groups.record(self.scheduler.gone(id, "its stored output is gone"))
                self.groups.record(self.scheduler.adopt(id, "what it needs may have to be brought"))
            return
        self.todo.add(id)
        self.__dict__.pop("_consumers", None)
        self.groups.record(self.scheduler.extend(tasks_of(self.plan, {id}, self.todo, self.commits.expected)))

    def _behind(self, id: str) -> bool:
        """Whether a step that could be judged waits for one that was found to have to run again."""
        return any(self.scheduler.state(other) in (State.WAITING, State.READY, State.QUEUED, State.RUNNING) for other in self._held.get(id, ()))

    @property
    def _below(self) -> dict[int, list[str]]:
        if not hasattr(self, "_consumers"):
            self._consumers: dict[int, list[str]] = {}
            for id in self.todo:
                for need in self.plan.needs(self.plan.index[id]):
                    self._consumers.setdefault(need, []).append(id)
        return self._consumers

    def _grow(self) -> None:
        """A pending matrix whose files are known by now becomes its instances."""
        if not self.plan.pending:
            return
        grown = expansions(self.ws, self.plan, self.made)
        fresh = {k: v for k, v in grown.items() if k not in self.survey.globs}
        if not fresh:
            return
        self.survey.globs.update(fresh)
        old = self.plan
        self.plan = compiled(self.ws, self.survey.source, self.survey.request, self.survey.globs)
        made = {self.plan.index[old.nodes[n].id]: m for n, m in self.made.items() if old.nodes[n].id in self.plan.index}
        self.made.clear()
        self.made.update(made)
        self.survey.plan = self.plan
        self.commits.masker.learn(all_given(self.plan, os.environ))
        self.survey.places = self.survey.place(self.ws, self.plan)
        facts = look(self.ws, self.plan, self.survey.request)
        facts.there = dict(self.ws.cache.contents(path for targets in self.survey.places.values() for _, path in targets))
        facts.ours = self.ws.published()
        self.facts = self.survey.facts = facts
        known = {node.id for node in old.nodes}
        new = {node.id for node in self.plan.nodes} - known
        self.todo |= new
        if hasattr(self, "_consumers"):
            del self._consumers
        self.commits.expanded(fresh, len(new))
        self.groups.record(self.scheduler.extend(tasks_of(self.plan, new, self.todo, self.commits.expected)))

    def _capacity(self) -> dict[str, float]:
        wanted = [spec.resources for spec in self.plan.specs()]
        named = {pool for wants in wanted for pool in wants.pools}
        sizes = self.host_pool.machine(name for name in ("cpus", "memory", "gpus") if any(name in wants.room for wants in wanted))
        return {**sizes, **dict.fromkeys(named, 1.0), **self.options.pools}

    # -- starting --------------------------------------------------------------------------------------------------------------------------------

    async def _start_ready(self) -> bool:
        now = time.monotonic()
        for id in [id for id, at in self.resting.items() if at <= now]:
            del self.resting[id]
        moved = False
        self._disturbed = False
        for id in self.scheduler.startable(self.resting):
            moved |= await self._start(id)
            if self._disturbed:
                break  # a failure or an interrupt: what may be started is another question now
        return moved

    async def _start(self, id: str) -> bool:
        """Begin an attempt; True when something moved."""
        n = self.plan.index[id]
        if id in self._refused:
            self.groups.record([self.scheduler.start(id)])
            self._fail(id, *self._refused[id])
            return True
        node, spec = self.plan.nodes[n], self.plan.specs()[n]
        verdict = self._verdicts[id]
        key = verdict.key
        taking = spec.resources.room
        site = self._site_for(node, taking)
        if site is None:
            self.resting[id] = time.monotonic() + 0.2
            return self._without_room(id, node, taking)
        gpus: tuple[Device, ...] = ()
        if taking.get("gpus") and not (key is not None and key[:24] in self.left):  # what an earlier worker left may hold its own
            try:
                gpus = await self._pick(id, site, int(taking["gpus"]))
            except DriverError as error:
                self.groups.record([self.scheduler.start(id)])
                self._fail(id, "error", str(error))
                return True
            if not gpus:
                return False
        if key is not None and not self.commits.hold(key, id):
            # Another run here, or another step of this one, is making the same thing: wait, then judge again and find it made.
            self.resting[id] = time.monotonic() + 0.1
            self._contended |= not self.commits.holds(key)
            return True  # its place is free for others
        contended = self._contended or not self.commits.keys.alone()
        if contended and key is not None:
            self.left.look_again()  # whoever held the key may have died with its attempt running
        if key is not None and (contended or key in self.commits.made) and self._is_made(n):
            self.commits.release(key)
            self.groups.record(self.scheduler.adopt(id, f"another {'step of this run' if key in self.commits.made else 'run'} made it"))
            return True
        world, _ = judging.world_of(node, self.facts, self.made)
        try:
            processes = self.attempts.processes(spec, n, site) if spec.state else None
            generation, lock = await self._open_state(node, spec, world, key, processes)
            restored = await asyncio.to_thread(self.attempts.restored, spec, generation, processes) if generation is not None else {}
        except OSError as error:
            self.groups.record([self.scheduler.start(id)])
            self._fail(id, "disk", str(no_space(error, error.filename or "")))
            return True
        if lock is None and spec.state:
            # Another attempt holds the state, under other `continues` values: two trainers in one folder would spoil it.
            if key is not None:
                self.commits.release(key)
            self.resting[id] = time.monotonic() + 0.2
            return False
        if self._disturbed:
            # An interrupt or the run's limit came while the state or the GPUs were asked after: nothing new starts.
            if lock is not None:
                lock.release()
            if key is not None:
                self.commits.release(key)
            return False
        name = self._name(n, key)
        self.commits.next_attempt(id)
        data = self._shown(id, name, spec)
        conflicts = [] if self.options.overwrite else self.publisher.conflicts(n)
        taken, trouble = None, None
        try:
            if not conflicts:
                taken = await self._take_up(n, node, spec, key, world, generation, lock)
        except (RecipeError, OSError, DriverError) as error:
            trouble = error
        if taken is not None:
            restored = {}  # it goes on: nothing is begun again from a checkpoint
        elif generation is not None and (note := "; ".join(filter(None, (generation.note, *(found.words for found in restored.values()))))):
            data["note"] = note
        for found in restored.values():
            if found.passed and found.name is None:
                self.commits.say(f"{id}: {found.words}")
        if site is not self.host_pool.here:
            data["site"] = site.name
        self.groups.record([self.scheduler.start(id, data)])
        try:
            if trouble is not None:
                raise trouble
            if conflicts:
                from ..survey.explain import replaced

                (words,) = replaced(self.ws, conflicts[:1])
                raise CannotRun(f"it would replace {words}", fix="move it away, give --overwrite, or `recipe adopt` it")
            running = taken or await self._begin(n, node, spec, key, world, generation, lock, name, site, restored, gpus)
        except _Taken:
            if lock is not None:
                lock.release()
            self._not_begun(id, key)
            return True
        except (RecipeError, OSError, DriverError) as error:
            if lock is not None:
                lock.release()
            if key is not None:
                self.commits.release_after_flush(key)
            trouble = no_space(error, error.filename or name) if isinstance(error, OSError) else error
            if self._out_of_time:
                self._fail(id, LIMIT, f"stopped: the whole run may take {self.plan.settings.limits.time:g} s (`limits.time`)")
            elif self._interrupts and isinstance(error, CannotRun):  # an install that we ended ourselves has not failed
                self._fail(id, "stopped", "interrupted")
            else:
                self._fail(id, "error", str(trouble), getattr(trouble, "fix", ""))
            return True
        self.running[id] = running
        running.site.enter(running.wants, running.devices)
        if running.errand is not None:
            running.task = asyncio.get_running_loop().create_task(self._carry(id, running, running.errand))
        elif self._next is not None and running.site is self.host_pool.here:
            self._next.near.hear(running.job, functools.partial(self._heard, id))
        else:
            self._beside(self._wait(id, running))
        if self._stopping:  # asked for while this job was being started
            self._beside(self._stop(running))
        return True

    async def _pick(self, id: str, site: Site, count: int) -> tuple[Device, ...]:
        """GPUs of a place that nobody holds; none when the step has to wait for them, which is told once.  Raises DriverError."""
        found = await site.pick(count)
        if not found.devices:
            self.resting[id] = time.monotonic() + found.again
            if found.others and site.name not in self._queued_for:
                self._queued_for.add(site.name)
                what = "a GPU" if count == 1 else f"{count} GPUs"
                where = "" if site is self.host_pool.here else f" on {site.name}"
                held = f"{found.others} of {len(site.devices)} {'is' if found.others == 1 else 'are'}"
                self.commits.say(f"waiting for {what}{where}: {held} in use by another run")
        return found.devices

    def _not_begun(self, id: str, key: Digest | None = None) -> None:
        """Another run took a GPU in the moment before: the step waits again, at no cost to its retries."""
        if key is not None:
            self.commits.release_after_flush(key)
        self.groups.record(self.scheduler.end(id, Outcome(False, BUSY)))
        self.resting[id] = time.monotonic() + SOONEST_LOOK

    def _discard(self, running: Running) -> None:
        """Delete what there is of an attempt that did not begin."""
        if running.errand is not None and isinstance(running.site, Away):
            self._beside(self.tidying.clear_away(running.site, running.errand, ()))
        clear_up(running, self._scrap, self.ws.objects)

    def _shown(self, id: str, name: str, spec: StepSpec) -> dict[str, object]:
        """What is said of an attempt that begins."""
        log = f"{self._attempts}/{name}.log"
        data: dict[str, object] = {"log": log, "attempt": self.commits.tries(id)}
        if spec.metrics is not None:
            data["metrics"] = log[:-4] + ".metrics"
        # Names, so that who follows the raw log can mask it.
        hidden = [secret.source for secret in spec.secrets if os.environ.get(secret.source)]
        hidden += [name for name in spec.pass_env if tokenlike(name, os.environ.get(name, ""))]
        if hidden:
            data["secrets"] = hidden
        if spec.env_files:
            data["env_files"] = list(spec.env_files)
        return data

    def _site_for(self, node: Node, wants: Mapping[str, float]) -> Site | None:
        """Where a step may start now: where what it needs lies already, else where there is room."""
        if not self.host_pool.away or node.flags & LOCAL:
            return self.host_pool.here
        absent = self._absent(node)
        sites = [site for site in self.host_pool.sites if site.has_room(wants) and all(holds(site, content) for content in absent)]
        return next((site for site in sites if not site.silent), sites[0] if sites else None)

    def _absent(self, node: Node) -> list[str]:
        """What a step takes of earlier ones and that is not here: `temporary` outputs, which stayed on their host."""
        found = [self.made[each.producer].outputs.get(each.output) for each in node.upstream]
        return [content for content in found if content is not None and not self.ws.objects.has(Content(content))]

    def _without_room(self, id: str, node: Node, wants: Mapping[str, float]) -> bool:
        """A step that could start and finds no place: it waits, or what it needs is made again, or there will never be one."""
        live = [site for site in self.host_pool.sites if not site.lost]
        for content in self._absent(node):
            if not any(holds(site, content) for site in live):
                producer = next(each.producer for each in node.upstream if self.made[each.producer].outputs.get(each.output) == content)
                name = self.plan.nodes[producer].id
                self.made.pop(producer)
                self.groups.record(self.scheduler.gone(name, "its output stayed on a host that is lost"))
                return True
        if self._replacing or any(site.could(wants) for site in live):
            return False
        self.groups.record([self.scheduler.start(id)])
        self._fail(id, "error", f"there is no host left for it: {'; '.join(self.host_pool.lost) or 'none is large enough'}")
        return True

    async def _open_state(
        self, node: Node, spec: StepSpec, world: World, own: Digest | None, processes: int | None
    ) -> tuple[checkpoints.Generation | None, Lock | None]:
        if not spec.state:
            return None, None
        from ..storage import checkpoints

        continues = spec.continues
        key = checkpoints.key(spec, world, node.id)
        lock = self.ws.locks.try_hold(f"state-{key}")
        if lock is None:
            return None, None
        root = self.ws.home / "states" / key
        holder = checkpoints.holder(root)
        if holder and not holder.startswith((own or "-")[:24]) and (there := self.left.site_of(holder)) and await self.left.goes_on(holder):
            # Its worker is gone but it writes there still, under other `continues` values: it has to end before another may begin.
            await there.host.stop(Job(holder), GRACE)
            lock.release()
            return None, None
        return checkpoints.choose(root, continues, world=processes), lock

    def _name(self, n: int, key: Digest | None) -> str:
        """An attempt's name: its key's, so that the next worker finds it; without a key, the run's."""
        id = self.plan.nodes[n].id
        run, what = self.commits.run, key or id
        self._named[what] = number = self._named.get(what, 0) + 1
        return f"{key[:24]}-{run[-6:]}-{number}" if key is not None else f"{run}-{n}-{number}"

    async def _take_up(
        self, n: int, node: Node, spec: StepSpec, key: Digest | None, world: World, generation: checkpoints.Generation | None, lock: Lock | None
    ) -> Running | None:
        """What an earlier worker left of this very step, if it runs still or ended well.  Raises CannotRun, DriverError, OSError."""
        for old in self.left.pop(key[:24]) if key is not None else ():
            found = await self.left.taken_up(node, old, self._always(n, self._verdicts[node.id]))
            if found is not None:
                job, site = found
                attempt = Attempt(f"{self._attempts}/{old}")
                log = attempt.path + ".log"
                wants = spec.resources.room
                running = Running(node, n, key, world, attempt, job, old, log, time.time(), generation, lock, site, wants, taken_up=True)
                if isinstance(site, Away):
                    running.errand = self.attempts.errand(running, spec, sys.executable, site)
                    running.errand.job, running.errand.rejoined = job, True
                return running
        return None

    async def _begin(
        self,
        n: int,
        node: Node,
        spec: StepSpec,
        key: Digest | None,
        world: World,
        generation: checkpoints.Generation | None,
        lock: Lock | None,
        name: str,
        site: Site,
        restored: Mapping[str, checkpoints.Newest],
        gpus: tuple[Device, ...] = (),
        start: Callable[[Command, str], Awaitable[Job]] | None = None,
    ) -> Running:
        """Prepare an attempt and start it: at once, unless `start` says in which way."""
        attempt = Attempt(f"{self._attempts}/{name}")
        taking = spec.resources.room
        if not gpus and taking.get("gpus") and not (gpus := await self._pick(node.id, site, int(taking["gpus"]))):
            raise _Taken
        log = attempt.path + ".log"
        image = self.attempts.image(spec)
        python = "python" if image else await self.attempts.python(node, site)
        if image:
            await self.attempts.containers_of(site).image(image)
        running = Running(node, n, key, world, attempt, Job(name), name, log, time.time(), generation, lock, site, taking, gpus)
        if generation is not None:
            from ..storage import checkpoints

            checkpoints.hold(generation.path.parent, name)
        if isinstance(site, Away):
            Path(f"{attempt.path}.site").write_text(site.name, encoding="utf-8")
            running.errand = self.attempts.errand(running, spec, python, site)
            return running
        attempt.begin(self._scrap)
        crashpoint("attempt-made")
        self.attempts.stage(node, spec, attempt)
        self.attempts.link_state(spec, attempt, generation)
        running.goes_on = max((found.step for found in restored.values() if found.step is not None), default=None)
        command, script = self.attempts.command(running, spec, python, restored)
        if script is not None:
            self._scrap.write_script(site.paths(attempt).script, script)
            self._scrap.log(log)
        crashpoint("attempt-staged")
        running.job = await (start or site.host.start)(command, name)
        crashpoint("job-started")
        return running

    async def _carry(self, id: str, running: Running, errand: Errand) -> None:
        """Put the end of an attempt elsewhere into the queue, whatever happens."""
        assert isinstance(running.site, Away)
        end: Exit | DriverError | RecipeError
        try:
            running.brought = await running.site.carry(errand)
            end = running.brought.exit
        except asyncio.CancelledError:
            if not running.stopped:
                raise
            end = Exit(None, reason="stopped")
        except (DriverError, RecipeError) as error:
            end = error
        except OSError as error:
            end = no_space(error, error.filename or errand.name)
        self._heard(id, end)

    async def _stop(self, running: Running) -> None:
        """End what runs; an attempt that has not begun yet on its host never does."""
        running.stopped = True
        if running.errand is not None and running.errand.job is None:
            if running.task is not None:
                running.task.cancel()
            return
        job = running.errand.job if running.errand is not None and running.errand.job is not None else running.job
        with contextlib.suppress(DriverError):  # who waits for its end hears that the host is gone, or cannot be reached
            await running.site.host.stop(job, GRACE)

    def _lose(self, site: Away, why: str) -> None:
        """A host is gone: nothing starts there any more, and another takes its place if there is one."""
        if site.lost:
            return
        site.lost = why
        self.commits.say(f"{site.name} is lost: {why}")
        self._replacing += 1
        self._beside(self._replace(site))

    async def _replace(self, lost: Away) -> None:
        try:
            found = await self.host_pool.replace(lost)
            if found is not None:
                await self.attempts.hooks_of(found).setup()
                self.commits.say(f"{found.name} takes its place")
        except RecipeError as error:
            self.commits.say(str(error))
        finally:
            self._replacing -= 1
            self._wake()

    def _always(self, n: int, verdict: Verdict) -> bool:
        """Whether it must run although somebody made the same."""
        return verdict.reasons == FORCED or bool(self.plan.nodes[n].flags & UNCACHED)

    def _heard(self, id: str, exit: Exit | DriverError | RecipeError) -> None:
        self.ended.append((id, exit))
        self._wake()

    async def _wait(self, id: str, running: Running) -> None:
        """Hear of the job's end, whatever happens: for a host that has to be asked."""
        try:
            exit: Exit | DriverError | None = None
            while exit is None:
                exit = await running.site.host.wait(running.job, FOREVER)
        except DriverError as error:
            exit = error
        self._heard(id, exit)

    # -- looking ahead ---------------------------------------------------------------------------------------------------------------------------

    async def _look_ahead(self) -> bool:
        """Prepare what will run next, while all room is taken by steps that end within moments."""
        next_ones = self._next
        if next_ones is None or self._contended or not (wanted := next_ones.wanted(self.scheduler, self.running, self.resting)):
            return False
        if self.host_pool.away or self._downloads is not None or not self.commits.keys.alone():
            return False
        moved = False
        for ahead, job, id in wanted:
            next_ones.brisk = await self._prepare(next_ones, ahead, job, id)
            moved |= next_ones.brisk
        return moved

    async def _prepare(self, next_ones: Successors, ahead: str, job: Job, id: str) -> bool:
        """Have a step begin when the job `job` of `ahead` has ended well; what is special about it is for its own turn."""
        n = self.plan.index[id]
        node, spec, key = self.plan.nodes[n], self.plan.specs()[n], self._verdicts[id].key
        plain = not (spec.state or node.lock or self.attempts.image(spec) or spec.resources.gpus or id in self._refused)
        if not plain or key is None or key[:24] in self.left or key in self.commits.made:
            return False
        if self.publisher.conflicts(n) or not self.commits.hold(key, id):
            return False
        world, _ = judging.world_of(node, self.facts, self.made)
        name = self._name(n, key)
        start = functools.partial(next_ones.near.follow, ahead=job)
        try:
            prepared = await self._begin(n, node, spec, key, world, None, None, name, self.host_pool.here, {}, start=start)
        except (RecipeError, OSError, DriverError):
            clear(f"{self._attempts}/{name}")
            self.commits.release_after_flush(key)
            return False
        next_ones.add(ahead, id, prepared)
        self.resting[id] = float("inf")
        next_ones.near.hear(prepared.job, functools.partial(self._heard, id))
        return True

    def _succeed(self, next_ones: Successors, ahead: str, exit: Exit | DriverError | RecipeError) -> None:
        """What has begun in the place of a step that is over is running."""
        id = next_ones.begun(ahead, exit)
        if id is None:
            return
        if self.scheduler.state(id) is not State.QUEUED:  # cancelled a moment ago: its end is only cleared up after
            self._beside(self._stop(next(each for each in next_ones if each.node.id == id)))
            return
        running = self.running[id] = next_ones.pop(id)
        del self.resting[id]
        self.scheduler.vacate(ahead)
        self.commits.next_attempt(id)
        self.groups.record([self.scheduler.start(id, self._shown(id, running.name, self.plan.specs()[running.number]), begun=True)])
        running.started = exit.ended if isinstance(exit, Exit) else time.time()
        running.site.enter(running.wants)

    def _withdrawn(self, prepared: Running) -> None:
        """It has not begun, and waits for its turn like any other."""
        del self.resting[prepared.node.id]
        if prepared.key is not None:
            self.commits.release_after_flush(prepared.key)
        clear_up(prepared, self._scrap, self.ws.objects)

    # -- ending ----------------------------------------------------------------------------------------------------------------------------------

    async def _over(self, id: str, exit: Exit | DriverError | RecipeError) -> None:
        if self._next is not None:
            if id in self._next:
                self._withdrawn(self._next.pop(id))
                return
            self._succeed(self._next, id, exit)
            self._next.brisk = isinstance(exit, Exit) and exit.ended - exit.started < BRISK
        running = self.running.pop(id)
        if isinstance(exit, Exit):
            _log.info("%s ended on %s: %s %s after %.3f s", readable(id), running.site.name, exit.reason, exit.code, exit.ended - exit.started)
        running.site.leave(running.wants, running.devices)
        spec = self.plan.specs()[self.plan.index[id]]
        image = self.attempts.image(spec)
        try:
            if image and isinstance(exit, Exit):
                with contextlib.suppress(DriverError):
                    await self.attempts.containers_of(running.site).over(running.site.paths(running.attempt).cwd, exit)
            if isinstance(exit, HostLost) and isinstance(running.site, Away):
                self._lose(running.site, str(exit))
            if isinstance(exit, Exit) and exit.reason == BUSY:
                self._discard(running)
                self._not_begun(id)
            elif isinstance(exit, RecipeError):
                self._failed(id, running, spec, "error", f"{exit}{f' ({exit.fix})' if exit.fix else ''}")
            elif isinstance(exit, DriverError):
                self._failed(id, running, spec, "lost" if isinstance(exit, HostLost) else "driver", str(exit))
            elif exit.reason == "withdrawn":
                self._failed(id, running, spec, "lost", "an earlier run, which is gone, had prepared it and never began it")
            elif exit.reason == "stopped" and self._out_of_time:
                limit = self.plan.settings.limits.time
                self._failed(id, running, spec, LIMIT, f"stopped: the whole run may take {limit:g} s (`limits.time`)")
            elif exit.reason == "stopped" and id in self._sick:
                self._sick.discard(id)
                self._failed(id, running, spec, "health", f"the recipe's health check failed {PATIENCE} times in a row")
            elif exit.reason == "stopped" and exit.detail and not self._interrupts:
                self._failed(id, running, spec, "lost", f"{running.site.name} ended it: {exit.detail}")
            elif running.taken_up and exit.reason == "stopped" and not self._interrupts:
                self._failed(id, running, spec, "lost", "an earlier run, which is gone, had told it to stop")
            elif exit.code != 0 or exit.reason not in ("exit",):
                reason, words = (
                    attempt_result.reason(exit),
                    attempt_result.said(exit, spec, image, attempt_result.tail(running.log, self.commits.masker)),
                )
                if exit.reason == "lost" and running.site is self.host_pool.here:
                    # This machine runs on, or we would not: what ends with it each time is not bad luck, and counts as the step's failure.
                    self._unwatched[id] += 1
                    if self._unwatched[id] >= UNWATCHED:
                        reason, words = "unwatched", f"the process that watches steps was killed {UNWATCHED} times while it ran"
                elif exit.reason == "lost":
                    words += f" ({running.site.name} was restarted, or it was killed there)"
                if reason == "exit":
                    where = "" if running.site is self.host_pool.here else running.site.name
                    if where and exit.code == 127 and not image:
                        words += f" on {where}; `recipe doctor --driver {self.host_pool.name}` tells what there is"
                    if full := attempt_result.full(attempt_result.tail(running.log, self.commits.masker), await running.site.room(), where):
                        reason, words = "disk", f"{words}: {full}"
                self._failed(id, running, spec, reason, words, exit)
            else:
                await self._succeeded(id, running, spec, exit)
        finally:
            if running.lock is not None:
                running.lock.release()
            if running.key is not None:
                self.commits.release_after_flush(running.key)

    async def _succeeded(self, id: str, running: Running, spec: StepSpec, exit: Exit) -> None:
        crashpoint("job-over")
        node, attempt = running.node, running.attempt
        n = self.plan.index[id]
        seconds = (exit.ended - exit.started) if exit.ended else time.time() - running.started
        try:
            tampered = running.brought.changed if running.brought is not None else attempt.tampered(self.ws.cache, self.ws.objects)
            if tampered:
                shared = running.brought is None and tampered[0] in attempt.links
                who = "it, or somebody meanwhile, changed" if shared else "it changed"
                self._failed(id, running, spec, "input", f"{who} its input {tampered[0]}; what is declared as an input is only to be read")
                return
            kept = [each.path for each in spec.state]
            if running.brought is not None:
                if running.brought.wrong:
                    raise OutputProblem(running.brought.wrong)
                outputs = dict(running.brought.outputs)
            elif attempt.heavy(node.outputs):
                outputs = await asyncio.to_thread(attempt.collect, node.outputs, self.ws.objects, kept)
            else:
                outputs = attempt.collect(node.outputs, self.ws.objects, kept)
        except OutputProblem as error:
            self._failed(id, running, spec, "lost" if running.taken_up else "output", f"{error} (exit 0)")
            return
        except Infrastructure as error:
            self._failed(id, running, spec, "disk", str(error))
            return
        crashpoint("outputs-stored")
        values = attempt_result.measured(attempt.path, running.log, spec.metrics, self.commits.masker)
        if running.goes_on is not None:
            from ..storage import checkpoints

            if words := checkpoints.went_back(running.goes_on, metrics.first_step(Path(f"{attempt.path}.metrics"))):
                self.commits.say(f"{id}: {words}")
        made = Made(True, outputs, values)
        self.made[n] = made
        stale = attempt.stale(self.ws.cache)
        note: dict[str, object] = {}
        if stale:
            where = str(self.ws.root / stale[0]).removeprefix(f"{self.ws.root}/")
            note["note"] = f"{where} changed while it ran: its result is used now, and it will run again"
        elif running.key is not None:
            self.commits.trace(running.key, node, outputs, values, exit, self._facts(running, self.attempts.image(spec)))
        if not self.survey.library:
            try:
                self.publisher.publish(n, made)
            except RecipeError as error:
                self._failed(id, running, spec, "publish", str(error))
                return
            crashpoint("published")
        pre_image, python = {"author": spec.author, "world": running.world}, self.attempts.interpreter(node, spec, running.site)
        self.commits.attempt(id, running.name, running.key, running.started, "done", "", pre_image, exit, python)
        self.tidying.keep_log(id, running, spec)
        data: dict[str, object] = {"seconds": round(seconds, 3), **note}
        if values:
            data["metrics"] = values
        if exit.strays:
            data["strays"] = exit.strays
        self.groups.record(self.scheduler.end(id, Outcome(True)) if not data else self._with_data(self.scheduler.end(id, Outcome(True)), id, data))
        self.tidying.tidy(running, spec, success=True)
        self._grow()

    def _facts(self, running: Running, image: str) -> dict[str, object]:
        """What happened to be so, and is no part of the key."""
        found: dict[str, object] = {}
        if running.site is not self.host_pool.here:
            found["host"] = running.site.name
        if image:
            found["image"] = self.attempts.containers_of(running.site).digest(image)
        if python := self.attempts.interpreter(running.node, self.plan.specs()[running.number], running.site):
            found["python"] = python
        if running.goes_on is not None:
            found["continued_from"] = running.goes_on
        return found

    def _with_data(self, moves: list[Move], id: str, data: dict[str, object]) -> list[Move]:
        return [Move(m.subject, m.id, m.before, m.after, m.reason, {**m.data, **data}) if m.id == id and m.subject == "step" else m for m in moves]

    def _failed(self, id: str, running: Running, spec: StepSpec, reason: str, words: str, exit: Exit | None = None) -> None:
        attempt = running.attempt
        tail = attempt_result.tail(running.log, self.commits.masker)
        if reason == "disk":
            delete(Path(attempt.path))  # what it wrote is likely what fills the disk, and there has to be room to say so
        try:
            log = self.tidying.keep_log(id, running, spec)
            attempt_result.discard(running.log, self.tidying.measured(running, spec), self._scrap)
        except OSError as error:
            log, words = running.log, f"{words}; its log stays where it is ({no_space(error, running.log)})"
        hint = "let the step end only processes that it started, by their ids" if reason == "unwatched" else ""
        if reason in ("exit", "output"):
            declared = [*attempt.staged, *attempt.links, *attempt.objects, *(output.path for output in running.node.outputs)]
            missing = undeclared(tail.decode(errors="replace"), self.ws.root, running.site.paths(attempt).cwd, declared)
            hint = f"{missing} is in the workspace but not declared: add it to `deps` of {id}" if missing else ""
        python = self.attempts.interpreter(running.node, spec, running.site)
        if exit is not None and not hint:
            lock = "" if self.survey.request.current_python else running.node.lock
            ran = hints.Ran(python, lock, self.attempts.image(spec), running.site.elsewhere)
            hint = hints.fix(exit, tail.decode(errors="replace"), spec, ran, os.environ)
        image = {"author": spec.author, "world": running.world}
        self.commits.attempt(id, self.tidying.failed_name(id), running.key, running.started, "failed", reason, image, None, python)
        self.tidying.tidy(running, spec, success=False)
        self._fail(id, reason, words, hint, attempt_result.words(tail), log, self.tidying.left(running))

    def _fail(self, id: str, reason: str, words: str, hint: str = "", tail: bytes = b"", log: str = "", left: str = "") -> None:
        self._disturbed = True
        moves = self.scheduler.end(id, Outcome(False, reason, words))
        self.groups.record(moves)
        own = next(move for move in moves if move.id == id)
        if own.after == State.QUEUED:
            wait = own.data.get("wait", 0.0)
            self.resting[id] = time.monotonic() + (float(wait) if isinstance(wait, (int, float)) else 0.0)
            return
        if own.after == State.FAILED:
            self.made[self.plan.index[id]] = NOTHING
            text = self.commits.masker.text
            self.failures.append(Failure(id, text(words or reason), tail, log, text(hint), reason != "error", left))

    def publish_all(self) -> None:
        """A library recipe's results, at the end."""
        self.publisher.publish_all(self.made)
        self.commits.flush()

    # -- signals ---------------------------------------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """First: start nothing new.  Second: stop what runs.  Third: leave it running and go."""
        self._interrupts += 1
        self._disturbed = True
        # What is said may find its reader gone: it is said last.
        if self._interrupts == 1:
            self.groups.record(self.scheduler.drain())
            for hooks in self.attempts.hooks:
                self._beside(hooks.stop(INSTALL))  # what would be started in it is not
            self.commits.say(f"finishing {len(self.running)} running step(s); press Ctrl-C again to stop them")
        elif self._interrupts == 2:
            self._terminate()
            self.commits.say("stopping; press Ctrl-C again to go without waiting for that")
        else:
            self._abandoned = True
        self._wake()

    def _terminate(self) -> None:
        self._interrupts = max(self._interrupts, 2)
        self._disturbed = True
        self.groups.record(self.scheduler.cancel("interrupted"))
        self._stop_all()

    def _time_is_up(self, limit: float) -> None:
        """The run reached its `limits.time`: nothing new starts, and what runs is stopped and has failed; its state is kept."""
        self._disturbed = True
        self._out_of_time = True
        self.groups.record(self.scheduler.drain(LIMIT))
        self._stop_all()
        self.commits.say(f"the run reached its limit of {limit:g} s (`limits.time`): stopping")

    def _stop_all(self) -> None:
        self._stopping = True
        for hooks in self.attempts.hooks:
            self._beside(hooks.stop())
        for running in self.running.values():
            self._beside(self._stop(running))
        self._wake()

    def _beside(self, doing: Coroutine[Any, Any, None]) -> None:
        """Go on with something while the loop does other things."""
        task = asyncio.get_running_loop().create_task(doing)
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)

    def _wake(self) -> None:
        """End the wait for an end: what was asked is looked at now."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0
