"""Decide about the leases of runs without a worker, and release them.

Leases of live runs and of resumable runs stay.

Automatic releases cover pending releases, leases past their end, leases of finished runs, and free
leases of dead runs.  A paid machine of a dead run is only reported, because a training may still
run there.  The same holds for an allocation that its provider still lists, because its release
would end its jobs.
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
from .any_driver import alternatives
from .budget import TERM
from .leases import OVERDUE, Leases, create_driver, to_stored
from .stack_leases import StackLeases

RunStatus: TypeAlias = Literal["live", "over", "dead", "gone", "never"]
"""Status of a run.

A `live` run is executing or about to be submitted, an `over` run has finished, and a `dead` run has
no worker. A `gone` run is unknown to its workspace.  A `never` run is unknown too, but its lease is
free, so it was never submitted.
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
    """Whether the lease is released automatically."""
    reason: Reason
    more: str = ""
    """Details that follow the text of the reason."""

    @property
    def why(self) -> str:
        """The reason as text."""
        return WORDS[self.reason] + self.more


def decide_fate(row: LeaseRow, run_status: RunStatus, now: float) -> Fate:
    """Decide whether a lease is released automatically, and give the reason."""
    is_releasing = row.state == "RELEASING"
    if row.kept and not is_releasing:
        return Fate(False, "kept", f" {row.stack}")
    if row.until <= now:
        return Fate(True, "overdue")
    if row.machine and not row.run and not is_releasing:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.until))
        return Fate(False, "kept", f" {row.stack}, until {until}")
    if is_releasing and run_status != "live":
        return Fate(True, "releasing")
    fates = _PAID_FATES if row.price else _FREE_FATES
    return fates[run_status]


_FREE_FATES: Final[Mapping[RunStatus, Fate]] = {
    "live": Fate(False, "at-work"),
    "over": Fate(True, "over"),
    "dead": Fate(True, "dead"),
    "gone": Fate(False, "unknown"),
    "never": Fate(True, "never"),
}
_PAID_FATES: Final[Mapping[RunStatus, Fate]] = {**_FREE_FATES, "dead": Fate(False, "dead")}


def find_run_status(row: LeaseRow, environ: Mapping[str, str]) -> RunStatus:
    """Return the status of a lease's run from its workspace.

    With runs in a database, `gone` includes runs that are not submitted yet.
    """
    root = home(Path(row.workspace), environ)
    shared = environ.get("RECIPE_RUNS", "")
    try:
        with Store.open(root, read_only=True, shared=shared, workspace=row.workspace) as store:
            return _read_run_status(store, row, bool(shared))
    except RecipeError:
        return "gone"


def _read_run_status(store: Store, row: LeaseRow, shared: bool) -> RunStatus:
    try:
        run = store.runs.get(row.run)
    except NotFound:
        run = None
    if store.runs.live(row.run):
        return "live"
    if run is None:
        return "gone" if row.price or shared else "never"
    return "over" if is_over(run, store.runs.tallies([row.run])[row.run]) else "dead"


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
    """Release leftover leases of the drivers and the stack of `leases`; return messages about other
    leases, failures and unknown machines.

    Raises DriverError if the provider cannot list the allocation of a dead run.
    """
    said = []
    for row, fate in judge_leases(leases.ledger.living_leases(), environ):
        if row.run == leases.run or fate.reason == "kept":
            continue
        # Another stack may use another account.
        is_ours = row.driver in leases.names and row.stack == leases.stack
        ends, is_reported = fate.end, bool(row.price)
        may_have_jobs = row.lease and fate.reason in ("dead", "unknown")
        if is_ours and may_have_jobs and leases.driver.traits.allocates:
            # A release would end the jobs of an allocation, and an idle allocation ends itself.
            is_reported = await leases.is_listed(row)
            ends = not is_reported
        if ends and is_ours:
            fault = await release_orphan(leases, row, fate.why)
            if fault:
                said.append(f"cannot release the machine {row.key} of {row.driver}: {fault}")
        elif is_reported and fate.reason != "at-work":
            said.append(
                f"{describe_lease(row, time.time())}: {fate.why}; left running; terminate it with `recipe reap {row.key}`"
            )
    if leases.driver.traits.priced:
        with suppress(DriverError):  # the run itself reports the error
            for lease in await leases.find_strangers():
                said.append(
                    f"{describe_stranger(lease)}; add it to the ledger with `recipe reap --adopt {lease.key}`"
                )
    return said


def add_stranger(ledger: Ledger, lease: Lease, workspace: str) -> None:
    """Add an unknown machine of this installation to the ledger, as a lease without a run for one
    term.

    Such a lease is not released before its end, unless a user terminates the machine by name.
    """
    now = time.time()
    row = LeaseRow(
        lease.key,
        lease.driver,
        run="",
        workspace=workspace,
        need={},
        holder="recipe reap",
        state="ASKED",
        offer={"driver": lease.driver, "id": lease.id, "price": lease.price},
        until=now + TERM.total_seconds(),
        price=lease.price,
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
    """Run `release_leftovers` for a run with nothing to execute, on a stack if `stack` is not
    empty; return the messages.

    Without leases, no driver is created.
    """
    said: list[str] = []
    several = alternatives(ws.config, name)
    if several:
        for each in several:
            said += settle(each, hosts, ws, stack)
        return said
    for path in (of_user(ws.environ), of_workspace(ws.home)):
        with Ledger.open(path, read_only=True) as ledger:
            has_leases = bool(ledger.living_leases(name))
        if has_leases:
            driver = create_driver(name, ws.config.driver(name), hosts, str(ws.home))
            with Ledger.open(path) as ledger:
                leases = StackLeases(driver, name, ledger, "", str(ws.root))
                leases.stack = ws.config.stack(stack).id if stack else ""
                said += asyncio.run(_release_and_close(leases, ws.environ))
    return said


async def _release_and_close(leases: Leases, environ: Mapping[str, str]) -> list[str]:
    try:
        return await release_leftovers(leases, environ)
    finally:
        await leases.driver.aclose()


def describe_lease(row: LeaseRow, now: float) -> str:
    """Describe the machine, the run and the cost of a lease."""
    if row.kept:
        hours = max(0.0, now - row.asked) / 3600
        return f"{row.driver} {row.key} (machine {row.lease.get('id', '?')}), disk ${24 * row.price:.2f} a day, ${row.price * hours:.2f} so far"
    cost = "costs nothing"
    if row.price:
        began = now if row.paid_from is None else row.paid_from
        hours = max(0.0, now - began) / 3600
        cost = f"${row.price:.2f} an hour, ${row.price * hours:.2f} so far"
    return f"{row.driver} {row.key} of run {row.run} in {row.workspace}, {cost}"
