"""Leases on machines.  This module is the only caller of a driver's `acquire` and `release`.

Every rental has an intent, an effect, a record, and a proof.  The ledger row comes first, so that a
machine is known before it exists.  If the reply to an order is lost or unreadable, two listings are
searched before anything else is rented.  A lease is GONE only when nothing is billed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from drivers import load
from drivers.base import (
    Charge,
    Denied,
    Driver,
    DriverError,
    Host,
    HostLost,
    Lease,
    Need,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Resources,
    Traits,
    Unreachable,
    Unsure,
    Wish,
)

from ... import extensions
from ...errors import CannotRun, Infrastructure, Invalid, Problem
from ...failures import LeaseFailure
from ...logs import Log
from ...retry import OnRetry, nothing, retry_async
from ...storage.crash import crashpoint
from ...storage.records.ledger import LeaseRow, Ledger
from ..link.contact import LONG, SOON, retry_policy
from .budget import Budget
from .cooldowns import COOLDOWNS, account_digest, is_denied
from .money import RELEASE_SECONDS, committed_cost

_T = TypeVar("_T")
RENEW: Final = 3600.0
"""Seconds between two renewals of a lease."""
SLOW: Final = 600.0
"""Seconds after which a starting machine is reported as slow."""
OVERDUE: Final = "its rental period has ended"
"""Reason for the release of a machine past its end."""
LOST_AFTER: Final = "15 minutes"
"""Duration of `LONG` attempts to reach a host, in messages."""
RAISE_LIMIT: Final = "raise the limit, or use a preset that requires less"
REAP_OR_RAISE_LIMIT: Final = (
    "terminate the machine with `recipe reap {}`, then run again; or raise the limit"
)
PRICE_COUNTS: Final = (
    "its price counts toward the limit until the provider confirms the termination"
)
RECIPE_SETTINGS: Final = (
    "container_engine",
    "engine_args",
    "container_args",
    "idle",
    "market",
    "confirm",
    "least",
    "term",
    "secrets",
)
"""Settings in a driver's table that belong to recipe, unless the driver accepts them."""

_log = Log("leases")

OnChange: TypeAlias = Callable[[str, LeaseRow], None]
"""Called after each state change of a lease with the previous state and the new row."""


def create_driver(
    name: str, settings: Mapping[str, Any], hosts: Sequence[str], home: str, python: str = ""
) -> Driver:
    """Create a driver with these settings, overridden by `hosts` and `python`.

    Raises CannotRun, and Invalid for a wrong setting.
    """
    given = dict(settings)
    if hosts:
        given["hosts"] = list(hosts)
    if python:
        given["python"] = python
    if name == "loopback":
        given.setdefault("root", f"{home}/loopback")
    try:
        make = load(name, extensions.drivers(name))
        takes = inspect.signature(make).parameters
        # A driver need not take the settings of recipe itself, but an unknown setting is an error.
        ignored = set(RECIPE_SETTINGS) - set(takes)
        made: Driver = make(**{key: value for key, value in given.items() if key not in ignored})
    except TypeError as error:
        fix = "see `recipe config` and docs/remote-hosts.md"
        raise CannotRun(f"invalid settings of the driver {name}: {error}", fix=fix) from error
    except (NoCapacity, Rejected) as error:
        fix = f"correct `[drivers.{name}]` in the file that `recipe config` shows"
        if isinstance(error, NoCapacity):  # a location that the provider does not have
            raise Infrastructure(str(error), fix=fix) from error
        raise Invalid([Problem("driver-setting", str(error), fix=fix)]) from error
    except Denied as error:
        raise CannotRun(str(error)) from error
    if not isinstance(made, Driver):
        fix = "derive its class from drivers.base.Driver (see docs/adding-a-driver.md)"
        raise CannotRun(f"the driver {name} is a {type(made).__name__}, not a Driver", fix=fix)
    return made


