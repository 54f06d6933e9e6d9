"""Turn the hosts of a driver into places.

Inspects a host, and opens the agent connection and the host store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from drivers import devices, machine
from drivers.base import (
    Driver,
    Host,
    Lease,
    Need,
    Offer,
    Rejected,
    Resources,
    Traits,
)
from drivers.devices import Card, Device

from ..errors import CannotRun, Infrastructure
from ..extensions import packages
from ..failures import LeaseFailure
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from . import interpreters
from .link.client import Client, connect_remote
from .link.contact import ask_program
from .place.place import Place, Shell
from .place.remote import RemotePlace
from .renting.cooldowns import UnusableMachine

if TYPE_CHECKING:
    from .link.wire import TransferProgress
    from .transfer.host_store import HostStore

TELL = 5.0
"""Seconds between two progress messages of a transfer."""

# Prints the login's PATH, the Python, the login's variables, and the GPUs.  Many systems have a
# python3 and no python, or an older one of that name: then a directory below the root gets a
# program `python`, unless the disk is mounted noexec. $1: the Python or its environment, $2: the
# root, $3: path of a fallback Python below it, $4: programs known to hang.
_ASK = (
    machine.SMI
    + r"""PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin
case $2 in /*) ours=$2 ;; *) ours=${HOME:-.}/$2 ;; esac
python=$(command -v "$(program "$1")" || command -v "$ours/$3")
printf '\nPATH=%s\nPYTHON=%s\n' "$PATH" "$python"
which='import sys; print(sys.version.split()[0])'
version=
if [ -n "$python" ] && [ "${python##*/}" != python ]; then
  ours=$ours/bin/python-$(printf %s "$python" | cksum | tr ' ' -)
  [ -x "$ours/python" ] || {
    mkdir -p -- "$ours"
    quoted=$(printf %s "$python" | sed "s/'/'\\\\''/g")
    printf '%s\n' '#!/bin/sh' "exec '$quoted' \"\$@\"" >"$ours/python.$$" && chmod 755 "$ours/python.$$" && mv -f "$ours/python.$$" "$ours/python"
  } 2>/dev/null
  version=$("$ours/python" -I -S -c "$which" 2>/dev/null) && printf 'CALLED=%s\n' "$ours"
fi
[ -n "$version" ] || version=$("$python" -I -S -c "$which" 2>/dev/null)
printf 'VERSION=%s\n' "$version"
env | sed 's/^/env /'
hung=$4
smi '' -L
"""
)
_FACTS = ("PATH=", "PYTHON=", "VERSION=", "CALLED=")


# Prints the version of a Python, and sorted name==version lines.
_PACKAGES = (
    "import json, platform; from importlib.metadata import distributions as all\n"
    "print(json.dumps([platform.python_version(), sorted({f'{each.name}=={each.version}' for each in all()})]))"
)
_NAME_PYTHON = (
    "set the matching `python` in the driver's settings, or lock the packages in the recipe"
)


class HostConnection(NamedTuple):
    """A host with a connection to its agent that is still being opened."""

    python: str
    """The Python that the settings name for the host."""
    jobs: Client
    host_store: HostStore
    answers: asyncio.Future[tuple[bytes, None]]
    """The host's description of itself, available when the connection is open."""

    async def aclose(self) -> None:
        """Close the connection to a host that did not become a place."""
        self.answers.cancel()
        await asyncio.gather(self.answers, return_exceptions=True)
        await self.jobs.aclose()


