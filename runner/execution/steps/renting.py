"""Machines that cost money: asked for when the first step that needs one is QUEUED, given back when no unfinished step has a use for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from drivers.base import DriverError, Need

from ...errors import RecipeError
from ...hosts.connect import same_packages
from ...hosts.place.place import Place
from ...planning.schedule import FINAL, Move, State
from ...planning.step import TEMPORARY
from ...storage.records.ledger import LeaseRow
from ..reporting import log_remote
from .control import money_is_spent, stop
from .failing import replaced
from .work import Work

LOOK: Final = 0.2
"""Seconds between two looks at what is needed."""


def rent(work: Work) -> None:
    """Ask for what QUEUED steps need, beside the loop, and give back what is not needed."""
    pool = work.host_pool
    if pool.moves:
        note(work)
    if not pool.away or work.rented_at + LOOK > (now := time.monotonic()):
        return
    work.rented_at = now
    if pool.limit is not None and pool.leases is not None and pool.money_is_over():
        money_is_spent(work, pool.limit)
    if not pool.priced:
        return _succeed_in_time(work)
    _save_in_time(work)
    states = work.scheduler.states()
    queued: Counter[Need] = Counter()
    crews: dict[Need, int] = {}  # the most machines that one step takes at once
    pool.together = {
        pool.need(work.spec(id))
        for id in work.todo
        if states[id] not in FINAL and pool.joins(work.spec(id))
    }
    for id in work.todo:
        if states[id] not in FINAL:
            crew = pool.head.workers(work.spec(id)) if states[id] is State.QUEUED else 0
            for need in _needs(work, id):
                queued[need] += crew
                crews[need] = max(crews.get(need, 1), crew)
    for need, count in queued.items():
        wanted = min(count, max(crews[need], work.options.machines))
        while (
            not work.scheduler.held
            and need not in pool.refused
            and not pool.full
            and pool.inventory.machines(need) < wanted
        ):
            pool.inventory.coming.append(need)
            work.replacing += 1
            work.beside(_get(work, need))
    for place, reason in pool.inventory.spare(queued, work.orphans.places()):
        work.beside(_give_back(work, place, reason))
    return None


def _save_in_time(work: Work) -> None:
    """Have what runs on a machine that is about to be taken away save and end: the next attempt resumes from there."""
    for place in work.host_pool.inventory.leaving():
        for running in work.running.values():
            if place in running.place.members and not running.stopped:
                work.commits.say(
                    f"{place.name} is about to be taken away: {running.node.id} saves, and continues elsewhere"
                )
                running.stopped = True
                work.beside(stop(running, place.notice))


def _succeed_in_time(work: Work) -> None:
    """Have what runs on an allocation that is about to end save, ask for the next one meanwhile, and give back the one on which nothing runs."""
    _save_in_time(work)
    pool = work.host_pool
    if not pool.inventory.leaving():
        return
    states = work.scheduler.states()
    needed = not (work.scheduler.held or work.control.stopping) and any(
        states[id] not in FINAL and not work.stays(id) for id in work.todo
    )
    for place in pool.inventory.ending() if needed else ():
        work.replacing += 1
        work.beside(replaced(work, place, pool.allocate()))
    for place in pool.inventory.unused_leases():
        work.beside(_give_back(work, place, place.leaving))


def note(work: Work) -> None:
    """Note the moves of leases among those of the run."""
    moves, work.host_pool.moves = work.host_pool.moves, []
    for _before, row in moves:
        log_remote(work.ws, work.commits.run, row.driver, str(row.lease.get("id", "")), row.state)
    work.groups.record(
        [
            Move("lease", row.key, before, row.state, row.reason, _facts(work, row))
            for before, row in moves
        ]
    )


def _facts(work: Work, row: LeaseRow) -> dict[str, object]:
    """What is said of a lease: of one that costs nothing also what a worker of another machine needs to take it over."""
    found: dict[str, object] = {
        "driver": row.driver,
        "offer": row.offer.get("id", ""),
        "price": row.price,
    }
    if work.ws.delivers and not work.host_pool.priced:
        found |= {"offered": dict(row.offer), "need": dict(row.need), "until": row.until}
    return found


def _needs(work: Work, id: str) -> Iterator[Need]:
    """What a step needs a rented machine for: to run there, or to have what another left there."""
    if not work.stays(id):
        yield work.host_pool.need(work.spec(id))
    for each in work.plan.nodes[work.plan.index[id]].upstream:
        node = work.plan.nodes[each.producer]
        if any(
            name == each.output and flags & TEMPORARY for name, _, flags in node.outputs
        ) and not work.stays(node.id):
            yield work.host_pool.need(work.spec(node.id))


async def _get(work: Work, need: Need) -> None:
    pool = work.host_pool

    async def ready(place: Place) -> None:
        await work.attempts.hooks_of(place).setup()
        if work.survey.request.current_python:
            await same_packages([place])
        if stayed := work.stayed():
            await place.folder.look_for(stayed)

    try:
        await pool.rent(need, ready)
    except (RecipeError, DriverError) as error:
        pool.refuse(need, str(error))
    except Exception as error:  # whatever it was: another try would rent another machine
        pool.refuse(need, f"internal error of recipe: {type(error).__name__}: {error}")
    finally:
        pool.inventory.coming.remove(need)
        work.replacing -= 1
        work.wake()


async def _give_back(work: Work, place: Place, reason: str) -> None:
    try:
        if not await work.host_pool.give_back(place, reason):
            work.commits.say(
                f"{place.name} is not given back yet; it is asked again at the end of the run"
            )
    except (RecipeError, DriverError) as error:
        work.commits.say(f"{place.name} could not be given back: {error}; `recipe reap` asks again")
