"""SSH driver: a pool of existing servers, with one lease per execution slot of a server.

Leases are stored on the servers, as one small file per slot (`leases/` below the work directory).
So every process sees them, and `leases()` is complete or raises.  An expired lease no longer holds
its slot.
"""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import machine
from .base import (
    NOTHING,
    ROOT,
    Argv,
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
    Traits,
    Unreachable,
    Wish,
)
from .sshconfig import ServerConfig, SshConfig
from .sshlink import KNOWN_HOSTS, Route, SshLink, client, odd_lines

TTL = timedelta(seconds=30)  # for which a server's facts stay cached
ANSWERS = 20.0  # timeout for the answer of a connected server, in seconds
HURRY = 1.0  # least seconds for further answers after the first
PORT = 22
LONGEST_WAY = 8  # hops
ADDRESS = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<bare>[^\]\s]+)\]|(?P<name>[^@:\s\[\]-][^@:\s\[\]]*))(?::(?P<port>\d{1,5}))?"
)
# Added to the question about a server's hardware: the slots in use.
TAKEN = 'for place in "$root"/leases/slot.*; do [ -f "$place" ] && echo "lease=$place"; done'

# $1: shell lines to run before a command, in a login shell, where modules can be loaded.  Their
# input and output is kept apart from the command's.
SETUP = """\
exec 3<&0 4>&1 </dev/null >&2
shell=$(command -v bash) || shell=/bin/sh
lines=$1
shift
exec "$shell" -lc "$lines
exec <&3 >&4 3<&- 4>&-
exec \\"\\$@\\"" sh "$@"
"""

# The script for all verbs on slots.  A slot is a file `slot.N` with three lines: when the lease
# ends, the lease's id, the lease. $1 root, $2 verb, $3 id, $4 duration in seconds, $5 number of
# slots, $6 the lease.  Only the server's own clock counts: ours may differ. A complete file is
# linked to a slot's name, which succeeds for one process only.
PLACES = r"""
set -eu
umask 077
case $2 in
take) mkdir -p "$1/leases"; chmod 700 "$1"; cd "$1/leases" ;;
*) cd "$1/leases" 2>/dev/null || exit 0 ;;
esac
id() { until='' id=''; { read -r until && read -r id; } 2>/dev/null <"$1" || :; }
found=''
for place in slot.*; do
    [ -f "$place" ] || continue
    case $2 in
    list) sed -n 3p "$place" ;;
    give) id "$place"; [ "$id" != "$3" ] || rm -f "$place" ;;
    *) id "$place"; if [ "$id" = "$3" ]; then found=$place; break; fi ;;
    esac
done
case $2 in
has) [ -z "$found" ] || echo "$found" ;;
take)
    now=$(date +%s)
    # cat says what is wrong with a disk; some printf know only "I/O error"
    printf '%s\n' "$((now + $4))" "$3" "$6" | cat >"new.$$" || { rm -f "new.$$"; exit 1; }
    if [ -n "$found" ]; then mv "new.$$" "$found"; echo "$found"; exit; fi
    place=0
    while [ "$place" -lt "$5" ]; do
        id "slot.$place"
        if [ -n "$until" ] && [ "$until" -lt "$now" ] && mv "slot.$place" "old.$$" 2>/dev/null; then
            id "old.$$"
            [ "$until" -lt "$now" ] || ln "old.$$" "slot.$place" 2>/dev/null || :  # somebody else was faster, and has it
            rm -f "old.$$"
        fi
        if ln "new.$$" "slot.$place" 2>/dev/null; then
            other=0
            while [ "$other" -lt "$place" ]; do
                id "slot.$other"
                if [ "$id" = "$3" ]; then rm -f "slot.$place"; place=$other; fi  # another process, with our key
                other=$((other + 1))
            done
            rm -f "new.$$"
            echo "slot.$place"
            exit
        fi
        id "slot.$place"
        if [ "$id" = "$3" ]; then mv "new.$$" "slot.$place"; echo "slot.$place"; exit; fi  # by another process, just now
        [ -e "slot.$place" ] || ln "new.$$" "slot.$place"  # says why it cannot
        place=$((place + 1))
    done
    rm -f "new.$$"
    ;;
esac
"""


