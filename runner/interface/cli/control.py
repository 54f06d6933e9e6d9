"""`recipe cancel`, `pause`, `resume`, `retry` and `prioritize`: control a run from any terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ...api import requests
from ...api.outcomes import Outcome
from ...errors import Busy, Invalid, Problem
from ...execution.terms import choice_of_run, request_of_run, settings_of_run
from ...planning.ids import stored_form
from ...storage.records.runs import FINAL
from ..handle.local_transport import LocalTransport
from ..tail import safe_line
from .flags import EVENTS_HELP, RUN_HELP, check_driver
from .run import execute_and_print
from .transports import transport_for_changes

if TYPE_CHECKING:
    from ...execution.terms import Choice
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace
    from ..handle.transport import Transport

PATIENCE: Mapping[str, float] = {"cancel": 60.0, "pause": 360.0}
"""Seconds to wait for a run to stop. Cancelled steps have 30 seconds to save; paused training first
finishes its current step."""
LOOK = 0.2
"""Seconds between two checks of the run's state."""
ENDS: Mapping[str, Literal["CANCELLED", "PAUSED"]] = {"cancel": "CANCELLED", "pause": "PAUSED"}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "prioritize":
        parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    else:
        parser.add_argument(
            "run", nargs="?", default="last", metavar="RUN", help=f"{RUN_HELP} (default: last)"
        )
    if verb in ENDS:
        parser.add_argument(
            "--no-wait",
            action="store_true",
            help="Send the request to the run's worker and return at once",
        )
    if verb == "cancel":
        parser.description = (
            "Cancel a run. Its steps get SIGTERM, and SIGKILL 30 seconds later. Results and "
            "checkpoints are kept. If the run has lost its worker, its remaining processes "
            "on this machine are stopped too."
        )
        parser.epilog = "Examples:\n  recipe cancel\n  recipe cancel 3f1035"
    elif verb == "pause":
        parser.description = (
            "Pause a run. Training steps that support it finish the current step, save a "
            "checkpoint and exit. All other steps get SIGTERM, and SIGKILL 30 seconds later. "
            "A step without checkpoints starts over when you resume the run."
        )
        parser.add_argument(
            "--keep-host",
            action="store_true",
            help="Keep rented machines, at their usual price, so that resuming starts at once",
        )
        parser.epilog = "Examples:\n  recipe pause\n  recipe resume"
    elif verb == "prioritize":
        parser.add_argument(
            "priority",
            type=int,
            metavar="N",
            help="New priority; workers claim runs with a higher number first",
        )
        parser.description = (
            "Change the priority of an unfinished run. If a worker already executes the run, the new "
            "priority applies when the run is queued again."
        )
        parser.epilog = "Examples:\n  recipe prioritize last 5\n  recipe prioritize 3f1035 -1"
    else:
        parser.add_argument(
            "--driver",
            metavar="NAME",
            help="Driver for the run (default: the driver of the previous execution)",
        )
        parser.add_argument(
            "--queue",
            action="store_true",
            help="Queue the run for a worker instead of executing it here (default for runs of `recipe submit`)",
        )
        parser.add_argument("--json", action="store_true", help=EVENTS_HELP)
        if verb == "retry":
            parser.add_argument(
                "--from",
                dest="begin",
                type=stored_form,
                metavar="STEP",
                help="Rerun STEP and all downstream steps, ignoring cached results",
            )
            parser.epilog = "Examples:\n  recipe retry\n  recipe retry last~2 --from train"
        else:
            parser.epilog = (
                "Examples:\n  recipe resume\n  recipe resume 3f1035 --driver ssh\n"
                "  recipe resume last --queue"
            )


def run(args: argparse.Namespace) -> int:
    with closing(transport_for_changes(args)) as transport:
        run = transport.find(args.run)
        if args.verb in ENDS:
            return _stop(transport, run, args)
        if args.verb == "prioritize":
            return _prioritize(transport, run, args)
        if isinstance(transport, LocalTransport):
            return _continue_locally(transport, run, args)
        return _continue(transport, run, args)


def _stop(transport: Transport, run: str, args: argparse.Namespace) -> int:
    """Cancel or pause a run, wait for its end unless `--no-wait`, and print its state.

    Raises Busy on timeout.
    """
    keep_hosts = args.verb == "pause" and args.keep_host
    outcome = _stop_run(transport, run, args.verb, keep_hosts=keep_hosts)
    is_pending = not outcome.done and outcome.state not in FINAL
    if is_pending and not args.no_wait:
        outcome = _wait_for_end(transport, run, args.verb, keep_hosts=keep_hosts)
    print(describe_outcome(outcome, args.verb))
    # The run ended in another way before the request took effect.
    came_late = not outcome.done and outcome.state in FINAL
    return 1 if came_late else 0


