"""Decide about the leases of runs without a worker, and release them.  Leases of live runs and of resumable runs stay.

Automatic releases cover pending releases, leases past their end, leases of finished runs, and free leases of dead runs, because a free release
ends no job.  A paid machine of a dead run is only reported, because a training may still run there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from drivers.base import DriverError, Lease

from ...errors import NotFound, RecipeError
from ...storage.records.ledger import LeaseRow, Ledger, NotOurs, of_user, of_workspace
from ...storage.records.runs import is_over
from ...storage.records.store import Store, home
from ...storage.workspace import Workspace
from .budget import TERM
from .kept import KeptLeases
from .leases import OVERDUE, Leases, create_driver, to_stored
from .several import alternatives

RunStatus: TypeAlias = Literal["live", "over", "dead", "gone", "never"]
"""Status of a run.

In order: executing or about to be submitted; finished; without a worker; unknown to its workspace; never submitted, with a free lease.
"""

Reason: TypeAlias = Literal[
    "kept", "overdue", "at-work", "releasing", "over", "dead", "never", "unknown"
]
WORDS: Final[Mapping[Reason, str]] = {
    "kept": "kept for the stack",
    "overdue": OVERDUE,
    "at-work": "its run is running",
    "releasing": "release in progress",
    "over": "its run has finished",
    "dead": "its run lost its worker",
    "never": "its run never started",
    "unknown": "its run is unknown in its workspace",
}


class Fate(NamedTuple):
    """The decision about a lease."""

    end: bool
    reason: Reason
    more: str = ""

    @property
    def why(self) -> str:
        """The reason as text."""
        return WORDS[self.reason] + self.more


def decide_fate(row: LeaseRow, run_status: RunStatus, now: float) -> Fate:
    """Decide whether a lease is released automatically, and give the reason."""
    if row.kept and row.state != "RELEASING":
        return Fate(False, "kept", f" {row.stack}")
    if row.until <= now:
        return Fate(True, "overdue")
    if row.machine and not row.run and row.state != "RELEASING":
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.until))
        return Fate(False, "kept", f" {row.stack}, until {until}")
    if run_status == "live":
        return Fate(False, "at-work")
    if row.state == "RELEASING":
        return Fate(True, "releasing")
    if run_status == "over":
        return Fate(True, "over")
    if run_status == "dead":
        return Fate(not row.price, "dead")
    return Fate(True, "never") if run_status == "never" else Fate(False, "unknown")


def find_run_status(row: LeaseRow, environ: Mapping[str, str]) -> RunStatus:
    """Return the status of a lease's run from its workspace.  With runs in a database, `gone` includes runs that are not submitted yet."""
    root = home(Path(row.workspace), environ)
    try:
        with Store.open(
            root, read_only=True, shared=environ.get("RECIPE_RUNS", ""), workspace=row.workspace
        ) as store:
            try:
                found = store.runs.get(row.run)
            except NotFound:
                found = None
            if store.runs.live(row.run):
                return "live"
            if found is None:
                return "gone" if row.price or environ.get("RECIPE_RUNS") else "never"
            return "over" if is_over(found, store.runs.tallies([row.run])[row.run]) else "dead"
    except RecipeError:
        return "gone"


def judge_leases(
    rows: Iterable[LeaseRow], environ: Mapping[str, str]
) -> list[tuple[LeaseRow, Fate]]:
    """Return each lease with its fate."""
    now = time.time()
    return [(row, decide_fate(row, find_run_status(row, environ), now)) for row in rows]


async def release_orphan(leases: Leases, row: LeaseRow, why: str) -> str:
    """Release a lease of another process.  Returns why it still exists; empty if its end is confirmed."""
    try:
        leases = leases.of_driver(row.driver)
        taken = leases.ledger.take(row, leases.holder)
        return "" if await leases.release(taken, why) else "the provider has not terminated it yet"
    except NotOurs:
        return ""  # another reaper was faster
    except DriverError as error:
        return str(error)


