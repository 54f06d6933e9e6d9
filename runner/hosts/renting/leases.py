"""Leases on machines: the only caller of a driver's `acquire`, `release` and `leases`.

Every rental has an intent, an effect, a record, and a proof.  The ledger row comes first, so that a machine is known before it exists.  If the
reply to an order is lost or unreadable, two listings are searched before anything else is rented.  A lease is GONE only when nothing is billed.
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
from typing import Any, Final, TypeAlias, TypeVar

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
from .money import RELEASE_SECONDS, committed_cost
from .resting import COOLDOWNS, account_digest, is_denied

_T = TypeVar("_T")
RENEW: Final = 3600.0
"""Seconds between two renewals of a lease."""
SLOW: Final = 600.0
"""Seconds after which a starting machine is reported as slow."""
OVERDUE: Final = "its lease has expired"
"""Reason for the release of a machine past its end."""
LOST_AFTER: Final = "15 minutes"
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
    """Create a driver with these settings, overridden by `hosts` and `python`.  Raises CannotRun, and Invalid for a wrong setting."""
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
        made: Driver = make(
            **{
                key: value
                for key, value in given.items()
                if key in takes or key not in RECIPE_SETTINGS
            }
        )
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
        self.driver, self.name, self.ledger, self.run, self.workspace, self.on_change = (
            driver,
            name,
            ledger,
            run,
            workspace,
            on_change,
        )
        self.budget = Budget(ledger, run, driver.traits.comes_up.total_seconds())
        self.stack = ""
        """The run's stack as stored in the ledger."""
        self.say: Callable[[str], None] = lambda _text: None
        self.settings: Mapping[str, object] = {}
        """Settings of the driver.  If they change, a provider that denied an order is asked again."""
        self._waits = ""
        self._asked_again = False  # whether the retry message was shown
        self._releasing: dict[str, asyncio.Task[bool]] = {}
        self.freed = asyncio.Event()
        """Set when a paid lease has ended: other leases of the run may use its remaining money."""
        self.holder = f"process {os.getpid()} {os.urandom(4).hex()}"

    @property
    def exclusions(self) -> Mapping[str, int]:
        """Why the last offers are incomplete, by count."""
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
        """Maximum number of concurrent machines, without regard to other runs."""
        return min(
            self.driver.traits.hosts_at_once or math.inf,
            self._machine_limit,
        )

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the offers for `wish`.  Raises DriverError."""
        return await self.call(partial(self.driver.offers, wish))

    async def rent(self, need: Need, offer: Offer, shares: int = 1) -> LeaseRow | None:
        """Rent an offer: return a COMING lease, or None if the offer is no longer available.

        `shares` is the number of machines that share the run's remaining money.  Raises DriverError, CannotRun if the money is too little, and
        Full while the user has the maximum number of machines of `[limits] machines`.
        """
        until = await self.determine_end(need, offer, shares)
        row = self.make_intent(need, offer, until)
        self._note(row)
        crashpoint("lease-intended")
        self.on_change("", row)
        return await self.order(row, until)

    def _note(self, *rows: LeaseRow) -> None:
        """Record intents in the ledger.  Raises Full if the user has the maximum number of machines."""
        if math.isinf(self._machine_limit):
            self.ledger.ask(*rows)
        else:
            self.ledger.ask_within(self._machine_limit, *rows)

    async def determine_end(self, need: Need, offer: Offer, shares: int = 1) -> datetime:
        """Return the end of a lease that starts now.  Raises CannotRun if the money does not cover it.

        A lease in release may cost its price up to its own end.  If that prevents or shortens the new
        lease, wait for the confirmation of the release, at most as long as a machine may take to start.
        """
        price = 0.0 if offer.queued else offer.price
        gives_up = time.monotonic() + self.driver.traits.comes_up.total_seconds()
        said = False
        while ending := self.budget.pending_releases():
            lacks = self.budget.explain_shortage(
                need, offer, shares, self.budget.guaranteed_funds()
            )
            if not lacks and not self.budget.shortens_lease(price, shares):
                break
            if short := self.budget.explain_shortage(
                need, offer, shares, self.budget.maximum_funds()
            ):
                raise CannotRun(short, fix=RAISE_LIMIT)
            if time.monotonic() >= gives_up:
                break
            if not said:
                said = True
                self.say(f"waiting until {_display_names(ending)} is terminated: {PRICE_COUNTS}")
            await asyncio.sleep(self.driver.traits.poll.total_seconds())
        left = self.budget.guaranteed_funds()
        if short := self.budget.explain_shortage(need, offer, shares, left):
            if ending:
                raise CannotRun(
                    self._describe_unconfirmed(ending, short),
                    fix=REAP_OR_RAISE_LIMIT.format(ending[0].key),
                )
            raise CannotRun(short, fix=RAISE_LIMIT)
        return self.budget.lease_end(price, left, shares)

    def _describe_unconfirmed(self, ending: Sequence[LeaseRow], short: str) -> str:
        """Return the error message if money may be free but its release is not confirmed."""
        minutes = self.driver.traits.comes_up.total_seconds() / 60
        now = time.time()
        most = sum(committed_cost(row.price, now, row.until) for row in ending)
        return (
            f"{self.name} has not terminated {_display_names(ending)} within {minutes:g} minutes, and until its "
            f"lease ends it may cost ${most:.4g} more: {short}"
        )

    def make_intent(self, need: Need, offer: Offer, until: datetime) -> LeaseRow:
        """Return the ledger row of a lease that is about to be requested."""
        return LeaseRow(
            os.urandom(8).hex(),
            self.name,
            self.run,
            self.workspace,
            to_stored(need),
            self.holder,
            "ASKED",
            to_stored(offer),
            until.timestamp(),
            offer.price,
        )._replace(asked=time.time(), stack=self.stack)

    async def order(self, row: LeaseRow, until: datetime) -> LeaseRow | None:
        """Execute an intent: return a COMING lease, or None if the offer is no longer available.  Raises DriverError."""
        offer = offer_of(row)
        lease: Lease | None
        try:
            order = Order(offer, row.key, until, row.kept, need_of(row).image)
            lease = await retry_async(partial(self.driver.acquire, order), retry_policy(LONG))
        except (NoCapacity, Denied, Rejected) as error:
            if error.lease is None:
                failure, why, account = LeaseFailure.TAKEN, f"not available: {error}", ""
                if isinstance(error, Denied):
                    failure, why = LeaseFailure.DENIED, str(error)
                    account = account_digest(self.settings, await _read_account(self))
                self._move(row, "GONE", reason=why, failure=failure, account=account)
            else:  # refused, but the machine exists: release it
                await self.release(
                    self._move(row, "COMING", lease=to_stored(error.lease)), str(error)
                )
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

    async def wait_until_up(self, row: LeaseRow) -> tuple[LeaseRow, Sequence[Host]]:
        """Wait for the machines of a lease.  If they are lost or do not start in time, release the lease and raise HostLost."""
        traits, began = self.driver.traits, time.monotonic()
        deadline, slow = began + traits.comes_up.total_seconds(), row.state == "COMING"
        while not (hosts := await self._ask_hosts(row)):
            if slow and time.monotonic() >= began + SLOW and self.driver.traits.priced:
                slow, words = (
                    False,
                    f"the machine has been starting for {SLOW / 60:g} minutes{await _describe_vitals(self.driver, self.name, row)}",
                )
                self.say(
                    f"{self.name} {row.key}: {words}; giving up after {traits.comes_up.total_seconds() / 60:g}"
                )
                self.on_change("COMING", row._replace(reason=words))
            if time.monotonic() > deadline:
                minutes = traits.comes_up.total_seconds() / 60
                said = await _describe_vitals(self.driver, self.name, row)
                late = f"the machine did not start within {minutes:g} minutes{said}"
                await self.release(row, late, LeaseFailure.FAILED)
                raise HostLost(late)
            if self.driver.waits != self._waits:
                self._waits = self.driver.waits
                self.say(self._waits)
            await asyncio.sleep(traits.poll.total_seconds())
        if row.state == "COMING":
            row = self._move(row, "UP")
            crashpoint("lease-up")
        return await self._apply_actual_price(row), hosts

    async def _apply_actual_price(self, row: LeaseRow) -> LeaseRow:
        """Correct a lease that costs more than offered: it ends when the same money is spent."""
        if not row.price or row.machine:
            return row
        named = self.driver.highest_price(lease_of(row))
        if named <= row.price:
            return row
        row = self.ledger.reprice(
            row, named, row.asked + (row.until - row.asked) * row.price / named
        )
        if self.driver.traits.prolongs:
            ends = datetime.fromtimestamp(row.until, UTC)
            with suppress(
                DriverError
            ):  # the run leaves the machine in time; the provider's own end is the last resort
                await self.call(partial(self.driver.prolong, lease_of(row), ends))
        return row

    async def _ask_hosts(self, row: LeaseRow) -> Sequence[Host] | None:
        ours = (
            row.state == "UP" and not row.price
        )  # a free host, where a step of this run may be running

        def waiting(error: Exception) -> None:
            if ours and not self._asked_again:
                self._asked_again = True
                words = "then the run continues without it (to continue immediately, remove the host from the settings)"
                self.say(
                    f"{error}; steps of this run may be running on this host: trying again for {LOST_AFTER}, {words}"
                )

        try:
            return await self.call(partial(self.driver.hosts, lease_of(row)), LONG, waiting)
        except Unreachable as error:
            if not ours:
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

    async def release(self, row: LeaseRow, reason: str, failure: str = "") -> bool:
        """Release a lease.  Returns True once nothing is billed; otherwise it stays RELEASING for a later attempt.  Raises DriverError."""
        task = self._releasing.get(row.key)
        if task is None:
            now = self.ledger.row(row.key)
            if (
                now.holder == row.holder
            ):  # otherwise another process holds it, and the next state change raises
                row = now
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
        """Return whether the provider has stopped billing a lease."""
        # A free place ends by itself, and its host may be gone for good.
        lease = (
            lease_of(row)
            if row.lease
            else await self._find(row, LONG if self.driver.traits.priced else SOON)
        )
        return lease is None or await confirm_end(self, partial(self.driver.release, lease))

    async def adopt(self) -> list[LeaseRow]:
        """Take over the COMING and UP leases of earlier workers of this run.

        Their pending releases are completed.

        Leases past their end are released too, unless only this process ends them and there is money for more.  Raises DriverError.
        """
        kept = []
        for found in self.ledger.of_run(self.run):
            if found.state == "GONE" or found.driver != self.name:
                continue
            row = self.ledger.take(found, self.holder)
            if row.state == "ASKED":
                row = await self._resolve_intent(row)
            if (
                row.price
                and row.state in ("COMING", "UP")
                and row.until <= time.time()
                and self.driver.traits.ends == "nothing"
            ):
                row = await self.renew(row)
            if row.state == "RELEASING" or (
                self.driver.traits.priced
                and row.price
                and row.state in ("COMING", "UP")
                and row.until <= time.time()
            ):
                with suppress(DriverError):  # repeated by `again`
                    await self.release(row, OVERDUE)
            elif row.state in ("COMING", "UP"):
                self.on_change(row.state, row)
                kept.append(row)
        return kept

    async def _resolve_intent(self, row: LeaseRow) -> LeaseRow:
        """Resolve the intent of an earlier worker: COMING if the provider has the machine, otherwise GONE."""
        lease = await self._find(row)
        return (
            self._move(row, "GONE", reason="never rented")
            if lease is None
            else self._move(row, "COMING", lease=to_stored(lease))
        )

    def inherit(self, row: LeaseRow) -> None:
        """Record a lease that a worker on another machine had for this run.  `adopt` then takes it over."""
        if row.driver == self.name and row.key not in self.ledger.states(self.name):
            self.ledger.ask(row._replace(holder=self.holder))

    async def renew(self, row: LeaseRow) -> LeaseRow:
        """Extend a lease by another term, if the driver supports it."""
        price = 0.0 if offer_of(row).queued else row.price
        until = self.budget.lease_end(
            price,
            self.budget.guaranteed_funds(row.key)
            - committed_cost(row.price, row.asked, time.time()),
        )
        if until.timestamp() <= max(
            row.until, time.time() + RELEASE_SECONDS
        ):  # or past its end, with no money left
            return row
        if self.driver.traits.replays:
            row = self.ledger.extend(row, until.timestamp())
            order = Order(
                offer_of(row), row.machine or row.key, until, bool(row.machine), need_of(row).image
            )
            await self.call(partial(self.driver.acquire, order))
        elif self.driver.traits.ends == "nothing":
            row = self.ledger.extend(row, until.timestamp())
        elif self.driver.traits.prolongs:
            row = self.ledger.extend(row, until.timestamp())
            await self.call(partial(self.driver.prolong, lease_of(row), until))
        return row

    async def repeat_releases(self) -> list[LeaseRow]:
        """Repeat the pending releases of this process.  Returns the leases that still exist."""
        left = []
        for row in self.ledger.of_run(self.run):
            if (
                row.state == "RELEASING"
                and row.holder == self.holder
                and row.key not in self._releasing
            ):
                with suppress(DriverError):
                    if await self.release(row, row.reason):
                        continue
                left.append(row)
        return left

    async def check_denial(self) -> None:
        """Raise Denied while the last order of this account with these settings is on cooldown after a denial."""
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
            if row.price and row.lease and row.state != "GONE" and row.holder == self.holder:
                self.ledger.accrue(row)

    async def record_charges(self) -> None:
        """Record the provider's charges for this run's machines, if the provider reports them."""
        for row in self.ledger.of_run(self.run):
            if (
                row.lease and row.driver == self.name and not row.machine
            ):  # for a persistent machine, the provider reports its whole cost
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
        """Return machines tagged by this installation that the ledger does not know.  Machines of GONE leases are released.  Raises DriverError."""
        found = await self.call(self.driver.leases)
        states = self.ledger.states(self.name)
        for lease in found:
            if states.get(lease.key) == "GONE":
                await self.call(partial(self.driver.release, lease))
        return [lease for lease in found if lease.key not in states]

    async def close(
        self,
        keys: Collection[str] | None = None,
        reason: str = "the run has finished",
        failure: str = "",
    ) -> list[tuple[LeaseRow, str]]:
        """Release all leases of this process and run, or only `keys`.  Returns those that could not be released, with reasons."""

        async def kept(row: LeaseRow) -> str:
            try:
                return "" if await self.release(row, reason, failure) else "it still exists"
            except DriverError as error:
                return str(error)

        ours = [
            row
            for row in self.ledger.of_run(self.run)
            if row.state != "GONE" and row.holder == self.holder
        ]
        rows = [row for row in ours if keys is None or row.key in keys]
        # In parallel, so that a slow release does not let others cost money.
        return [
            (row, why)
            for row, why in zip(rows, await asyncio.gather(*map(kept, rows)), strict=True)
            if why
        ]

    async def _find(self, row: LeaseRow, tries: int = LONG) -> Lease | None:
        """Find the lease of a key at the provider.  None requires two listings, `settles` apart.  Raises DriverError."""
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
        """Call a driver, and retry if it is unreachable.  An unreadable reply counts as unreachable."""

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
    """Return the display names of leases."""
    return ", ".join(f"{row.driver} {row.key}" for row in rows)


async def confirm_end(leases: Leases, ask: Callable[[], Awaitable[bool]]) -> bool:
    """Ask a provider up to `SOON` times to end or stop a machine; return whether it confirmed.  Raises DriverError."""
    for tried in range(SOON):
        if tried:
            await asyncio.sleep(leases.driver.traits.poll.total_seconds())
        gone = await leases.call(ask)
        if gone:
            break
    crashpoint("release-asked")
    return gone


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
