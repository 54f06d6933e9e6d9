"""Prepare the next short steps, take over those that began by themselves, and take back those that did not."""

from __future__ import annotations

import functools
import time

from drivers.base import DriverError, Exit, Job

from ..errors import RecipeError
from ..planning.judge import world_of
from ..planning.schedule import State
from .attempts import Running, clear_up
from .control import stop
from .orphans import clear
from .starting import Held, begin, name_of, shown
from .successors import Successors
from .work import End, Work


async def look_ahead(work: Work) -> bool:
    """Prepare what will run next, while all room is taken by steps that end within moments."""
    successors = work.successors
    if successors is None or work.contended or not (wanted := successors.wanted(work.scheduler, work.running, work.resting)):
        return False
    if work.host_pool.away or work.downloads is not None or not work.commits.keys.alone():
        return False
    moved = False
    for ahead, job, id in wanted:
        successors.brisk = await _prepare(work, successors, ahead, job, id)
        moved |= successors.brisk
    return moved


async def _prepare(work: Work, successors: Successors, ahead: str, job: Job, id: str) -> bool:
    """Have a step begin when the job `job` of `ahead` has ended well; what is special about it is for its own turn."""
    n = work.plan.index[id]
    node, spec, key = work.plan.nodes[n], work.plan.specs()[n], work.verdicts[id].key
    plain = not (spec.state or node.lock or work.attempts.image(spec) or spec.resources.gpus or id in work.refused)
    if not plain or key is None or key[:24] in work.orphans or key in work.commits.made:
        return False
    if work.publisher.conflicts(n) or not work.commits.hold(key, id):
        return False
    world, _ = world_of(node, work.facts, work.made)
    held = Held(n, node, spec, key, world, work.host_pool.here)
    held.name = name_of(work, held)
    try:
        prepared = await begin(work, held, functools.partial(successors.near.follow, ahead=job))
    except (RecipeError, OSError, DriverError):
        clear(f"{work.folder}/{held.name}")
        work.commits.release_after_flush(key)
        return False
    successors.add(ahead, id, prepared)
    work.resting[id] = float("inf")
    successors.near.hear(prepared.job, functools.partial(work.ends, id))
    return True


def take_over(work: Work, successors: Successors, ahead: str, end: End) -> None:
    """What has begun in the place of a step that is over is running."""
    id = successors.begun(ahead, end)
    if id is None:
        return
    if work.scheduler.state(id) is not State.QUEUED:  # cancelled a moment ago: its end is only cleared up after
        work.beside(stop(next(each for each in successors if each.node.id == id)))
        return
    running = work.running[id] = successors.pop(id)
    del work.resting[id]
    work.scheduler.vacate(ahead)
    work.commits.next_attempt(id)
    work.groups.record([work.scheduler.start(id, shown(work, id, running.name, work.plan.specs()[running.number]), begun=True)])
    running.started = end.ended if isinstance(end, Exit) else time.time()
    running.site.enter(running.wants)


def withdrawn(work: Work, prepared: Running) -> None:
    """It has not begun, and waits for its turn like any other."""
    del work.resting[prepared.node.id]
    if prepared.key is not None:
        work.commits.release_after_flush(prepared.key)
    clear_up(prepared, work.scrap, work.ws.objects)
