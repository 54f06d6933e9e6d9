"""`recipe cancel`, `pause`, `resume`, `retry`: ask something of a run, from any terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ...api import requests
from ...errors import Busy, Invalid, Problem
from ...execution.terms import choice_of_run, request_of_run, settings_of_run
from ...planning.ids import stored
from ...storage.records.runs import FINAL
from .chosen import existing, find_run
from .flags import EVENTS_HELP, RUN_HELP, check_driver
from .run import carried_out

if TYPE_CHECKING:
    from ...api.outcomes import Outcome
    from ...execution.terms import Choice
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace

PATIENCE: Mapping[str, float] = {"cancel": 60.0, "pause": 360.0}
"""Seconds that a request is waited for: what is cancelled may save for 30; a training that is paused ends its step first."""
ENDS: Mapping[str, Literal["CANCELLED", "PAUSED"]] = {"cancel": "CANCELLED", "pause": "PAUSED"}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
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
    else:
        parser.add_argument(
            "--driver", metavar="NAME", help="Driver to run on (default: unchanged)"
        )
        parser.add_argument(
            "--queue",
            action="store_true",
            help="Queue the run for a worker (default: only if it was submitted)",
        )
        parser.add_argument("--json", action="store_true", help=EVENTS_HELP)
        if verb == "retry":
            parser.add_argument(
                "--from",
                dest="begin",
                type=stored,
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
    with existing(args.workspace) as ws:
        row = find_run(ws.store, args.run)
        if args.verb in ENDS:
            return _stop(ws, row.id, args)
        if args.driver is not None:
            check_driver(args.driver)
        # A submitted run stays with the workers, and one of `recipe run` with its terminal.
        queue = args.queue or row.due is not None or bool(row.bundle)
        if queue and args.driver is not None:
            raise _driver_stays()
        if args.verb == "resume":
            return _resume(ws, row.id, args, queue=queue)
        return _retry(ws, row, args, queue=queue)


def _stop(ws: Workspace, run: str, args: argparse.Namespace) -> int:
    """Cancel or pause a run, and wait for its worker.  Raises Busy when that does not answer."""
    patience = 0.0 if args.no_wait else PATIENCE[args.verb]
    if args.verb == "cancel":
        outcome = requests.cancel(ws, run, patience=patience)
    else:
        outcome = requests.pause(ws, run, keep_hosts=args.keep_host, patience=patience)
    for text in outcome.said:
        print(f"recipe: {text}", file=sys.stderr)
    if not outcome.done and outcome.state not in FINAL and not args.no_wait:
        raise _not_answered(ws.store.runs.get(run), args.verb, patience)
    print(answer_of(outcome, args.verb))
    return 0 if outcome.done or outcome.state not in FINAL else 1


def answer_of(outcome: Outcome, verb: str) -> str:
    """Say in a sentence what came of a request."""
    run, state = outcome.run, outcome.state
    if not outcome.done and state not in FINAL:
        if verb == "resume":
            return f"run {run} was about to pause, and continues"
        return f"run {run} was asked to {verb}"
    if state == "PAUSED":
        return f"run {run} is PAUSED; `recipe resume {run}` resumes it"
    if state == "QUEUED":
        return f"run {run} is QUEUED: the next worker resumes it"
    return f"run {run} is {state}"


def _not_answered(row: RunRow, verb: str, patience: float) -> Busy:
    # The claim names the process: `HOST process PID`, or `process PID` for one of this machine.
    fix = (
        f"`recipe logs {row.id} -f` shows its output; "
        f"if the worker hangs, kill it, and run `recipe {verb} {row.id}` again"
    )
    return Busy(
        f"run {row.id} was asked to {verb}, and its worker ({row.claim}) has not done it in {patience:.0f} s",
        fix=fix,
    )


def _resume(ws: Workspace, run: str, args: argparse.Namespace, *, queue: bool) -> int:
    outcome = requests.resume(ws, run, queue=queue)
    if outcome.done or outcome.state in FINAL or ws.store.runs.live(run):
        print(answer_of(outcome, "resume"))
        return 0
    row = ws.store.runs.get(run)
    return _carry_out(ws, row, args, choice_of_run(row), resumed=run)


def _retry(ws: Workspace, row: RunRow, args: argparse.Namespace, *, queue: bool) -> int:
    if queue or row.state not in FINAL:
        print(requests.retry(ws, row.id, args.begin).run)
        return 0
    return _carry_out(ws, row, args, requests.retried_choice(row, args.begin))


def _driver_stays() -> Invalid:
    fix = "leave --driver out, or run `recipe submit` with --driver"
    return Invalid([Problem("bad-request", "a queued run keeps its driver", fix=fix)])


def _carry_out(
    ws: Workspace, row: RunRow, args: argparse.Namespace, choice: Choice, resumed: str = ""
) -> int:
    """Continue a run in this terminal, or run its request again here."""
    request = request_of_run(row)
    if request is None:
        raise requests.has_no_request(row.id)
    settings = settings_of_run(row)
    if args.driver is not None and args.driver != settings.driver:
        settings = replace(settings, driver=args.driver, hosts=(), stack="")
    ws.share(settings.store or None)
    return carried_out(ws, request, choice, settings, args, resumed)
