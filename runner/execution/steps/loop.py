"""The one loop: Scheduler ⇄ Hosts ⇄ Store.  Decides nothing itself.

    judge what is ready · start what fits · when neither moved, wait for one end

Order against kill -9: an output is stored, then its trace and the step's move are committed together, then its attempt directory goes.  A worker
that dies leaves its jobs to their agent; the next run with the same key finds the attempt by its name, which is the key's and takes its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...errors import CannotRun, Infrastructure
from ...hosts.link.local_agents import forget_claims
from ...hosts.place.place import Place
from ..signals import signals
from .control import GRACE, stop
from .early import watched
from .ending import end
from .failing import Failure
from .groups import GROUP_SECONDS
from .judging import judge_ready
from .orphans import left_by
from .starting import start_ready
from .watches import watch
from .work import Work


@dataclass(slots=True)
class Report:
    """How a run ended."""

    state: str
    counts: dict[str, int]
    failures: list[Failure]
    abandoned: list[str] = field(default_factory=list)
    left: bool = False
    """The run is not over: another worker goes on with it."""


async def run(work: Work) -> Report:
    """Until every step is final, or nothing may start any more.  Raises Infrastructure when the store or the host fails."""
    ours = work.handover is None  # else signals end the worker, which does more than this run
    with (
        signals(work.stopper.interrupt, work.stopper.terminate)
        if ours
        else contextlib.nullcontext()
    ):
        try:
            with _clock(work):
                await _set_up(work)
                with _looks(work), watched(work), _pulse(work):
                    await _turn(work)
        finally:
            await _close(work)
        work.commits.flush()
        work.scrap.clear()
    left = work.stopper.is_abandoned
    return Report(
        work.schedule.result,
        work.schedule.counts,
        work.failures.final,
        sorted(work.running) if left else [],
        left,
    )


def publish_all(work: Work) -> None:
    """A library recipe's results, at the end."""
    work.publisher.publish_all(work.steps.made)
    work.commits.flush()


async def _turn(work: Work) -> None:
    while (
        not work.schedule.is_finished
        and not work.stopper.is_abandoned
        and work.schedule.result != "PAUSED"
    ):
        # One end at a time: what takes its place runs while the next is looked at.
        moved = work.running.has_ended
        if moved:
            await end(work, *work.running.next_end())
        work.machines.rent()
        if not (judge_ready(work) | await start_ready(work) | moved | work.running.has_ended):
            await work.bell.wait()
        if work.groups.landed:
            work.groups.land()
        if work.groups.due:
            work.groups.send()
    work.stopper.leave_unfinished()


async def _close(work: Work) -> None:
    kept = work.stopper.keeps_hosts and work.schedule.result == "PAUSED"
    try:
        await _leave(work)
    finally:  # whatever went wrong, no machine is paid for any longer
        await work.host_pool.close(leave=work.stopper.is_abandoned or kept)
    work.machines.note_moves()
    work.scrap.clear()


async def _leave(work: Work) -> None:
    """Let go of what the run has on its hosts."""
    if work.schedule.is_finished or work.schedule.result == "PAUSED":
        with contextlib.suppress(Infrastructure):  # raised again by the last flush
            work.commits.flush()
        await work.bell.settle(GRACE.total_seconds())
    work.bell.cancel_background()
    if not work.stopper.is_abandoned:
        await work.attempts.end_installs()
        for hooks in work.hooks:
            for problem in await hooks.cleanup() if not hooks.place.lost else ():
                work.commits.say(problem)
    if (
        work.schedule.is_finished and work.schedule.result == "COMPLETED"
    ):  # else a step that ended well may still wait to be collected
        await work.orphans.sweep()
        if not left_by(work.ws.home, work.commits.run)[0]:
            forget_claims(work.ws.home, work.commits.run)


async def _set_up(work: Work) -> None:
    """Make every host ready.  A setup that we stopped ourselves has not failed: its steps are cancelled already, with the true reason."""
    here = {work.machines.stays_here(id) for id in work.steps.todo}
    pool = work.host_pool
    places = [
        *([*pool.head.places, *pool.places] if pool.away and False in here else ()),
        *([pool.here] if True in here else ()),
    ]
    try:
        await asyncio.gather(*(work.hooks.of(place).setup() for place in places))
    except CannotRun:
        if not work.stopper.is_stopping:
            raise
    if stayed := work.steps.left_on_hosts(work.ws.objects):
        await asyncio.gather(*(place.folder.look_for(stayed) for place in places))


@contextlib.contextmanager
def _clock(work: Work) -> Iterator[None]:
    """End the run when it reaches its `limits.time`."""
    limit = work.steps.plan.settings.limits.time
    clock = (
        asyncio.get_running_loop().call_later(limit, work.stopper.time_is_up, limit)
        if limit
        else None
    )
    try:
        yield
    finally:
        if clock is not None:
            clock.cancel()


@contextlib.contextmanager
def _looks(work: Work) -> Iterator[None]:
    """Look now and then at the hosts' health, if the recipe says how."""
    health = work.steps.plan.settings.health
    if health is None:
        yield
        return
    looks = watch(work.hooks, health.run, health.every, functools.partial(_end_sick, work))
    task = asyncio.get_running_loop().create_task(looks)
    try:
        yield
    finally:
        task.cancel()


async def _end_sick(work: Work, place: Place) -> None:
    """Stop what runs on a host whose health check failed."""
    there = [running for running in work.running.values() if place in running.place.members]
    work.sick |= {running.node.id for running in there}
    for running in there:
        await stop(running)


@contextlib.contextmanager
def _pulse(work: Work) -> Iterator[None]:
    """End the loop's waits now and then; one timer for all of them costs less than one each."""
    timer: asyncio.TimerHandle

    def beat() -> None:
        nonlocal timer
        timer = asyncio.get_running_loop().call_later(GROUP_SECONDS, beat)
        work.bell.wake()
        work.stopper.hand_over()
        with contextlib.suppress(
            Infrastructure
        ):  # a database that does not answer: the next beat asks again
            work.stopper.poll_requests()
            work.commits.let_go()
            work.chunks.tick()
            work.numbers.tick()
            work.silences.look()
        if work.tick:
            work.tick()

    timer = asyncio.get_running_loop().call_later(GROUP_SECONDS, beat)
    try:
        yield
    finally:
        timer.cancel()
