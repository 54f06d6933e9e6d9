"""Stacks: named places to run.  One run at a time uses a stack; other runs wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from drivers.base import Host, HostLost, Need, Rejected, Wish

from ..digest import of_value
from ..errors import Busy, CannotRun, Infrastructure
from ..language.units import duration
from ..storage.locks import Lock, Locks
from ..storage.records.ledger import LeaseRow, Ledger, of_user
from .renting.any_driver import alternatives
from .renting.leases import create_driver, lease_of, need_of, offer_of
from .renting.needs import min_seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..settings import Stack
    from ..storage.buckets.bucket import Bucket
    from ..storage.workspace import Workspace
    from .renting.stack_leases import StackLeases

LOOK: Final = 0.2
"""Seconds between two checks whether the stack is free."""


def wait_for_stack(
    stack: Stack,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    leave: Callable[[], bool] = lambda: False,
) -> Lock | None:
    """Wait until no other run of this user holds the stack, and lock it.

    Returns None if `leave` returns True while waiting.

    Raises Busy if another run holds the stack and `queue` is false.
    """
    locks, name = Locks(of_user(environ).parent / "stacks"), of_value("stack", stack.id)
    lock = locks.try_hold(name)
    if lock is not None:
        return lock
    reason = f"{locks.holder(name)} uses the stack {stack.name}"
    if not stack.queue:
        raise Busy(
            reason,
            fix="run again when that run has finished, choose another stack, or set `queue = true`",
        )
    say(f"{reason}: waiting for it")
    while not leave():
        lock = locks.try_hold(name)
        if lock is not None:
            return lock
        time.sleep(LOOK)
    return None


@contextmanager
def hold_stack(stack: Stack, environ: Mapping[str, str]) -> Iterator[None]:
    """Lock the stack for the duration of the block.  Raises Busy if a run holds it."""
    lock = wait_for_stack(replace(stack, queue=False), environ, lambda _words: None)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class StackState(NamedTuple):
    """The state of a stack's machine.

    `stands` is the provider's answer, empty if the provider was not asked.
    """

    machine: LeaseRow | None
    uses: Sequence[LeaseRow] = ()
    stands: str = ""


@asynccontextmanager
async def open_leases(ws: Workspace, stack: Stack) -> AsyncIterator[StackLeases]:
    """Open the leases of a stack with a persistent machine, outside of a run.

    Raises CannotRun if the stack has none.
    """

    from .renting.stack_leases import StackLeases

    if not stack.keep:
        raise CannotRun(
            f"the stack {stack.name} has no persistent machine: each run rents its own",
            fix='add `keep = "stopped"` to the stack',
        )
    ws.on(stack.name)
    driver = create_driver(stack.driver, ws.config.driver(stack.driver), (), str(ws.home))
    with Ledger.open(of_user(ws.environ)) as ledger:
        leases = StackLeases(driver, stack.driver, ledger, "", str(ws.root))
        leases.budget.limits = ws.config.limits
        leases.settings = ws.config.driver(stack.driver)
        leases.budget.min_seconds = min_seconds_of(leases.settings)
        leases.use_stack(stack)
        try:
            yield leases
        finally:
            await driver.aclose()


async def read_state(leases: StackLeases) -> StackState:
    """Return a stack's machine, its uses, and the provider's answer about it.

    Raises DriverError.
    """
    machine = leases.find_machine()
    if machine is None:
        return StackState(None)
    uses = leases.find_uses(machine)
    status = await leases.ask_status(machine) if machine.lease else ""
    return StackState(machine, uses, status)


async def start_machine(leases: StackLeases, say: Callable[[str], None]) -> LeaseRow:
    """Start the stack's machine outside of a run, until its time is over; rent it if necessary.

    Raises Infrastructure if no machine is available, Busy if a run uses the machine, CannotRun,
    DriverError.
    """
    from .connect import check_as_sold

    leases.require_free()
    need = Need(gpus=1)
    for offer in await leases.offers(Wish(need)):
        say(f"{offer.id} for ${offer.price:.2f} an hour")
        row = await leases.rent(need, offer)
        if row is None:
            continue
        try:
            row, hosts = await leases.wait_until_up(row)
            await check_as_sold(
                offer_of(row),
                need_of(row),
                hosts[0],
                leases.driver.traits.image,
                str(leases.settings.get("cuda", "")),
            )
            leases.mark_persistent(row)
            return row
        except HostLost as error:
            say(f"{offer.id}: {error}")
            await leases.close({row.key}, str(error))
    raise Infrastructure(
        f"{leases.name} has no machine for the stack now",
        fix="list the offers and the reasons with `recipe offers --stack NAME`",
    )


async def ensure(ws: Workspace, stack: Stack, leases: StackLeases) -> list[str]:
    """Create missing resources of a stack, such as networks, and its store's bucket.

    Returns descriptions of the new resources.
    """
    made = [*await leases.call(leases.driver.ensure)]
    store = _bucket(ws, stack)
    if store is not None and await asyncio.to_thread(store.make):
        made.append(f"the store {store.url}")
    return made


async def drop(ws: Workspace, stack: Stack, leases: StackLeases) -> list[str]:
    """Delete the resources that `ensure` created, except the store with its results.

    Returns descriptions of deleted and remaining resources.
    """
    dropped = [*await leases.call(leases.driver.drop)]
    store = _bucket(ws, stack)
    return (
        dropped
        if store is None
        else [*dropped, f"the shared store {store.url} and its results are kept"]
    )


def _bucket(ws: Workspace, stack: Stack) -> Bucket | None:
    """Return the bucket or directory of the stack's shared store."""
    if not stack.store:
        return None
    from ..storage.buckets import opening as buckets

    named = ws.config.store_named(stack.store)
    assert named is not None  # the settings check the name
    return buckets.open(named, ws.own)


