"""The machines that are rented, of all workspaces of a user, and the places that a workspace has at no cost: what there are, and their end."""

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
from ..hosts.renting.kept import KeptLeases
from ..hosts.renting.leases import driver_of
from ..storage.records.ledger import LeaseRow, Ledger, of_user, of_workspace
from ..storage.records.store import home
from .values import LAST, Facts, moment


class Known(NamedTuple):
    """A lease that is not gone, what becomes of it by itself, and the ledger that it stands in."""

    row: LeaseRow
    fate: reaper.Fate
    path: Path


def known_leases(root: Path, environ: Mapping[str, str], driver: str | None = None) -> list[Known]:
    """Return every lease that is not gone: of the user's ledger, and of this workspace's; of one driver, if it is named."""
    found = []
    for path in (of_user(environ), of_workspace(home(root, environ))):
        with Ledger.open(path, read_only=True) as ledger:
            rows = ledger.living_leases(driver)
        found += [Known(row, fate, path) for row, fate in reaper.judge_leases(rows, environ)]
    return found


def list_leases(root: Path, environ: Mapping[str, str]) -> list[Facts]:
    """Return the leases that are not gone, with what each has cost so far in US dollars."""
    found: list[Facts] = []
    for path in (of_user(environ), of_workspace(home(root, environ))):
        with Ledger.open(path, read_only=True) as ledger:
            rows = ledger.living_leases()
            noted = ledger.costs([row.key for row in rows])
        for row, fate in reaper.judge_leases(rows, environ):
            spent = noted[row.key].usd if row.key in noted else 0.0
            found.append(_shown(row, fate, max(spent, _accrued(row)), root))
    return found


def _shown(row: LeaseRow, fate: reaper.Fate, usd: float, root: Path) -> Facts:
    gpus, gpu = gpus_of(row)
    return {
        "key": row.key,
        "provider": row.driver,
        "run": row.run,
        "here": row.workspace == str(root),
        "state": row.state,
        "gpus": gpus,
        "gpu": gpu,
        "since": moment(row.up or row.asked),
        "until": moment(row.until) if row.until < LAST else None,
        "usd_an_hour": row.price,
        "usd": usd,
        "used": fate.reason,
        "why": fate.why,
        "stack": row.stack.partition(" of ")[0],
    }


def _accrued(row: LeaseRow) -> float:
    """What a lease has cost by its price until now: the ledger notes it only at times."""
    return row.price * (time.time() - row.paid_from) / 3600 if row.paid_from is not None else 0.0


def gpus_of(row: LeaseRow) -> tuple[int, str]:
    """Return how many GPUs a lease has, and which; 0 and empty if its offer did not say."""
    have = row.offer.get("resources")
    have = have if isinstance(have, dict) else {}
    count, name = have.get("gpus"), have.get("gpu")
    return count if isinstance(count, int) else 0, str(name or "")


def lease_to_end(known: Sequence[Known], key: str) -> Known:
    """Return the lease of a key, which may be ended.  Raises NotFound; CannotRun if a run is at work on it, or a stack keeps it."""
    by_key = {each.row.key: each for each in known}
    if key not in by_key:
        fix = did_you_mean(key, by_key) or "list the leases with `recipe reap -n`"
        raise NotFound(f"no lease {key}", fix=fix)
    found = by_key[key]
    if found.row.kept and not found.fate.end:
        words = f"the lease {key} is the persistent machine of the stack {found.row.stack}"
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
    """End the lease of a key, on which no run is at work, for good.  Answers why it is still there; empty when it is proved gone.

    Raises NotFound, CannotRun.
    """
    found = lease_to_end(known_leases(root, environ), key)
    return asyncio.run(end_leases([found], root, environ)).get(key, "")


async def end_leases(
    ends: Sequence[Known], root: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """End leases for good.  Answers which are still there, by key, and why."""
    left: dict[str, str] = {}
    for row, fate, path in ends:
        try:
            driver = _driver(row, root, environ)
            with Ledger.open(path) as ledger:
                leases = KeptLeases(driver, row.driver, ledger, row.run, row.workspace)
                if words := await reaper.end(leases, row, fate.why):
                    left[row.key] = words
            await driver.aclose()
        except RecipeError as error:
            left[row.key] = str(error)
    return left


def _driver(row: LeaseRow, root: Path, environ: Mapping[str, str]) -> Driver:
    """The driver of a lease, by the settings of its workspace, or, where that is no more, of this one.  Raises RecipeError."""
    root = Path(row.workspace if os.path.isdir(row.workspace) else os.path.abspath(root))
    config, stack = settings.load(root, environ), row.stack.partition(" of ")[0]
    config = config.on(stack) if stack in config.stacks else config
    return driver_of(row.driver, config.driver(row.driver), (), str(home(root, environ)))
