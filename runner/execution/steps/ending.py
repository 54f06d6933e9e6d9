"""An attempt is over: take its outputs and its numbers, or find out why it failed; store that, and tidy up."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...errors import Invalid, RecipeError
from ...hosts.place.host_task import TaskResult
from ...hosts.place.staging import undeclared
from ...language.imports import started
from ...logs import Log
from ...planning import causes
from ...planning.halving import STOPPED
from ...planning.ids import readable
from ...planning.judge import NOTHING, Made
from ...planning.schedule import BUSY, EARLY, LIMIT, PREEMPTIONS, Outcome
from ...planning.step import StepSpec
from ...storage import metrics
from ...storage.content.disk import delete
from ...storage.content.files import Content, no_space
from ...storage.crash import crashpoint
from ...storage.records import links
from ...storage.records.links import Link
from ...survey import imports
from ...survey.env_files import EnvFiles
from . import attempt_result, hints
from .attempts import Running, clear_up, saved
from .failing import Cause, Evidence
from .judging import grow
from .running_attempts import End
from .watches import PATIENCE
from .work import Work

UNWATCHED: Final = 3
"""Times that the agent here is killed under a step in one run before that counts as the step's failure."""

NO_OUTPUTS: Final[Mapping[str, str]] = MappingProxyType({})
_log: Final = Log("loop")


async def end(work: Work, id: str, end: End) -> None:
    """Take what an attempt gave, or note that it failed."""
    running = work.running.pop(id)
    if isinstance(end, Exit):
        _log.info(
            "%s ended on %s: %s %s after %.3f s",
            readable(id),
            running.place.name,
            end.reason,
            end.code,
            end.ended - end.started,
        )
    for words in attempt_result.remove_replaced(running.attempt.path, running.logs):
        work.commits.say(f"{readable(id)}: {words}")
    spec = work.steps.spec(id)
    image = work.attempts.wrapped(spec, running.place)
    try:
        if image and isinstance(end, Exit):
            for each, part in zip(
                running.place.members, running.task.parts or [running.task], strict=True
            ):
                with contextlib.suppress(DriverError):
                    await work.attempts.containers_of(each).over(each.paths(part.attempt).cwd, end)
        if isinstance(end, HostLost):
            work.machines.lose(running.place, end)
        if isinstance(end, Exit) and end.reason == BUSY:
            _discard(work, running)
            work.failures.queue_again(id)
        elif (why := await _why(work, id, running, spec, end)) is not None:
            (_stopped if why.reason == EARLY else _failed)(
                work, id, running, spec, why, end if isinstance(end, Exit) else None
            )
        elif isinstance(end, Exit) and running.brought is not None:
            _succeeded(work, id, running, spec, end, running.brought)
    finally:
        work.early.pop(id, None)
        if running.lock is not None:
            running.lock.release()
        if running.key is not None:
            work.commits.release_after_flush(running.key)


async def _why(work: Work, id: str, running: Running, spec: StepSpec, end: End) -> Cause | None:
    """Why an attempt failed; None when it ended well."""
    if isinstance(end, RecipeError):
        if work.stopper.limit:
            return _limit(work)
        return Cause("error", str(end), end.fix)
    if isinstance(end, DriverError):
        if isinstance(end, HostLost):
            return Cause(
                "preempted" if work.host_pool.spot.preemptible(running.place) else "lost", str(end)
            )
        return Cause("driver", str(end))
    if end.reason == "stopped" and id in work.early and not work.stopper.is_stopping:
        return Cause(EARLY, work.early[id])
    if end.reason == "stopped" and work.stopper.limit:
        return _limit(work)
    if end.reason == "stopped" and end.detail:
        running.place.ending(end.detail)
    if (
        end.reason == "stopped"
        and not work.stopper.is_stopping
        and (taken := [place for place in running.place.members if place.leaving])
    ):
        return Cause("preempted", f"{taken[0].name}: {taken[0].leaving}")
    if end.reason == "stopped" and id in work.sick:
        work.sick.discard(id)
        return Cause("health", f"the recipe's health check failed {PATIENCE} times in a row")
    if end.reason == "stopped" and end.detail and not work.stopper.is_stopping:
        return Cause("lost", f"{running.place.name} ended it: {end.detail}")
    if running.taken_up and end.reason == "stopped" and not work.stopper.is_stopping:
        return Cause("lost", "an earlier run, which is gone, had asked it to stop")
    if end.code == 0 and end.reason == "exit":
        return _not_taken(running)
    return await _exit(work, id, running, spec, end)