def export_program(ws: Workspace, stack: Stack) -> str:
    """Return the stack's resources as a Pulumi program, without asking a provider.

    Raises CannotRun if the driver cannot export, Invalid.
    """
    ws.on(stack.name)
    given = ws.config.driver(stack.driver)
    driver = None
    if not alternatives(ws.config, stack.driver):
        driver = create_driver(stack.driver, given, (), str(ws.home))
    if driver is None or not driver.traits.exports:
        raise CannotRun(
            f"cannot export a stack of the driver {stack.driver} as a Pulumi program",
            fix="use a stack of the driver gcp",
        )
    store = ws.config.store_named(stack.store) if stack.store else None
    bucket = (
        store.url.removeprefix("gs://").partition("/")[0]
        if store is not None and store.url.startswith("gs://")
        else ""
    )
    seconds = (
        duration(stack.auto_stop) if stack.auto_stop else 3600.0 * float(given.get("term", 24))
    )
    try:
        return driver.program(
            stack.name,
            market=given.get("market", "on-demand"),
            keep=bool(stack.keep),
            seconds=int(seconds),
            bucket=bucket,
            nodes=max(1, stack.nodes),
        )
    except Rejected as error:
        raise CannotRun(
            f"the stack {stack.name}: {error}",
            fix="list the offers with `recipe offers --stack NAME`",
        ) from error


async def stop_machine(leases: StackLeases, reason: str) -> bool:
    """Stop the stack's machine.  Returns True once the stop is confirmed.  Raises DriverError."""
    machine = leases.find_machine()
    if machine is None:
        return True
    stopped = True
    for row in leases.find_uses(machine):
        stopped &= await leases.release(leases.ledger.take(row, leases.holder), reason)
    return stopped


async def terminate_machine(leases: StackLeases) -> bool:
    """Terminate the stack's machine and its disk.

    Returns True once the end is confirmed.  Raises DriverError.
    """
    if not await stop_machine(leases, "the stack was taken down"):
        return False
    machine = leases.find_machine()
    return machine is None or await leases.release(
        leases.ledger.take(machine, leases.holder), "the stack was taken down"
    )


async def find_host(leases: StackLeases) -> Host | None:
    """Return the stack's machine if it is up; otherwise None.  Raises DriverError."""
    machine = leases.find_machine()
    if machine is None or not machine.lease:
        return None
    hosts = await leases.call(partial(leases.driver.hosts, lease_of(machine)))
    return hosts[0] if hosts else None
