"""Start steps: find a place, hold the key, the GPUs and the state, make the attempt ready, begin it.  Every hold is given back on every way out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drivers.base import DriverError, Exit, HostLost, Job, Unreachable

from ...digest import Digest
from ...errors import CannotRun, Infrastructure, RecipeError
from ...failures import StepFailure
from ...hosts.place.place import Place
from ...hosts.place.staging import Attempt
from ...logs import Log
from ...planning.fingerprint import World
from ...planning.ids import readable
from ...planning.judge import world_of
from ...planning.plan import LOCAL, UNCACHED, Node
from ...planning.schedule import LIMIT
from ...planning.step import StepSpec
from ...secrets import tokenlike
from ...storage.content.files import no_space
from ...storage.locks import Lock
from . import attempt_result, shared_states, stayed
from .attempts import Running
from .control import GRACE, stop
from .failing import Cause
from .judging import is_made
from .running_attempts import End
from .work import Work

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...storage import checkpoints

FOREVER: Final = timedelta(days=3650)
NO_ROOM: Final = 0.2
"""Seconds until a step that found no place, or its state in use, is tried again."""
KEY_IN_USE: Final = 0.1
"""Seconds until a step that another run is making is looked at again."""
KEY_ELSEWHERE: Final = 1.0
"""The same where another machine may be making it."""


_log: Final = Log("loop")


class _Taken(Exception):
    """The GPUs that there seemed to be are another run's by now, or the host that had begun the step is lost."""


@dataclass(slots=True)
class Held:
    """What a step holds before it begins."""

    n: int
    node: Node
    spec: StepSpec
    key: Digest | None
    world: World
    place: Place
    gpus: tuple[Device, ...] = ()
    state: checkpoints.Generation | None = None
    lock: Lock | None = None  # of the state
    restored: Mapping[str, checkpoints.Newest] = field(default_factory=dict)
    name: str = ""


async def start_ready(work: Work) -> bool:
    """Start every step that there is room for; True when something moved."""
    moved = False
    for id in work.schedule.startable():
        moved |= await _start(work, id)
    return moved


async def _start(work: Work, id: str) -> bool:
    """Begin an attempt; True when something moved."""
    if id in work.refused:
        work.failures.fail_unstarted(id, work.refused[id])
        return True
    n = work.steps.plan.index[id]
    node, spec, key = (
        work.steps.plan.nodes[n],
        work.steps.plan.specs()[n],
        work.steps.verdicts[id].key,
    )
    wants = spec.resources.room
    if key is not None and work.orphans.out_of_reach(key[:24]):
        work.schedule.rest(id, KEY_ELSEWHERE)
        return False
    place = _place_for(work, node, spec)
    if place is None:
        work.schedule.rest(id, NO_ROOM)
        return _without_room(work, id, node)
    gpus: tuple[Device, ...] = ()
    if wants.get("gpus") and not (
        key is not None and key[:24] in work.orphans
    ):  # what an earlier worker left may hold its own
        try:
            gpus = await _pick(work, id, place, int(wants["gpus"]))
        except HostLost as error:
            work.machines.lose(place, error)
            return True
        except DriverError as error:
            work.failures.fail_unstarted(id, Cause("error", str(error)))
            return True
        if not gpus:
            return False
    if key is not None and (moved := _hold(work, id, n, key)) is not None:
        return moved
    world, _ = world_of(node, work.steps.facts, work.steps.made)
    held = Held(n, node, spec, key, world, place, gpus)
    try:
        opened = await _open_state(work, held)
    except OSError as error:
        _give_back(work, held)
        full = no_space(error, error.filename or "")
        work.failures.fail_unstarted(id, Cause("disk", str(full)))
        return True
    if not opened:
        # Another attempt holds the state, under other `continues` values: two trainers in one folder would spoil it.
        work.schedule.rest(id, NO_ROOM)
    if (
        not opened or work.schedule.is_disturbed
    ):  # an interrupt or the run's limit came meanwhile: nothing new starts
        _give_back(work, held)
        return False
    await _launch(work, id, held)
    return True


def _give_back(work: Work, held: Held) -> None:
    """A step does not begin after all."""
    if held.lock is not None:
        held.lock.release()
    if held.key is not None:
        work.commits.release(held.key)


