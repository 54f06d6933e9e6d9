"""The places of a run: this machine, and hosts with leases.

The pool knows resources and needs, but no steps.

Free places are acquired before the run, as many as it can use.  A paid machine is rented when a
step needs it, and released when no step does.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import sys
import time
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivers.base import (
    SAVES,
    Driver,
    DriverError,
    Host,
    HostLost,
    Need,
    Offer,
    Rejected,
    Unreachable,
    Wish,
)

from ..errors import Busy, CannotRun, Infrastructure, Invalid, NoHost, Problem
from ..failures import LeaseFailure
from ..logs import Log
from ..planning.step import StepSpec
from ..storage.records import ledger
from ..storage.records.ledger import Full, LeaseRow, Ledger
from ..storage.workspace import Workspace
from . import interpreters
from .connect import Connector, HostConnection, check_as_sold, unused_gpus_warning
from .head import StackHead
from .link import client
from .link.client import Client
from .place.place import Place
from .renting.any_driver import alternatives, data_notice
from .renting.budget import TERM
from .renting.cooldowns import COOLDOWNS, UnusableMachine, find_on_cooldown
from .renting.inventory import IDLE, Inventory, find_places_named
from .renting.joint_leases import JointLeases
from .renting.lease_upkeep import LeaseUpkeep
from .renting.leases import create_driver, lease_of, need_of, offer_of
from .renting.money import DOWNLOAD_SECONDS
from .renting.needs import (
    Spot,
    StepTotals,
    join_markets,
    join_min_seconds,
    market_of,
    min_seconds_of,
    need_for,
    wish_for,
)
from .renting.offering import describe_excluded
from .renting.stack_leases import StackLeases
from .renting.totals import CostModel, History
from .renting.zones import Zones, zone_of

BOOTS = 3
"""Failed machines per need after which the need is given up."""
OPENS = 60.0
"""Seconds to wait for a free host to connect while there are others."""

_log = Log("hosts")


@dataclass(slots=True)
class HostPool:
    """The places on which the steps of one run can run."""

    # Given by the caller, before `open`.
    ws: Workspace
    run: str
    local: Client
    """Jobs on this machine."""
    name: str
    """Name of the driver."""
    hosts: Sequence[str] = ()
    """Host addresses given for this run instead of those in the settings."""
    say: Callable[[str], None] = lambda _text: None
    python: str = ""
    """The Python for steps without a lock: see `interpreters.choose_python`.  Empty for none."""
    everything_there: bool = False
    """Run CPU-only steps on rented machines too."""
    limit: float | None = None
    """Cost limit of the run in US dollars."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Offer filters in addition to those of the driver's settings."""
    stack: str = ""
    """Name of the run's stack; empty for none."""
    keep_alive: bool = False
    """Leave the stack's persistent machine running after the run."""
    driver: Driver | None = None
    """A driver that already connects; by default, `open` creates one."""
    given_contents: Collection[str] = ()
    """Contents that the first steps need."""
    earlier: Sequence[LeaseRow] = ()
    """Leases that a worker on another machine had for this run."""

    # Created by `open`.
    local_place: Place = field(init=False)
    head: StackHead = field(default_factory=StackHead)
    leases: StackLeases | None = None
    container_settings: Mapping[str, Any] = field(default_factory=dict)
    """`container_engine` (for Slurm `container`), `engine_args` and `container_args`."""
    _opened: list[Place] = field(default_factory=list)
    _connector: Connector = field(init=False)
    _connectors: Mapping[str, Connector] = field(default_factory=dict)
    """A connector per driver, if the run has several."""
    _upkeep: LeaseUpkeep = field(init=False)
    _wish: Wish = field(default_factory=Wish)
    _want: int = 0
    """Number of free places that the run can use."""

    # The machines that the steps need.
    step_totals: Mapping[Need, StepTotals] = field(default_factory=dict)
    """What the steps of each need take, on any market."""
    together: Collection[Need] = ()
    """Needs whose machines are the nodes of one step, and so must be in one zone."""
    zones: Zones = field(default_factory=Zones)
    spot: Spot = field(default_factory=Spot)
    unmet: dict[Need, str] = field(default_factory=dict)
    """Needs without an offer before the run, each with the excluded offers by count."""
    refused: dict[Need, str] = field(default_factory=dict)
    """Needs for which no machine is available, with the reasons."""

    # The places of the run and their leases.
    inventory: Inventory = field(default_factory=Inventory)
    """The remote places of the run."""
    moves: list[tuple[str, LeaseRow]] = field(default_factory=list)
    """State changes of leases that the run has not recorded yet: the previous state, and the lease.
    """
    lost: list[str] = field(default_factory=list)
    """Reasons for the loss of places."""
    _local_places: dict[Path, Place] = field(default_factory=dict)
    """Places of this machine for the agents of earlier claims, by agent root."""
    _releasing: set[str] = field(default_factory=set)
    """Keys of leases that this run is releasing."""
    _shown: set[str] = field(default_factory=set)
    """Messages that are shown once."""

    @property
    def is_remote(self) -> bool:
        """Whether steps run on other machines."""
        return self.name != "local"

    @property
    def places(self) -> list[Place]:
        """The places of steps that are not bound to this machine."""
        return self.inventory.places if self.is_remote else [self.local_place]

    @property
    def is_priced(self) -> bool:
        """Whether hosts cost money, so that each is rented on demand."""
        return self.leases is not None and self.leases.driver.traits.priced

    def total_capacity(self, names: Iterable[str]) -> dict[str, float]:
        """Return the total of `cpus`, `gpus`, or `memory` in bytes of all places.

        The result is empty if machines are rented on demand.
        """
        if self.is_priced:
            return {}
        totals: dict[str, float] = {}
        for name in names:
            totals[name] = sum(place.capacity.total_of(name) for place in self.places)
        return totals

    @property
    def has_late(self) -> bool:
        """True if slow hosts have not answered yet.  `add_late_hosts` may add them."""
        return self.is_remote and not self.is_priced and bool(self._require_leases().driver.late)

    @property
    def is_full(self) -> bool:
        """Whether no more machines may be added."""
        if self._require_leases().kept_stack is not None and len(self.inventory):
            return True
        if self.user_is_full:
            return True
        return len(self.inventory) >= (
            self._require_leases().driver.traits.hosts_at_once or math.inf
        )

    @property
    def user_is_full(self) -> bool:
        """Whether the user has the maximum number of machines, counting orders of this run.

        The maximum is `[limits] machines`.
        """
        room = self._require_leases().budget.machine_room
        if math.isinf(room):
            return False
        states = [row.state for row in self._require_leases().ledger.of_run(self.run)]
        not_noted = len(self.inventory.coming) - states.count("ASKED") - states.count("COMING")
        return room <= max(0, not_noted)

    def money_is_over(self) -> bool:
        """Return whether running machines must be left now to keep the cost limit."""
        leases = self._require_leases()
        if not self.is_priced:
            return leases.budget.reaches_limit(DOWNLOAD_SECONDS)
        return any(
            not leases.budget.covers_replacement(row, need_of(row), offer)
            for offer, row in self.inventory.find_overdue()
        )

    def runs_locally(self, spec: StepSpec) -> bool:
        """Return whether a step without a fixed place runs on this machine."""
        if not self.is_remote:
            return True
        if not self.is_priced or self.everything_there or self.head.leads(spec):
            return False
        if self.needs_one_zone(spec):
            return False
        return not spec.resources.gpus and self.local_place.fits(spec.resources.room)

    def needs_one_zone(self, spec: StepSpec) -> bool:
        """Return whether the nodes of a step are machines rented in one zone."""
        joins = self.leases is not None and self.leases.driver.traits.joins
        return joins and spec.node_count > 1 and not self.head.leads(spec)

    def places_of(self, spec: StepSpec, *, local: bool) -> Sequence[Place]:
        """Return the places where a step may run; with `local`, only this machine."""
        if local:
            return [self.local_place]
        if not self.is_priced:
            return self.places
        if self.runs_locally(spec):
            return [self.local_place]
        return self.inventory.find_places(self.need(spec))

    def need(self, spec: StepSpec) -> Need:
        """Return the machine requirements of a step, on the market of the driver's settings."""
        return need_for(
            spec,
            self.spot.market,
            images=self._require_leases().driver.traits.images
            and self.python != interpreters.CURRENT,
        )

    async def open(self, *, want: int, wish: Callable[[], Wish] = Wish) -> None:
        """Take over the leases of an earlier worker of this run, and acquire up to `want` places if
        places cost nothing.

        The places are on as many hosts as `wish` needs nodes, or on all available hosts.
        Raises Busy if all slots are in use, NoHost if no host can be used, DriverError.
        """
        self._connector = self._create_connector(self.name)
        self._connectors = {
            name: self._create_connector(name) for name in alternatives(self.ws.config, self.name)
        }
        self.local_place = self._connector.local_place(self.local)
        self._opened.append(self.local_place)
        if not self.is_remote:
            return
        notice = data_notice(self.ws.config, self.name)
        if notice:
            self.say(notice)
        self.leases = self._open_leases()
        self._upkeep = LeaseUpkeep(
            self.leases, self.inventory, self.name, self.say, self.ws.environ
        )
        self._wish, self._want = wish(), want
        head = self.ws.config.stacks[self.stack].head if self.stack else None
        if head is not None:
            self.head = StackHead(self.ws, head, self.python, self.say)
        await self.head.open(
            self.leases.driver.traits, unused=not self.leases.ledger.of_run(self.run)
        )
        for row in self.earlier:
            self.leases.inherit(row)
        # Before leftovers of other runs: our own leases may be past their end while our steps still
        # run there.
        taken_over = _group_by_machine(await self.leases.adopt())
        await self._upkeep.tidy()
        if self.is_priced:
            self.local_place.capacity.slots = self.local_place.capacity.processors
        else:
            await self._acquire_free(taken_over)
        for rows in taken_over.values():
            await self._add_places(offer_of(rows[0]), rows)
        self.spot.preemptions = self.leases.count_preemptions() if self.is_priced else 0
        if not self.is_priced and not self.places:
            raise self._no_places_error()
        self._upkeep.start()

    def _create_connector(self, driver: str) -> Connector:
        return Connector(self.ws, driver, self.python, self.say, self.given_contents)

    def _no_places_error(self) -> NoHost | Busy:
        if self.lost:
            return NoHost(
                "\n".join(self.lost),
                fix=f"run `recipe doctor --driver {self.name}` to test the connection step by step",
            )
        return Busy(
            f"all slots on {self.name} are in use",
            fix="wait, raise `slots`, or choose another host",
        )

    async def _acquire_free(self, taken_over: dict[str, list[LeaseRow]]) -> None:
        """Acquire free places until the run has enough places and hosts, first on hosts with
        leases.

        A host that cannot be opened is skipped if another works, unless it has leases: a step may
        run there. Slow hosts are waited for only if the others are too few; otherwise
        `add_late_hosts` adds them.
        """
        driver = self._require_leases().driver
        if driver.traits.allocates:
            if not taken_over:
                await self.allocate()
            return
        trouble: list[str] = []
        async with self._connector.begin_connections(driver, self._want) as reached:
            await self._acquire_offered(Wish(hurry=True), taken_over, reached, trouble)
            if driver.late and not self._has_enough_hosts():
                await self._acquire_offered(Wish(), taken_over, reached, trouble)
        if trouble and not self.places:
            raise NoHost(
                "\n".join(trouble),
                fix=f"run `recipe doctor --driver {self.name}` to test the connection step by step",
            )

    async def _acquire_offered(
        self,
        wish: Wish,
        taken_over: dict[str, list[LeaseRow]],
        reached: dict[str, HostConnection],
        trouble: list[str],
    ) -> None:
        """Acquire places on offered hosts while they are useful.

        Leases in `taken_over` are used first, and removed from it.
        """
        offers = sorted(await self._offers(wish), key=lambda offer: offer.id not in taken_over)
        names = {place.name for place in self.places}
        for offer in offers:
            missing = self._count_missing()
            is_useful = missing > 0 or offer.id in taken_over
            if not is_useful or f"{self.name} {offer.id}" in names:
                continue
            leases = taken_over.pop(offer.id, [])
            is_last = offer is offers[-1] and not self._require_leases().driver.late
            alone = is_last and not self.places
            limit = None if leases or alone else OPENS
            try:
                async with asyncio.timeout(limit):
                    places = await self._acquire(
                        offer, missing, Need(), leases, reached=reached.get(offer.id)
                    )
                    if places:
                        reached.pop(offer.id, None)
            except (DriverError, TimeoutError) as error:
                if leases:
                    raise
                why = str(error) or f"not ready after {OPENS:g} s"
                trouble.append(f"{self.name} {offer.id}: {why}")
                if not alone:
                    self.say(f"{trouble[-1]}; continuing without this host")

    def _count_missing(self) -> int:
        """Return how many more places the run can use.

        This is at least one while a step has more nodes than there are hosts.
        """
        places = self._want - sum(place.capacity.slots or 0 for place in self.places)
        hosts = self._wish.need.nodes - len(self.head.places) - len(self.places)
        return max(places, int(hosts > 0))

    def _has_enough_hosts(self) -> bool:
        """Return whether the largest step of the run could start on the present hosts."""
        need = self._wish.need
        wants = {"cpus": need.cpus, "memory": need.memory, "gpus": need.gpus}
        room = {name: float(amount) for name, amount in wants.items() if amount}
        hosts = sum(place.fits(room) for place in self.places)
        return hosts >= max(1, need.nodes - len(self.head.places))

    async def add_late_hosts(self, ready: Callable[[Place], Awaitable[object]]) -> Sequence[Place]:
        """Wait for slow hosts, and acquire them if the run can use them; `ready` prepares each.

        Reports hosts that cannot be reached.  Raises DriverError.
        """
        joined: list[Place] = []
        names = {place.name for place in self.places}
        for offer in await self._offers(Wish()):
            missing = self._count_missing()
            if missing > 0 and f"{self.name} {offer.id}" not in names:
                joined += await self._acquire(offer, missing, Need(), ready=ready)
        return joined

    async def allocate(self) -> Sequence[Place]:
        """Acquire one lease with the nodes of a step, from the first offer available."""
        for offer in await self._offers(self._wish):
            shortage = self._require_leases().budget.explain_shortage(self._wish.need, offer)
            if shortage:
                raise _limit_error(shortage)
            places = await self._acquire(offer, 1, self._wish.need)
            if places:
                return places
        return ()

    async def find_offered(self, needs: Mapping[Need, StepTotals]) -> set[Need]:
        """Return the needs for which a machine is running or offered.  Rents nothing.

        Raises DriverError, Invalid if the cost limit does not cover the cheapest offer, and Busy if
        a dead run may use the persistent machine.
        """
        if self.leases is None:  # all steps run on this machine
            return set()
        leases = self.leases
        leases.require_free()
        self.step_totals = {replace(need, market="any"): takes for need, takes in needs.items()}
        intervals: dict[Need, float] = {}
        for need, takes in self.step_totals.items():
            if takes.checkpoint_interval is not None:
                intervals[need] = takes.checkpoint_interval
        leases.budget.checkpoint_intervals = intervals
        obtainable = set()
        for need in needs:
            if self.inventory.count_machines(need):
                obtainable.add(need)
                continue
            await leases.check_denial()
            offers = await self._offers(wish_for(need, self.step_totals, self.where))
            if not offers:
                self.unmet[need] = describe_excluded(leases.exclusions)
                continue
            obtainable.add(need)
            await leases.call(leases.driver.solvent)
            funds = leases.budget.maximum_funds()
            shortage = leases.budget.explain_shortage(need, offers[0], funds=funds)
            if shortage:
                raise _limit_error(shortage)
        return obtainable

    async def rent(self, need: Need, ready: Callable[[Place], Awaitable[object]]) -> Place | None:
        """Rent a machine for this need, and prepare it with `ready`; None if none is available.

        A machine that fails is released.

        Raises CannotRun, DriverError, and the errors of `ready`.
        """
        leases = self._require_leases()
        await leases.check_denial()
        tried = _TriedOffers()
        while not tried.is_enough:
            offer = await self._choose_offer(need, tried.keys)
            if offer is None:
                break
            tried.keys.add((offer.driver, offer.id))
            try:
                place = await self._start_machine(need, offer, ready)
            except Full as error:  # another run was faster: try again when there is room
                self.say(f"{self._offer_name(offer)} is not rented yet: {error}")
                return None
            if place is not None:
                return place
            name = self._offer_name(offer) if self._connectors else offer.id
            tried.note_failure(name, leases.ledger.of_run(self.run)[-1])
        self.refuse(need, tried.explain(self.name))
        return None

    async def _choose_offer(self, need: Need, tried: Container[tuple[str, str]]) -> Offer | None:
        """Return the offer to rent next, and announce it; None if there is none in any zone."""
        while True:
            offers = await self._untried_offers(need, tried)
            offer = self._prefer_healthy(offers)
            if offer is not None:
                if need in self.together:
                    self.zones.choose(need, offer)
                self._announce(need, offer, offers)
                return offer
            if need not in self.together or not self._leave_zone(need):
                return None

    async def _untried_offers(
        self, need: Need, tried: Container[tuple[str, str]]
    ) -> Sequence[Offer]:
        """Return the present offers that were not requested yet.

        Earlier offers may be gone, or more expensive.
        """
        present = await self._offers(wish_for(need, self.step_totals, self.where))
        offers = [offer for offer in present if (offer.driver, offer.id) not in tried]
        if need in self.together:
            return self.zones.filter_offers(need, offers, self._zones_of(need))
        return offers

    def _prefer_healthy(self, offers: Sequence[Offer]) -> Offer | None:
        """Return the first offer that is not on cooldown, otherwise the first; None if there are no offers."""
        now = time.time()
        recent = self._require_leases().ledger.since(now - max(COOLDOWNS.values()))
        for offer in offers:
            if not find_on_cooldown(recent, self._driver_name(offer), now).covers(offer):
                return offer
        return next(iter(offers), None)

    def _announce(self, need: Need, offer: Offer, offers: Sequence[Offer]) -> None:
        leases = self._require_leases()
        is_kept = leases.kept_stack is not None and leases.find_machine() is not None
        verb = "starting" if is_kept else "renting"
        why = self._why_spot(need, offer, offers)
        self.say(f"{verb} {self._offer_name(offer)} for ${offer.price:.2f} an hour{why}")

    async def _start_machine(
        self, need: Need, offer: Offer, ready: Callable[[Place], Awaitable[object]]
    ) -> Place | None:
        """Rent the machine of an offer and wait until it is up; None if it failed.  Raises Full."""
        began = time.monotonic()
        places = await self._acquire(offer, 1, need, ready=ready)
        if not places:
            return None
        place = places[0]
        self.say(f"{place.name} is up after {time.monotonic() - began:.0f} s")
        if need in self.together and zone_of(offer) != self.zones.zone_for(need):
            place.leaving = f"too few machines in {zone_of(offer)}"
        return place

    def _zones_of(self, need: Need) -> list[str]:
        """Return the zones of the running machines of this need."""
        return [place.zone for place in self.inventory.find_places(need)]

    def _leave_zone(self, need: Need) -> bool:
        """Give up the zone of a need, with its idle machines; False if no zone was chosen."""
        zone = self.zones.give_up(need, self._zones_of(need))
        if not zone:
            return False
        why = f"too few machines in {zone}"
        self.say(f"{why} for the nodes of one step; trying another zone")
        for place in self.inventory.find_places(need):
            if place.zone == zone and not place.capacity.busy:
                place.leaving = why
        return True

    def _why_spot(self, need: Need, offer: Offer, offers: Sequence[Offer]) -> str:
        """Return the reason for the chosen market as the end of a sentence; empty if there was no choice."""
        others = [each for each in offers if each.market != offer.market]
        if need.market != "any" or not others or offer is not offers[0]:
            return ""
        spot_offer = offer if offer.market == "spot" else others[0]
        often = self._pricing_for(need).known_history.preemption_rate(spot_offer)
        losses = f"with {often:.2g} preemptions an hour"
        if offer.market == "spot":
            left = self.spot.max_preemptions - self.spot.preemptions
            return f", spot: cheaper than ${others[0].price:.2f} on demand even {losses}; on demand after {left} more"
        return f", on demand: spot at ${others[0].price:.2f} is not cheaper {losses}"

    def refuse(self, need: Need, why: str) -> None:
        """Rent no more machines for this need."""
        self.refused[need] = why
        self.lost.append(why)

    def may_get_place(self, spec: StepSpec) -> bool:
        """Return whether a step has a place to run, or may get one later."""
        if self.head.leads(spec) and self.head.places[0].lost:
            return False
        if len(
            self.head.find_fitting(spec, self.places_of(spec, local=False))
        ) >= self.head.count_workers(spec):
            return True
        return (
            self.is_priced and not self.runs_locally(spec) and self.need(spec) not in self.refused
        )

    def find_place(self, names: Sequence[str]) -> Place | None:
        """Return the place with these hosts, by rank; None if the run does not have all of them."""
        from .place.group import group_of

        places = find_places_named([*self.head.places, *self.places], names)
        return group_of(places) if places else None

    def local_place_of(self, root: Path) -> Place:
        """Return this machine for jobs of another agent root, where nothing new starts."""
        if str(root.absolute()) == self.local.root:
            return self.local_place
        if root not in self._local_places:
            self._local_places[root] = place = copy.copy(self.local_place)
            place.host = client.connect_local(root)
            self._opened.append(place)
        return self._local_places[root]

    async def release(self, place: Place, reason: str) -> bool:
        """Release the leases of a place.

        Returns False if a release is not confirmed yet.  Raises DriverError.
        """
        rows, with_it = self.inventory.drop(place)
        self._releasing |= {row.key for row in rows}
        for each in with_it:
            each.lost = each.lost or reason
        closing = asyncio.gather(*(each.aclose() for each in (place, *with_it)))
        if not place.lost:  # closing the connections of a lost machine takes no paid time
            await closing
        gone, spot, failure = True, self.spot.market, ""
        if self.spot.count_preempted((place, *with_it)):
            failure, reason = LeaseFailure.TAKEN_AWAY, f"preempted: {reason}"
            if self.spot.market != spot:
                self.say(
                    f"{self.spot.max_preemptions} spot machines were preempted; renting on demand from now on"
                )
        healthy = not (place.lost or place.leaving)
        for row in rows:
            if healthy and self._require_leases().stays_alive(row):
                self._require_leases().hand_over(row)
            else:
                gone &= await self._require_leases().release(row, reason, failure)
        await closing
        return gone

    async def replace(self, lost: Place) -> Sequence[Place]:
        """Acquire places in exchange for a lost one, if available.

        A paid machine is rented again when a step needs it.
        """
        self.lost.append(f"{lost.name}: {lost.lost}")
        _log.info("%s lost: %s", lost.name, lost.lost)
        if lost in self.head.places:
            await lost.aclose()
            await self.head.open(self._require_leases().driver.traits, unused=False)
            return self.head.places
        wanted = not self.inventory.has_successor(lost)
        with contextlib.suppress(DriverError):
            await self.release(lost, lost.lost)
        if self.is_priced:
            return ()
        try:
            if self._require_leases().driver.traits.allocates:
                return await self.allocate() if wanted else ()
            for offer in await self._offers(Wish()):
                if self._has_place(offer):
                    continue
                places = await self._acquire(offer, lost.capacity.slots or 1, Need())
                if places:
                    return places
        except (DriverError, Infrastructure) as error:
            self.say(f"no replacement for {lost.name}: {error}")
        return ()

    def _has_place(self, offer: Offer) -> bool:
        """Return whether a place on the host of an offer is in use."""
        return any(place.name == f"{self.name} {offer.id}" for place in self.places)

    async def close(self, *, leave: bool = False) -> None:
        """Release everything.

        With `leave`, keep paid machines and their jobs for the worker that resumes the run.
        """
        leases = self.leases
        if leases is not None:
            await self._upkeep.aclose()
        closing, closing_lost = self._begin_closing()
        if leases is None or self.is_priced or leases.driver.traits.allocates:
            await closing  # if jobs end with the lease, all transfers must be finished first
        if not self._opened:
            await self.local.aclose()
        if leases is None:
            await closing_lost
            return
        if not (leave and self.is_priced):
            await self._release_leases(leases)
        await asyncio.gather(closing, closing_lost)
        with contextlib.suppress(DriverError, Busy):  # the accrued cost stays
            await leases.record_charges()
        await leases.driver.aclose()
        leases.ledger.close()

    def _begin_closing(self) -> tuple[asyncio.Future[list[None]], asyncio.Future[list[None]]]:
        """Start to close all places.

        Returns a future for the places in use, and another for lost places.
        """
        places = [*self._opened, *self.head.places, *self.inventory.places]
        closing_lost = asyncio.gather(*(place.aclose() for place in places if place.lost))
        closing = asyncio.gather(*(place.aclose() for place in places if not place.lost))
        return closing, closing_lost

    async def _release_leases(self, leases: StackLeases) -> None:
        """Release all leases.  A healthy machine that stays alive is handed over instead."""
        for held in self.inventory.held:
            if held.place.lost or held.place.leaving:
                continue
            for row in filter(leases.stays_alive, held.leases):
                leases.hand_over(row)
        for row, why in await leases.close():
            self.say(
                f"cannot release the machine {row.key} of {row.driver}: {why}; try again with `recipe reap`{self._upkeep.console}"
            )

    def instance_of(self, place: Place) -> str:
        """Return the provider's ids of a place's machines; its name if there are none."""
        leases = self.inventory.leases_of(place)
        ids = [str(row.lease["id"]) for row in leases if row.lease.get("id")]
        return ",".join(ids) or place.name

    def _require_leases(self) -> StackLeases:
        assert self.leases is not None
        return self.leases

    def _driver_name(self, offer: Offer) -> str:
        """Return the driver name of an offer."""
        return offer.driver if self._connectors else self.name

    def _offer_name(self, offer: Offer) -> str:
        """Return an offer's display name."""
        return f"{self._driver_name(offer)} {offer.id}"

    def _open_leases(self) -> StackLeases:
        """Open the ledger and the driver of the run; for several drivers, all of them as one."""
        if self._connectors:
            return self._open_joint_leases()
        return self._open_driver_leases(self.name, self.driver)

    def _open_joint_leases(self) -> JointLeases:
        by_driver = {name: self._open_driver_leases(name, None) for name in self._connectors}
        settings = {name: self.ws.config.driver(name) for name in by_driver}
        # The container settings of a driver whose machines run their own engine.
        for name, leases in by_driver.items():
            if not leases.driver.traits.images:
                self.container_settings = _container_settings(settings[name])
        self.spot = Spot(join_markets(settings.values()))
        joined = JointLeases(self.name, by_driver, self.ws.config)
        joined.say = self.say
        joined.stack = next(iter(by_driver.values())).stack
        term = min(leases.budget.term for leases in by_driver.values())
        self._apply_limits(joined, join_min_seconds(settings.values()), term)
        idle = min(float(given.get("idle", IDLE)) for given in settings.values())
        self.inventory = Inventory(idle, ends=True)
        return joined

    def _apply_limits(self, leases: StackLeases, least: float | None, term: timedelta) -> None:
        """Apply the limits of the run to its leases."""
        budget, traits = leases.budget, leases.driver.traits
        budget.limits = self.ws.config.limits if traits.priced else {}
        budget.limit = self.limit if traits.priced or traits.billed else None
        budget.min_seconds, budget.term = least, term
        budget.leaving_keys = lambda: self.inventory.leaving_keys() | self._releasing

    def _open_driver_leases(self, name: str, given: Driver | None) -> StackLeases:
        settings = self.ws.config.driver(name)
        self.container_settings = _container_settings(settings)
        self.spot = Spot(market_of(settings))
        driver = given or driver_for(self.ws, name, self.hosts, self.python)
        for line in driver.notices:
            self.say(line)
        leases = StackLeases(
            driver,
            name,
            Ledger.open(_ledger_path(self.ws, self.run, name, driver)),
            self.run,
            str(self.ws.root),
            lambda before, row: self.moves.append((before, row)),
        )
        self.inventory = Inventory(float(settings.get("idle", IDLE)), ends=driver.traits.priced)
        leases.say = self.say
        term = timedelta(hours=float(settings.get("term", TERM.total_seconds() / 3600)))
        self._apply_limits(leases, min_seconds_of(settings), term)
        leases.keep_alive, leases.settings = self.keep_alive, settings
        if self.stack:
            leases.use_stack(self.ws.config.stacks[self.stack])
        return leases

    def _pricing_for(self, need: Need) -> CostModel:
        """Return the cost model for a run with this need."""
        takes = self.step_totals.get(replace(need, market="any"), StepTotals())
        return CostModel(
            History.from_rows(self._require_leases().ledger.since(0), time.time()), takes.hours_on
        )

    async def _offers(self, wish: Wish) -> Sequence[Offer]:
        leases = self._require_leases()
        offers: Sequence[Offer] = await leases.offers(wish)
        if self.is_priced:
            offers = self._pricing_for(wish.need).rank(offers, wish)
        for host, why in leases.driver.left_out.items():
            self._say_once(f"skipped host {host}: {why}")
        for offer in offers:
            if "hung" in offer.data:
                self._say_once(unused_gpus_warning(self._offer_name(offer)))
        if not offers and not self.is_priced:
            why = f": {'; '.join(leases.driver.excluded)}" if leases.driver.excluded else ""
            raise NoHost(
                f"the driver {self.name} offers no host{why}",
                fix=f"check the hosts with `recipe doctor --driver {self.name}`",
            )
        return offers

    def _say_once(self, message: str) -> None:
        if message not in self._shown:
            self._shown.add(message)
            self.say(message)

    async def _acquire(
        self,
        offer: Offer,
        want: int,
        need: Need,
        taken_over: Sequence[LeaseRow] = (),
        ready: Callable[[Place], Awaitable[object]] | None = None,
        reached: HostConnection | None = None,
    ) -> Sequence[Place]:
        """Acquire free slots on one machine until there are `want`, counting the leases in
        `taken_over`; empty if none is free.

        Raises CannotRun if the host is reachable but unusable.
        """
        leases = self._require_leases()
        taken: list[LeaseRow] = []
        try:
            with self._usable(offer):
                while len(taken_over) + len(taken) < want:
                    coming = max(1, len(self.inventory.coming))
                    row = await leases.rent(need, offer, coming)
                    if row is None:
                        break
                    taken.append(row)
            if not taken_over and not taken:
                return ()
            return await self._add_places(offer, [*taken_over, *taken], ready, reached)
        except (Exception, asyncio.CancelledError) as error:
            await leases.close({row.key for row in taken}, f"cannot use it: {error}")
            raise

    @contextlib.contextmanager
    def _usable(self, offer: Offer) -> Iterator[None]:
        """Turn the rejection of a reachable but unusable machine into CannotRun with a fix."""
        try:
            yield
        except Rejected as error:
            fix = "free disk space, or set `root` to a writable directory in the driver's settings; `recipe doctor` shows the details"
            raise CannotRun(f"cannot use {self._offer_name(offer)}: {error}", fix=fix) from error

    async def _add_places(
        self,
        offer: Offer,
        rows: Sequence[LeaseRow],
        ready: Callable[[Place], Awaitable[object]] | None = None,
        reached: HostConnection | None = None,
    ) -> Sequence[Place]:
        """Wait for the machines of leases and return their places; empty if they are lost and
        released.

        A new machine that cannot be used is released too, and its offer counts as failed.  Raises
        CannotRun, and the errors of `ready`.
        """
        places: list[Place] = []
        leases = self._require_leases().of_driver(offer.driver)
        connector = self._connectors.get(offer.driver, self._connector)
        try:
            with self._usable(offer):
                leased = [await self._require_leases().wait_until_up(row) for row in rows]
            rows = [row for row, _ in leased]
            hosts = leased[0][1]
            if ready is None:
                checking = self._usable(offer)
            else:
                checking = _fail_offer_on(DriverError, Infrastructure, CannotRun)
            with checking:
                if self.is_priced:
                    await self._check_machine(leases, offer, rows[0], hosts[0])
                lease, traits = lease_of(rows[0]), leases.driver.traits
                for host in hosts:
                    place = await connector.create_place(
                        offer, lease, host, traits, slots=len(rows), reached=reached
                    )
                    places.append(place)
            if ready is not None:
                with _fail_offer_on(HostLost, Unreachable):
                    for place in places:
                        await ready(place)  # before a step can start there
        except HostLost as error:
            await self._drop_machine(offer, rows, places, error)
            return ()
        for place, host in zip(places, hosts, strict=True):
            self._register(place, host, offer, rows)
        return places

    async def _check_machine(
        self, leases: StackLeases, offer: Offer, row: LeaseRow, host: Host
    ) -> None:
        """Check that a rented machine has the offered resources.  Raises UnusableMachine."""
        cuda = self.where.get("cuda") or str(leases.settings.get("cuda", ""))
        await check_as_sold(offer, need_of(row), host, leases.driver.traits.image, cuda)
        leases.mark_persistent(row)

    async def _drop_machine(
        self, offer: Offer, rows: Sequence[LeaseRow], places: Sequence[Place], error: HostLost
    ) -> None:
        """Report a lost or unusable machine, and release its leases."""
        self.say(f"{self._offer_name(offer)}: {error}")
        if not self.is_priced:
            self.lost.append(f"{self.name} {offer.id}: {error}")
        for place in places:
            await place.aclose()
        failure = error.failure if isinstance(error, UnusableMachine) else ""
        await self._require_leases().close({row.key for row in rows}, str(error), failure)

    def _register(self, place: Place, host: Host, offer: Offer, rows: Sequence[LeaseRow]) -> None:
        """Add a new place to the inventory.

        A preemption notice or the end of its time is watched.
        """
        leases = self._require_leases().of_driver(offer.driver)
        traits = leases.driver.traits
        place.image = need_of(rows[0]).image
        place.is_rented = self.is_priced
        place.zone = zone_of(offer) if traits.joins else ""
        self.inventory.add(place, offer, rows)
        if host.until < math.inf:
            place.leave_at = host.until - host.grace
            place.notice = timedelta(seconds=host.grace * SAVES)
        if offer.market == "spot":
            self.spot.add(place)
            if traits.notice:
                self._upkeep.watch(place, host, leases.driver)