async def release_leftovers(leases: Leases, environ: Mapping[str, str]) -> list[str]:
    """Release leftover leases of the same driver at the start of a run.  Returns messages about the others."""
    said = []
    for row, found in judge_leases(leases.ledger.living_leases(), environ):
        ends, why = found.end, found.why
        if row.run == leases.run or found.reason == "kept":
            continue
        ours, tell = (
            row.driver in leases.names and row.stack == leases.stack,
            bool(row.price),
        )  # another stack may use another account
        if (
            ours
            and row.lease
            and found.reason in ("dead", "unknown")
            and leases.driver.traits.allocates
        ):
            tell = await leases.is_listed(
                row
            )  # a release would end its jobs, and the allocation ends itself when idle
            ends = not tell
        if ends and ours:
            if left := await release_orphan(leases, row, why):
                said.append(f"cannot release the machine {row.key} of {row.driver}: {left}")
        elif tell and found.reason != "at-work":
            said.append(
                f"{describe_lease(row, time.time())}: {why}; left running; terminate it with `recipe reap {row.key}`"
            )
    if leases.driver.traits.priced:
        with suppress(DriverError):  # the run itself reports the error
            said += [
                f"{describe_stranger(lease)}; add it to the ledger with `recipe reap --adopt {lease.key}`"
                for lease in await leases.find_strangers()
            ]
    return said


def add_stranger(ledger: Ledger, lease: Lease, workspace: str) -> None:
    """Add an unknown machine tagged by this installation to the ledger, as a lease without a run.  It stays until a user terminates it by name."""
    now = time.time()
    offer: dict[str, object] = {"driver": lease.driver, "id": lease.id, "price": lease.price}
    until = now + TERM.total_seconds()
    row = LeaseRow(
        lease.key,
        lease.driver,
        "",
        workspace,
        {},
        "recipe reap",
        "ASKED",
        offer,
        until,
        lease.price,
        asked=now,
    )
    ledger.ask(row)
    ledger.move(row, "COMING", lease=to_stored(lease), reason="found at the provider")


def describe_stranger(lease: Lease, installation: str | None = None) -> str:
    """Describe a machine without a lease in the ledger, tagged by this or another installation."""
    cost = f"${24 * lease.price:.2f} a day" if lease.price else "cost unknown"
    mark = "this installation" if installation is None else f"the installation {installation}"
    return f"{lease.driver} {lease.key} (machine {lease.id}) of {mark} has no lease in the ledger: {cost}"


def settle(name: str, hosts: Sequence[str], ws: Workspace, stack: str) -> list[str]:
    """Run `release_leftovers` for a run with nothing to execute, on a stack if one is named.  Creates no driver if there are no leases."""
    said: list[str] = []
    if several := alternatives(ws.config, name):
        return [words for each in several for words in settle(each, hosts, ws, stack)]
    for path in (of_user(ws.environ), of_workspace(ws.home)):
        with Ledger.open(path, read_only=True) as ledger:
            known = ledger.living_leases(name)
        if known:
            driver = create_driver(name, ws.config.driver(name), hosts, str(ws.home))
            with Ledger.open(path) as ledger:
                leases = KeptLeases(driver, name, ledger, "", str(ws.root))
                leases.stack = ws.config.stack(stack).id if stack else ""
                said += asyncio.run(_tidy_and_close(leases, ws.environ))
    return said


async def _tidy_and_close(leases: Leases, environ: Mapping[str, str]) -> list[str]:
    try:
        return await release_leftovers(leases, environ)
    finally:
        await leases.driver.aclose()


def describe_lease(row: LeaseRow, now: float) -> str:
    """Describe a lease: machine, run and cost."""
    if row.kept:
        hours = max(0.0, now - row.asked) / 3600
        return f"{row.driver} {row.key} (machine {row.lease.get('id', '?')}), disk ${24 * row.price:.2f} a day, ${row.price * hours:.2f} so far"
    hours = max(0.0, now - (now if row.paid_from is None else row.paid_from)) / 3600
    cost = (
        f"${row.price:.2f} an hour, ${row.price * hours:.2f} so far"
        if row.price
        else "costs nothing"
    )
    return f"{row.driver} {row.key} of run {row.run} in {row.workspace}, {cost}"