def _hold(work: Work, id: str, n: int, key: Digest) -> bool | None:
    """Hold the key of a step.  None: it is held, and the step is to be made; else whether something moved."""
    if not work.commits.hold(key, id):
        # Another run here, or another step of this one, is making the same thing: wait, then judge again and find it made.
        work.schedule.rest(id, (KEY_ELSEWHERE if work.ws.delivers else KEY_IN_USE))
        work.contended |= not work.commits.holds(key)
        return True  # its place is free for others
    contended = work.contended or work.ws.delivers or not work.commits.keys.alone()
    if contended:
        work.orphans.look_again()  # the run that held the key may have died with its attempt running
    if work.ws.delivers and work.ws.remote_cache is not None and key not in work.commits.made:
        work.ws.remote_cache.look_again(key)  # another machine may have made it meanwhile
    if (contended or key in work.commits.made) and is_made(work, n):
        work.commits.release(key)
        work.schedule.judge_again(
            id, f"another {'step of this run' if key in work.commits.made else 'run'} made it"
        )
        return True
    return None


async def _launch(work: Work, id: str, held: Held) -> None:
    """Begin the attempt of a step that holds all it needs, or fail it."""
    held.name = name_of(work, held)
    conflicts = [] if work.options.overwrite else work.publisher.conflicts(held.n)
    taken: Running | None = None
    trouble: Exception | None = None
    try:
        if not conflicts:
            taken = await _taken_up(work, held)
    except (_Taken, RecipeError, OSError, DriverError) as error:
        trouble = error
    _record(work, id, held, taken)
    try:
        if trouble is not None:
            raise trouble
        if conflicts:
            from ...survey.explain import replaced

            (words,) = replaced(work.ws, conflicts[:1])
            raise CannotRun(
                f"it would replace {words}",
                fix="move it away, give --overwrite, or `recipe adopt` it",
            )
        running = taken or await _begin(work, held)
    except (_Taken, RecipeError, OSError, DriverError) as error:
        if held.lock is not None:
            held.lock.release()
        if isinstance(error, HostLost):
            work.machines.lose(held.place, error)
        if isinstance(error, (_Taken, HostLost)):
            return work.failures.queue_again(id, held.key)
        if held.key is not None:
            work.commits.release_after_flush(held.key)
        trouble = (
            no_space(error, error.filename or held.name) if isinstance(error, OSError) else error
        )
        if work.stopper.limit:
            return work.failures.fail(id, Cause(LIMIT, f"stopped: {work.stopper.limit}"))
        if work.stopper.is_interrupted and isinstance(
            error, CannotRun
        ):  # an install that we ended ourselves has not failed
            return work.failures.fail(id, Cause("stopped", "interrupted"))
        return work.failures.fail(id, Cause("error", str(trouble), getattr(trouble, "fix", "")))
    work.running.add(id, running)
    running.carried = asyncio.get_running_loop().create_task(_carry(work, id, running))
    if work.stopper.is_stopping:  # asked for while this job was being started
        work.bell.run_in_background(stop(running))
    return None


def _record(work: Work, id: str, held: Held, taken: Running | None) -> None:
    """Note that the step's next attempt begins; one that this run began under an earlier worker is still the same."""
    if taken is None or not work.commits.tries(id):
        work.commits.next_attempt(id)
    data = shown(work, id, taken.name if taken is not None else held.name, held.spec)
    if taken is None:
        if held.state is not None and (
            note := "; ".join(
                filter(None, (held.state.note, *(found.words for found in held.restored.values())))
            )
        ):
            data["note"] = note
        for found in held.restored.values():
            if found.passed and found.name is None:
                work.commits.say(f"{id}: {found.words}")
    else:
        data["taken_up"] = True
    place = taken.place if taken is not None else held.place
    if place.elsewhere:
        data["site"] = place.elsewhere
        if held.state is not None:
            data["generation"] = held.state.id
    work.schedule.start(id, data)


def shown(work: Work, id: str, name: str, spec: StepSpec) -> dict[str, object]:
    """What is said of an attempt that begins."""
    log = f"{work.folder}/{name}.log"
    data: dict[str, object] = {"log": log, "attempt": work.commits.tries(id)}
    if spec.metrics is not None and spec.metrics.in_environment:
        data["metrics"] = log[:-4] + ".metrics"
    elif spec.metrics is not None and spec.metrics.pattern:
        data["pattern"] = spec.metrics.pattern
    # Names, so that a reader of the raw log can mask it.
    hidden = [secret.source for secret in spec.secrets if work.ws.environ.get(secret.source)]
    hidden += [name for name in spec.pass_env if tokenlike(name, work.ws.environ.get(name, ""))]
    if hidden:
        data["secrets"] = hidden
    if spec.env_files:
        data["env_files"] = list(spec.env_files)
    return data