@dataclass
class _TriedOffers:
    """The offers that were requested for one need, and why their machines failed."""

    keys: set[tuple[str, str]] = field(default_factory=set)
    """Driver and id of each offer."""
    failures: list[str] = field(default_factory=list)
    """Machines that were rented but failed, with the reasons."""
    last_reason: str = ""

    @property
    def is_enough(self) -> bool:
        """Whether so many machines failed that no more are rented."""
        return len(self.failures) >= BOOTS

    def note_failure(self, name: str, row: LeaseRow) -> None:
        """Note the failed lease of an offer.  Without a machine, only its reason counts."""
        self.last_reason = row.reason
        if row.lease:
            self.failures.append(f"{name}: {row.reason}")

    def explain(self, driver: str) -> str:
        """Return why no machine is available."""
        why = f"{driver} has no other matching machine"
        if self.is_enough:
            why = f"{len(self.failures)} machines of {driver} failed to start"
        details = self.failures
        if not details and self.last_reason:
            details = [f"last request: {self.last_reason}"]
        return "; ".join([why, *details])


def _limit_error(short: str) -> Invalid:
    """Return the error for a cost limit that does not cover an offer."""
    fix = "raise the limit, or use a preset that requires less"
    return Invalid([Problem("limit", short, fix=fix)])


