"""The places that a run has: this machine, and hosts on which it has leases.  Knows resources and needs, not steps.

Places that cost nothing are taken before the run, as many as it can use.  A machine that costs money is asked for when a step needs it, and is given
back when no step does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from drivers import devices, machine
from drivers.base import (
    SAVES,
    Accounted,
    Addressed,
    Argv,
    Closing,
    DriverError,
    Ending,
    Excluding,
    Host,
    HostLost,
    Lease,
    Market,
    Named,
    Need,
    Offer,
    Rejected,
    Skipping,
    Wish,
)
from drivers.devices import Card

from ..errors import Busy, CannotRun, Infrastructure, Invalid, Problem
from ..extensions import packages
from ..logs import Log
from ..planning.step import ResourceSpec, StepSpec
from ..storage import ledger
from ..storage.ledger import LeaseRow, Ledger
from ..storage.workspace import Workspace
from . import interpreters
from .away import Away
from .client import Client, there
from .kept import KeptLeases
from .leases import LEAST, RENEW, TAKEN_AWAY, driver_of, lease_of, need_of, offer_of
from .money import leave_at
from .offering import left_out
from .sites import Site

if TYPE_CHECKING:
    from .wire import Progress

IDLE = 120.0
"""Seconds that a machine that costs money is kept with nothing to do."""
BOOTS = 3
"""Machines that are rented for one need and do not come up as they were sold, before the need is given up."""
MOST_TAKEN = 3
"""Spot machines that are taken away from a run before it rents on demand."""
AGAIN = 20.0
"""Seconds until a machine that was not given back is given back once more."""
ALARM = 600.0
"""Seconds after which a person is told of one that is there still."""
LOOK = 300.0
"""Seconds between two looks at what other runs left, while a run goes on."""
SWEEP = timedelta(days=1)
"""Between two looks at what a host keeps that nobody has asked for in a long time."""
NOTICED = 5.0
"""Seconds until a machine is asked again whether it is taken away, when it did not answer."""
TELL = 5.0
"""Seconds between words about a transfer."""

# The command path of a login there, the Python that was named, the variables of the login, and the GPUs that it sees.  Systems have a python3 and no
# python, or an older one of that name: a folder of ours has a program `python` that is the one, unless nothing may be executed there.
# $1: the name of that Python, $2: our root, empty for no such folder.
_ASK = r"""PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin
python=$(command -v "$1")
printf '\nPATH=%s\nPYTHON=%s\n' "$PATH" "$python"
printf 'VERSION=%s\n' "$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null)"
if [ -n "$2" ] && [ -n "$python" ] && [ "${python##*/}" != python ]; then
  case $2 in /*) ours=$2 ;; *) ours=${HOME:-.}/$2 ;; esac
  ours=$ours/bin/python-$(printf %s "$python" | cksum | tr ' ' -)
  [ -x "$ours/python" ] || {
    mkdir -p -- "$ours"
    quoted=$(printf %s "$python" | sed "s/'/'\\\\''/g")
    printf '%s\n' '#!/bin/sh' "exec '$quoted' \"\$@\"" >"$ours/python.$$" && chmod 755 "$ours/python.$$" && mv -f "$ours/python.$$" "$ours/python"
  } 2>/dev/null
  "$ours/python" -c '' 2>/dev/null && printf 'CALLED=%s\n' "$ours"
fi
env | sed 's/^/env /'
nvidia-smi -L 2>/dev/null || :
"""
_TOLD = ("PATH=", "PYTHON=", "VERSION=", "CALLED=")


# What Python this is: its version, and sorted name==version lines.
_PACKAGES = (
    "import json, platform; from importlib.metadata import distributions as all\n"
    "print(json.dumps([platform.python_version(), sorted({f'{each.name}=={each.version}' for each in all()})]))"
)
_NAME_PYTHON = "name the right one as `python` in the driver's settings, or let the recipe's lock say what is needed"


_log = Log("hosts")


@dataclass(slots=True)
class _Used:
    """A place, and the leases that it stands on."""

    site: Site
    offer: Offer
    leases: list[LeaseRow]
    idle_since: float

    def serves(self, need: Need) -> bool:
        """Whether it does for a need."""
        return self.site.image == need.image and covers(self.offer, need)


@dataclass(slots=True)
class HostPool:
    """Where the steps of one run may run."""

    ws: Workspace
    run: str
    local: Client
    """Jobs of this machine."""
    name: str
    """Of the driver that hosts come from."""
    hosts: Sequence[str] = ()
    """Addresses that were named for this run, instead of those of the settings."""
    say: Callable[[str], None] = lambda _text: None
    python: str = ""
    """The Python that was named for steps without a lock: see `interpreters.chosen`.  Empty for none."""
    everything_there: bool = False
    """Have steps that need no GPU run on rented machines, too."""
    limit: float | None = None
    """US dollars that the run may cost."""
    where: Mapping[str, str] = field(default_factory=dict)
    """Filters of what is rented, beside those of the driver's settings."""
    stack: str = ""
    """The stack that the run is on, by its name in the settings."""
    keep_alive: bool = False
    """Leave the machine that is kept for the stack running after the run."""
    earlier: Sequence[LeaseRow] = ()
    """Leases that a worker of another machine had for this run."""
    unmet: dict[Need, str] = field(default_factory=dict)
    """Needs for which nothing was offered before the run, and what was left out, by count."""
    here: Site = field(init=False)
    sites: list[Site] = field(default_factory=list)
    box: Mapping[str, Any] = field(default_factory=dict)
    """How containers are run there: the settings `container_engine`, `engine_args` and `container_args`."""
    moves: list[tuple[str, LeaseRow]] = field(default_factory=list)
    """Moves of leases that the run has not noted yet: the state before, and the lease."""
    leases: KeptLeases | None = None
    _idle: float = IDLE
    _market: Market | Literal["any"] = "on-demand"
    _wish: Wish = field(default_factory=Wish)
    _used: list[_Used] = field(default_factory=list)
    _spot: set[str] = field(default_factory=set)
    """Names of places that were rented on the spot market."""
    _succeeded: set[str] = field(default_factory=set)
    """Keys of leases about to end, in whose place another was asked for."""
    _taken: int = 0
    """How many of them were taken away, from this worker and from those before it."""
    _beside: list[asyncio.Task[None]] = field(default_factory=list)

    lost: list[str] = field(default_factory=list)
    """Why places that were ours are not any more."""
    refused: dict[Need, str] = field(default_factory=dict)
    """Needs for which no machine can be had, and why."""
    coming: list[Need] = field(default_factory=list)
    """Needs for which a machine was asked that is not up yet."""

    @property
    def away(self) -> bool:
        """Whether steps run elsewhere than on this machine."""
        return self.name != "local"

    @property
    def priced(self) -> bool:
        """Whether hosts cost money, so that each is asked for when a step needs it."""
        return self.leases is not None and self.leases.driver.traits.priced

    def preemptible(self, place: Site) -> bool:
        """Whether a place may be taken away before it is given back."""
        return any(site.name in self._spot for site in place.members)

    def leaving(self) -> list[Site]:
        """Places that are about to be taken away, or whose time is over."""
        now = time.time()
        for used in self._used:
            spent = self.priced and any(now >= leave_at(row.asked, row.until) for row in used.leases)
            if not used.site.leaving and (spent or now >= used.site.leave_at):
                used.site.leaving = "its time is over"
        return [used.site for used in self._used if used.site.leaving]

    def machine(self, names: Iterable[str]) -> dict[str, float]:
        """What all places have together of cpus, gpus, or memory in bytes.  Where machines are rented when they are needed nobody can tell."""
        return {} if self.priced else {name: sum(site.has(name) for site in self.sites) for name in names}

    @property
    def full(self) -> bool:
        """Whether there may be no more machines than there are."""
        most = self._of().driver.traits.hosts_at_once
        if self._of().full or (self._of().keeping is not None and (self._used or self.coming)):
            return True
        return most is not None and len(self._used) + len(self.coming) >= most

    def stays(self, wants: ResourceSpec) -> bool:
        """Whether a step that says nothing of where it runs stays on this machine."""
        if not self.away or not self.priced or self.everything_there:
            return not self.away
        return not wants.gpus and self.here.could(wants.room)

    def sites_of(self, spec: StepSpec, *, local: bool) -> Sequence[Site]:
        """Where a step may run: a local one on this machine only."""
        if local or (self.priced and self.stays(spec.resources)):
            return [self.here]
        if not self.priced:
            return self.sites
        need = self.need(spec)
        return [used.site for used in self._used if used.serves(need) and not used.site.lost and not used.site.leaving]

    def need(self, spec: StepSpec) -> Need:
        """What a step needs of a machine, on the market of the driver's settings."""
        market = self._market if self._taken < MOST_TAKEN else "on-demand"
        return need_for(spec, market, images=self._of().driver.traits.images and self.python != interpreters.CURRENT)

    async def open(self, *, want: int, wish: Callable[[], Wish] = Wish) -> None:
        """Take over what an earlier worker of this run had, and, where places cost nothing, as many more as `want` steps need.

        There are as many hosts then as `wish` needs nodes, or all that can be had.

        Raises Busy when all is taken, DriverError.
        """
        python = self._python()
        self.here = self._near(python, "local", self.local, self.ws.machine(), lambda: self.ws.devices)
        if not self.away:
            self.sites = [self.here]
            return
        self.leases = self._leases()
        self._wish = wish()
        for row in self.earlier:
            self.leases.inherit(row)
        await self._tidy()
        kept = _by_machine(await self.leases.adopt())
        if self.priced:
            self.here.slots = len(os.sched_getaffinity(0))
        else:
            await self._fill(kept, want)
        for rows in kept.values():
            await self._enter(offer_of(rows[0]), rows)
        self._taken = self.leases.taken_away() if self.priced else 0
        if not self.priced and not self.sites:
            raise Busy(f"all places that {self.name} has are taken", fix="wait, or name another host")
        self._beside += [asyncio.get_running_loop().create_task(beside) for beside in (self._renew(), *((self._tend(),) if self.priced else ()))]

    async def _fill(self, kept: dict[str, list[LeaseRow]], want: int) -> None:
        """Take places until there are `want`, and as many hosts as a step has nodes; first where we have one."""
        if self._of().driver.traits.allocates:
            if not kept:
                await self.allocate()
            return
        for offer in sorted(await self._offers(Wish()), key=lambda offer: offer.id not in kept):
            missing = max(want - sum(site.slots or 0 for site in self.sites), int(len(self.sites) < self._wish.need.nodes))
            if missing > 0 or offer.id in kept:
                await self._take(offer, missing, Need(), kept.pop(offer.id, []))

    async def allocate(self) -> Sequence[Site]:
        """One lease of as many nodes as a step of this run has, from the first offer that can be had."""
        for offer in await self._offers(self._wish):
            if found := await self._take(offer, 1, self._wish.need):
                return found
        return ()

    async def _tidy(self) -> None:
        """End what dead runs left to nobody; say what they left that costs money."""
        from . import reaper

        for words in await reaper.tidy(self._of(), self.ws.environ):
            self.say(words)

    async def offered(self, needs: Iterable[Need]) -> set[Need]:
        """Those needs for which a machine is there or is offered.  Rents nothing.

        Raises DriverError, Invalid when the limit of the run does not pay for the cheapest, and Busy when a dead run may use the kept machine.
        """
        found = set()
        if self.leases is not None:
            self.leases.free()
        for need in needs:
            driver = self._of().driver
            if self.machines(need):
                found.add(need)
            elif offers := await self._offers(Wish(need, filters=self.where)):
                found.add(need)
                if isinstance(driver, Accounted):
                    await driver.solvent()
                if short := self._of().pays(offers[0]):
                    raise Invalid([Problem("limit", short, fix="raise the limit, or take a preset that needs less")])
            else:
                self.unmet[need] = left_out(driver.excluded) if isinstance(driver, Excluding) else ""
        return found

    @property
    def spent(self) -> bool:
        """Whether what runs on a machine has to stop now, to be brought home within the limit of the run."""
        now = time.time()
        return self.limit is not None and any(now >= leave_at(row.asked, row.until) for used in self._used for row in used.leases)

    async def rent(self, need: Need, ready: Callable[[Site], Awaitable[object]]) -> Site | None:
        """A machine for this need, up and made `ready`; None when there is none any more.  What cannot be made ready is given back.

        Raises CannotRun, DriverError, and what `ready` raises.
        """
        tried: list[str] = []
        asked: set[str] = set()
        last = ""
        while len(tried) < BOOTS:
            # Asked anew each time: what was quoted before the last machine failed may be gone, or dearer.
            offers = [offer for offer in await self._offers(Wish(need, filters=self.where)) if offer.id not in asked]
            resting = self._of().resting()
            offer = min(offers, key=lambda offer: offer.id in resting, default=None)
            if offer is None:
                break
            asked.add(offer.id)
            verb = "renting" if self._of().keeping is None or self._of().machine() is None else "starting"
            self.say(f"{verb} {self.name} {offer.id} for ${offer.price:.2f} an hour")
            began = time.monotonic()
            if found := await self._take(offer, 1, need, ready=ready):
                self.say(f"{found[0].name} is up after {time.monotonic() - began:.0f} s")
                return found[0]
            row = self._of().ledger.of_run(self.run)[-1]
            last = row.reason
            if row.lease:
                tried.append(f"{offer.id}: {last}")
        why = f"{self.name} has no machine left that does for it" if len(tried) < BOOTS else f"{len(tried)} machines of {self.name} failed to come up"
        self.refuse(need, "; ".join([why, *(tried or [f"the last that was asked for: {last}"] * bool(last))]))
        return None

    def refuse(self, need: Need, why: str) -> None:
        """Ask for no machine of this need any more."""
        self.refused[need] = why
        self.lost.append(why)

    def hopes(self, spec: StepSpec) -> bool:
        """Whether there is a place where a step could run, or may be one yet."""
        if sum(site.could(spec.resources.room) for site in self.sites_of(spec, local=False)) >= spec.node_count:
            return True
        return self.priced and not self.stays(spec.resources) and self.need(spec) not in self.refused

    def group(self, sites: Sequence[Site]) -> Site:
        """These hosts as one place, the first of them node 0."""
        from .group import Group

        return Group([site for site in sites if isinstance(site, Away)])

    def named(self, names: Sequence[str]) -> Site | None:
        """The place with these hosts, by rank; None when this run has not all of them."""
        known = {site.name: site for site in self.sites if not site.lost}
        found = [known[name] for name in names if name in known]
        if len(found) < len(names):
            return None
        return found[0] if len(found) == 1 else self.group(found)

    def machines(self, need: Need) -> int:
        """How many machines that do for this need are up, or were asked for."""
        return self.coming.count(need) + sum(used.serves(need) and not used.site.lost and not used.site.leaving for used in self._used)

    def spare(self, needs: Mapping[Need, int]) -> list[tuple[Site, str]]:
        """Rented machines that are to be given back, and why: no step has such a need any more, or there was nothing to do for a while.

        `needs` are those of unfinished steps, with how many of these are QUEUED.
        """
        now, found = time.monotonic(), []
        for used in self._used:
            served = [count for need, count in needs.items() if used.serves(need)]
            if used.site.leaving and not used.site.busy:
                found.append((used.site, used.site.leaving))
            elif used.site.busy or any(served):
                used.idle_since = now
            elif not served:
                found.append((used.site, "no unfinished step needs it"))
            elif now - used.idle_since >= self._idle:
                found.append((used.site, f"it had nothing to do for {self._idle:g} s"))
        return found

    async def give_back(self, site: Site, reason: str) -> bool:
        """End the leases of a place: nothing starts there any more.  False when one is not proved gone yet.  Raises DriverError."""
        rows = {row.key: row for used in self._used if used.site is site for row in used.leases}
        with_it = [used.site for used in self._used if used.site is not site and any(row.key in rows for row in used.leases)]
        self._used = [used for used in self._used if used.site is not site and used.site not in with_it]
        for each in with_it:
            each.lost = each.lost or reason
        for each in (site, *with_it):
            if each in self.sites:
                self.sites.remove(each)
            await each.aclose()
        gone = True
        if any([self._gone(each) for each in (site, *with_it)]):
            reason = f"{TAKEN_AWAY}: {reason}"
        healthy = not (site.lost or site.leaving)
        for row in rows.values():
            if healthy and self._of().stays_alive(row):
                self._of().hand_over(row)
            else:
                gone &= await self._of().release(row, reason)
        return gone

    def _gone(self, site: Site) -> bool:
        """Whether a place that is given back is one of the spot market that was taken away."""
        taken = site.name in self._spot and bool(site.lost or site.leaving)
        if taken:
            self._taken += 1
            if self._taken == MOST_TAKEN:
                self.say(f"{MOST_TAKEN} spot machines were taken away: what is rented from now on is on demand")
        return taken

    async def _watch(self, site: Site, host: Host) -> None:
        """Wait until a place is about to be taken away, or gone."""
        while not site.lost and site in self.sites:
            try:
                async for _ in host.call(self._of().driver.traits.notice):
                    pass
            except DriverError:
                await asyncio.sleep(NOTICED)
            else:
                site.leaving = f"{self.name} takes it away"
                return

    async def replace(self, lost: Site) -> Sequence[Site]:
        """Other places for one that is gone, if there are any.  One that costs money is asked for again when a step needs it."""
        self.lost.append(f"{lost.name}: {lost.lost}")
        _log.info("%s lost: %s", lost.name, lost.lost)
        held = any(used.site is lost and not any(row.key in self._succeeded for row in used.leases) for used in self._used)
        with contextlib.suppress(DriverError):
            await self.give_back(lost, lost.lost)
        if self.priced:
            return ()
        try:
            if self._of().driver.traits.allocates:
                return await self.allocate() if held else ()
            for offer in await self._offers(Wish()):
                if not any(site.name == f"{self.name} {offer.id}" for site in self.sites) and (
                    found := await self._take(offer, lost.slots or 1, Need())
                ):
                    return found
        except (DriverError, Infrastructure) as error:
            self.say(f"there is no other host for {lost.name}: {error}")
        return ()

    def ending(self) -> list[Site]:
        """One place of each lease that has begun to end since the last look."""
        found = {row.key: used.site for used in self._used if used.site.leaving for row in used.leases if row.key not in self._succeeded}
        self._succeeded |= found.keys()
        return list(found.values())

    def spent_leases(self) -> list[Site]:
        """One place of each lease that is about to end and on which nothing runs any more."""
        found: dict[str, Site] = {}
        busy = {row.key for used in self._used if used.site.busy or not used.site.leaving for row in used.leases}
        for used in self._used:
            found |= {row.key: used.site for row in used.leases if row.key not in busy}
        return list(found.values())

    async def _renew(self) -> None:
        """Keep the leases, until cancelled."""
        while True:
            await asyncio.sleep(RENEW)
            for used in self._used:
                for n, row in enumerate(used.leases):
                    with contextlib.suppress(DriverError, Busy):  # there is time for many tries before it ends
                        used.leases[n] = await self._of().renew(row)

    async def _tend(self) -> None:
        """Ask again for what is not given back yet, and look what other runs left, until cancelled."""
        said: set[str] = set()
        began: dict[str, float] = {}
        looked = time.monotonic()
        while True:
            await asyncio.sleep(AGAIN)
            with contextlib.suppress(Busy):
                self._of().accrue()
                for row in await self._of().again():
                    if time.monotonic() - began.setdefault(row.key, time.monotonic()) >= ALARM and row.key not in said:
                        said.add(row.key)
                        self.say(f"{self.name} has not ended the lease {row.key} for {ALARM / 60:g} minutes{self._console()}")
            if time.monotonic() - looked >= LOOK:
                looked = time.monotonic()
                from . import reaper

                with contextlib.suppress(DriverError, Busy):
                    for words in await reaper.tidy(self._of(), self.ws.environ):
                        if (told := words.partition(", $")[0]) not in said:
                            said.add(told)
                            self.say(words)

    def _console(self) -> str:
        driver = self._of().driver
        return f": end it at {driver.console}" if isinstance(driver, Accounted) else ""

    async def close(self, *, leave: bool = False) -> None:
        """Give everything back.  `leave`: jobs go on without us, so what they would die with is kept for who resumes the run."""
        for beside in self._beside:
            beside.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for site in self.sites if not self.priced else ():
            if isinstance(site, Away) and not site.lost:
                with contextlib.suppress(DriverError, Infrastructure):  # the next run does it
                    await site.depot.sweep(every=SWEEP)
        for site in dict.fromkeys([self.here, *self.sites]):
            await site.aclose()
        if self.leases is not None:
            if not (leave and self.priced):
                for used in self._used:
                    if not (used.site.lost or used.site.leaving):
                        for row in filter(self.leases.stays_alive, used.leases):
                            self.leases.hand_over(row)
                for row, why in await self.leases.close():
                    self.say(f"the lease {row.key} of {self.name} could not be given back: {why}; `recipe reap` asks again{self._console()}")
            with contextlib.suppress(DriverError, Busy):  # what was accrued stands
                await self.leases.charges()
            if isinstance(self.leases.driver, Closing):
                await self.leases.driver.aclose()
            self.leases.ledger.close()

    def _of(self) -> KeptLeases:
        assert self.leases is not None
        return self.leases

    def _leases(self) -> KeptLeases:
        settings = self.ws.config.driver(self.name)
        self.box = {name: settings[name] for name in ("container_engine", "engine_args", "container_args") if name in settings}
        self._idle = float(settings.get("idle", IDLE))
        self._market = market_of(settings)
        python = "" if self.python == interpreters.CURRENT else self.python
        driver = driver_of(self.name, settings, self.hosts, str(self.ws.home), python)
        path = ledger.of_user(self.ws.environ) if driver.traits.priced else ledger.of_workspace(self.ws.home)
        leases = KeptLeases(driver, self.name, Ledger.open(path), self.run, str(self.ws.root), lambda before, row: self.moves.append((before, row)))
        leases.limits = self.ws.config.limits if driver.traits.priced else {}
        leases.limit, leases.least, leases.say = self.limit, float(settings.get("least", LEAST)), self.say
        leases.term = timedelta(hours=float(settings.get("term", leases.term.total_seconds() / 3600)))
        leases.keep_alive = self.keep_alive
        if self.stack:
            leases.of(self.ws.config.stacks[self.stack])
        return leases

    async def _offers(self, wish: Wish) -> Sequence[Offer]:
        leases = self._of()
        offers = await leases.offers(wish)
        if isinstance(leases.driver, Skipping):
            for host, why in leases.driver.left_out.items():
                self.say(f"{host} is left out: {why}")
        if not offers and not self.priced:
            why = f": {'; '.join(leases.driver.excluded)}" if isinstance(leases.driver, Excluding) and leases.driver.excluded else ""
            raise Infrastructure(f"the driver {self.name} offers no host{why}", fix=f"`recipe doctor --driver {self.name}` says what there is")
        return offers

    async def _take(
        self, offer: Offer, want: int, need: Need, kept: Sequence[LeaseRow] = (), ready: Callable[[Site], Awaitable[object]] | None = None
    ) -> Sequence[Site]:
        """As many places on one machine as are free and wanted, beside those `kept`; empty when there is none.

        Raises CannotRun when it lets us in and can do nothing for us.
        """
        taken: list[LeaseRow] = []
        try:
            with self._usable(offer):
                while len(kept) + len(taken) < want and (row := await self._of().ask(need, offer, max(1, len(self.coming)))) is not None:
                    taken.append(row)
            return await self._enter(offer, [*kept, *taken], ready) if kept or taken else ()
        except Exception as error:
            await self._of().close({row.key for row in taken}, f"it cannot be used: {error}")
            raise

    @contextlib.contextmanager
    def _usable(self, offer: Offer) -> Iterator[None]:
        """A machine that lets us in and can do nothing for us is told with what to do."""
        try:
            yield
        except Rejected as error:
            fix = "make room there, or name a folder that can be written as `root` in the driver's settings; `recipe doctor` says what it lacks"
            raise CannotRun(f"{self.name} {offer.id} cannot be used: {error}", fix=fix) from error

    async def _enter(self, offer: Offer, rows: Sequence[LeaseRow], ready: Callable[[Site], Awaitable[object]] | None = None) -> Sequence[Site]:
        """The place that these leases on one machine give us, or the nodes of a lease, when they are up; empty when they are gone, and given back.

        Raises CannotRun.
        """
        try:
            with self._usable(offer):
                leased = [await self._of().up(row) for row in rows]
                rows = [row for row, _ in leased]
                hosts = leased[0][1]
                if self.priced:
                    await self._measure(offer, need_of(rows[0]), hosts[0])
                    self._of().measured(rows[0])
                slots = None if self._of().driver.traits.allocates else len(rows)
                sites = [await self._site(offer, lease_of(rows[0]), host, slots) for host in hosts]
        except HostLost as error:
            self.say(f"{self.name} {offer.id}: {error}")
            await self._of().close({row.key for row in rows}, str(error))
            return ()
        for site, host in zip(sites, hosts, strict=True):
            site.image = need_of(rows[0]).image
            if ready is not None:
                await ready(site)  # before any step can be started there
            self._used.append(_Used(site, offer, list(rows), time.monotonic()))
            self.sites.append(site)
            if isinstance(host, Ending):
                site.leave_at, site.notice = host.until - host.grace, timedelta(seconds=host.grace * SAVES)
            if offer.market == "spot":
                self._spot.add(site.name)
                if self._of().driver.traits.notice:
                    self._beside.append(asyncio.get_running_loop().create_task(self._watch(site, host)))
        return sites

    async def _measure(self, offer: Offer, need: Need, host: Host) -> None:
        """Raises HostLost when a machine has less than was promised."""
        told = machine.facts(b"".join([data async for data in host.call(machine.question(".", machine.SMI))]))
        if short := machine.less(offer.resources, need, told):
            raise HostLost(short)

    async def _site(self, offer: Offer, lease: Lease, host: Host, slots: int | None) -> Site:
        have = offer.resources
        room = {"cpus": have.cpus or 1.0, "memory": float(have.memory or 0) or float("inf")}
        cards = tuple(Card(number) for number in range(have.gpus or 0))
        name = f"{self.name} {host.name if isinstance(host, Named) else lease.id if self.priced else offer.id}"
        from .transfer import Depot
        from .wire import Wire

        python = lease.data.get("python", "python3")
        root = lease.data.get("root") or host.root
        wire = Wire(host, root, name=name, say=self.say, progress=_Told(self.say))
        jobs = there(wire)
        shared = self._of().driver.traits.shared_disk
        if not shared:
            jobs.wake()  # it comes up while we ask
        asked = self._said(host, ("/bin/sh", "-c", _ASK, "sh", python, "" if shared else root))
        if shared:
            cards = devices.listed(await asked) or cards
            return self._near(self._python(), name, jobs, room, lambda: devices.visible(None, cards), slots)
        depot = Depot(wire, self._recall)
        try:
            said, _ = await asyncio.gather(asked, depot.open())
        except BaseException as error:
            await jobs.aclose()
            if isinstance(error, Infrastructure):
                raise CannotRun(f"{name} cannot be used: {error}", fix=error.fix) from error
            raise
        cards = devices.listed(said) or cards
        told = dict(line.split("=", 1) for line in said.split("\n") if line.startswith(_TOLD))
        python, path = told.get("PYTHON") or python, told.get("PATH", "/usr/bin:/bin")
        for folder in filter(None, (os.path.dirname(python), told.get("CALLED"))):
            path = f"{folder}:{path}"
        login = dict(line[4:].split("=", 1) for line in said.split("\n") if line.startswith("env ") and "=" in line)
        seen = devices.visible(login.get(devices.VISIBLE), cards)
        site = Away(
            self.ws,
            name,
            jobs,
            room,
            seen,
            depot,
            slots=slots,
            python=python,
            version=told.get("VERSION", ""),
            path=path,
            login=login,
            say=self.say,
        )
        site.address = host.address if isinstance(host, Addressed) else ""
        return site

    async def _said(self, host: Host, argv: Argv) -> str:
        return b"".join([data async for data in host.call(argv)]).decode("utf-8", "surrogateescape")

    def _python(self) -> str:
        """The interpreter of this machine; one that was named for hosts need not be here.  Raises CannotRun."""
        named = "" if self.away and self.python != interpreters.CURRENT else self.python
        python = interpreters.chosen(named, self.ws.root, self.ws.environ)
        interpreters.ask(python)
        return python

    def _near(
        self,
        python: str,
        name: str,
        host: Client,
        machine: Mapping[str, float],
        cards: Callable[[], Sequence[devices.Device]],
        slots: int | None = None,
    ) -> Site:
        """A place that sees our disk: what this login has is there, too."""
        path = interpreters.command_path(python, self.ws.home, self.ws.environ)
        return Site(self.ws, name, host, machine, cards, slots=slots, python=python, path=path, login=self.ws.environ)

    def _recall(self, content: str) -> Any:
        from ..storage.files import Content

        return self.ws.objects.entries(Content(content)) if self.ws.objects.has(Content(content)) else None

    async def match(self, sites: Sequence[Site]) -> None:
        """See to it that the Python of these hosts has the packages of ours, which stand in keys.  Raises CannotRun."""
        for site in sites:
            if not isinstance(site, Away):
                continue
            call = site.host.call((site.python, "-c", _PACKAGES))
            try:
                found = json.loads(b"".join([data async for data in call]))
            except (Rejected, ValueError) as error:
                raise CannotRun(f"the Python of {site.name} ({site.python}) does not run: {error}", fix=_NAME_PYTHON) from error
            ours = list(packages())
            if found != ours:
                differ = sorted({*found[1]} ^ {*ours[1]})
                some = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
                what = some or f"Python {found[0]}, not {ours[0]}"
                raise CannotRun(f"{site.python} on {site.name} has other packages than this Python ({what})", fix=_NAME_PYTHON)


def need_for(spec: StepSpec, market: Market | Literal["any"] = "on-demand", *, images: bool = False) -> Need:
    """What a step needs of a machine.  `images`: a machine is a container of the step's image, where it has one."""
    wants = spec.resources
    image = spec.image or "" if images else ""
    return Need(wants.cpus, wants.memory, wants.gpus, wants.gpu, wants.gpu_memory, wants.disk, market=market, image=image)


def market_of(settings: Mapping[str, Any]) -> Market | Literal["any"]:
    """On which market the driver of these settings rents.  Raises CannotRun."""
    known: dict[object, Market | Literal["any"]] = {"on-demand": "on-demand", "spot": "spot", "any": "any"}
    found = known.get(settings.get("market", "on-demand"))
    if found is None:
        raise CannotRun(f'the market "{settings["market"]}" is not known', fix=f"write market = one of {', '.join(map(str, known))}")
    return found


def covers(offer: Offer, need: Need) -> bool:
    """Whether a machine that was offered so does for a need."""
    return need.market in (offer.market, "any") and machine.enough(offer.resources, Wish(replace(need, market="any")))


def _by_machine(rows: Iterable[LeaseRow]) -> dict[str, list[LeaseRow]]:
    """Places on one machine together; what costs money is a machine of its own each."""
    found: dict[str, list[LeaseRow]] = {}
    for row in rows:
        found.setdefault(row.key if row.price else str(row.offer["id"]), []).append(row)
    return found


class _Told:
    """Words about long transfers: one line now and then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: dict[str, float] = {}

    def __call__(self, progress: Progress) -> None:
        now = asyncio.get_running_loop().time()
        if progress.done == progress.total:
            self._last.pop(progress.what, None)
        elif progress.what not in self._last:
            self._last[progress.what] = now
        elif now - self._last[progress.what] >= TELL:
            self._last[progress.what] = now
            left = f", {progress.eta:.0f} s left" if progress.eta is not None else ""
            share = f"{progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} MB"
            self._say(f"{progress.what}: {share}, {progress.rate / 1e6:.0f} MB/s{left}")