class Ssh(Driver):
    """Driver for a pool of SSH servers.

    Each of `hosts` is `user@name:port`, or a table of `host` with its own `slots`, `root`,
    `python`, `setup`, `host_key` and `address`.  `address` is the name by which other nodes of a
    step reach the server.  By default, this is the name used from here.  `deadman` is how many
    seconds without contact a server waits before it ends its jobs of this driver.  `setup` holds
    shell lines to run before any program.
    """

    traits = Traits(visits=True, replays=True, comes_up=timedelta(minutes=1))

    def __init__(
        self,
        *,
        hosts: Sequence[str | Mapping[str, str | int | Sequence[str]]] = (),
        known_hosts: str | None = None,
        host_key: str | None = None,
        identity: str | Sequence[str] = (),
        agent: bool | str = True,
        jump: str | None = None,
        use_config: bool = True,
        keepalive: float = 15.0,
        root: str = ROOT,
        python: str = "python3",
        setup: str | Sequence[str] = (),
        slots: int = 1,
        deadman: float | None = None,
    ) -> None:
        if not hosts:
            raise Rejected(
                'the ssh driver has no hosts: pass `--host user@name`, or set [drivers.ssh] hosts = ["user@name"] in recipe.toml'
            )
        socket = os.environ.get("SSH_AUTH_SOCK") if agent is True else agent or None
        files = (identity,) if isinstance(identity, str) else tuple(identity)
        trusted = (known_hosts,) if known_hosts else ()
        agent_path = str(socket) if socket else None
        pattern = Route(
            "",
            "",
            known_hosts=trusted,
            identity=files,
            agent=agent_path,
            keep_alive=keepalive,
        )
        config = _Configured(agent is True) if use_config else None
        self._machines: dict[str, SshServer] = {}
        for entry in hosts:
            own = {"host": entry} if isinstance(entry, str) else dict(entry)
            route = _route(str(own.get("host", "")), pattern, jump, config)
            pinned = str(own["host_key"]) if "host_key" in own else host_key
            route = replace(route, host_key=pinned)
            self._machines[str(route)] = SshServer(
                route,
                str(own.get("root", root)),
                str(own.get("python", python)),
                int(str(own.get("slots", slots))),
                str(own.get("address", route.host)),
                setup=_lines(own.get("setup", setup)),
            )
        self._deadman = deadman
        self._hosts: dict[str, SshHost] = {}
        self.left_out: Mapping[str, str] = {}
        self.late: Collection[str] = ()
        unsupported = config.notices() if config is not None else []
        odd = odd_lines(each.route for each in self._machines.values())
        self.notices = (*unsupported, *odd)
        self._took: set[str] = set()  # leases not yet checked since they were taken

    async def connect(self) -> None:
        await _first_of([each.connect() for each in self._machines.values()])

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the servers that match `wish`, free servers first, then larger servers.

        If no server can be asked, raises Denied or Unreachable with all reasons.
        """
        machines = list(self._machines.values())
        questions = {each: each.ask() for each in machines}
        if wish.hurry:
            await _first_of(list(questions.values()))
        else:
            await asyncio.wait(questions.values())
        self.late = [str(each.route) for each, asked in questions.items() if not asked.done()]
        errors: dict[str, DriverError] = {}
        found: list[tuple[tuple[float, ...], Offer]] = []
        for each, asked in questions.items():
            if not asked.done():
                continue
            try:
                answer = each.take_answer()
            except DriverError as error:
                errors[str(each.route)] = error
                continue
            have = machine.parse_resources(answer)
            if machine.satisfies(have, wish):
                is_full = len(answer.get("lease", ())) >= each.slots
                offer = Offer("ssh", str(each.route), have, data=each.data(answer))
                found.append((_rank(have, is_full), offer))
            elif not any(host.machine is each for host in self._hosts.values()):
                await each.link.aclose()
        self.left_out = {route: str(error) for route, error in errors.items()}
        if len(errors) == len(machines):
            _raise_all(list(errors.values()))
        found.sort(key=lambda pair: pair[0])
        return [offer for _, offer in found]

    async def acquire(self, order: Order) -> Lease:
        """Take a slot on the offered server.  Raises NoCapacity if all its slots are in use."""
        each = self._machine(order.offer.id)
        told = await each.facts()
        lease = Lease("ssh", _id(order.key), order.key, each.data(told))
        logging.getLogger("drivers.ssh").debug("asking %s for a place", each.route)
        each.forget()
        took = await each.places(
            "take",
            lease.id,
            str(int(order.until.timestamp() - time.time())),
            str(each.slots),
            json.dumps([lease.id, lease.key, dict(lease.data)]),
        )
        if not took:
            raise NoCapacity(
                f"all slots on {each.route} are in use ({each.slots}; the number is `slots` in the settings)"
            )
        self._took.add(lease.id)
        return lease

    async def hosts(self, lease: Lease) -> Sequence[SshHost] | None:
        each = self._machine(lease.data.get("host", ""))
        if lease.id in self._took:
            self._took.remove(lease.id)
        elif not await each.places("has", lease.id):
            raise HostLost(f'the lease "{lease.key}" of {each.route} was released')
        if lease.id not in self._hosts:
            root = lease.data.get("root") or (await each.facts())["root"][0]
            self._hosts[lease.id] = SshHost(each, root, self._forget, self._deadman)
        return (self._hosts[lease.id],)

    def connected_hosts(self) -> Mapping[str, SshHost]:
        found: dict[str, SshHost] = {}
        for name, each in self._machines.items():
            if each.link.is_connected:
                found[name] = SshHost(each, each.folder, self._forget, self._deadman)
        return found

    async def release(self, lease: Lease) -> bool:
        each = self._machines.get(lease.data.get("host", ""))
        if each is None:
            raise Denied(
                f"{lease.data.get('host')} is no longer in the `hosts` setting, so its lease cannot be released"
            )
        each.forget()
        self._took.discard(lease.id)
        await each.places("give", lease.id)
        if lease.id in self._hosts:
            await self._hosts[lease.id].aclose()
        elif not any(host.machine is each for host in self._hosts.values()):
            await each.link.aclose()
        return True

    async def leases(self) -> Sequence[Lease]:
        found: list[Lease] = []
        machines = list(self._machines.values())
        for each, said in zip(
            machines, await asyncio.gather(*(each.places("list") for each in machines)), strict=True
        ):
            try:
                for id, key, data in map(json.loads, filter(None, said.splitlines())):
                    found.append(Lease("ssh", id, key, data))
            except (ValueError, TypeError) as error:
                raise Denied(
                    f"leases/ on {each.route} contains unknown files: check and remove them"
                ) from error
        return found

    async def visit(self) -> AsyncIterator[tuple[str, SshHost | DriverError]]:
        """Yield every server's host, or its connection error, without taking a slot."""
        for each in self._machines.values():
            each.ask()
        for name, each in self._machines.items():
            await asyncio.wait([each.ask()])
            try:
                yield name, SshHost(each, each.take_answer()["root"][0], self._forget)
            except DriverError as error:
                yield name, error

    async def aclose(self) -> None:
        """Close all connections.  Leases and jobs stay."""
        for host in list(self._hosts.values()):
            await host.aclose()
        for each in self._machines.values():
            await each.aclose()

    def _machine(self, name: str) -> SshServer:
        if name not in self._machines:
            raise Rejected(
                f'"{name}" is not among the hosts in the settings (they are {", ".join(self._machines)})'
            )
        return self._machines[name]

    async def _forget(self, host: SshHost) -> None:
        for name, other in list(self._hosts.items()):
            if other is host:
                del self._hosts[name]
        if not any(other.machine is host.machine for other in self._hosts.values()):
            await host.machine.link.aclose()


