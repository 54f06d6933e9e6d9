"""Execution of one claimed run: open its hosts, run its event loop and store its result.

Both `recipe run` and `recipe worker` use this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from drivers.base import DriverError, NoCapacity

from ..errors import (
    CannotRun,
    Infrastructure,
    Invalid,
    NoHost,
    NotFound,
    RecipeError,
    StoreUnavailable,
)
from ..failures import RunFailure, of_step
from ..hosts import interpreters, stacks
from ..hosts.ahead import EarlyConnection
from ..hosts.connect import check_same_packages
from ..hosts.interpreters import CURRENT
from ..hosts.link.client import Client
from ..hosts.link.local_agents import note_claim
from ..hosts.pool import HostPool
from ..logs import Log, mask
from ..planning.halving import Goal
from ..planning.ids import bare
from ..planning.judge import FRESH
from ..planning.schedule import Move
from ..planning.secret_values import all_given, secrets_of_addresses
from ..secrets import Masker
from ..storage.content.files import no_space
from ..storage.records.runs import Requested, RunState
from ..storage.run_graph import recall
from ..storage.workspace import Workspace
from ..survey import run_environment, run_graph
from ..survey.empty_globs import warn_of_empty_globs
from ..survey.input_manifests import store_manifests
from ..survey.skipped_steps import add_skipped_steps, list_skipped_steps
from ..survey.survey import Survey
from ..survey.trainings import training_length
from . import takeover
from .refusals import (
    compose_wish,
    default_jobs,
    estimate_takes,
    find_rental_needs,
    refuse_denied_secrets,
    refuse_too_large,
)
from .reporting import log_remote
from .results import count_steps, deliver, list_results, point_latest, show_notices, show_warnings
from .resume import ClaimedRun
from .signals import handle_signals
from .steps.assembly import Options, assemble
from .steps.commit import GroupCommit
from .steps.control import Handover
from .steps.loop import Loop, Report
from .tasks import find_given_contents, pattern_of
from .terms import Listener, Overview, Settings, Since, Summary, lower_limits

_log = Log("worker")
LOCAL: Final = "local"


@dataclass(slots=True)
class Assignment:
    """Claimed run, with the objects that this process needs to execute it."""

    ws: Workspace
    local: Client
    """Client of this machine's agent."""
    found: Survey
    claimed: ClaimedRun
    settings: Settings
    listener: Listener
    since: Since
    submit: Callable[[], int] | None = None
    """Function that stores a new run after the hosts have accepted it, and returns its fence."""
    handover: Handover | None = None
    """Stop requests to the process of a queue worker."""
    ahead: EarlyConnection | None = None
    """Driver of the run, which is already connecting."""
    masker: Masker = field(init=False)
    commits: GroupCommit | None = None
    """Journal writer of the run once it has started."""

    def __post_init__(self) -> None:
        self.masker = Masker(
            [
                *all_given(self.found.plan, self.ws.environ),
                *secrets_of_addresses(self.ws.addresses.values()),
            ]
        )

    def called_away(self) -> bool:
        """Return True if the waiting run or its process was asked to stop."""
        return self.handover is not None and bool(
            self.handover.asked or self.ws.store.runs.get(self.claimed.id).request
        )


def work(ours: Assignment) -> Summary | None:
    """Execute a run and return its summary; None if the run paused and must resume now.

    After an error, the caller releases the claim.
    """
    ws, plan, settings, claimed = ours.ws, ours.found.plan, ours.settings, ours.claimed
    plan.settings = plan.settings._replace(
        limits=lower_limits(plan.settings.limits, settings.limits)
    )
    mask(ours.masker)
    if not settings.stack:
        return _work(ours)
    held = stacks.wait_for_stack(
        ws.config.stack(settings.stack), ws.environ, ours.listener.say, ours.called_away
    )
    if held is None:
        ws.store.runs.release(claimed.id, claimed.fence)
        return (
            Summary(claimed.state, {}, ours.since.seconds, run=claimed.id)
            if ours.handover is not None and ours.handover.asked
            else None
        )
    try:
        return _work(ours)
    finally:
        held.release()


