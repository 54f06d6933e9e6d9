"""Implementation of `recipe run`: survey, check, submit, execute and report.

`recipe plan` stops after the survey.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from ..errors import CannotRun, NotFound, did_you_mean
from ..logs import Log
from ..planning.ids import bare, inner_names, names
from ..planning.judge import FRESH, MAYBE, RESTORE, RUN, SKIPPED, Verdict
from ..planning.schedule import EARLY
from ..storage.content.files import Content
from ..storage.crash import crashpoint
from ..storage.records.runs import RunFilter, RunRow
from ..storage.workspace import Workspace
from ..survey.empty_globs import warn_of_empty_globs
from ..survey.request import Request
from ..survey.skipped_steps import add_skipped_steps, list_skipped_steps
from ..survey.survey import Survey, survey
from .refusals import check, preflight
from .reporting import deliveries, points_refused, reserve_points
from .results import count_steps, list_results, show_notices, show_warnings
from .terms import (
    EVERYTHING,
    Choice,
    Listener,
    Overview,
    Settings,
    Since,
    Summary,
    apply_stack,
    limits_data,
    lower_limits,
    new_id,
    options_data,
    request_data,
)

if TYPE_CHECKING:
    from ..hosts.ahead import EarlyConnection
    from ..planning.plan import Plan
    from .resume import ClaimedRun


_log = Log("session")
LAST: Final = 10
"""Maximum number of open runs to check if no step has to run."""


def preview(ws: Workspace, request: Request, choice: Choice = EVERYTHING) -> Survey:
    """Compute the plan of a request with a verdict and its reasons for each step.

    Runs no step, but updates the caches, may create a lock file (see `survey`), and replaces
    damaged objects by copies of their published files. Raises Invalid, NotFound, CannotRun.
    """
    found = survey(
        ws,
        request,
        forced=frozenset(choice.again) | ({choice.begin} if choice.begin else frozenset()),
        all=choice.all,
    )
    check_ids(found.plan, choice)
    if choice.begin:
        later = found.plan.after(found.plan.nodes_named(choice.begin))
        found = survey(
            ws,
            request,
            forced=frozenset(choice.again)
            | {choice.begin}
            | {found.plan.nodes[n].id for n in later},
        )
    found.begin, found.only, found.until = choice.begin or "", choice.only or "", choice.until or ""
    if choice.only or choice.until:
        _skip_unchosen(found)
    if choice.leave:
        for n in found.plan.after(
            set().union(*(found.plan.nodes_named(id) for id in choice.leave))
        ):
            found.verdicts[n] = Verdict(SKIPPED, found.verdicts[n].key, (EARLY,), None)
    require_outputs(ws, found)
    if ws.remote_cache is not None:
        from ..survey import remote_results

        remote_results.explain_remote(ws, ws.remote_cache, found)
    return found


def require_outputs(ws: Workspace, found: Survey) -> None:
    """Change verdicts so that missing outputs of up-to-date steps are restored or created again.

    Only outputs that a running step needs count. Steps are checked from last to first. Outputs in
    the shared store are restored.
    """
    expected = []
    for n, verdict in enumerate(found.verdicts):
        if verdict.answer in (RUN, MAYBE):
            expected += [content for _, _, content in _list_known_inputs(found, n)]
    ws.objects.tiny.expect(expected)
    for n in range(len(found.verdicts) - 1, -1, -1):
        if found.verdicts[n].answer in (RUN, MAYBE):
            for producer, output, content in _list_known_inputs(found, n):
                _require_output(ws, found, n, producer, output, content)


def _list_known_inputs(found: Survey, n: int) -> Iterator[tuple[int, str, Content]]:
    """Yield the known outputs of other steps that a step reads: producer, output, content."""
    for producer, output, _name, _below in found.plan.nodes[n].upstream:
        content = found.made[producer].outputs.get(output) if producer in found.made else None
        if content is not None:
            yield producer, output, Content(content)


def _require_output(
    ws: Workspace, found: Survey, reader: int, producer: int, output: str, content: Content
) -> None:
    """Change the verdict of an up-to-date step if its output is missing."""
    verdict, name = found.verdicts[producer], found.plan.nodes[reader].id
    if verdict.answer not in (FRESH, RESTORE) or ws.objects.intact(content):
        return
    if _restore_published(ws, found, producer, content):
        return
    if content not in ws.stored:
        why = f"its output {output} is no longer stored, and {name} requires it"
        found.verdicts[producer] = Verdict(RUN, verdict.key, (why,), None)
        found.made.pop(producer)
    elif verdict.answer == FRESH:
        reasons = (*verdict.reasons, f"{name} needs it here")
        found.verdicts[producer] = verdict._replace(answer=RESTORE, reasons=reasons)


def run(
    ws: Workspace,
    request: Request,
    choice: Choice,
    settings: Settings,
    listener: Listener,
    resumed: str = "",
) -> Summary:
    """Run the steps that are out of date and return a summary, also if steps failed.

    `resumed` is the run to continue. By default, an interrupted run of the same request continues,
    or a new run starts. Raises an error before the first step starts if the request cannot work.
    """
    since = Since(time.monotonic(), ws.store.database.version())
    settings = apply_stack(ws, settings)
    found = preview(ws, request, choice)
    _log.info(
        "survey of %d steps took %.3f s, %d to run",
        len(found.verdicts),
        since.seconds,
        len(found.todo),
    )
    if not found.todo:
        return _nothing_to_do(ws, found, settings, listener, since)
    from .signals import (
        raise_on_signals,  # imports asyncio, which a run without steps does not need
    )

    with raise_on_signals(listener.say), _connect_ahead(ws, found, settings) as ahead:
        preflight(ws, found, settings)
        check(ws, found, settings, listener)
        if settings.upload:
            from . import uploading

            uploading.check(ws, found.plan, settings.upload)
        summary, again = _work(ws, found, choice, settings, listener, since, resumed, ahead)
    return (
        summary
        if summary is not None
        else run(ws, found.request, choice, settings, listener, again)
    )


def _connect_ahead(
    ws: Workspace, found: Survey, settings: Settings
) -> AbstractContextManager[EarlyConnection | None]:
    """Start connecting the driver in the background during the checks.

    Raises CannotRun, Invalid.
    """
    if settings.driver == "local":
        return nullcontext()
    from ..hosts.renting.any_driver import alternatives

    if alternatives(ws.config, settings.driver):  # the driver is chosen when a machine is ordered
        return nullcontext()
    from ..hosts.ahead import connect_ahead
    from ..hosts.interpreters import CURRENT
    from ..hosts.pool import driver_for

    python = CURRENT if found.request.current_python else settings.python
    return connect_ahead(driver_for(ws, settings.driver, settings.hosts, python))


def _nothing_to_do(
    ws: Workspace, found: Survey, settings: Settings, listener: Listener, since: Since
) -> Summary:
    """Report a request without out-of-date steps, and complete interrupted runs."""
    total, fresh = count_steps(found)
    listener.begin(
        Overview("", found.plan.recipe, total, fresh, (), {}, settings.jobs, str(ws.root))
    )
    show_notices(ws, listener)
    show_warnings(ws, found, listener)
    if settings.driver != "local":
        from ..hosts.renting import reaper

        for words in reaper.settle(settings.driver, settings.hosts, ws, settings.stack):
            listener.say(words)
    if settings.upload:
        from . import uploading

        uploading.upload(
            ws, found.plan, found.made, settings.upload, listener, uploading.find_maker(ws, found)
        )
    if left := ws.store.runs.page(RunFilter(("ACTIVE",), found.plan.recipe), LAST):
        from . import resume

        resume.close_finished(ws, found, left)
    wanted = found.select_wanted(found.plan)
    summary = Summary(
        "COMPLETED",
        add_skipped_steps({"FRESH": fresh}, found.plan, wanted),
        since.seconds,
        results=list_results(ws, found),
        warnings=warn_of_empty_globs(ws, found),
        skipped=list_skipped_steps(found.plan, (), wanted),
    )
    listener.end(summary)
    return summary


def _work(
    ws: Workspace,
    found: Survey,
    choice: Choice,
    settings: Settings,
    listener: Listener,
    since: Since,
    resumed: str,
    ahead: EarlyConnection | None,
) -> tuple[Summary | None, str]:
    """Resume or submit a run and execute it; return its summary and its ID."""
    from ..hosts.link import client

    local = client.connect_own(ws.home)  # the agent starts during the preparation

    from . import resume
    from .worker import Assignment, work

    digest = resume.request_digest(
        ws,
        found,
        {
            "driver": settings.driver,
            "hosts": settings.hosts,
            "stack": settings.stack,
            "choice": asdict(replace(choice, leave=())),
            "nodes": found.request.nodes,
            **({"resources": dict(found.request.resources)} if found.request.resources else {}),
        },
    )
    taken = resume.take_over(ws, found, digest, resumed)
    claimed = taken or resume.ClaimedRun(new_id(), 0)
    if taken is None and settings.driver != "local":
        ws.store.runs.prepare(claimed.id)
    if taken is not None and (words := reserve_points(ws, taken.id, taken.fence)):
        raise points_refused(taken.id, words)

    def submit() -> int:
        nonlocal claimed
        claimed = _submit(ws, found, claimed.id, digest, choice, settings)
        if words := reserve_points(ws, claimed.id, claimed.fence):
            raise points_refused(claimed.id, words)
        return claimed.fence

    try:
        with deliveries(ws):
            ours = Assignment(
                ws,
                local,
                found,
                claimed,
                settings,
                listener,
                since,
                submit if taken is None else None,
                ahead=ahead,
            )
            return work(ours), claimed.id
    except BaseException:
        if claimed.fence:
            ws.store.runs.release(claimed.id, claimed.fence)
        raise


def _submit(
    ws: Workspace, found: Survey, id: str, digest: str, choice: Choice, settings: Settings
) -> ClaimedRun:
    """Store a new run in the database and claim it."""
    from .resume import ClaimedRun

    total, fresh = count_steps(found)
    data = {
        "source": str(found.source),
        "asked": request_data(found.request),
        "digest": digest,
        "total": total,
        "fresh": fresh,
    }
    data |= options_data(choice, settings) | limits_data(
        lower_limits(found.plan.settings.limits, settings.limits)
    )
    row = RunRow(
        id,
        found.plan.recipe,
        found.plan.digest,
        found.plan.inputs,
        str(ws.root),
        created=time.time(),
        data=data,
    )
    fence = ws.store.runs.submit(row, f"process {os.getpid()}").fence
    crashpoint("run-claimed")
    return ClaimedRun(id, fence)


def _restore_published(ws: Workspace, found: Survey, producer: int, content: str) -> bool:
    """Copy a published output back into the object store if its content is unchanged.

    Return False if no published file has the content.
    """
    for output, path in found.targets.get(producer, ()):
        if (
            found.made[producer].outputs.get(output) == content
            and found.facts.there.get(path) == content
        ):
            if not ws.read_only:
                ws.objects.remove(Content(content))
                ws.objects.put(ws.root / path, Content(content), move=False)
            return True
    return False


def check_ids(plan: Plan, choice: Choice, read: Callable[[str], str] = str) -> None:
    """Check that the chosen steps exist.

    `read` is applied to each ID. Raises NotFound, or CannotRun for an instance that is not known
    yet.
    """
    known = {node.id for node in plan.nodes} | plan.waiting.keys()
    every = {name for id in known for name in names(id) | inner_names(id)}
    single = (choice.only, choice.until, choice.begin)
    for id in [*choice.again, *filter(None, single)]:
        if read(id) in every:
            continue
        if bare(id) in plan.waiting:
            words = f"the step {id} is not known yet: its instances depend on the outputs of another step"
            raise CannotRun(words, fix=f"name all instances with {bare(id)}")
        raise _unknown_step(plan, id, known)


def _unknown_step(plan: Plan, id: str, known: set[str]) -> NotFound:
    steps = sorted(map(bare, known))
    inside = [step.partition("/")[2] for step in steps]
    hint = did_you_mean(id, {*steps, *inside, *known} - {""})
    fix = hint or f"its steps: {', '.join(list(dict.fromkeys(steps))[:10])}"
    return NotFound(f'{plan.recipe} has no step "{id}"', fix=fix)


def _skip_unchosen(found: Survey) -> None:
    """Skip the steps that the caller did not choose.

    Raises CannotRun if a dependency of the chosen step is out of date.
    """
    plan, only, wanted = found.plan, found.only, found.select_wanted(found.plan)
    dependencies = {each for n in wanted for each in plan.dependencies(n)}
    if only:
        before, waits = plan.closure_of(only)
        if waits:
            dependencies |= before
    for n, verdict in enumerate(found.verdicts):
        if n in wanted:
            continue
        if only and n in dependencies and verdict.answer in (RUN, MAYBE):
            raise CannotRun(
                f"{plan.nodes[n].id}, a dependency of {only}, is out of date",
                fix=f"run that step first, or use `--until {only}`",
            )
        if verdict.answer in (RUN, MAYBE, RESTORE):
            found.verdicts[n] = Verdict(SKIPPED, None, ("not asked for",), None)
            found.aside.add(plan.nodes[n].id)
