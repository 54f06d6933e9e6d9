"""`recipe reap`: list rented machines of all workspaces with their cost, and terminate unused ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drivers.base import DriverError, Lease

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
        help="Lease to terminate, even if an interrupted run could resume on it",
    )
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="List leases and planned terminations without terminating anything",
    )
    parser.add_argument("--driver", metavar="NAME", help="Only leases of this driver")
    parser.add_argument(
        "--dead",
        action="store_true",
        help="Terminate machines of runs whose worker is gone too; asks first",
    )
    parser.add_argument(
        "--adopt",
        metavar="KEY",
        help="Add an untracked machine of this installation to the lease ledger",
    )
    parser.add_argument(
        "--unknown",
        action="store_true",
        help="Terminate all untracked machines of this installation; asks first",
    )
    parser.add_argument(
        "--installation",
        metavar="ID",
        help="Only machines rented by another installation of yours, named recipe-ID-KEY",
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


def run(args: argparse.Namespace) -> int:
    root = Path(os.path.abspath(args.workspace))
    if args.installation is not None and (
        not _ID.fullmatch(args.installation) or args.adopt or args.dead
    ):
        words = "--installation requires the eight-digit ID of another installation, and excludes --adopt and --dead"
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    words,
                    None,
                    "find the ID in the machine name at the provider: recipe-ID-KEY",
                )
            ]
        )
    strange, silent = asyncio.run(_strange(args.driver, root, args.installation))
    entered = _enter_in_ledger(args, strange)
    strange = [lease for lease in strange if lease not in entered]
    own = {lease.key for lease in entered}
    known = [
        each
        for each in open_leases(root, os.environ, args.driver)
        if args.installation is None or each.row.key in own
    ]
    ends = _choose_leases(
        args, known, [*args.keys, *(lease.key for lease in entered if args.unknown)]
    )
    left = {} if args.dry_run else asyncio.run(end_leases(ends, root, os.environ))
    if args.json:
        unknown = [
            {
                "key": each.key,
                "driver": each.driver,
                "machine": each.id,
                "price": each.price,
                "done": "unknown",
            }
            for each in strange
        ]
        print(
            json.dumps(
                [*(_as_json(each, ends, left, args.dry_run) for each in known), *unknown], indent=2
            )
        )
        return 5 if left else 0
    now = time.time()
    for why in silent:
        print(f"warning: {why}", file=sys.stderr)
    for lease in strange:
        remedy = (
            f"`recipe reap --adopt {lease.key}` adds it to the ledger, `--unknown` terminates it"
        )
        if args.installation is not None:
            remedy = f"`recipe reap --installation {args.installation} {lease.key}` terminates it, `--unknown` terminates all of them"
        print(f"{'unknown':11}  {reaper.describe_stranger(lease, args.installation)}; {remedy}")
    if not known and not strange and not args.quiet:
        print(
            "no leases"
            if args.installation is None
            else f"no machines of the installation {args.installation}"
        )
    for each in known:
        words = f"{reaper.describe_lease(each.row, now)}: {each.fate.why}"
        if each.row.key in left:
            print(f"still there  {words}; {left[each.row.key]}", file=sys.stderr)
        elif each in ends:
            print(f"{'would end' if args.dry_run else 'ended':11}  {words}")
        elif not args.quiet:
            print(
                f"{'kept':11}  {words}"
                + (
                    ""
                    if _left_alone(each.fate)
                    else f"; `recipe reap {each.row.key}` terminates it"
                )
            )
    return 5 if left else 0


async def _strange(
    only: str | None, root: Path, installation: str | None
) -> tuple[list[Lease], list[str]]:
    """Return machines that are missing in the ledger, and a message per provider that fails to answer.

    Only machines tagged by this installation, or by `installation` if given, are listed.
    """
    config = settings.load(root, os.environ)
    with Ledger.open(of_user(os.environ), read_only=True) as ledger:
        names = {row.driver for row in ledger.living_leases() if row.price}
    found: list[Lease] = []
    silent: list[str] = []
    for name in sorted({*names, *config.drivers} if only is None else {only}):
        try:
            driver = create_driver(name, config.driver(name), (), str(home(root, os.environ)))
        except CannotRun:
            continue  # it has no lease in the ledger, or `end_leases` reports the problem
        except Invalid as error:
            if rents(
                name
            ):  # the user's own servers have no tags, and may have no hosts except a stack's head
                silent.append(f"cannot list the machines of this installation at {name}: {error}")
            continue
        try:
            has_marks = installation is None or driver.look_for(installation)
            if driver.traits.priced and has_marks:
                with Ledger.open(of_user(os.environ)) as ledger:
                    found += await Leases(driver, name, ledger, "", str(root)).find_strangers()
        except DriverError as error:
            silent.append(f"cannot list the machines of this installation at {name}: {error}")
        finally:
            await driver.aclose()
    return found, silent


def _enter_in_ledger(args: argparse.Namespace, strange: Sequence[Lease]) -> list[Lease]:
    """Add untracked machines to the ledger, and return their leases.

    These are the machines of `--adopt` (with `--installation`, of the given keys), or with
    `--unknown` all of them, for termination. Raises NotFound, Invalid.
    """
    named = [args.adopt] if args.installation is None else args.keys
    chosen = [lease for lease in strange if args.unknown or lease.key in named]
    if args.adopt and not chosen:
        known = [lease.key for lease in strange]
        raise NotFound(
            f"no untracked machine {args.adopt}",
            fix=did_you_mean(args.adopt, known)
            or "list the untracked machines with `recipe reap -n`",
        )
    if args.dry_run or not chosen:
        return []
    if args.unknown and not _ask_to_end(
        args, [reaper.describe_stranger(lease, args.installation) for lease in chosen], "--unknown"
    ):
        return []
    with Ledger.open(of_user(os.environ)) as ledger:
        for lease in chosen:
            reaper.add_stranger(ledger, lease, os.path.abspath(args.workspace))
    return chosen


def _ask_to_end(args: argparse.Namespace, lines: Sequence[str], option: str) -> bool:
    """Ask the user to confirm the termination, unless `--yes`.  Raises Invalid without a terminal."""
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
    ends = [each for each in known if (each.fate.end and not args.keys) or each.row.key in keys]
    dead = [each for each in known if args.dead and each not in ends and not _left_alone(each.fate)]
    if (
        dead
        and not args.dry_run
        and not _ask_to_end(
            args, [reaper.describe_lease(each.row, time.time()) for each in dead], "--dead"
        )
    ):
        dead = []
    return [*ends, *dead]


def _left_alone(fate: reaper.Fate) -> bool:
    """Return True if a run uses the lease or a stack keeps it, so that `--dead` must spare it."""
    return fate.reason in ("at-work", "kept")


def _as_json(
    each: OpenLease, ends: Sequence[OpenLease], left: dict[str, str], dry: bool
) -> dict[str, object]:
    row = each.row
    done = (
        "still there"
        if row.key in left
        else "kept"
        if each not in ends
        else "would end"
        if dry
        else "ended"
    )
    facts = {
        name: getattr(row, name)
        for name in ("key", "driver", "run", "workspace", "state", "price", "asked", "until")
    }
    return {**facts, "done": done, "why": left.get(row.key, each.fate.why)}