def rents(name: str) -> bool:
    """Return whether a driver's machines cost money, as far as known without its settings."""
    traits: Traits = getattr(load(name, extensions.drivers(name)), "traits", Traits(priced=True))
    return traits.priced


async def _describe_vitals(driver: Driver, name: str, row: LeaseRow) -> str:
    """Return the provider's status of a machine as the end of a sentence."""
    said = ""
    with suppress(DriverError):
        said = await driver.vitals(lease_of(row))
    return f" ({name} says: {said})" if said else ""


class Leases:
    """The leases of one run from one driver.  `holder` identifies this process in the ledger."""

    def __init__(
        self,
        driver: Driver,
        name: str,
        ledger: Ledger,
        run: str,
        workspace: str,
        on_change: OnChange = lambda _before, _row: None,
    ) -> None:
        self.driver, self.name = driver, name
        self.ledger, self.run, self.workspace = ledger, run, workspace
        self.on_change = on_change
        self.budget = Budget(ledger, run, driver.traits.comes_up.total_seconds())
        self.stack = ""
        """The run's stack as stored in the ledger."""
        self.say: Callable[[str], None] = lambda _text: None
        self.settings: Mapping[str, object] = {}
        """Settings of the driver.

        If they change, a provider that denied an order is asked again.
        """
        self._reported_wait = ""
        """The driver's last reported reason for waiting."""
        self._reported_retry = False
        """Whether the run was told that an unreachable host is tried again."""
        self._releasing: dict[str, asyncio.Task[bool]] = {}
        """The release in progress of each lease, by key."""
        self.freed = asyncio.Event()
        """Set when a paid lease has ended: other leases of the run may use its remaining money."""
        self.holder = f"process {os.getpid()} {os.urandom(4).hex()}"

    @property
    def exclusions(self) -> Mapping[str, int]:
        """Number of offers excluded from the last answer, by reason."""
        return self.driver.excluded

    @property
    def names(self) -> Collection[str]:
        """Names of the drivers of these leases."""
        return (self.name,)

    def of_driver(self, _name: str) -> Leases:
        """Return the leases of one driver, if the run has several."""
        return self

    @property
    def _machine_limit(self) -> float:
        """Maximum number of machines of the user over all runs."""
        return self.budget.limits.get("machines", math.inf)

    @property
    def max_machines(self) -> float:
        """Maximum number of concurrent machines, regardless of other runs."""
        return min(self.driver.traits.hosts_at_once or math.inf, self._machine_limit)

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers for `wish`.  Raises DriverError."""
        return await self.call(partial(self.driver.offers, wish))

    async def rent(self, need: Need, offer: Offer, shares: int = 1) -> LeaseRow | None:
        """Rent an offer.  Returns a COMING lease, or None if the offer is no longer available.

        `shares` is the number of machines that share the run's remaining money.

        Raises DriverError, CannotRun if the money is too little, and Full while the user has the
        maximum number of machines of `[limits] machines`.
        """
        until = await self.await_funds_and_end(need, offer, shares)
        row = self.make_intent(need, offer, until)
        self._note(row)
        crashpoint("lease-intended")
        self.on_change("", row)
        return await self.order(row, until)

    def _note(self, *rows: LeaseRow) -> None:
        """Record intents in the ledger.

        Raises Full if the user has the maximum number of machines.
        """
        if math.isinf(self._machine_limit):
            self.ledger.ask(*rows)
        else:
            self.ledger.ask_within(self._machine_limit, *rows)

    async def await_funds_and_end(self, need: Need, offer: Offer, shares: int = 1) -> datetime:
        """Wait until the money covers a lease that starts now, and return its end.

        Raises CannotRun if it never does.

        A lease in release may cost its price up to its own end.  If such leases prevent or shorten
        the new lease, wait for the confirmation of their release, at most as long as a machine may
        take to start.
        """
        pending = await self._wait_for_releases(need, offer, shares)
        funds = self.budget.guaranteed_funds()
        shortage = self.budget.explain_shortage(need, offer, shares, funds)
        if shortage and pending:
            fix = REAP_OR_RAISE_LIMIT.format(pending[0].key)
            raise CannotRun(self._describe_unconfirmed(pending, shortage), fix=fix)
        if shortage:
            raise CannotRun(shortage, fix=RAISE_LIMIT)
        return self.budget.lease_end(_billed_price(offer), funds, shares)

    async def _wait_for_releases(self, need: Need, offer: Offer, shares: int) -> list[LeaseRow]:
        """Wait while pending releases prevent or shorten a new lease; return the releases that are
        still pending.

        Raises CannotRun if the money would not cover the new lease after all releases either.
        """
        budget, traits = self.budget, self.driver.traits
        gives_up = time.monotonic() + traits.comes_up.total_seconds()
        reported = False
        while pending := budget.pending_releases():
            shortage = budget.explain_shortage(need, offer, shares, budget.guaranteed_funds())
            if not shortage and not budget.shortens_lease(_billed_price(offer), shares):
                break
            shortage = budget.explain_shortage(need, offer, shares, budget.maximum_funds())
            if shortage:
                raise CannotRun(shortage, fix=RAISE_LIMIT)
            if time.monotonic() >= gives_up:
                break
            if not reported:
                reported = True
                self.say(f"waiting until {_display_names(pending)} is terminated: {PRICE_COUNTS}")
            await asyncio.sleep(traits.poll.total_seconds())
        return pending

    def _describe_unconfirmed(self, pending: Sequence[LeaseRow], shortage: str) -> str:
        """Return the error message for money that is reserved by pending releases."""
        minutes = self.driver.traits.comes_up.total_seconds() / 60
        now = time.time()
        most = sum(committed_cost(row.price, now, row.until) for row in pending)
        return (
            f"{self.name} has not terminated {_display_names(pending)} within {minutes:g} minutes, and until its "
            f"rental period ends, it may cost ${most:.4g} more: {shortage}"
        )

    def make_intent(self, need: Need, offer: Offer, until: datetime) -> LeaseRow:
        """Return the ledger row of a lease that is about to be requested."""
        return LeaseRow(
            key=os.urandom(8).hex(),
            driver=self.name,
            run=self.run,
            workspace=self.workspace,
            need=to_stored(need),
            holder=self.holder,
            state="ASKED",
            offer=to_stored(offer),
            until=until.timestamp(),
            price=offer.price,
            asked=time.time(),
            stack=self.stack,
        )

    async def order(self, row: LeaseRow, until: datetime) -> LeaseRow | None:
        """Order the machine of a recorded intent.

        Returns a COMING lease, or None if the offer is no longer available.

        Raises DriverError.
        """
        lease: Lease | None
        try:
            order = Order(offer_of(row), row.key, until, row.kept, need_of(row).image)
            lease = await retry_async(partial(self.driver.acquire, order), retry_policy(LONG))
        except (NoCapacity, Denied, Rejected) as error:
            await self._record_refusal(row, error)
            if isinstance(error, NoCapacity):
                return None
            raise
        except Unsure as error:
            lease = error.lease or await self._find(row)
        except DriverError:
            raise  # the order may not have arrived: the intent stays until two listings show no machine
        except Exception as error:  # an unreadable reply
            _log.error("the reply to the order %s cannot be read: %s", row.key, error)
            lease = await self._find(row)
        if lease is None:
            self._move(row, "GONE", reason="never rented: missing in two listings")
            return None
        crashpoint("lease-asked")
        row = self._move(row, "COMING", lease=to_stored(lease))
        crashpoint("lease-recorded")
        return row

    async def _record_refusal(self, row: LeaseRow, error: DriverError) -> None:
        """Record that an order was refused.

        If its machine exists all the same, release the machine.
        """
        if error.lease is not None:
            row = self._move(row, "COMING", lease=to_stored(error.lease))
            await self.release(row, str(error))
        elif isinstance(error, Denied):
            account = account_digest(self.settings, await _read_account(self))
            self._move(row, "GONE", reason=str(error), failure=LeaseFailure.DENIED, account=account)
        else:
            self._move(row, "GONE", reason=f"not available: {error}", failure=LeaseFailure.TAKEN)

    async def wait_until_up(self, row: LeaseRow) -> tuple[LeaseRow, Sequence[Host]]:
        """Wait for the machines of a lease.

        If the machines are lost or do not start in time, release the lease and raise HostLost.
        """
        traits, began = self.driver.traits, time.monotonic()
        gives_up = began + traits.comes_up.total_seconds()
        may_be_slow = row.state == "COMING" and traits.priced
        while not (hosts := await self._ask_hosts(row)):
            if may_be_slow and time.monotonic() >= began + SLOW:
                may_be_slow = False
                await self._report_slow_start(row)
            if time.monotonic() > gives_up:
                await self._give_up_start(row)
            if self.driver.waits != self._reported_wait:
                self._reported_wait = self.driver.waits
                self.say(self._reported_wait)
            await asyncio.sleep(traits.poll.total_seconds())
        if row.state == "COMING":
            row = self._move(row, "UP")
            crashpoint("lease-up")
        return await self._apply_actual_price(row), hosts

    async def _report_slow_start(self, row: LeaseRow) -> None:
        status = await _describe_vitals(self.driver, self.name, row)
        reason = f"the machine has been starting for {SLOW / 60:g} minutes{status}"
        minutes = self.driver.traits.comes_up.total_seconds() / 60
        self.say(f"{self.name} {row.key}: {reason}; giving up after {minutes:g}")
        self.on_change("COMING", row._replace(reason=reason))

    async def _give_up_start(self, row: LeaseRow) -> NoReturn:
        """Release a lease whose machine did not start in time, and raise HostLost."""
        minutes = self.driver.traits.comes_up.total_seconds() / 60
        status = await _describe_vitals(self.driver, self.name, row)
        reason = f"the machine did not start within {minutes:g} minutes{status}"
        await self.release(row, reason, LeaseFailure.FAILED)
        raise HostLost(reason)

    async def _apply_actual_price(self, row: LeaseRow) -> LeaseRow:
        """Shorten a lease that costs more than offered, so that it does not cost more in total."""
        if not row.price or row.machine:
            return row
        price = self.driver.highest_price(lease_of(row))
        if price <= row.price:
            return row
        until = row.asked + (row.until - row.asked) * row.price / price
        row = self.ledger.reprice(row, price, until)
        if self.driver.traits.prolongs:
            end = datetime.fromtimestamp(row.until, UTC)
            # Without the provider's new end, the run still leaves the machine in time.
            with suppress(DriverError):
                await self.call(partial(self.driver.prolong, lease_of(row), end))
        return row

    async def _ask_hosts(self, row: LeaseRow) -> Sequence[Host] | None:
        """Return the machines of a lease; None while they start.  Raises HostLost if they are lost, after a release of the lease."""
        is_used = row.state == "UP" and not row.price  # a step of this run may be running there
        on_retry = self._report_retry if is_used else nothing
        try:
            return await self.call(partial(self.driver.hosts, lease_of(row)), LONG, on_retry)
        except Unreachable as error:
            if not is_used:
                raise
            raise HostLost(f"cannot reach the host for {LOST_AFTER}: {error}") from error
        except HostLost as error:
            failure, why = "", str(error)
            if row.state != "UP":
                failure, why = LeaseFailure.FAILED, f"the machine did not start: {error}"
            elif offer_of(row).market == "spot":
                failure, why = LeaseFailure.TAKEN_AWAY, f"preempted: {error}"
            await self.release(row, why, failure)
            raise

    def _report_retry(self, error: Exception) -> None:
        """Report once that an unreachable host is tried again."""
        if self._reported_retry:
            return
        self._reported_retry = True
        consequence = "then the run continues without it (to continue immediately, remove the host from the settings)"
        self.say(
            f"{error}; steps of this run may be running on this host: trying again for {LOST_AFTER}, {consequence}"
        )

    async def release(self, row: LeaseRow, reason: str, failure: str = "") -> bool:
        """Release a lease.

        Returns True once nothing is billed; otherwise the lease stays RELEASING for a later
        attempt.

        Raises DriverError.
        """
        task = self._releasing.get(row.key)
        if task is None:
            current = self.ledger.row(row.key)
            # If another process holds the lease, the next state change raises.
            if current.holder == row.holder:
                row = current
            if row.state == "GONE":
                return True
            if row.state != "RELEASING":
                row = self._move(row, "RELEASING", reason=reason, failure=failure)
                crashpoint("release-intended")
            task = asyncio.ensure_future(self._release(row, reason))
            self._releasing[row.key] = task
            task.add_done_callback(partial(self._forget_release, row.key))
        return await asyncio.shield(task)  # other callers may wait for the same release

    def _forget_release(self, key: str, task: asyncio.Task[bool]) -> None:
        del self._releasing[key]
        if not task.cancelled():
            task.exception()  # retrieve the error: the caller may be gone

    async def _release(self, row: LeaseRow, reason: str) -> bool:
        if not await self._end_billing(row, reason):
            return False
        crashpoint("release-proved")
        self._move(row, "GONE")
        return True

    async def _end_billing(self, row: LeaseRow, reason: str) -> bool:
        """Return the machine of a lease to the provider; return whether its billing has ended."""
        if row.lease:
            lease: Lease | None = lease_of(row)
        else:
            # A free slot ends by itself, and its host may be gone for good.
            tries = LONG if self.driver.traits.priced else SOON
            lease = await self._find(row, tries)
        return lease is None or await confirm_end(self, partial(self.driver.release, lease))

    async def adopt(self) -> list[LeaseRow]:
        """Take over the leases of earlier workers of this run; return the COMING and UP leases.

        Pending releases are completed.  Expired leases are released too, unless the provider does
        not end them and there is money to renew them.

        Raises DriverError.
        """
        adopted = []
        traits = self.driver.traits
        for earlier in self.ledger.of_run(self.run):
            if earlier.state == "GONE" or earlier.driver != self.name:
                continue
            row = self.ledger.take(earlier, self.holder)
            if row.state == "ASKED":
                row = await self._resolve_intent(row)
            if traits.ends == "nothing" and _has_expired(row):
                row = await self.renew(row)
            is_overdue = traits.priced and _has_expired(row)
            if row.state == "RELEASING" or is_overdue:
                with suppress(DriverError):  # repeated by `repeat_releases`
                    await self.release(row, OVERDUE)
            elif row.state in ("COMING", "UP"):
                self.on_change(row.state, row)
                adopted.append(row)
        return adopted

    async def _resolve_intent(self, row: LeaseRow) -> LeaseRow:
        """Resolve the intent of an earlier worker.

        Returns a COMING lease if the provider has the machine, otherwise a GONE lease.
        """
        lease = await self._find(row)
        if lease is None:
            return self._move(row, "GONE", reason="never rented")
        return self._move(row, "COMING", lease=to_stored(lease))

    def inherit(self, row: LeaseRow) -> None:
        """Record a lease that a worker on another machine had for this run.

        `adopt` then takes it over.
        """
        if row.driver == self.name and row.key not in self.ledger.states(self.name):
            self.ledger.ask(row._replace(holder=self.holder))

    async def renew(self, row: LeaseRow) -> LeaseRow:
        """Extend a lease by another term, if the driver supports extensions and the money covers
        it.
        """
        offer, traits = offer_of(row), self.driver.traits
        funds = self.budget.guaranteed_funds(row.key) - committed_cost(
            row.price, row.asked, time.time()
        )
        price = 0.0 if offer.queued else row.price
        until = self.budget.lease_end(price, funds)
        # Nothing is gained, or the lease has expired and no money is left.
        if until.timestamp() <= max(row.until, time.time() + RELEASE_SECONDS):
            return row
        if not (traits.replays or traits.prolongs or traits.ends == "nothing"):
            return row
        row = self.ledger.extend(row, until.timestamp())
        if traits.replays:
            key, kept = row.machine or row.key, bool(row.machine)
            order = Order(offer_of(row), key, until, kept, need_of(row).image)
            await self.call(partial(self.driver.acquire, order))
        elif traits.ends != "nothing":
            await self.call(partial(self.driver.prolong, lease_of(row), until))
        return row

    async def repeat_releases(self) -> list[LeaseRow]:
        """Repeat the pending releases of this process; return the leases that still exist."""
        left = []
        for row in self.ledger.of_run(self.run):
            is_pending = row.state == "RELEASING" and row.holder == self.holder
            if not is_pending or row.key in self._releasing:
                continue
            ended = False
            with suppress(DriverError):
                ended = await self.release(row, row.reason)
            if not ended:
                left.append(row)
        return left

    async def check_denial(self) -> None:
        """Raise Denied during the cooldown after a denied order, while the account and the settings
        are the same.
        """
        row = self.ledger.last(self.name)
        if row is None or not is_denied(row, time.time()):
            return
        if row.account == account_digest(self.settings, await _read_account(self)):
            minutes = COOLDOWNS[LeaseFailure.DENIED] / 60
            again = f"trying again with other settings of [drivers.{self.name}], or in {minutes:g} minutes"
            raise Denied(f"{row.reason} ({again})")

    def count_preemptions(self) -> int:
        """Return the number of spot machines that this run lost to preemption, over all workers."""
        return sum(row.failure == LeaseFailure.TAKEN_AWAY for row in self.ledger.of_run(self.run))

    def accrue(self) -> None:
        """Record the cost so far of this process's machines."""
        for row in self.ledger.of_run(self.run):
            if row.price and row.lease and self._holds(row):
                self.ledger.accrue(row)

    def _holds(self, row: LeaseRow) -> bool:
        """Return whether this process is responsible for a living lease."""
        return row.state != "GONE" and row.holder == self.holder

    async def record_charges(self) -> None:
        """Record the provider's charges for this run's machines, if the provider reports them."""
        for row in self.ledger.of_run(self.run):
            # For a persistent machine, the provider reports the cost of all runs.
            if not row.lease or row.driver != self.name or row.machine:
                continue
            since = datetime.fromtimestamp(row.asked, UTC)
            charged: Sequence[Charge] = ()
            with suppress(DriverError):  # the accrued cost stays
                charged = await self.call(partial(self.driver.charges, lease_of(row), since))
            if charged:
                self.ledger.charge(row, sum(charge.usd for charge in charged))

    async def is_listed(self, row: LeaseRow) -> bool:
        """Return whether the provider still lists the machine of a lease.  Raises DriverError."""
        return row.key in {lease.key for lease in await self.call(self.driver.leases, SOON)}

    async def find_strangers(self) -> list[Lease]:
        """Return machines tagged by this installation that the ledger does not know, and release
        machines of GONE leases.

        Raises DriverError.
        """
        listed = await self.call(self.driver.leases)
        states = self.ledger.states(self.name)
        for lease in listed:
            if states.get(lease.key) == "GONE":
                await self.call(partial(self.driver.release, lease))
        return [lease for lease in listed if lease.key not in states]

    async def close(
        self,
        keys: Collection[str] | None = None,
        reason: str = "the run has finished",
        failure: str = "",
    ) -> list[tuple[LeaseRow, str]]:
        """Release all leases of this process and run, or only `keys`.

        Returns the leases that could not be released, with reasons.
        """
        rows: list[LeaseRow] = []
        for row in self.ledger.of_run(self.run):
            is_wanted = keys is None or row.key in keys
            if is_wanted and self._holds(row):
                rows.append(row)
        # In parallel, so that a slow release does not let others cost money.
        faults = await asyncio.gather(*(self._try_release(row, reason, failure) for row in rows))
        return [(row, fault) for row, fault in zip(rows, faults, strict=True) if fault]

    async def _try_release(self, row: LeaseRow, reason: str, failure: str) -> str:
        """Release a lease; return why it still exists, empty if its end is confirmed."""
        try:
            ended = await self.release(row, reason, failure)
        except DriverError as error:
            return str(error)
        return "" if ended else "it still exists"

    async def _find(self, row: LeaseRow, tries: int = LONG) -> Lease | None:
        """Find the machine of a lease at the provider; None if two listings, `settles` apart, do
        not show it.

        Raises DriverError.
        """
        for again in (False, True):
            if again:
                await asyncio.sleep(self.driver.traits.settles.total_seconds())
            for lease in await self.call(self.driver.leases, tries):
                if lease.key == row.key:
                    return lease
        return None

    def _move(
        self,
        row: LeaseRow,
        after: Any,
        *,
        lease: Mapping[str, object] | None = None,
        reason: str = "",
        failure: str = "",
        account: str = "",
    ) -> LeaseRow:
        moved = self.ledger.move(
            row, after, lease=lease, reason=reason, failure=failure, account=account
        )
        _log.info("%s %s: %s -> %s %s", self.name, row.key, row.state, after, reason)
        if after == "GONE" and row.price:
            self.freed.set()
        self.on_change(row.state, moved)
        return moved

    async def call(
        self, ask: Callable[[], Awaitable[_T]], tries: int = SOON, on_retry: OnRetry = nothing
    ) -> _T:
        """Call a driver, and retry if it is unreachable.

        An unreadable reply counts as unreachable.
        """

        async def readable() -> _T:
            try:
                return await ask()
            except DriverError:
                raise
            except Exception as error:
                raise Unreachable(
                    f"cannot read the reply of {self.name}: {type(error).__name__}: {error}"
                ) from error

        return await retry_async(readable, retry_policy(tries), on_retry=on_retry)