def _work(ours: Assignment) -> Summary | None:
    """Execute a run, store its final state and report it.

    The caller holds the stack of the run.
    """
    ws, found, settings, run = ours.ws, ours.found, ours.settings, ours.claimed.id
    # Before the run, which expands the plan.
    fresh = {
        node.id
        for node, verdict in zip(found.plan.nodes, found.verdicts, strict=True)
        if verdict.answer == FRESH
    }
    # The plan lives until the run ends, so the garbage collector can skip it.
    gc.freeze()
    try:
        make_loop = ours.ahead.wait_for_loop if ours.ahead is not None else None
        with asyncio.Runner(loop_factory=make_loop) as runner:
            working, report = runner.run(_execute(ours))
        if settings.upload and report.state == "COMPLETED":
            from . import uploading

            plan, made = working.owners.steps.plan, working.owners.steps.made
            uploading.upload(ws, plan, made, settings.upload, ours.listener, run)
    except asyncio.CancelledError:  # no step has started
        raise KeyboardInterrupt from None
    except BaseException as error:
        _store_error(ours.commits, error)
        if words := _explain(error, ws, settings):
            raise words from error
        raise
    finally:
        gc.unfreeze()
        if ours.commits is not None:
            ours.commits.keys.close()
    commits = working.commits
    interrupted = working.owners.stopper.is_interrupted or report.left
    reason = "interrupted" if interrupted and report.state != "COMPLETED" else ""
    state = _store_end(ws, commits, report, reason)
    if settings.driver != LOCAL:
        log_remote(ws, run, settings.driver, "", state)
    if state == "PAUSED" and commits.answers == "resume":
        return None  # a resume was requested after all steps had stopped
    interrupted = interrupted or (bool(commits.answers) and state in ("CANCELLED", "PAUSED"))
    summary = _summarize(ours, working, report, state, fresh, interrupted=interrupted)
    if ws.remote_cache is not None and not report.left:
        ws.remote_cache.finish(ours.listener.say)
    show_notices(ws, ours.listener)
    ours.listener.end(summary)
    return summary


def _summarize(
    ours: Assignment,
    working: Loop,
    report: Report,
    state: str,
    fresh: Set[str],
    *,
    interrupted: bool,
) -> Summary:
    """Return the summary of a run with its stored state.

    `fresh` are the steps that were up to date before the run.
    """
    ws, found, steps = ours.ws, ours.found, working.owners.steps
    is_completed = report.state == "COMPLETED"
    fresh_count = report.counts.get("FRESH", 0) + len(fresh - steps.todo)
    wanted = found.select_wanted(steps.plan)
    return Summary(
        state,
        add_skipped_steps({**report.counts, "FRESH": fresh_count}, steps.plan, wanted),
        ours.since.seconds,
        report.failures,
        list_results(ws, found) if is_completed else (),
        ours.claimed.id,
        interrupted,
        report.abandoned,
        warn_of_empty_globs(ws, found) if is_completed else (),
        list_skipped_steps(steps.plan, working.owners.schedule.skipped_steps(), wanted),
    )


async def _execute(ours: Assignment) -> tuple[Loop, Report]:
    """Open the hosts, start the run and execute its event loop to the end."""
    ws, found, settings = ours.ws, ours.found, ours.settings
    host_pool = _compose_pool(ours)
    try:
        await _open_hosts(ours, host_pool)
        jobs = settings.jobs or default_jobs(found, host_pool)
        begins = (
            ours.claimed._replace(fence=ours.submit()) if ours.submit is not None else ours.claimed
        )
        note_claim(Path(ws.home), begins.id, begins.fence, ours.local.root)
        ours.commits = _start(ours, begins, jobs)
        noting = _note_environment(ours, begins) if found.todo and not begins.resumed else None
        contended = ws.store.database.version() != ours.since.version
        goal = Goal(*settings.stop_early) if settings.stop_early else None
        options = Options(
            jobs,
            settings.keep_going,
            settings.overwrite,
            settings.link,
            settings.pools,
            contended,
            goal,
            settings.jobs,
        )
        working = assemble(
            ws, found, ours.commits, host_pool, options, begins, ours.listener.tick, ours.handover
        )
    except BaseException:
        await host_pool.close(leave=True)
        raise
    report = await working.run()
    if noting is not None:
        noting.join(run_environment.PATIENCE)
    if report.state == "COMPLETED" and found.library:
        working.publish_all()
        point_latest(ws, found)
    if report.state == "COMPLETED":
        deliver(ws, begins.id, begins.fence, working.owners.steps.plan, working.owners.steps.made)
    return working, report


