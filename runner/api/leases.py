"""List and end leases: a user's rented machines, and a workspace's unpaid slots."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from drivers.base import Driver

from .. import settings
from ..errors import CannotRun, NotFound, RecipeError, did_you_mean
from ..hosts.renting import reaper
from ..hosts.renting.leases import create_driver
from ..hosts.renting.stack_leases import StackLeases
from ..storage.records.ledger import LeaseRow, Ledger, of_user, of_workspace
from ..storage.records.store import home
from .values import LAST, Facts, moment


class OpenLease(NamedTuple):
    """A lease that has not ended, with its next action and the path of its ledger."""

    row: LeaseRow
    fate: reaper.Fate
    path: Path


def open_leases(
    root: Path, environ: Mapping[str, str], driver: str | None = None
) -> list[OpenLease]:
    """Return the active leases from the ledgers of the user and of this workspace.

    With `driver`, return the leases of this driver only.
    """
    found = []
    for path in (of_user(environ), of_workspace(home(root, environ))):
        with Ledger.open(path, read_only=True) as ledger:
            rows = ledger.living_leases(driver)
        found += [OpenLease(row, fate, path) for row, fate in reaper.judge_leases(rows, environ)]
    return found


def list_leases(root: Path, environ: Mapping[str, str]) -> list[Facts]:
    """List the active leases as JSON-compatible mappings, with their cost so far in US dollars."""
    found: list[Facts] = []
    for path in (of_user(environ), of_workspace(home(root, environ))):
        with Ledger.open(path, read_only=True) as ledger:
            rows = ledger.living_leases()
            noted = ledger.costs([row.key for row in rows])
        for row, fate in reaper.judge_leases(rows, environ):
            spent = noted[row.key].usd if row.key in noted else 0.0
            found.append(_lease_facts(row, fate, max(spent, _accrued_cost(row)), root))
    return found


def _lease_facts(row: LeaseRow, fate: reaper.Fate, usd: float, root: Path) -> Facts:
    gpus, gpu = row.gpus
    until = moment(row.until) if row.until < LAST else None
    return {
        "key": row.key,
        "provider": row.driver,
        "run": row.run,
        "here": row.workspace == str(root),
        "state": row.state,
        "gpus": gpus,
        "gpu": gpu,
        "since": moment(row.up or row.asked),
        "until": until,
        "usd_an_hour": row.price,
        "usd": usd,
        "used": fate.reason,
        "why": fate.why,
        "stack": row.stack.partition(" of ")[0],
    }


def _accrued_cost(row: LeaseRow) -> float:
    """Return the cost of a lease until now, computed from its hourly price.

    The cost in the ledger is updated only occasionally.
    """
    if row.paid_from is None:
        return 0.0
    return row.price * (time.time() - row.paid_from) / 3600


def find_endable_lease(known: Sequence[OpenLease], key: str) -> OpenLease:
    """Return the lease `key` if it may be ended.

    Raises NotFound, and CannotRun if a run or a stack uses the lease.
    """
    by_key = {each.row.key: each for each in known}
    if key not in by_key:
        fix = did_you_mean(key, by_key) or "list the machines with `recipe reap -n`"
        raise NotFound(f"no lease {key}", fix=fix)
    found = by_key[key]
    if found.row.kept and not found.fate.end:
        words = f"{key} is the persistent machine of the stack {found.row.stack}"
        name = found.row.stack.partition(" ")[0]
        raise CannotRun(words, fix=f"terminate it with `recipe stack down {name}`")
    if found.fate.reason == "at-work":
        words = f"the run {found.row.run} is using the machine {key}"
        raise CannotRun(
            words,
            fix=f"cancel the run and terminate the machine with `recipe cancel {found.row.run}`",
        )
    return found


def end_lease(root: Path, environ: Mapping[str, str], key: str) -> str:
    """Release the unused machine of lease `key`. Return "", or the reason if the release failed.

    Raises NotFound, CannotRun.
    """
    found = find_endable_lease(open_leases(root, environ), key)
    return asyncio.run(end_leases([found], root, environ)).get(key, "")


async def end_leases(
    ends: Sequence[OpenLease], root: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """Release the machines of these leases. Return the reasons of failures by lease key."""
    left: dict[str, str] = {}
    for row, fate, path in ends:
        try:
            driver = _driver(row, root, environ)
            with Ledger.open(path) as ledger:
                leases = StackLeases(driver, row.driver, ledger, row.run, row.workspace)
                words = await reaper.release_orphan(leases, row, fate.why)
                if words:
                    left[row.key] = words
            await driver.aclose()
        except RecipeError as error:
            left[row.key] = str(error)
    return left


def _driver(row: LeaseRow, root: Path, environ: Mapping[str, str]) -> Driver:
    """Return the driver of a lease, configured with the settings of the lease's workspace.

    If that workspace no longer exists, use the settings of `root`. Raises RecipeError.
    """
    if os.path.isdir(row.workspace):
        root = Path(row.workspace)
    else:
        root = Path(os.path.abspath(root))
    config, stack = settings.load(root, environ), row.stack.partition(" of ")[0]
    if stack in config.stacks:
        config = config.on(stack)
    return create_driver(row.driver, config.driver(row.driver), (), str(home(root, environ)))