def _limit(work: Work) -> Cause:
    return Cause(LIMIT, f"stopped: {work.stopper.limit}")


def _not_taken(running: Running) -> Cause | None:
    """What is wrong with what a command left that ended well."""
    assert running.brought is not None
    problem, words = running.brought.problem, running.brought.words
    if problem == "input":
        return Cause("input", f"{words}; what is declared as an input is only to be read")
    if problem == "output":
        return Cause("lost" if running.taken_up else "output", f"{words} (exit 0)")
    if problem == "full":
        return Cause("disk", words)
    return Cause(problem, words) if problem else None


async def _exit(work: Work, id: str, running: Running, spec: StepSpec, exit: Exit) -> Cause:
    """What a bad exit means, by what the step printed and by where it ran."""
    tail, image = (
        attempt_result.tail(running.last_log, work.commits.masker),
        work.attempts.wrapped(spec, running.place),
    )
    reason, words = attempt_result.reason(exit), attempt_result.said(exit, spec, image, tail)
    node = running.brought.node if running.brought is not None else 0
    where = running.place.members[node].elsewhere
    if len(running.place.members) > 1:
        words += f" on node {node} ({where})"
    if exit.reason == "lost" and where:
        words += f" ({where} was restarted, or it was killed there)"
    elif exit.reason == "lost":
        # This machine runs on, or we would not: what ends with it each time is not bad luck, and counts as the step's failure.
        work.unwatched[id] += 1
        if work.unwatched[id] >= UNWATCHED:
            return Cause(
                "unwatched", f"the agent of this machine was killed {UNWATCHED} times while it ran"
            )
    if reason == "exit":
        if where and exit.code == 127 and not image:
            words += (
                f" on {where}; `recipe doctor --driver {work.host_pool.name}` shows what there is"
            )
        if full := attempt_result.full(
            tail, await running.place.members[node].folder.free(), where
        ):
            return Cause("disk", f"{words}: {full}")
    if (
        exit.signal == signal.SIGTERM
        and where
        and work.host_pool.spot.preemptible(running.place)
        and not running.stopped
    ):
        return Cause("preempted", f"{words}: {where} is being taken away")
    if reason in ("timeout", "idle") and causes.is_stalled(
        *metrics.pace(Path(f"{running.attempt.path}.metrics"))
    ):
        reason = "stalled"
    return Cause(causes.of_exit(reason, tail.decode(errors="replace")), words)