async def _open_hosts(ours: Assignment, host_pool: HostPool) -> None:
    """Open the hosts of a run, and refuse steps that they cannot run."""
    ws, found, settings = ours.ws, ours.found, ours.settings
    counts = [found.plan.specs()[n].node_count for n in found.todo]
    with _cancel_on_signals(host_pool) if ours.handover is None else contextlib.nullcontext():
        await host_pool.open(
            want=settings.jobs or sum(counts),
            wish=lambda: compose_wish(found, host_pool.runs_locally, settings.jobs),
        )
    if host_pool.is_priced:
        refuse_denied_secrets(ws, found, host_pool)
    needs = find_rental_needs(found, host_pool) if host_pool.is_priced else {}
    offered = await host_pool.find_offered(estimate_takes(ws, found, needs))
    refuse_too_large(ws, found, host_pool, settings, offered)
    if found.request.current_python:
        await check_same_packages([*host_pool.head.places, *host_pool.places])


def _note_environment(ours: Assignment, begins: ClaimedRun) -> threading.Thread:
    """Start a thread that records the code version and the installed packages of a run."""
    ws, settings = ours.ws, ours.settings
    asked = CURRENT if ours.found.request.current_python else settings.python
    named = asked if settings.driver == LOCAL or asked == CURRENT else ""
    python = partial(interpreters.choose_python, named, ws.root, ws.environ)
    return run_environment.begin(ws, begins.id, python, ours.masker.text)


def _compose_pool(ours: Assignment) -> HostPool:
    """Return the pool of hosts for the run, which is not opened yet."""
    ws, found, settings, claimed = ours.ws, ours.found, ours.settings, ours.claimed
    python = CURRENT if found.request.current_python else settings.python
    pool = HostPool(
        ws,
        claimed.id,
        ours.local,
        settings.driver,
        settings.hosts,
        ours.listener.say,
        python,
        settings.everything_there,
    )
    if settings.driver != LOCAL:
        pool.driver, pool.given_contents = (
            ours.ahead.driver if ours.ahead is not None else None,
            find_given_contents(found),
        )
    pool.where, pool.stack, pool.keep_alive = settings.where, settings.stack, settings.keep_alive
    pool.earlier = takeover.read_leases(ws, claimed.id) if claimed.resumed and ws.delivers else ()
    pool.limit = found.plan.settings.limits.cost
    return pool


@contextlib.contextmanager
def _cancel_on_signals(host_pool: HostPool) -> Iterator[None]:
    """Cancel the wait for hosts on Ctrl-C or SIGTERM.

    The requested hosts are then released; a second signal does not wait for the release.
    """
    waiting = asyncio.current_task()
    assert waiting is not None

    def end() -> None:
        if host_pool.is_remote and not host_pool.is_priced:
            host_pool.say(
                f"interrupted before a host was ready; released the request to {host_pool.name}"
            )
        waiting.cancel()

    with handle_signals(end, end):
        yield


def _store_end(ws: Workspace, commits: GroupCommit, report: Report, why: str) -> str:
    """Store the final state of a run and return it.

    A run that was left to the next worker is released and stays ACTIVE. Raises Stale if another
    worker has claimed it.
    """
    if report.left:
        commits.flush()
        ws.store.runs.take_request(commits.run, commits.fence)
        ws.store.runs.release(commits.run, commits.fence)
        return "ACTIVE"
    failed = [each for each in report.failures if not each.allowed] or report.failures
    if report.state == "FAILED" and failed:
        # The first failed step is the reason of the run's failure.
        first = failed[0]
        return _store_final_state(
            commits, RunState("FAILED", first.error, of_step(first.kind)), first.id
        )
    return _store_final_state(commits, RunState(report.state, why))


