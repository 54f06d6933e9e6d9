"""`recipe reap`: list rented machines of all workspaces with their cost, and terminate unused ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drivers.base import Driver, DriverError, Lease

from ... import settings
from ...api.leases import OpenLease, end_leases, find_endable_lease, open_leases
from ...errors import CannotRun, Invalid, NotFound, Problem, did_you_mean
from ...hosts.renting import reaper
from ...hosts.renting.leases import Leases, create_driver, rents
from ...storage.records.ledger import Ledger, of_user
from ...storage.records.store import home
from .flags import JSON_HELP, ask_consent

_ID = re.compile(r"[0-9a-f]{8}")


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "keys",
        nargs="*",
        metavar="KEY",
        help="Key of a machine to terminate, even if an interrupted run could resume on this machine",
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="List machines and planned terminations without terminating machines",
    )
    parser.add_argument("--driver", metavar="NAME", help="Only machines of this driver")
    parser.add_argument(
        "--dead",
        action="store_true",
        help="Also terminate machines of killed runs, which these runs could still use; asks for confirmation",
    )
    parser.add_argument(
        "--adopt",
        metavar="KEY",
        help="Add an unknown machine to the list of rented machines, by its key",
    )
    parser.add_argument(
        "--unknown",
        action="store_true",
        help="Terminate all unknown machines: tagged by this installation, but missing from its list; asks for confirmation",
    )
    parser.add_argument(
        "--installation",
        metavar="ID",
        help="List or terminate machines of another installation of yours, whose names start with recipe-ID",
    )
    parser.add_argument(
        "-y", "--yes", action="store_true", help="Skip the confirmation of --dead and --unknown"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = (
        "Without flags, `recipe reap` terminates machines that were being released, that "
        "are past their time limit, or that finished runs left behind.\n\n"
        "Examples:\n  recipe reap -n\n  recipe reap 3fa85f645717b3fc\n  recipe reap "
        "--dead\n  recipe reap --installation 0d3f91aa --unknown"
    )


class _Machines(NamedTuple):
    """The rented machines of one call, and the machines that the call terminates."""

    known: Sequence[OpenLease]
    ends: Sequence[OpenLease]
    left: Mapping[str, str]  # the reason of each failed termination by lease key
    untracked: Sequence[Lease]
    silent: Sequence[str]  # a message per provider that fails to answer


def run(args: argparse.Namespace) -> int:
    _check_installation(args)
    machines = _terminate(args)
    if args.json:
        _print_json(args, machines)
    else:
        _print_text(args, machines)
    return 5 if machines.left else 0


def _terminate(args: argparse.Namespace) -> _Machines:
    """Terminate the chosen machines, unless `--dry-run`.  Raises NotFound, CannotRun, Invalid."""
    root = Path(os.path.abspath(args.workspace))
    untracked, silent = asyncio.run(_find_untracked(args.driver, root, args.installation))
    entered = _enter_in_ledger(args, untracked)
    entered_keys = [lease.key for lease in entered]
    known = open_leases(root, os.environ, args.driver)
    if args.installation is not None:
        known = [each for each in known if each.row.key in entered_keys]
    keys = [*args.keys, *entered_keys] if args.unknown else args.keys
    ends = _choose_leases(args, known, keys)
    left = {} if args.dry_run else asyncio.run(end_leases(ends, root, os.environ))
    still_untracked = [lease for lease in untracked if lease not in entered]
    return _Machines(known, ends, left, still_untracked, silent)


def _print_json(args: argparse.Namespace, machines: _Machines) -> None:
    rows = [_as_json(each, machines, is_dry_run=args.dry_run) for each in machines.known]
    rows += map(_untracked_as_json, machines.untracked)
    print(json.dumps(rows, indent=2))


def _print_text(args: argparse.Namespace, machines: _Machines) -> None:
    for why in machines.silent:
        print(f"warning: {why}", file=sys.stderr)
    for lease in machines.untracked:
        print(_describe_untracked(lease, args.installation))
    has_machines = machines.known or machines.untracked
    if not has_machines and not args.quiet:
        print(_describe_none(args.installation))
    _print_leases(args, machines)


def _describe_none(installation: str | None) -> str:
    if installation is None:
        return "no leases"
    return f"no machines of the installation {installation}"


def _check_installation(args: argparse.Namespace) -> None:
    """Raise Invalid for a bad `--installation`, or one with `--adopt` or `--dead`."""
    if args.installation is None:
        return
    is_excluded = args.adopt or args.dead
    if is_excluded or not _ID.fullmatch(args.installation):
        words = "--installation requires the eight-digit ID of another installation, and excludes --adopt and --dead"
        fix = "find the ID in the machine name at the provider: recipe-ID-KEY"
        raise Invalid([Problem("bad-input", words, None, fix)])


def _describe_untracked(lease: Lease, installation: str | None) -> str:
    """Return the line of an untracked machine, with the commands that terminate it."""
    if installation is None:
        remedy = (
            f"`recipe reap --adopt {lease.key}` adds it to the ledger, `--unknown` terminates it"
        )
    else:
        remedy = f"`recipe reap --installation {installation} {lease.key}` terminates it, `--unknown` terminates all of them"
    return f"{'unknown':11}  {reaper.describe_stranger(lease, installation)}; {remedy}"


def _untracked_as_json(lease: Lease) -> dict[str, object]:
    return {
        "key": lease.key,
        "driver": lease.driver,
        "machine": lease.id,
        "price": lease.price,
        "done": "unknown",
    }


def _print_leases(args: argparse.Namespace, machines: _Machines) -> None:
    """Print a line per lease."""
    now = time.time()
    for each in machines.known:
        key = each.row.key
        words = f"{reaper.describe_lease(each.row, now)}: {each.fate.why}"
        if key in machines.left:
            print(f"still there  {words}; {machines.left[key]}", file=sys.stderr)
        elif each in machines.ends:
            done = "would end" if args.dry_run else "ended"
            print(f"{done:11}  {words}")
        elif not args.quiet:
            remedy = "" if _must_stay(each.fate) else f"; `recipe reap {key}` terminates it"
            print(f"{'kept':11}  {words}{remedy}")


async def _find_untracked(
    only: str | None, root: Path, installation: str | None
) -> tuple[list[Lease], list[str]]:
    """Return machines that are missing in the ledger, and a message per provider that fails to
    answer.

    Only machines tagged by this installation, or by `installation` if given, are listed.
    """
    config = settings.load(root, os.environ)
    found: list[Lease] = []
    silent: list[str] = []
    for name in _list_providers(config, only):
        try:
            driver = create_driver(name, config.driver(name), (), str(home(root, os.environ)))
        except CannotRun:
            continue  # it has no lease in the ledger, or `end_leases` reports the problem
        except Invalid as error:
            # The user's own servers have no tags, and may have no hosts except a stack's head.
            if rents(name):
                silent.append(_describe_silent(name, error))
            continue
        try:
            found += await _find_untracked_of(driver, name, root, installation)
        except DriverError as error:
            silent.append(_describe_silent(name, error))
        finally:
            await driver.aclose()
    return found, silent


def _list_providers(config: settings.Config, only: str | None) -> list[str]:
    """Return the names of the drivers with settings or paid leases, or only `only`."""
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        paid = {row.driver for row in ledger.living_leases() if row.price}
    if only is not None:
        return [only]
    return sorted({*paid, *config.drivers})


async def _find_untracked_of(
    driver: Driver, name: str, root: Path, installation: str | None
) -> list[Lease]:
    """Return the machines of a driver that are missing in the ledger.  Raises DriverError."""
    has_marks = installation is None or driver.look_for(installation)
    if not driver.traits.priced or not has_marks:
        return []
    with Ledger.open(of_user(os.environ)) as ledger:
        return await Leases(driver, name, ledger, "", str(root)).find_strangers()


def _describe_silent(name: str, error: Exception) -> str:
    return f"cannot list the machines of this installation at {name}: {error}"


def _enter_in_ledger(args: argparse.Namespace, untracked: Sequence[Lease]) -> list[Lease]:
    """Add the chosen untracked machines to the ledger, and return their leases.

    `--dry-run` adds none, nor does `--unknown` without the user's consent. Raises NotFound,
    Invalid.
    """
    chosen = _choose_untracked(args, untracked)
    if args.dry_run or not chosen:
        return []
    if args.unknown:
        lines = [reaper.describe_stranger(lease, args.installation) for lease in chosen]
        if not _ask_to_end(args, lines, "--unknown"):
            return []
    with Ledger.open(of_user(os.environ)) as ledger:
        for lease in chosen:
            reaper.add_stranger(ledger, lease, os.path.abspath(args.workspace))
    return chosen


def _choose_untracked(args: argparse.Namespace, untracked: Sequence[Lease]) -> list[Lease]:
    """Return the machines of `--adopt`, with `--installation` of the given keys.

    With `--unknown`, all untracked machines are chosen. Raises NotFound for `--adopt`.
    """
    if args.unknown:
        chosen = [*untracked]
    else:
        keys = [args.adopt] if args.installation is None else args.keys
        chosen = [lease for lease in untracked if lease.key in keys]
    if args.adopt and not chosen:
        near = did_you_mean(args.adopt, [lease.key for lease in untracked])
        fix = near or "list the untracked machines with `recipe reap -n`"
        raise NotFound(f"no untracked machine {args.adopt}", fix=fix)
    return chosen


def _ask_to_end(args: argparse.Namespace, lines: Sequence[str], option: str) -> bool:
    """Ask the user to confirm the termination, unless `--yes`.

    Raises Invalid without a terminal.
    """
    if args.yes:
        return True
    unasked = Problem(
        "bad-input",
        f"{option} terminates machines that may still run a training",
        fix="check the machines with `recipe reap -n`, then add `--yes`",
    )
    return ask_consent(
        "\n".join([*lines, f"terminate {len(lines)} machine(s) and their running jobs?"]),
        Invalid([unasked]),
    )


def _choose_leases(
    args: argparse.Namespace, known: Sequence[OpenLease], keys: Sequence[str]
) -> list[OpenLease]:
    """Return the leases to terminate.  Raises NotFound, CannotRun, Invalid."""
    for key in keys:
        find_endable_lease(known, key)
    ends: list[OpenLease] = []
    others: list[OpenLease] = []
    for each in known:
        # With keys on the command line, no other machine is terminated, even if it is due.
        is_due = each.fate.end and not args.keys
        if is_due or each.row.key in keys:
            ends.append(each)
        else:
            others.append(each)
    if args.dead:
        ends += _choose_dead(args, others)
    return ends


def _choose_dead(args: argparse.Namespace, leases: Sequence[OpenLease]) -> list[OpenLease]:
    """Return the leases of killed runs; none if the user refuses their termination."""
    dead = [each for each in leases if not _must_stay(each.fate)]
    if not dead or args.dry_run:
        return dead
    now = time.time()
    lines = [reaper.describe_lease(each.row, now) for each in dead]
    if not _ask_to_end(args, lines, "--dead"):
        return []
    return dead


def _must_stay(fate: reaper.Fate) -> bool:
    """Return True if a run uses the lease or a stack keeps it, so that `--dead` must spare it."""
    return fate.reason in ("at-work", "kept")


def _as_json(each: OpenLease, machines: _Machines, *, is_dry_run: bool) -> dict[str, object]:
    row = each.row
    shown = ("key", "driver", "run", "workspace", "state", "price", "asked", "until")
    facts = {name: getattr(row, name) for name in shown}
    if row.key in machines.left:
        done = "still there"
    elif each not in machines.ends:
        done = "kept"
    else:
        done = "would end" if is_dry_run else "ended"
    return {**facts, "done": done, "why": machines.left.get(row.key, each.fate.why)}