def _succeeded(
    work: Work, id: str, running: Running, spec: StepSpec, exit: Exit, brought: TaskResult
) -> None:
    node, attempt = running.node, running.attempt
    seconds = (exit.ended - exit.started) if exit.ended else time.time() - running.started
    outputs = brought.outputs
    crashpoint("outputs-stored")
    try:
        values = attempt_result.measured(
            attempt.path, running.log, spec.metrics, work.commits.masker
        )
    except Invalid as error:  # what it made is good: a better pattern reads the numbers later
        work.commits.say(f"{id}: {error.problems[0].message}: its numbers are not read")
        values = {}
    warnings = attempt_result.warnings(attempt.path, spec.metrics, work.commits.masker)
    work.numbers.over(id, running, values)
    if running.goes_on is not None:
        from ...storage import checkpoints

        if words := checkpoints.went_back(
            running.goes_on, metrics.first_step(Path(f"{attempt.path}.metrics"))
        ):
            work.commits.say(f"{id}: {words}")
    made = Made(True, outputs, values)
    work.steps.set_made(running.number, made)
    data: dict[str, object] = {"seconds": round(seconds, 3)}
    if stale := attempt.stale(work.ws.cache):
        where = str(work.ws.root / stale[0]).removeprefix(f"{work.ws.root}/")
        data["note"] = (
            f"{where} changed while it ran: its result is used now, and it will run again"
        )
    elif running.key is not None:
        again = work.steps.facts.traces.get(running.key) is not None
        facts = _facts(work, running, spec) | ({"warnings": warnings} if warnings else {})
        trace = work.commits.trace(running.key, node, outputs, values, exit, facts, again=again)
        work.smaller_inputs.note_result(id, trace)
    if not work.survey.library:
        try:
            work.publisher.publish(running.number, made)
        except RecipeError as error:
            return _failed(work, id, running, spec, Cause("publish", str(error)))
        crashpoint("published")
    python = work.attempts.interpreter(node, spec, running.place)
    image = attempt_result.image(spec, running.world)
    work.commits.attempt(
        id,
        running.name,
        running.key,
        running.started,
        "done",
        "",
        image,
        exit,
        python,
        links=_links(work, id, running, outputs),
    )
    work.tidying.keep_log(id, running, spec)
    work.chunks.over(id, running)
    if values:
        data["metrics"] = values
    if warnings:
        data["warnings"] = warnings
    if exit.strays:
        data["strays"] = exit.strays
    work.schedule.end(id, Outcome(True), data)
    work.tidying.tidy(running, spec, success=True)
    grow(work)
    return None


def _links(
    work: Work, id: str, running: Running, outputs: Mapping[str, str] = NO_OUTPUTS
) -> list[Link]:
    """Where else the numbers of an attempt can be looked at.  `outputs` are the contents of what it made."""
    trees = {name: Content(content) for name, content in outputs.items() if content[0] == "t"}
    boards = [
        Link(id, "TensorBoard", f"{id}.{name}")
        for name, content in trees.items()
        if work.ws.objects.manifests.mentions(content, links.EVENTS)
    ]
    paths = {output.name: output.path for output in running.node.outputs if output.name in trees}
    return [
        *links.printed(id, attempt_result.speaks(running.log, work.commits.masker), paths),
        *boards,
    ]


def _facts(work: Work, running: Running, spec: StepSpec) -> dict[str, object]:
    """What happened to be so, and is no part of the key."""
    found: dict[str, object] = {}
    if running.place.elsewhere:
        found["host"] = running.place.elsewhere
    if image := work.attempts.wrapped(spec, running.place):
        found["image"] = work.attempts.containers_of(running.place.members[0]).digest(image)
    elif image := work.attempts.image(spec):
        found["image"] = image
    if python := work.attempts.interpreter(running.node, spec, running.place):
        found["python"] = python
    if running.goes_on is not None:
        found["continued_from"] = running.goes_on
    if running.saved:
        found["checkpoint_bytes"] = running.saved
    return found


def _stopped(
    work: Work, id: str, running: Running, spec: StepSpec, why: Cause, exit: Exit | None
) -> None:
    """Keep what an attempt reported that others had left behind, and its state, from which a later run goes on."""
    work.numbers.over(id, running, {})
    work.tidying.keep_log(id, running, spec)
    work.chunks.over(id, running)
    python, image = (
        work.attempts.interpreter(running.node, spec, running.place),
        attempt_result.image(spec, running.world),
    )
    found = _links(work, id, running)
    work.commits.attempt(
        id,
        running.name,
        running.key,
        running.started,
        STOPPED,
        f"{why.reason}: {why.words}",
        image,
        exit,
        python,
        links=found,
    )
    attempt_result.discard(running.log, work.tidying.measured(running, spec), work.scrap)
    work.tidying.tidy(running, spec, success=False)
    work.steps.set_made(running.number, NOTHING)
    work.schedule.end(id, Outcome(False, EARLY, why.words))


def _is_kept(running: Running) -> bool:
    """Whether an attempt here ended well and there was no room to take what it made: the next one takes it up, as after a kill."""
    return (
        running.brought is not None
        and running.brought.problem == "full"
        and running.key is not None
        and not running.place.elsewhere
    )