class Connector:
    """Connects to the hosts of one run.

    `name` is the driver, `named` the Python for steps without a lock.

    `given` are contents that the first steps need.  Each host is asked for them as soon as it is
    connected.
    """

    def __init__(
        self,
        ws: Workspace,
        name: str,
        named: str,
        say: Callable[[str], None],
        given: Collection[str] = (),
    ) -> None:
        self._ws, self._name, self._named, self._say, self._given = ws, name, named, say, given

    def local_place(self, local: Client) -> Place:
        """Return this machine as a place.  Raises CannotRun."""
        python, ws = self._choose_python(), self._ws
        path = interpreters.command_path(python, ws.home, ws.environ)

        def find_devices() -> Sequence[Device]:
            try:
                return devices.here(ws.environ)
            except devices.Hung:
                self._say(unused_gpus_warning("this machine"))
                return ()

        shell = Shell(python, path, ws.environ)
        return Place(ws, "local", local, ws.machine(), find_devices, shell)

    def _choose_python(self) -> str:
        """Return the interpreter of this machine.

        A Python that was set for remote hosts need not exist here.  Raises CannotRun.
        """
        named = "" if self._name != "local" and self._named != interpreters.CURRENT else self._named
        return interpreters.choose_python(named, self._ws.root, self._ws.environ)

    def begin_connection(
        self,
        name: str,
        host: Host,
        python: str,
        traits: Traits,
        root: str = "",
        *,
        hung: str = "",
    ) -> HostConnection:
        """Start to connect to a host, and ask for the facts for `create_place`.

        `root` replaces the root directory of the host.  `hung` names programs that are known to
        hang there.
        """
        from .link.stream import OWN, PROGRAM
        from .link.wire import Wire
        from .transfer.host_store import HostStore

        root = root or host.root
        wire = Wire(host, root, name=name, say=self._say, progress=_ProgressPrinter(self._say))
        jobs = connect_remote(wire)
        jobs.wake()  # the agent starts while the host answers
        shared_folder = f"{self._ws.home}/partial" if traits.shared_disk else ""
        host_store = HostStore(wire, self._recall_manifest, shared_folder)
        words = ("/bin/sh", "-c", PROGRAM + _ASK, "sh", python, root, OWN, hung)
        asked = ask_program(host.call, words)
        return HostConnection(
            python, jobs, host_store, asyncio.gather(asked, self._open_store(host_store))
        )

    @contextlib.asynccontextmanager
    async def begin_connections(
        self, driver: Driver, want: int
    ) -> AsyncIterator[dict[str, HostConnection]]:
        """Connect to the hosts in parallel while their offers are read.

        On exit, close the connections that the caller has not taken out.
        """
        hosts = driver.connected_hosts()
        some = hosts if len(hosts) <= want else {}  # with more hosts, some may not be needed
        connections = {
            name: self.begin_connection(f"{self._name} {name}", host, host.python, driver.traits)
            for name, host in some.items()
        }
        try:
            yield connections
        finally:
            for each in connections.values():
                await each.aclose()

    async def _open_store(self, host_store: HostStore) -> None:
        await host_store.open()
        await host_store.prefetch_state(self._given)

    async def create_place(
        self,
        offer: Offer,
        lease: Lease,
        host: Host,
        traits: Traits,
        *,
        slots: int,
        reached: HostConnection | None = None,
    ) -> Place:
        """Return a place with `slots` leased slots on one host; `reached` is a connection already begun.  Raises CannotRun, DriverError."""
        id = lease.id if traits.priced else offer.id
        name = f"{self._name} {host.name or id}"
        hung = lease.data.get("hung", "")  # known since the offer
        if reached is None:
            python, root = lease.data.get("python", "python3"), lease.data.get("root", "")
            reached = self.begin_connection(name, host, python, traits, root, hung=hung)
        facts = await _receive_facts(reached, name)
        shell = _parse_shell(facts, reached.python)
        count = offer.resources.gpus or 0
        if "hung=nvidia-smi" in facts.split("\n") and not hung:
            self._say(unused_gpus_warning(name))
            count = 0
        cards = devices.parse_cards(facts) or tuple(map(Card, range(count)))
        # Steps share the machines of a lease without a limit of slots.
        limit = None if traits.allocates else slots
        place = RemotePlace(
            self._ws,
            name,
            reached.jobs,
            _capacity_of(offer.resources),
            devices.visible(shell.login.get(devices.VISIBLE), cards),
            reached.host_store,
            shell,
            limit,
            self._say,
        )
        place.address = host.address
        return place

    def _recall_manifest(self, content: str) -> Any:
        """Return the manifest of a locally stored tree; None if the tree is not stored."""
        if not self._ws.objects.has(Content(content)):
            return None
        return self._ws.objects.manifests.entries(Content(content))