class SshHost(Host):
    """An execution slot on an SSH server."""

    def __init__(
        self,
        machine: SshServer,
        root: str,
        when_closed: Callable[[SshHost], Awaitable[None]],
        deadman: float | None = None,
    ) -> None:
        self.machine, self.root, self.deadman = machine, root, deadman
        self.python, self.address = machine.python, machine.address
        self._when_closed = when_closed

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        setup = self.machine.setup
        if setup:
            argv = ("/bin/sh", "-c", SETUP, "sh", setup, *argv)
        return self.machine.link.call(argv, stdin)

    def way(self, folder: str) -> Argv:
        """Return the command line of OpenSSH's client for this server.

        It uses the same keys and the same host key as this driver.
        """
        return client(self.machine.route, Path(folder))

    async def aclose(self) -> None:
        await self._when_closed(self)


async def _first_of(asked: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until one task has succeeded and the others had as much time again, or all have ended.

    The others get at least HURRY seconds.
    """
    clock = asyncio.get_running_loop().time
    began, waits_for = clock(), set(asked)
    while waits_for:
        done, waits_for = await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() is None for task in done):
            break
    if waits_for:
        await asyncio.wait(waits_for, timeout=max(HURRY, clock() - began))


class SshServer:
    """An SSH server with its connection and its last reported hardware."""

    def __init__(
        self,
        route: Route,
        root: str,
        python: str,
        slots: int,
        address: str = "",
        *,
        link: SshLink | None = None,
        setup: str = "",
    ) -> None:
        self.route, self.python, self.slots, self.address, self.setup = (
            route,
            python,
            slots,
            address,
            setup,
        )
        self.link = link or SshLink(route)
        self._root = root
        self._told: machine.Facts | None = None
        self._asked = 0.0
        self._connecting: asyncio.Task[object] | None = None
        """Connection started ahead.  Its failure is raised once, to the next caller."""
        self._question: asyncio.Task[machine.Facts] | None = None

    @property
    def folder(self) -> str:
        """Work directory on the server, absolute or relative to the login's home directory."""
        return (
            self._root.removeprefix("~").lstrip("/") if self._root.startswith("~") else self._root
        )

    def connect(self) -> asyncio.Task[object]:
        """Start connecting in advance, before the first request."""
        self._connecting = asyncio.ensure_future(self.link.connection())
        return self._connecting

    def ask(self) -> asyncio.Task[machine.Facts]:
        """Start requesting the server's hardware, unless a request is pending.

        Call `take_answer` once the task is done.
        """
        if self._question is None:
            self._question = asyncio.create_task(self.facts())
        return self._question

    def take_answer(self) -> machine.Facts:
        """Return the result of the hardware request. The next `ask` starts a new request.

        Raises DriverError.
        """
        assert self._question is not None
        answered, self._question = self._question, None
        return answered.result()

    async def aclose(self) -> None:
        """Cancel pending questions and close the connection."""
        begun = [task for task in (self._connecting, self._question) if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await self.link.aclose()

    async def facts(self) -> machine.Facts:
        """Return the server's hardware and disk space, at most TTL old."""
        if self._connecting is not None:
            begun, self._connecting = self._connecting, None
            await begun
        if self._told is None or time.monotonic() - self._asked > TTL.total_seconds():
            await self.link.connection()
            try:
                async with asyncio.timeout(ANSWERS):
                    told = machine.facts(
                        await self._run_command(machine.question(self._root, TAKEN))
                    )
            except TimeoutError as error:
                raise Denied(
                    f"{self.route} did not report its hardware within {ANSWERS:g} s: a disk on the host "
                    "may be hanging (check with `df`), or the `setup` commands wait for input"
                ) from error
            if not told.get("root", ("",))[0].startswith("/"):
                raise Denied(
                    f"{self.route}: the login has no home directory for {self._root}: set an absolute `root` in the settings"
                )
            self._told, self._asked = told, time.monotonic()
        return self._told

    def forget(self) -> None:
        """Discard the cached hardware facts, because the server's slots are about to change."""
        self._asked = float("-inf")

    def data(self, told: machine.Facts) -> dict[str, str]:
        """Return the lease data by which a later process finds the server and directory."""
        found = {"host": str(self.route), "root": told["root"][0], "python": self.python}
        if "hung" in told:
            found["hung"] = told["hung"][0]
        return found

    async def places(self, verb: str, *others: str) -> str:
        """Run the slot management script PLACES on the server, with a verb."""
        root = (self._told or await self.facts())["root"][0]
        said = await self._run_command(("/bin/sh", "-c", PLACES, "sh", root, verb, *others))
        return said.decode("utf-8", "surrogateescape").strip()

    async def _run_command(self, argv: Argv) -> bytes:
        return b"".join([data async for data in self.link.call(argv)])


def _raise_all(errors: Sequence[DriverError]) -> None:
    """Raise one error with the reasons of all errors, if there are any."""
    if not errors:
        return
    reasons = "\n".join(map(str, errors))
    # One that needs the user is enough: waiting for the others would not help.
    if any(isinstance(error, Denied) for error in errors):
        raise Denied(reasons)
    raise Unreachable(reasons)


def _rank(have: Resources, is_full: bool) -> tuple[float, ...]:
    """Return the sort key of a server's offer: free servers first, then larger servers."""
    return (
        float(is_full),
        -float(have.gpus or 0),
        -float(have.gpu_memory or 0),
        -(have.cpus or 0.0),
        -float(have.memory or 0),
    )


def _lines(given: object) -> str:
    """Join lines of a shell script into one text."""
    return "\n".join(map(str, given)) if isinstance(given, (list, tuple)) else str(given)


def _id(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


# --- addresses


def _route(
    address: str,
    pattern: Route,
    jump: str | None,
    config: _Configured | None,
    depth: int = 0,
) -> Route:
    """Return the SSH route to a server given as `[user@]name[:port]`.

    The address takes precedence, then the settings, then the SSH configuration, then defaults.
    Raises Rejected for an invalid address, Denied if the route has too many hops.
    """
    user, name, port = _parse_address(address)
    said = config.settings_of(name, user, port) if config else ServerConfig()
    user = user or said.user or getpass.getuser()
    port = port or said.port or PORT
    agents = config is not None and config.agents
    route = replace(
        _choose_keys(pattern, said, agents),
        user=user,
        host=said.host or name,
        port=port,
        alias=said.alias,
        family=said.family,
        patience=said.patience or pattern.patience,
    )
    hops = _split_hops(jump or said.jump)
    if not hops:
        return route if jump else replace(route, proxy=said.proxy)
    if hops == [name]:
        return route  # a ProxyJump under `Host *` also applies to the jump server itself
    if depth == LONGEST_WAY:
        raise Denied(
            f"the ProxyJump chain to {route} has more than {LONGEST_WAY} servers, or is circular"
        )
    # The last hop connects to the server, and is itself reached through the earlier hops.
    before = ",".join(hops[:-1]) or None
    return replace(route, jump=_route(hops[-1], pattern, before, config, depth + 1))


def _choose_keys(pattern: Route, said: ServerConfig, agents: bool) -> Route:
    """Return a route with the keys of the settings, or else those of the SSH configuration.

    `agents` tells whether the configuration's IdentityAgent counts.
    """
    known_hosts = pattern.known_hosts or said.known_hosts or KNOWN_HOSTS
    agent = said.agent if agents and said.agent is not None else pattern.agent
    route = replace(pattern, known_hosts=known_hosts, agent=agent or None)
    # Like ssh, keys of the configuration that cannot be used are skipped, but not named keys.
    if pattern.identity:
        return replace(route, identities_only=True, lenient=False, certificates=())
    return replace(
        route,
        identity=said.identity,
        identities_only=said.identities_only,
        lenient=True,
        certificates=said.certificates,
    )


def _parse_address(address: str) -> tuple[str, str, int]:
    """Return the user, name and port of `[user@]name[:port]`.  Raises Rejected.

    Missing parts are empty or 0.
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts["port"] or PORT) < 65536:
        raise Rejected(
            f'"{address}" is not the address of a server: write user@name or user@name:port'
        )
    name = parts["bare"] or parts["name"]
    if name.startswith("-"):
        raise Rejected(f'"{name}" is not the name of a server: it begins with a hyphen')
    return parts["user"] or "", name, int(parts["port"] or 0)


def _split_hops(jump: str) -> list[str]:
    """Split an SSH ProxyJump value into its servers, in the order of connection."""
    return [hop.strip().removeprefix("ssh://") for hop in jump.split(",") if hop.strip()]


class _Configured:
    """OpenSSH's configuration, with a record of its unsupported directives.

    `agents` tells whether its IdentityAgent counts.
    """

    def __init__(self, agents: bool) -> None:
        self.agents = agents
        self._config = SshConfig(Path.home())
        self._passed_over: dict[str, list[str]] = {}

    def settings_of(self, name: str, user: str, port: int) -> ServerConfig:
        """Return the configuration of a server.  Raises Denied if the files cannot be read."""
        try:
            said = self._config.settings_of(name, user, port)
        except (OSError, ValueError) as error:
            raise Denied(
                f"cannot use the ssh configuration for {name}: {error}\n"
                "correct the configuration, or set use_config = false under [drivers.ssh]"
            ) from error
        for word in said.passed_over:
            names = self._passed_over.setdefault(word, [])
            if name not in names:
                names.append(name)
        return said

    def notices(self) -> list[str]:
        """Return a line for each OpenSSH directive that recipe does not support."""
        return [
            f"{word}, which the configuration of ssh has for {', '.join(names)}, has no effect"
            for word, names in self._passed_over.items()
        ]