def _failed(
    work: Work, id: str, running: Running, spec: StepSpec, why: Cause, exit: Exit | None = None
) -> None:
    """Keep what a failed attempt printed and wrote, with what helps to mend it."""
    attempt, (reason, words, hint) = running.attempt, why
    tail = attempt_result.tail(running.last_log, work.commits.masker)
    warnings = attempt_result.warnings(attempt.path, spec.metrics, work.commits.masker)
    work.numbers.over(id, running, {})
    if _is_kept(running):
        work.orphans.look_again()
        words += "; what it made is kept in its attempt, and is taken when there is room"
        kept = Cause(reason, words, causes.REMEDIES["disk"])
        return work.failures.fail(id, kept, Evidence(tail, running.log))
    if reason == "disk":
        delete(
            Path(attempt.path)
        )  # what it wrote is likely what fills the disk, and there has to be room to say so
    found = _links(work, id, running)
    try:
        log = work.tidying.keep_log(id, running, spec)
        work.chunks.over(id, running)
        attempt_result.discard(running.log, work.tidying.measured(running, spec), work.scrap)
    except OSError as error:
        log, words = (
            running.log,
            f"{words}; its log stays where it is ({no_space(error, running.log)})",
        )
    if reason == "unwatched":
        hint = "let the step end only processes that it started, by their ids"
    if reason in ("exit", "output"):
        declared = [
            *attempt.staged,
            *attempt.links,
            *attempt.objects,
            *(output.path for output in running.node.outputs),
        ]
        said, base = tail.decode(errors="replace"), work.steps.plan.homes[running.node.home]
        hint = imports.advice(said, id, base, declared, started(spec.run, spec.accelerate))
        missing = (
            undeclared(said, work.ws.root, running.place.paths(attempt).cwd, declared)
            if not hint
            else None
        )
        hint = (
            f"{missing} is in the workspace but not declared: add it to `deps` of {id}"
            if missing
            else hint
        )
    python = work.attempts.interpreter(running.node, spec, running.place)
    if exit is not None and not hint:
        lock = "" if work.survey.request.current_python else running.node.lock
        ran = hints.Ran(
            python,
            lock,
            work.attempts.wrapped(spec, running.place),
            running.place.elsewhere,
            given_files=bool(attempt.objects or attempt.links),
        )
        hint = causes.REMEDIES.get(reason, "") if reason != "oom" else ""
        hint = hint or hints.fix(
            exit,
            tail.decode(errors="replace"),
            spec,
            ran,
            work.ws.environ,
            EnvFiles(work.ws.own).names(".env"),
        )
    image = attempt_result.image(spec, running.world)
    advanced = reason in PREEMPTIONS and saved(running, spec)
    name = work.tidying.failed_name(id)
    work.commits.attempt(
        id,
        name,
        running.key,
        running.started,
        "failed",
        reason,
        image,
        None,
        python,
        saved=advanced,
        links=found,
    )
    work.tidying.tidy(running, spec, success=False)
    shown = attempt_result.words(tail)
    work.failures.fail(
        id,
        Cause(reason, words, hint),
        Evidence(
            shown,
            log,
            work.tidying.left(running),
            _error(reason, words, shown) if exit is not None else "",
            warnings,
            exit,
            advanced,
        ),
    )


def _error(reason: str, words: str, tail: bytes) -> str:
    """The error of a command that ended badly, by the end of its log; empty where that shows none, or something else ended it."""
    if reason not in ("exit", "oom", "nan", "signal", "disk"):
        return ""
    text = tail.decode(errors="replace")
    if error := causes.error_in(text):
        return error
    last = causes.last_line(text)
    return f"{words}: {last}" if last and reason == "exit" else ""


def _discard(work: Work, running: Running) -> None:
    """Delete what there is of an attempt that did not begin."""
    work.bell.run_in_background(running.place.clear_after(running.task, ()))
    clear_up(running, work.scrap)