async def _receive_facts(reached: HostConnection, name: str) -> str:
    """Return the output of `_ASK`.

    Closes the connection after a failure.  Raises CannotRun, DriverError.
    """
    try:
        answer, _ = await reached.answers
    except BaseException as error:
        await reached.aclose()
        if isinstance(error, Infrastructure):
            raise CannotRun(f"cannot use {name}: {error}", fix=error.fix) from error
        raise
    return answer.decode("utf-8", "surrogateescape")


def _capacity_of(resources: Resources) -> dict[str, float]:
    """Return the pools of a host; memory is unlimited if its size is unknown."""
    return {
        "cpus": resources.cpus or 1.0,
        "memory": float(resources.memory or 0) or float("inf"),
    }


def _parse_shell(text: str, python: str) -> Shell:
    """Parse the output of `_ASK`.  `python` is the interpreter that the settings name."""
    lines = text.split("\n")
    facts: dict[str, str] = {}
    login: dict[str, str] = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if line.startswith(_FACTS):
            facts[name] = value
        elif line.startswith("env ") and equals:
            login[name.removeprefix("env ")] = value
    python, path = facts.get("PYTHON") or python, facts.get("PATH", "/usr/bin:/bin")
    for folder in (os.path.dirname(python), facts.get("CALLED")):
        if folder:
            path = f"{folder}:{path}"
    return Shell(python, path, login, facts.get("VERSION", ""))


async def check_as_sold(offer: Offer, need: Need, host: Host, image: str, cuda: str) -> None:
    """Check that a machine has the offered resources.  Raises UnusableMachine.

    Its GPU driver must also support the CUDA version of its image.

    `image` is the driver's default image, `cuda` its CUDA version if the name has none.
    """
    facts = machine.facts(await ask_program(host.call, machine.question(".", machine.GPUS)))
    shortfall = machine.describe_shortfall(offer.resources, need, facts, need.image or image, cuda)
    if shortfall:
        raise UnusableMachine(f"the machine has less than offered: {shortfall}", LeaseFailure.LACKS)


async def check_same_packages(places: Iterable[Place]) -> None:
    """Check that the Python of each host has the packages of this Python, which are part of the
    cache key.  Raises CannotRun.
    """
    for place in places:
        if not isinstance(place, RemotePlace):
            continue
        try:
            found = json.loads(await ask_program(place.host.call, (place.python, "-c", _PACKAGES)))
        except (Rejected, ValueError) as error:
            raise CannotRun(
                f"the Python of {place.name} ({place.python}) does not run: {error}",
                fix=_NAME_PYTHON,
            ) from error
        local = list(packages())
        if found != local:
            differ = sorted({*found[1]} ^ {*local[1]})
            what = ", ".join(differ[:5]) or f"Python {found[0]}, not {local[0]}"
            if len(differ) > 5:
                what += f" and {len(differ) - 5} more"
            raise CannotRun(
                f"{place.python} on {place.name} and the local Python have different packages ({what})",
                fix=_NAME_PYTHON,
            )


def unused_gpus_warning(name: str) -> str:
    """Return the warning for a machine whose GPUs stay unused because nvidia-smi does not answer."""
    return f"{name}: {machine.HUNG}, so its GPUs are not used; {machine.WEDGED}"


class _ProgressPrinter:
    """Prints the progress of long transfers, one line every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: dict[str, float] = {}

    def __call__(self, progress: TransferProgress) -> None:
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