def _display_names(rows: Sequence[LeaseRow]) -> str:
    return ", ".join(f"{row.driver} {row.key}" for row in rows)


def _billed_price(offer: Offer) -> float:
    """Return the price of an offer from its order on.

    A queued machine costs nothing until it starts.
    """
    return 0.0 if offer.queued else offer.price


def _has_expired(row: LeaseRow) -> bool:
    """Return whether a paid machine exists past the end of its lease."""
    return row.price > 0 and row.state in ("COMING", "UP") and row.until <= time.time()


async def confirm_end(leases: Leases, ask: Callable[[], Awaitable[bool]]) -> bool:
    """Ask a provider up to `SOON` times to end or stop a machine; return whether it confirmed.  Raises DriverError."""
    for tried in range(SOON):
        if tried:
            await asyncio.sleep(leases.driver.traits.poll.total_seconds())
        confirmed = await leases.call(ask)
        if confirmed:
            break
    crashpoint("release-asked")
    return confirmed


async def _read_account(leases: Leases) -> Sequence[tuple[str, str]]:
    """Return the provider's account facts, or nothing if it cannot be asked."""
    with suppress(DriverError):
        return await leases.call(leases.driver.account)
    return ()


def to_stored(value: Need | Offer | Lease) -> dict[str, object]:
    """Return a driver's value as a stored dict, without empty fields."""
    return {name: inner for name, inner in asdict(value).items() if inner not in (None, "", {})}


def lease_of(row: LeaseRow) -> Lease:
    """Return the driver's lease of a row."""
    given: Any = row.lease
    return Lease(**given)


def offer_of(row: LeaseRow) -> Offer:
    """Return the offer of a row."""
    given: Any = row.offer
    return Offer(**{**given, "resources": Resources(**given.get("resources", {}))})


def need_of(row: LeaseRow) -> Need:
    """Return the need of a row."""
    given: Any = row.need
    return Need(**given)
