"""`recipe cancel`, `pause`, `resume`, `retry`: ask something of a run, from any terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ...errors import Busy, Invalid, NotFound, Problem
from ...execution.queue import again, give_back
from ...execution.terms import Choice, choice_of_run, request_of_run, settings_of_run
from ...execution.unattended import end_unattended
from ...planning.ids import stored
from ...storage.records.runs import FINAL
from .chosen import existing, find_run
from .flags import EVENTS_HELP, RUN_HELP, check_driver
from .run import carried_out

if TYPE_CHECKING:
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace

PATIENCE: Mapping[str, float] = {"cancel": 60.0, "pause": 360.0}
"""Seconds that a request is waited for: what is cancelled may save for 30; a training that is paused ends its step first."""
LOOK = 0.1

ENDS: Mapping[str, Literal["CANCELLED", "PAUSED"]] = {"cancel": "CANCELLED", "pause": "PAUSED"}


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "run", nargs="?", default="last", metavar="RUN", help=f"{RUN_HELP} (default: last)"
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
            parser.epilog = "Examples:\n  recipe resume\n  recipe resume 3f1035 --driver ssh"


def run(args: argparse.Namespace) -> int:
    with existing(args.workspace) as ws:
        row = find_run(ws.store, args.run)
        if args.verb in ENDS:
            return _end(
                ws,
                row,
                args.verb,
                {"keep_hosts": True} if getattr(args, "keep_host", False) else {},
            )
        if args.driver is not None:
            check_driver(args.driver)
        return _resume(ws, row, args) if args.verb == "resume" else _retry(ws, row, args)


def _end(ws: Workspace, row: RunRow, verb: str, data: Mapping[str, object]) -> int:
    """Cancel or pause a run: by its worker, or, where it has none, here."""
    if row.state in FINAL or row.state == ENDS[verb]:
        raise _refused(f"run {row.id} is {row.state} already")
    while True:
        if not ws.store.runs.live(row.id):
            done = end_unattended(
                ws, row.id, ENDS[verb], lambda text: print(f"recipe: {text}", file=sys.stderr)
            )
        elif ws.store.runs.request(row.id, verb, data):
            done = _waited(ws, row.id, ENDS[verb], PATIENCE[verb])
        else:  # its worker is about to let go of it
            done = False
            time.sleep(LOOK)
        state = ws.store.runs.get(row.id).state
        if done or state in FINAL:
            break
    print(
        f"run {row.id} is {state}"
        + (f"; recipe resume {row.id} continues it" if state == "PAUSED" else "")
    )
    return 0 if state == ENDS[verb] else 1


def _waited(ws: Workspace, run: str, state: str, patience: float) -> bool:
    """Wait until the worker of a run has brought it to this state, or to its end.  False: it died, or let go of it, meanwhile.  Raises Busy."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        row = ws.store.runs.get(run)
        if row.state in FINAL or row.state == state:
            return True
        if not ws.store.runs.live(run):
            return False
        time.sleep(LOOK)
    raise Busy(
        f"run {run} was asked, and is not stopped after {patience:.0f} s",
        fix=f"`recipe logs {run} -f` shows what it does",
    )


def _left(ws: Workspace, run: str) -> None:
    """Wait until the worker of a paused run has let go of it.  Raises Busy."""
    deadline = time.monotonic() + PATIENCE["pause"]
    while ws.store.runs.live(run):
        if time.monotonic() > deadline:
            raise Busy(f"the worker of the paused run {run} does not end", fix="try again")
        time.sleep(LOOK)


def _resume(ws: Workspace, row: RunRow, args: argparse.Namespace) -> int:
    if row.state in FINAL:
        raise _refused(
            f"run {row.id} is {row.state}: there is nothing to resume",
            "`recipe retry` runs it once more",
        )
    if ws.store.runs.live(row.id):
        if row.request != "pause":
            raise _refused(f"run {row.id} is running", f"`recipe logs {row.id} -f` follows it")
        ws.store.runs.request(row.id, "resume")
        if (
            ws.store.runs.get(row.id).state != "PAUSED"
        ):  # its worker will read it, in the last moment too
            print(f"run {row.id} was about to pause, and continues")
            return 0
        _left(ws, row.id)
    if row.bundle:
        _unchanged(args)
        if row.state == "PAUSED":
            give_back(ws, row.id)
        print(f"run {row.id} is QUEUED: the next worker continues it")
        return 0
    return _again(ws, row, args, choice_of_run(row), resumed=row.id)


def _retry(ws: Workspace, row: RunRow, args: argparse.Namespace) -> int:
    if row.state not in FINAL:
        raise _refused(
            f"run {row.id} is not over", "`recipe resume` continues it, `recipe cancel` ends it"
        )
    choice = Choice(begin=args.begin) if args.begin else choice_of_run(row)
    if row.bundle:
        _unchanged(args)
        print(again(ws, row, choice).id)
        return 0
    return _again(ws, row, args, choice)


def _unchanged(args: argparse.Namespace) -> None:
    """A run for workers of other machines stays as it was submitted.  Raises Invalid."""
    if args.driver is not None:
        raise _refused(
            "the driver of a submitted run stays", "`recipe submit` with --driver makes another"
        )


def _again(
    ws: Workspace, row: RunRow, args: argparse.Namespace, choice: Choice, resumed: str = ""
) -> int:
    request = request_of_run(row)
    if request is None:
        raise NotFound(
            f"run {row.id} did not note what it was asked for",
            fix="`recipe run` with its recipe and inputs runs it again",
        )
    settings = settings_of_run(row)
    if args.driver is not None and args.driver != settings.driver:
        settings = replace(settings, driver=args.driver, hosts=(), stack="")
    ws.share(settings.store or None)
    return carried_out(ws, request, choice, settings, args, resumed)


def _refused(why: str, fix: str = "`recipe runs` lists runs and their states") -> Invalid:
    return Invalid([Problem("bad-request", why, fix=fix)])