def _store_final_state(commits: GroupCommit, end: RunState, step: str = "") -> str:
    """Store the final state of a run and return it.

    A last cancel request wins.
    """
    while True:
        if end.state in ("CANCELLED", "PAUSED"):
            words = {"cancel": "cancelled", "pause": "paused"}.get(commits.answers, end.reason)
            end = end._replace(reason=words)
        data = {"failure": end.failure, "step": step} if end.failure else {}
        commits.add_move(Move("run", commits.run, "ACTIVE", end.state, end.reason, data))
        try:
            commits.flush()
            return end.state
        except Requested as error:
            commits.take_back()
            commits.answers = error.request
            if error.request == "cancel":
                end = RunState("CANCELLED", "cancelled")


def failed_state(error: RecipeError | DriverError) -> RunState:
    """Return the FAILED state for an error outside the steps of a run."""
    kind = RunFailure.INFRASTRUCTURE
    if isinstance(error, NoCapacity | NoHost):
        kind = RunFailure.PROVISIONING
    elif isinstance(error, Invalid | NotFound | CannotRun):
        kind = RunFailure.INVALID
    return RunState("FAILED", str(error), kind)


def _store_error(commits: GroupCommit | None, error: BaseException) -> None:
    """Store an error as the final state of a started run.

    Ignores errors that do not concern the run.
    """
    if (
        commits is not None
        and isinstance(error, (RecipeError, DriverError))
        and not isinstance(error, StoreUnavailable)
    ):
        with contextlib.suppress(Infrastructure):  # the store itself may have failed
            _store_final_state(commits, failed_state(error))


def _explain(error: BaseException, ws: Workspace, settings: Settings) -> RecipeError | None:
    """Return a user-facing error with a fix, or None for an unknown error."""
    if isinstance(error, DriverError):
        return Infrastructure(
            str(error),
            fix=f"run `recipe doctor --driver {settings.driver}` to test the connection step by step",
        )
    if isinstance(error, OSError):
        return no_space(error, str(error.filename or ws.home))
    return None


def _start(ours: Assignment, begins: ClaimedRun, jobs: int) -> GroupCommit:
    """Start a claimed run: store its graph, show its overview and record its first event."""
    ws, found, settings, listener = ours.ws, ours.found, ours.settings, ours.listener
    recipe, ids = found.plan.recipe, [found.plan.nodes[n].id for n in found.todo]
    total, fresh = count_steps(found)
    store_manifests(ws, found)
    if begins.resumed:
        graph = recall(ws.home, begins.id)
    else:
        graph = run_graph.store_graph(ws, begins.id, found)
    expected = ws.store.index.expected_seconds(recipe, ids)
    _log.info(
        "run %s %s: %d steps, %d at once",
        begins.id,
        "resumed" if begins.resumed else "submitted",
        len(ids),
        jobs,
    )
    commits = GroupCommit(
        ws,
        begins.id,
        begins.fence,
        recipe,
        listener,
        expected,
        listener.say,
        ours.masker,
        tries=begins.tries,
        made=begins.made,
    )
    overview = Overview(
        begins.id, recipe, total, fresh, ids, expected, jobs, str(ws.root), ours.masker
    )
    listener.begin(
        overview._replace(
            command=partial(_command_of, found),
            steps=partial(training_length, found),
            pattern=partial(pattern_of, found),
            trains=bare(graph.trains) if graph is not None else "",
        )
    )
    show_notices(ws, listener)
    show_warnings(ws, found, listener)
    if settings.driver != LOCAL:
        log_remote(ws, begins.id, settings.driver, "", "ACTIVE")
    if begins.resumed:
        listener.say(f"resuming run {begins.id}{_INTERRUPTIONS.get(begins.state, '')}")
    reason = "resumed" if begins.resumed else ""
    facts = {"fresh": fresh, "steps": len(ids), "resumed": begins.resumed}
    commits.add_move(Move("run", begins.id, begins.state, "ACTIVE", reason, facts))
    return commits


_INTERRUPTIONS: Final = {"PAUSED": ", which was paused", "ACTIVE": ", which lost its worker"}


def _command_of(found: Survey, id: str) -> str:
    from ..survey.explain import shown_command

    return shown_command(found, found.plan.index[id])[0]
