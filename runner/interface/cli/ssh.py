"""`recipe ssh`: open a shell or forward a port to a running step, with the run's own SSH and host
keys.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivers.base import DriverError, Host

from ...api.finding import find_run
from ...errors import CannotRun, Infrastructure, Invalid, NotFound, Problem
from ...execution.terms import apply_stack, settings_of_run
from ...hosts.renting.any_driver import alternatives
from ...hosts.renting.leases import create_driver, lease_of
from ...planning.ids import names
from ...storage.records.ledger import LeaseRow, Ledger, of_user, of_workspace
from .targets import open_for_reading

if TYPE_CHECKING:
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "place",
        metavar="RUN/STEP",
        help="Running step; RUN is an ID from `recipe runs`, or `last`",
    )
    add_way(parser)
    parser.epilog = "Examples:\n  recipe ssh last/train\n  recipe ssh last/train -L 6006\n  recipe ssh last/train -- nvidia-smi"


def add_way(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a shell, a command or a forwarded port."""
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="Command to run instead of a shell; put it after `--` if it has flags",
    )
    parser.add_argument(
        "-L",
        dest="forwards",
        metavar="PORT",
        action="append",
        default=[],
        help=(
            "Forward a port of the host to this machine instead of opening a shell, for example 6006 or "
            "8080:localhost:6006"
        ),
    )


def run(args: argparse.Namespace) -> int:
    word, _, step = args.place.partition("/")
    if not step:
        raise Invalid(
            [Problem("bad-input", f'"{args.place}" is not RUN/STEP', fix=f"write last/{word}")]
        )
    with open_for_reading(args.workspace) as ws:
        row = find_run(ws.store, word)
        return asyncio.run(_enter(ws, row, _find_host(ws, row, step), args))


async def _enter(ws: Workspace, row: RunRow, place: str, args: argparse.Namespace) -> int:
    settings = apply_stack(ws, settings_of_run(row))
    name = place.split(" ", 1)[0] if alternatives(ws.config, settings.driver) else settings.driver
    lease = _find_lease(ws, row.id, name, place)
    driver = create_driver(name, ws.config.driver(name), settings.hosts, str(ws.home))
    try:
        found = await driver.hosts(lease_of(lease))
        host = found[0] if found else None
        return enter(place, host, args.forwards, args.command)
    except DriverError as error:
        raise Infrastructure(
            str(error), fix=f"check the state of run {row.id} with `recipe status`"
        ) from error
    finally:
        await driver.aclose()


def enter(place: str, host: Host | None, forwards: Sequence[str], command: Sequence[str]) -> int:
    """Open a shell, forward ports or execute a command on a host; return the SSH client's exit
    code.

    Raises CannotRun, and Infrastructure if `host` is None.
    """
    if host is None:
        raise Infrastructure(
            f"{place} is not running",
            fix="wait until it runs; check with `recipe stack status` or `recipe status`",
        )
    only_forwards = bool(forwards) and not command
    with tempfile.TemporaryDirectory(prefix="recipe-ssh-") as folder:
        way = [*host.way(folder)]
        if not way:
            raise CannotRun(
                f"{place} is a directory on this machine; no SSH needed",
                fix=f"cd {host.root}",
            )
        words = way[:1]
        for each in forwards:
            words += ["-L", _forward(each)]
        if only_forwards:
            words.append("-N")
        if not command and sys.stdin.isatty():
            words.append("-t")
        words += way[1:]
        if only_forwards:
            print(
                f"recipe: {', '.join(forwards)} forwarded from {place}; press Ctrl-C to stop",
                file=sys.stderr,
                flush=True,
            )
        return _run_program([*words, *command])


def _forward(word: str) -> str:
    """Return the argument of `ssh -L` for a port, or for an argument of `ssh -L`."""
    return f"{word}:localhost:{word}" if word.isdecimal() else word


def _run_program(words: Sequence[str]) -> int:
    """Run a program in this terminal and return its exit code.

    Raises CannotRun if it is missing.

    SIGTERM terminates the program. Ctrl-C reaches the program directly, and this process ignores
    it.
    """
    try:
        program = subprocess.Popen(words)
    except FileNotFoundError as error:
        raise CannotRun(
            "`ssh` is not installed on this machine", fix="install the OpenSSH client"
        ) from error
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    try:
        return program.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _find_host(ws: Workspace, row: RunRow, word: str) -> str:
    """Return the host of a running step, as recorded in the run's events.

    Raises NotFound for an unknown step, CannotRun for a local step or a step that is not running.
    """
    steps = [step for step in ws.store.runs.steps(row.id).values() if word in names(step.step)]
    if not steps:
        raise NotFound(
            f'run {row.id} has no started step "{word}"',
            fix=f"list the steps of run {row.id} with `recipe status`",
        )
    running = next((step.step for step in steps if step.state == "RUNNING"), None)
    if running is None:
        raise CannotRun(
            f"{steps[0].step} is not running (state: {steps[0].state})",
            fix="show its output with `recipe logs`",
        )
    site = None
    for event in ws.store.runs.events(row.id):
        if event.subject == "step" and event.id == running:
            # The last one counts, as an earlier attempt may have run elsewhere.
            site = event.data.get("site") or site
    if site is None:
        raise CannotRun(
            f"{running} runs locally; no SSH needed",
            fix=f"find its directory below {os.path.join(ws.home, 'attempts')}",
        )
    return str(site).partition("\n")[0]


def _find_lease(ws: Workspace, run: str, driver: str, place: str) -> LeaseRow:
    """Return the lease of a host.

    Raises CannotRun if this machine has no active lease of the host.
    """
    for path in (of_user(ws.environ), of_workspace(ws.home)):
        with Ledger.open(path, read_only=True) as ledger:
            for row in ledger.of_run(run):
                places = [f"{driver} {each.get('id')}" for each in (row.lease, row.offer)]
                if row.state == "UP" and place in places:
                    return row
    raise CannotRun(
        f"{place} is not in this machine's ledger of rented machines",
        fix="run `recipe ssh` on the machine that started the run",
    )