def name_of(work: Work, held: Held) -> str:
    """An attempt's name: its key's, so that the next worker finds it; without a key, the run's."""
    run, what = work.commits.run, held.key or held.node.id
    work.named[what] = number = work.named.get(what, 0) + 1
    # A job is known by its name: none of this worker's is one of a worker that had the run before.
    ordinal = f"{work.commits.fence}-{number}"
    return (
        f"{held.key[:24]}-{run}-{ordinal}" if held.key is not None else f"{run}-{held.n}-{ordinal}"
    )


async def _begin(work: Work, held: Held) -> Running:
    """Prepare an attempt to be carried out."""
    node, spec, place = held.node, held.spec, held.place
    wants = spec.resources.room
    if wants.get("gpus") and not held.gpus:
        held.gpus = await _pick(work, node.id, place, int(wants["gpus"]))
        if not held.gpus:
            raise _Taken
    pythons = [await work.attempts.python(node, spec, each) for each in place.members]
    for each in place.members:
        if image := work.attempts.wrapped(spec, each):
            await work.attempts.containers_of(each).image(image)
    running = _running(work, held, held.name, pythons)
    if held.state is not None:
        from ...storage import checkpoints

        checkpoints.hold(held.state.path.parent, held.name)
    if place.elsewhere:
        Path(f"{running.attempt.path}.site").write_text(
            "\n".join(each.name for each in place.members), encoding="utf-8"
        )
    return running


def _running(
    work: Work, held: Held, name: str, pythons: Sequence[str], place: Place | None = None
) -> Running:
    attempt = Attempt(f"{work.folder}/{name}")
    running = Running(
        held.node,
        held.n,
        held.key,
        held.world,
        attempt,
        name,
        attempt.path + ".log",
        time.time(),
        held.state,
        held.lock,
        place or held.place,
        held.spec.resources.room,
        held.gpus,
    )
    running.task = work.attempts.task(running, held.spec, pythons, held.restored)
    return running


async def _taken_up(work: Work, held: Held) -> Running | None:
    """The attempt of an earlier worker with the same key, if it runs still or ended well unseen."""
    if held.key is None:
        return None
    # Although it was made already.
    always = work.steps.verdicts[held.node.id].forced or bool(held.node.flags & UNCACHED)
    for name in work.orphans.pop(held.key[:24]):
        try:
            found = await work.orphans.taken_up(held.node, name, always)
        except HostLost as error:
            work.machines.lose(work.orphans.place_of(name) or held.place, error)
            raise _Taken from error
        except Unreachable as error:  # its agent went, or another is just beginning there
            work.orphans.look_again()
            raise _Taken from error
        if found is None:
            continue
        job, place = found
        running = _running(work, held, name, [sys.executable] * len(place.members), place)
        if name not in work.inherited and not work.attempts.recall(held.node, running.attempt):
            await work.orphans.end(held.node, job, place)
            continue
        running.devices, running.taken_up = (), True
        running.task.job, running.task.rejoined = job, True
        return running
    return None


async def _carry(work: Work, id: str, running: Running) -> None:
    """Put the end of an attempt into the queue, whatever happens."""
    end: End
    try:
        async with shared_states.sent(work, running, work.steps.spec(id)):
            running.brought = await running.place.carry(running.task)
        end = running.brought.exit
        if running.asked and end.reason in ("exit", "signal") and end.code != 0:
            end = end._replace(reason="stopped")  # it saved, and ended itself
    except asyncio.CancelledError:
        if not running.stopped:
            raise
        lost = running.place.lost
        end = HostLost(lost) if lost else Exit(None, reason="stopped")
    except (DriverError, RecipeError) as error:
        end = error
    except OSError as error:
        end = no_space(error, error.filename or running.name)
    except Exception as error:
        end = await _internal(id, running, error)
    work.running.note_end(id, end)


async def _internal(id: str, running: Running, error: Exception) -> RecipeError:
    """The end of an attempt that an error of our own cut off: its job is stopped, and its log has the traceback."""
    import traceback

    text = "".join(traceback.format_exception(error))
    _log.error("%s: %s", readable(id), text)
    with contextlib.suppress(OSError):
        attempt_result.add(running.log, text)
    if running.task.job is not None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(stop(running), 2 * GRACE.total_seconds())
    words = f"internal error of recipe: {type(error).__name__}: {error}"
    return Infrastructure(
        words, fix="run again; if it comes back, report it with the end of this step's log"
    )