@contextlib.contextmanager
def _fail_offer_on(*faults: type[Exception]) -> Iterator[None]:
    """Treat `faults` of a new machine as a failed offer, so that the next offer is used."""
    try:
        yield
    except UnusableMachine:
        raise
    except faults as error:
        raise UnusableMachine(f"the machine did not start: {error}", LeaseFailure.FAILED) from error


def _container_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container settings of a driver."""
    keys = ("container", "container_engine", "engine_args", "container_args")
    return {key: settings[key] for key in keys if key in settings}


def driver_for(ws: Workspace, name: str, hosts: Sequence[str], python: str) -> Driver:
    """Return the driver of a run; `hosts` and `python` override its settings.  Raises CannotRun, Invalid."""
    settings = ws.config.driver(name)
    if (
        python == interpreters.CURRENT
    ):  # remote hosts use the Python of the settings, which must have the same packages
        python = sys.executable if name == "loopback" and "python" not in settings else ""
    return create_driver(
        name,
        settings,
        hosts,
        str(ws.home),
        python,
    )


def _ledger_path(ws: Workspace, run: str, name: str, driver: Driver) -> Path:
    """Return the path of the ledger for a run's leases: the user's if they cost money.

    An existing allocation stays in its ledger.
    """
    user, workspace = ledger.of_user(ws.environ), ledger.of_workspace(ws.home)
    usual, other = workspace, user
    if driver.traits.priced or driver.traits.billed:
        usual, other = user, workspace
    if not driver.traits.allocates:
        return usual
    with Ledger.open(other, read_only=True) as noted:
        is_noted = any(row.driver == name and row.state != "GONE" for row in noted.of_run(run))
    return other if is_noted else usual


def _group_by_machine(rows: Iterable[LeaseRow]) -> dict[str, list[LeaseRow]]:
    """Group leases by machine.  Each paid lease is a machine of its own."""
    machines: dict[str, list[LeaseRow]] = {}
    for row in rows:
        machine = row.key if row.price else str(row.offer["id"])
        machines.setdefault(machine, []).append(row)
    return machines