def _stop_run(transport: Transport, run: str, verb: str, *, keep_hosts: bool) -> Outcome:
    """Send a cancel or pause request and print its notices."""
    action: Literal["cancel", "pause"] = "cancel" if verb == "cancel" else "pause"
    outcome = transport.request(run, action, keep_hosts=keep_hosts)
    for text in outcome.said:
        print(safe_line(f"recipe: {text}"), file=sys.stderr)
    return outcome


def _wait_for_end(transport: Transport, run: str, verb: str, *, keep_hosts: bool) -> Outcome:
    """Wait until a run is cancelled, paused or finished.  Raises Busy on timeout."""
    deadline = time.monotonic() + PATIENCE[verb]
    while True:
        now = transport.run(run)
        if now.over or now.state == ENDS[verb]:
            return Outcome(run, now.state, now.state == ENDS[verb])
        if now.word == "NEEDS_RECOVERY":  # its worker died before it read the request
            return _stop_run(transport, run, verb, keep_hosts=keep_hosts)
        if time.monotonic() > deadline:
            raise _timeout_error(transport, run, verb)
        time.sleep(LOOK)


def _prioritize(transport: Transport, run: str, args: argparse.Namespace) -> int:
    outcome = transport.prioritize(run, args.priority)
    print(f"run {outcome.run} is {outcome.state} with priority {args.priority}")
    return 0


def describe_outcome(outcome: Outcome, verb: str) -> str:
    """Describe the outcome of a cancel, pause or resume request."""
    run, state = outcome.run, outcome.state
    if not outcome.done and state not in FINAL:
        if verb == "resume":
            return f"run {run} was about to pause and now continues"
        return f"run {run}: sent the request to {verb} it"
    if state == "PAUSED":
        return f"run {run} is PAUSED; resume it with `recipe resume {run}`"
    if state == "QUEUED":
        return f"run {run} is QUEUED: the next worker resumes it"
    return f"run {run} is {state}"


def _timeout_error(transport: Transport, run: str, verb: str) -> Busy:
    # A worker's name contains its PID: `HOST process PID`, or `process PID` for a worker of this
    # machine.
    workers = [each.worker for each in transport.workers() if run in each.runs]
    who = f" ({workers[0]})" if workers else ""
    to = f" --to {transport.name}" if transport.name else ""
    fix = (
        f"check the output with `recipe logs {run} -f{to}`; "
        f"if the worker hangs, kill it and run `recipe {verb} {run}{to}` again"
    )
    words = f"the worker{who} of run {run} did not {verb} it within {PATIENCE[verb]:.0f} s"
    return Busy(words, fix=fix)


def _continue(transport: Transport, run: str, args: argparse.Namespace) -> int:
    """Queue a run to resume, or retry its request as a new run."""
    if args.verb == "retry":
        print(transport.retry(run, args.begin).run)
    else:
        print(describe_outcome(transport.request(run, "resume"), "resume"))
    return 0


def _continue_locally(transport: LocalTransport, run: str, args: argparse.Namespace) -> int:
    """Resume or retry a run of this workspace: in this terminal, or queued if it was submitted.

    Raises Invalid if `--driver` is given for a queued run.
    """
    row = transport.ws.store.runs.get(run)
    if args.driver is not None:
        check_driver(args.driver)
    # A submitted run goes to a worker again, and a run of `recipe run` continues in this terminal.
    was_submitted = row.due is not None or bool(row.bundle)
    queue = args.queue or was_submitted
    if queue and args.driver is not None:
        raise _fixed_driver_error()
    # `_continue` refuses to retry a run that has not finished.
    is_too_early = args.verb == "retry" and row.state not in FINAL
    if queue or is_too_early:
        return _continue(transport, run, args)
    if args.verb == "retry":
        return _execute(transport.ws, row, args, requests.retried_choice(row, args.begin))
    return _resume(transport.ws, run, args)


def _resume(ws: Workspace, run: str, args: argparse.Namespace) -> int:
    outcome = requests.resume(ws, run, queue=False)
    is_settled = outcome.done or outcome.state in FINAL
    if is_settled or ws.store.runs.live(run):
        print(describe_outcome(outcome, "resume"))
        return 0
    row = ws.store.runs.get(run)
    return _execute(ws, row, args, choice_of_run(row), resumed=run)


def _fixed_driver_error() -> Invalid:
    fix = "remove `--driver`, or run `recipe submit` with `--driver`"
    return Invalid([Problem("bad-request", "a queued run keeps its driver", fix=fix)])


def _execute(
    ws: Workspace, row: RunRow, args: argparse.Namespace, choice: Choice, resumed: str = ""
) -> int:
    """Execute a resumed or retried run in this terminal."""
    request = request_of_run(row)
    if request is None:
        raise requests.has_no_request(row.id)
    settings = settings_of_run(row)
    if args.driver is not None and args.driver != settings.driver:
        settings = replace(settings, driver=args.driver, hosts=(), stack="")
    ws.share(settings.store or None)
    return execute_and_print(ws, request, choice, settings, args, resumed)
