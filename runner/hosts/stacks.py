"""Stacks: places to run by name.  One run at a time uses a stack; the others wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ..digest import of_value
from ..errors import Busy, CannotRun, Infrastructure
from ..storage.locks import Lock, Locks
from ..storage.records.ledger import LeaseRow, Ledger, of_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from drivers.base import Host

    from ..settings import Stack
    from ..storage.buckets.bucket import Bucket
    from ..storage.workspace import Workspace
    from .renting.kept import KeptLeases

LOOK: Final = 0.2
"""Seconds between two looks whether a stack is free."""


def alone(
    stack: Stack,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    leave: Callable[[], bool] = lambda: False,
) -> Lock | None:
    """The stack, once no other run of this user has it; None when `leave` answers True meanwhile.

    Raises Busy where it is another's and `queue` is false.
    """
    locks, name = Locks(of_user(environ).parent / "stacks"), of_value("stack", stack.id)
    if (held := locks.try_hold(name)) is not None:
        return held
    words = f"{locks.holder(name)} uses the stack {stack.name}"
    if not stack.queue:
        raise Busy(words, fix="run again when it is over, take another stack, or set queue = true")
    say(f"{words}: this run waits for it")
    while not leave():
        if (held := locks.try_hold(name)) is not None:
            return held
        time.sleep(LOOK)
    return None


@contextmanager
def hold_stack(stack: Stack, environ: Mapping[str, str]) -> Iterator[None]:
    """The stack, for as long as the block lasts.  Raises Busy while a run has it."""
    lock = alone(replace(stack, queue=False), environ, lambda _words: None)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


class StackState(NamedTuple):
    """What is known of the machine of a stack.  `stands` is the provider's word; empty where it was not asked."""

    machine: LeaseRow | None
    uses: Sequence[LeaseRow] = ()
    stands: str = ""


@asynccontextmanager
async def open_kept_leases(ws: Workspace, stack: Stack) -> AsyncIterator[KeptLeases]:
    """The leases of a stack whose machine is kept, for no run.  Raises CannotRun for a stack that keeps none."""

    from .renting.kept import KeptLeases
    from .renting.leases import driver_of
    from .renting.needs import least_of

    if not stack.keep:
        raise CannotRun(
            f"the stack {stack.name} keeps no machine: each run rents its own",
            fix='add keep = "stopped" to it',
        )
    ws.on(stack.name)
    driver = driver_of(stack.driver, ws.config.driver(stack.driver), (), str(ws.home))
    with Ledger.open(of_user(ws.environ)) as ledger:
        leases = KeptLeases(driver, stack.driver, ledger, "", str(ws.root))
        leases.budget.limits = ws.config.limits
        leases.settings = ws.config.driver(stack.driver)
        leases.budget.least = least_of(leases.settings)
        leases.of(stack)
        try:
            yield leases
        finally:
            await driver.aclose()


async def state_of(leases: KeptLeases) -> StackState:
    """The machine of a stack, and what its provider says of it.  Raises DriverError."""
    if (machine := leases.machine()) is None:
        return StackState(None)
    return StackState(
        machine, leases.uses(machine), await leases.stands(machine) if machine.lease else ""
    )


async def start(leases: KeptLeases, say: Callable[[str], None]) -> LeaseRow:
    """Have the machine of a stack run, for no run, until its time is over; it is made where there is none.

    Raises Infrastructure when it cannot be had, Busy when a run has it, CannotRun, DriverError.
    """
    from drivers.base import HostLost, Need, Wish

    from .connect import measure
    from .renting.leases import need_of, offer_of

    leases.free()
    need = Need(gpus=1)
    for offer in await leases.offers(Wish(need)):
        say(f"{offer.id} for ${offer.price:.2f} an hour")
        if (row := await leases.ask(need, offer)) is None:
            continue
        try:
            row, hosts = await leases.up(row)
            await measure(
                offer_of(row),
                need_of(row),
                hosts[0],
                leases.driver.traits.image,
                str(leases.settings.get("cuda", "")),
            )
            leases.measured(row)
            return row
        except HostLost as error:
            say(f"{offer.id}: {error}")
            await leases.close({row.key}, str(error))
    raise Infrastructure(
        f"{leases.name} has no machine for the stack now",
        fix="`recipe offers --stack NAME` shows what there is, and why not",
    )


async def ensure(ws: Workspace, stack: Stack, leases: KeptLeases) -> list[str]:
    """Make what the machine of a stack needs beside itself, and the bucket of its store, where they are missing.  Answers what was made."""
    made = [*await leases.call(leases.driver.ensure)]
    if (store := _bucket(ws, stack)) is not None and await asyncio.to_thread(store.make):
        made.append(f"the store {store.url}")
    return made


async def drop(ws: Workspace, stack: Stack, leases: KeptLeases) -> list[str]:
    """Remove what `ensure` made, but for results.  Answers what was removed and what stays."""
    dropped = [*await leases.call(leases.driver.drop)]
    store = _bucket(ws, stack)
    return (
        dropped
        if store is None
        else [*dropped, f"the store {store.url} stays, with the results in it"]
    )


def _bucket(ws: Workspace, stack: Stack) -> Bucket | None:
    """The bucket or folder of the store that runs of a stack push to."""
    if not stack.store:
        return None
    from ..storage.buckets import opening as buckets

    named = ws.config.store_named(stack.store)
    assert named is not None  # it has a name
    return buckets.open(named, ws.own)


def program(ws: Workspace, stack: Stack) -> str:
    """What the stack rents as a program for Pulumi.  Asks no provider.  Raises CannotRun for a driver that has none, Invalid."""
    from drivers.base import Rejected

    from ..language.units import duration
    from .renting.leases import driver_of
    from .renting.several import alternatives

    ws.on(stack.name)
    given = ws.config.driver(stack.driver)
    driver = None
    if not alternatives(ws.config, stack.driver):
        driver = driver_of(stack.driver, given, (), str(ws.home))
    if driver is None or not driver.traits.exports:
        raise CannotRun(
            f"what {stack.driver} rents cannot be written as a Pulumi program",
            fix="a stack of the driver gcp can",
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
            fix="`recipe offers --stack NAME` shows what there is",
        ) from error


async def stop(leases: KeptLeases, reason: str) -> bool:
    """Have the machine of a stack stand still.  True once that is proved.  Raises DriverError."""
    machine = leases.machine()
    stopped = True
    for row in leases.uses(machine) if machine is not None else ():
        stopped &= await leases.release(leases.ledger.take(row, leases.holder), reason)
    return stopped


async def down(leases: KeptLeases) -> bool:
    """End the machine of a stack, with its disk.  True once that is proved.  Raises DriverError."""
    if not await stop(leases, "the stack is taken down"):
        return False
    machine = leases.machine()
    return machine is None or await leases.release(
        leases.ledger.take(machine, leases.holder), "the stack is taken down"
    )


async def host(leases: KeptLeases) -> Host | None:
    """The machine of a stack, where it is up; else None.  Raises DriverError."""
    from .renting.leases import lease_of

    machine = leases.machine()
    found = (
        await leases.call(partial(leases.driver.hosts, lease_of(machine)))
        if machine is not None and machine.lease
        else None
    )
    return found[0] if found else None
