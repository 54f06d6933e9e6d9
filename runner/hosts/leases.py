"""The places that a run has: this machine, and leases on others, taken before it begins and given back at its end.  Knows drivers, not steps.

A lease is renewed while its run lives.  One whose run is dead is given back by the next run of the same workspace that uses the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from drivers import devices, load
from drivers.base import (
    Closing,
    Denied,
    Driver,
    DriverError,
    Host,
    HostLost,
    Lease,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Resources,
    Skipping,
)
from drivers.devices import Card

from .. import extensions
from ..digest import of_value
from ..errors import Busy, CannotRun, Infrastructure
from ..extensions import packages
from ..logs import Log
from ..retry import retry_async
from ..storage.workspace import Workspace
from . import interpreters
from .away import Away, throttled
from .sites import Site

if TYPE_CHECKING:
    from .wire import Progress

COMING_UP = 900.0
"""Seconds in which a machine that was asked for has to be there."""
LOOK = 0.5
TERM = timedelta(days=1)
"""For which a lease is asked, and asked again every `RENEW`: how long a place stays taken when a worker and its workspace are gone for good."""
RENEW = 3600.0
SWEEP = timedelta(days=1)
"""Between two looks at what a host keeps that nobody has asked for in a long time."""
TELL = 5.0
"""Seconds between words about a transfer."""

# The command path of a login there, the Python that was named, the variables of the login, and the GPUs that it sees.  $1: the name of that Python.
_ASK = (
    "PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin\n"
    'printf "\\nPATH=%s\\nPYTHON=%s\\n" "$PATH" "$(command -v "$1")"\n'
    'printf "VERSION=%s\\n" "$("$1" -c "import platform; print(platform.python_version())" 2>/dev/null)"\n'
    "env | sed 's/^/env /'\n"
    "nvidia-smi -L 2>/dev/null || :\n"
)
_TOLD = ("PATH=", "PYTHON=", "VERSION=")


# A program called `python` in the folder $1 that is the Python $2, as words of a shell: systems have a python3 and no python, or an older one of that
# name.  Where nothing in our folder may be executed there is none.
_CALL_IT = (
    '[ -x "$1/python" ] || { mkdir -p -- "$1" && printf "%s\\n" "#!/bin/sh" "exec $2 \\"\\$@\\"" >"$1/python.$$" &&'
    ' chmod 755 "$1/python.$$" && mv -f "$1/python.$$" "$1/python"; }\n'
    '"$1/python" -c "print(\'it runs\')"\n'
)
# What Python this is: its version, and sorted name==version lines.
_PACKAGES = (
    "import json, platform; from importlib.metadata import distributions as all\n"
    "print(json.dumps([platform.python_version(), sorted({f'{each.name}=={each.version}' for each in all()})]))"
)
_NAME_PYTHON = "name the right one as `python` in the driver's settings, or let the recipe's lock say what is needed"


_log = Log("hosts")


@dataclass(slots=True)
class _Leased:
    lease: Lease
    order: Order
    place: str


@dataclass(slots=True)
class HostPool:
    """Where the steps of one run may run."""

    ws: Workspace
    run: str
    local: Driver
    name: str
    """Of the driver that hosts come from."""
    hosts: Sequence[str] = ()
    """Addresses that were named for this run, instead of those of the settings."""
    say: Callable[[str], None] = lambda _text: None
    python: str = ""
    """The Python that was named for steps without a lock: see `interpreters.chosen`.  Empty for none."""
    here: Site = field(init=False)
    sites: list[Site] = field(default_factory=list)
    box: Mapping[str, Any] = field(default_factory=dict)
    """How containers are run there: the settings `container_engine`, `engine_args` and `container_args`."""
    _driver: Driver | None = None
    _leased: list[_Leased] = field(default_factory=list)
    _here: Lease | None = None
    _renewing: asyncio.Task[None] | None = None

    lost: list[str] = field(default_factory=list)
    """Why places that were ours are not any more."""

    @property
    def away(self) -> bool:
        """Whether steps run elsewhere than on this machine."""
        return self.name != "local"

    def sites_of(self, *, local: bool) -> Sequence[Site]:
        """Where a step may run: a local one on this machine only."""
        return [self.here] if local else self.sites

    def machine(self, names: Iterable[str]) -> dict[str, float]:
        """What all places have together of cpus, gpus, or memory in bytes."""
        return {name: sum(site.has(name) for site in self.sites) for name in names}

    async def open(self, *, want: int) -> None:
        """Take what there is, for at most `want` steps at once.  Raises Busy when all is taken, DriverError."""
        python = self._python()
        self._here = await self.local.acquire(Order(Offer("local", "local"), self.run, datetime.max))
        found = await self.local.hosts(self._here)
        if not found:
            raise Infrastructure("this machine has no host")
        self.here = self._near(python, "local", found[0], self.ws.machine(), lambda: self.ws.devices)
        if not self.away:
            self.sites = [self.here]
            return
        self._driver = self._made()
        await self._give_back_dead()
        for offer in await self._offers():
            if sum(site.slots or 0 for site in self.sites) >= want:
                break
            await self._take(offer, want - sum(site.slots or 0 for site in self.sites))
        self._renewing = asyncio.get_running_loop().create_task(self._renew())
        if not self.sites:
            raise Busy(f"all places that {self.name} has are taken", fix="wait, or name another host")

    async def replace(self, lost: Site) -> Site | None:
        """Another place for one that is gone, if there is any."""
        self.lost.append(f"{lost.name}: {lost.lost}")
        _log.info("%s lost: %s", lost.name, lost.lost)
        for leased in [leased for leased in self._leased if leased.place == lost.name]:
            self._leased.remove(leased)
            with contextlib.suppress(DriverError):
                await self._of().release(leased.lease)
        if lost in self.sites:
            self.sites.remove(lost)
        try:
            for offer in await self._offers():
                if not any(site.name == f"{self.name} {offer.id}" for site in self.sites) and (found := await self._take(offer, lost.slots or 1)):
                    return found
        except (DriverError, Infrastructure) as error:
            self.say(f"there is no other host for {lost.name}: {error}")
        return None

    async def _renew(self) -> None:
        """Keep the leases, until cancelled."""
        while True:
            await asyncio.sleep(RENEW)
            for leased in list(self._leased):
                order = Order(leased.order.offer, leased.order.key, datetime.now(UTC) + TERM)
                with contextlib.suppress(DriverError):  # there is time for many tries before it ends
                    leased.lease = await self._of().acquire(order)

    async def close(self) -> None:
        """Give everything back."""
        if self._renewing is not None:
            self._renewing.cancel()
        for site in self.sites:
            if isinstance(site, Away) and not site.lost:
                with contextlib.suppress(DriverError, Infrastructure):  # the next run does it
                    await site.depot.sweep(every=SWEEP)
        for leased in self._leased:
            try:
                await self._of().release(leased.lease)
                _log.info("%s released: %s", leased.place, leased.lease.id)
            except DriverError as error:
                self.say(f"{leased.place} could not be given back: {error}")
        self._leased = []
        if isinstance(self._driver, Closing):
            await self._driver.aclose()
        if self._here is not None:
            await self.here.host.aclose()
            await self.local.release(self._here)

    def _of(self) -> Driver:
        assert self._driver is not None
        return self._driver

    def _made(self) -> Driver:
        settings = self.ws.config.driver(self.name)
        self.box = {name: settings.pop(name) for name in ("container_engine", "engine_args", "container_args") if name in settings}
        if self.hosts:
            settings["hosts"] = list(self.hosts)
        if self.python not in ("", interpreters.CURRENT):
            settings["python"] = self.python
        if self.name == "loopback":
            settings.setdefault("root", str(self.ws.home / "loopback"))
        try:
            made: Driver = load(self.name, extensions.drivers(self.name))(**settings)
        except TypeError as error:
            fix = "see `recipe config` and docs/remote-hosts.md"
            raise CannotRun(f"the driver {self.name} does not take these settings: {error}", fix=fix) from error
        except (Rejected, Denied) as error:
            raise CannotRun(str(error)) from error
        return made

    async def _offers(self) -> Sequence[Offer]:
        driver = self._of()
        offers = await driver.offers(Resources())
        if isinstance(driver, Skipping):
            for host, why in driver.left_out.items():
                self.say(f"{host} is left out: {why}")
        if not offers:
            raise Infrastructure(f"the driver {self.name} offers no host", fix=f"`recipe doctor --driver {self.name}` says what there is")
        return offers

    async def _take(self, offer: Offer, want: int) -> Site | None:
        """As many places on one machine as are free and wanted.  Raises CannotRun when it lets us in and can do nothing for us."""
        try:
            return await self._taken(offer, want)
        except Rejected as error:
            fix = "make room there, or name a folder that can be written as `root` in the driver's settings; `recipe doctor` says what it lacks"
            raise CannotRun(f"{self.name} {offer.id} cannot be used: {error}", fix=fix) from error

    async def _taken(self, offer: Offer, want: int) -> Site | None:
        driver, taken = self._of(), []
        for number in range(want):
            order = Order(offer, f"{self.run}.{offer.id}.{number}", datetime.now(UTC) + TERM)
            try:
                lease = await retry_async(partial(driver.acquire, order), throttled)
            except NoCapacity:
                break
            _log.info("%s %s acquired: %s", self.name, offer.id, lease.id)
            taken.append(_Leased(lease, order, f"{self.name} {offer.id}"))
        if not taken:
            return None
        self._leased += taken
        try:
            host = await self._up(taken[0].lease)
            site = await self._site(offer, taken[0].lease, host, len(taken))
        except HostLost as error:
            self.say(f"{self.name} {offer.id}: {error}")
            for leased in taken:
                self._leased.remove(leased)
                await driver.release(leased.lease)
            return None
        self.sites.append(site)
        return site

    async def _up(self, lease: Lease) -> Host:
        deadline = asyncio.get_running_loop().time() + COMING_UP
        while True:
            hosts = await self._of().hosts(lease)
            if hosts:
                return hosts[0]
            if asyncio.get_running_loop().time() > deadline:
                raise HostLost(f"it did not come up within {COMING_UP / 60:.0f} minutes")
            await asyncio.sleep(LOOK)

    async def _site(self, offer: Offer, lease: Lease, host: Host, slots: int) -> Site:
        have = offer.resources
        machine = {"cpus": have.cpus or 1.0, "memory": float(have.memory or 0) or float("inf")}
        cards = tuple(Card(number) for number in range(have.gpus or 0))
        if self._of().traits.shared_disk:
            return self._near(self._python(), f"{self.name} {offer.id}", host, machine, lambda: devices.visible(None, cards), slots)
        from .transfer import Depot

        name = f"{self.name} {offer.id}"
        python = lease.data.get("python", "python3")
        said = b"".join([data async for data in host.call(("/bin/sh", "-c", _ASK, "sh", python))]).decode("utf-8", "surrogateescape")
        told = dict(line.split("=", 1) for line in said.split("\n") if line.startswith(_TOLD))
        cards = devices.listed(said) or cards
        told_of = _Told(self.say)
        depot = Depot(host, lease.data.get("root", ".recipe-host"), name=name, say=self.say, progress=told_of, recall=self._recall)
        await depot.open()
        python, path = told.get("PYTHON") or python, told.get("PATH", "/usr/bin:/bin")
        if folder := os.path.dirname(python):
            path = f"{folder}:{path}"
        if told.get("PYTHON") and os.path.basename(python) != "python":
            ours = f"{depot.root}/bin/python-{of_value('python', python)[:12]}"
            with contextlib.suppress(Rejected):
                answer = [data async for data in host.call(("/bin/sh", "-c", _CALL_IT, "sh", ours, shlex.quote(python)))]
                path = f"{ours}:{path}" if b"it runs" in b"".join(answer) else path
        login = dict(line[4:].split("=", 1) for line in said.split("\n") if line.startswith("env ") and "=" in line)
        seen = devices.visible(login.get(devices.VISIBLE), cards)
        return Away(
            self.ws,
            name,
            host,
            machine,
            seen,
            depot,
            slots=slots,
            python=python,
            version=told.get("VERSION", ""),
            path=path,
            login=login,
            say=self.say,
        )

    def _python(self) -> str:
        """The interpreter of this machine; one that was named for hosts need not be here.  Raises CannotRun."""
        named = "" if self.away and self.python != interpreters.CURRENT else self.python
        python = interpreters.chosen(named, self.ws.root, os.environ)
        interpreters.ask(python)
        return python

    def _near(
        self,
        python: str,
        name: str,
        host: Host,
        machine: Mapping[str, float],
        cards: Callable[[], Sequence[devices.Device]],
        slots: int | None = None,
    ) -> Site:
        """A place that sees our disk: what this login has is there, too."""
        path = interpreters.command_path(python, self.ws.home, os.environ)
        return Site(self.ws, name, host, machine, cards, slots=slots, python=python, path=path, login=os.environ)

    def _recall(self, content: str) -> Any:
        from ..storage.files import Content

        return self.ws.objects.entries(Content(content)) if self.ws.objects.has(Content(content)) else None

    async def match(self) -> None:
        """See to it that the Python of every host has the packages of ours, which stand in keys.  Raises CannotRun."""
        for site in self.sites:
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

    async def _give_back_dead(self) -> None:
        """Places that a run of this workspace holds whose worker is gone."""
        known = {row.id for row in self.ws.store.runs.latest(last=1000)}
        try:
            leases = await self._of().leases()
        except DriverError:
            return  # one host of several cannot be asked: the offers leave it out and say why
        for lease in leases:
            run = lease.key.partition(".")[0]
            if run in known and not self.ws.store.runs.live(run):
                await self._of().release(lease)


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