# -- places, GPUs and state


def _place_for(work: Work, node: Node, spec: StepSpec) -> Place | None:
    """Where a step may start now: where what it needs is already, else where there is room; for several nodes that many hosts, or none."""
    wants, local = spec.resources.room, bool(node.flags & LOCAL)
    places = work.host_pool.places_of(spec, local=local)
    absent = stayed.absent(work, node)
    if absent:
        places = [] if local else stayed.holders(work, absent, wants)
        if not places:
            stayed.send_for(work, node.id, absent)
            return None
    elif len(places) == 1 and not places[0].elsewhere and not work.host_pool.priced:
        return places[0]  # the scheduler has seen to it that there is room on this machine
    places = sorted(
        (place for place in places if place.has_room(wants)), key=lambda place: place.contact.silent
    )
    if spec.node_count > 1:
        from ...hosts.place.group import group_of

        crew = work.host_pool.head.crew(spec, places)
        return group_of(crew) if crew else None
    return places[0] if places else None


def _without_room(work: Work, id: str, node: Node) -> bool:
    """A step that could start and finds no place: it waits, or what it needs is made again, or there will never be one."""
    absent = stayed.absent(work, node)
    for content in absent:
        if not stayed.holders(work, [content]):
            producer = next(
                each.producer
                for each in node.upstream
                if work.steps.made[each.producer].outputs.get(each.output) == content
            )
            name = work.steps.plan.nodes[producer].id
            work.steps.forget_made(producer)
            work.schedule.make_again(name, "its output stayed on a host that is lost")
            return True
    if (
        work.coming.intersection(absent)
        or work.machines.are_coming
        or work.host_pool.hopes(work.steps.spec(id))
    ):
        return False
    fix = f"`recipe offers --driver {work.host_pool.name}` shows what there is, `recipe doctor --driver {work.host_pool.name}` the account"
    words = (
        f"there is no host left for it: {'; '.join(work.host_pool.lost) or 'none is large enough'}"
    )
    cause = Cause(StepFailure.UNPLACED, words, fix if work.host_pool.priced else "")
    work.failures.fail_unstarted(id, cause)
    return True


async def _pick(work: Work, id: str, place: Place, count: int) -> tuple[Device, ...]:
    """Free GPUs of a place; none when the step has to wait for them, which is said once.  Raises DriverError."""
    found = await place.capacity.pick(count)
    if not found.devices:
        work.schedule.rest(id, found.again)
        if found.others and place.name not in work.queued_for:
            work.queued_for.add(place.name)
            what = "a GPU" if count == 1 else f"{count} GPUs"
            where = f" on {place.elsewhere}" if place.elsewhere else ""
            held = f"{found.others} of {len(place.capacity.devices)} {'is' if found.others == 1 else 'are'}"
            work.commits.say(f"waiting for {what}{where}: {held} in use by another run")
    return found.devices


async def _open_state(work: Work, held: Held) -> bool:
    """Hold the state of a step that keeps one, and choose where it resumes.  False: another attempt holds it.  Raises OSError."""
    spec = held.spec
    if not spec.state:
        return True
    from ...storage import checkpoints

    processes = work.attempts.processes(spec, held.n, held.place)
    key = checkpoints.key(spec, held.world, held.node.id)
    lock = work.ws.locks.try_hold(f"state-{key}")
    if lock is None:
        return False
    root, own = work.ws.home / "states" / key, (held.key or "-")[:24]
    holder = checkpoints.holder(root)
    another = bool(holder) and not holder.startswith(own)
    if another and work.orphans.is_out_of_reach(holder):
        lock.release()
        return False
    there = work.orphans.place_of(holder) if another else None
    if there is not None and await there.contact.insist(lambda: work.orphans.goes_on(holder)):
        # Its worker is gone but it writes there still, under other `continues` values: it has to end before another may begin.
        await there.stop(Job(holder), GRACE)
        lock.release()
        return False
    held.lock = lock
    await shared_states.restore(work, held.node.id, spec, key, root)
    for begun in (
        left.generation
        for name, left in work.inherited.items()
        if left.generation and name.startswith(own)
    ):
        checkpoints.adopt(root, {"continues": dict(spec.continues), "id": begun})
    held.state = checkpoints.choose(root, spec.continues, world=processes)
    held.restored = await asyncio.to_thread(work.attempts.restored, spec, held.state, processes)
    return True
