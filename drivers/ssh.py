"""Servers that are there already, reached over SSH: a pool of them, and a lease as a place on one.

What is leased is remembered on the server itself, a small file for each of its places (`leases/` below our root there): any process sees it, and
`leases()` is complete or raises.  A lease past its `until` holds no place any more.
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
    Traits,
    Unreachable,
    Wish,
)
from .sshconfig import Config, Said
from .sshlink import KNOWN_HOSTS, Link, Route, client, odd_lines

TTL = timedelta(seconds=30)  # for which a machine is believed to be as it was
ANSWERS = 20.0  # seconds in which a machine that is connected has said what it has
HURRY = 1.0  # seconds, or as long as the first took, that others may answer after the first
PORT = 22
LONGEST_WAY = 8  # hops
ADDRESS = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<bare>[^\]\s]+)\]|(?P<name>[^@:\s\[\]-][^@:\s\[\]]*))(?::(?P<port>\d{1,5}))?"
)
# What a question about a machine asks besides: which of its places are taken.
TAKEN = 'for place in "$root"/leases/slot.*; do [ -f "$place" ] && echo "lease=$place"; done'

# $1 lines of shell that run before a command, in a login shell, where modules can be loaded.  What is printed and read there is not the command's.
SETUP = """\
exec 3<&0 4>&1 </dev/null >&2
shell=$(command -v bash) || shell=/bin/sh
lines=$1
shift
exec "$shell" -lc "$lines
exec <&3 >&4 3<&- 4>&-
exec \\"\\$@\\"" sh "$@"
"""

# One script for all that is done to places, a place being a file `slot.N`: when it ends, the lease's id, the lease.
# $1 root, $2 verb, $3 id, $4 for how many seconds, $5 number of places, $6 the lease.  Only the server's own clock is asked: ours may be another.
# A whole file is linked to the name of a place, which succeeds for one only.
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
    """A pool of servers.  Each of `hosts` is `user@name:port`, or a table of `host` with its own `slots`, `root`, `python`, `setup`, `host_key`
    and `address`: what the other nodes of a step dial, by default the name on the way from here.

    `deadman`: seconds without contact after which a server ends the jobs of ours that it has.  `setup`: lines of shell before anything runs there.
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
                'the ssh driver has no hosts: name one with `--host user@name`, or in recipe.toml: [drivers.ssh] hosts = ["user@name"]'
            )
        socket = os.environ.get("SSH_AUTH_SOCK") if agent is True else agent or None
        files = (identity,) if isinstance(identity, str) else tuple(identity)
        pattern = Route(
            "",
            "",
            known_hosts=(known_hosts,) if known_hosts else (),
            identity=files,
            agent=str(socket) if socket else None,
            keep_alive=keepalive,
        )
        config = _Configured(agent is True) if use_config else None
        self._machines: dict[str, Machine] = {}
        for entry in hosts:
            own = {"host": entry} if isinstance(entry, str) else dict(entry)
            route = _route(str(own.get("host", "")), pattern, jump, config)
            route = replace(route, host_key=str(own["host_key"]) if "host_key" in own else host_key)
            self._machines[str(route)] = Machine(
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
        self.notices = (
            *(config.notices() if config is not None else ()),
            *odd_lines(each.route for each in self._machines.values()),
        )
        self._took: set[str] = set()  # leases of which nothing was asked yet since they were taken

    async def connect(self) -> None:
        await _first_of([each.connect() for each in self._machines.values()])

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """The servers that do for `wish`: those with a free place first, then the larger.  Raises why, when not one of them can be asked."""
        machines = list(self._machines.values())
        questions = {each: each.ask() for each in machines}
        if wish.hurry:
            await _first_of(list(questions.values()))
        else:
            await asyncio.wait(questions.values())
        self.late = [str(each.route) for each, asked in questions.items() if not asked.done()]
        left_out: dict[str, str] = {}
        trouble: list[DriverError] = []
        found: list[tuple[tuple[float, ...], Offer]] = []
        for each, asked in questions.items():
            if not asked.done():
                continue
            try:
                answer = each.take_answer()
            except DriverError as error:
                left_out[str(each.route)] = str(error)
                trouble.append(error)
            else:
                have = machine.resources(answer)
                if machine.enough(have, wish):
                    taken = len(answer.get("lease", ()))
                    rank = (
                        float(taken >= each.slots),
                        -float(have.gpus or 0),
                        -float(have.gpu_memory or 0),
                        -(have.cpus or 0.0),
                        -float(have.memory or 0),
                    )
                    found.append(
                        (rank, Offer("ssh", str(each.route), have, data=each.data(answer)))
                    )
                elif not any(host.machine is each for host in self._hosts.values()):
                    await each.link.aclose()
        self.left_out = left_out
        if left_out and len(left_out) == len(machines):
            kind = Denied if any(isinstance(error, Denied) for error in trouble) else Unreachable
            raise kind("\n".join(left_out.values()))
        return [offer for _, offer in sorted(found, key=lambda pair: pair[0])]

    async def acquire(self, order: Order) -> Lease:
        """Take a place on the server that was offered.  Raises NoCapacity when others have them all."""
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
                f"all places of {each.route} are taken ({each.slots}; `slots` in the settings says how many it has)"
            )
        self._took.add(lease.id)
        return lease

    async def hosts(self, lease: Lease) -> Sequence[SshHost] | None:
        each = self._machine(lease.data.get("host", ""))
        if lease.id in self._took:
            self._took.remove(lease.id)
        elif not await each.places("has", lease.id):
            raise HostLost(f'the lease "{lease.key}" of {each.route} was given back')
        if lease.id not in self._hosts:
            self._hosts[lease.id] = SshHost(
                each,
                lease.data.get("root") or (await each.facts())["root"][0],
                self._forget,
                self._deadman,
            )
        return (self._hosts[lease.id],)

    def connected_hosts(self) -> Mapping[str, SshHost]:
        there = {name: each for name, each in self._machines.items() if each.link.is_connected}
        return {
            name: SshHost(each, each.folder, self._forget, self._deadman)
            for name, each in there.items()
        }

    async def release(self, lease: Lease) -> bool:
        each = self._machines.get(lease.data.get("host", ""))
        if each is None:
            raise Denied(
                f"{lease.data.get('host')} is not among the hosts in the settings any more: its lease cannot be given back"
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
                    f"what is kept in leases/ on {each.route} is no list of leases: look there, and remove what is not ours"
                ) from error
        return found

    async def visit(self) -> AsyncIterator[tuple[str, SshHost | DriverError]]:
        """Every server in turn, or why it cannot be asked: to look at, without a place of its own to run anything."""
        for each in self._machines.values():
            each.ask()
        for name, each in self._machines.items():
            await asyncio.wait([each.ask()])
            try:
                yield name, SshHost(each, each.take_answer()["root"][0], self._forget)
            except DriverError as error:
                yield name, error

    async def aclose(self) -> None:
        """Let go of all connections; leases and jobs go on."""
        for host in list(self._hosts.values()):
            await host.aclose()
        for each in self._machines.values():
            await each.aclose()

    def _machine(self, name: str) -> Machine:
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
    """A place on a server."""

    def __init__(
        self,
        machine: Machine,
        root: str,
        when_closed: Callable[[SshHost], Awaitable[None]],
        deadman: float | None = None,
    ) -> None:
        self.machine, self.root, self.deadman = machine, root, deadman
        self.python, self.address = machine.python, machine.address
        self._when_closed = when_closed

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        setup = self.machine.setup
        return self.machine.link.call(
            ("/bin/sh", "-c", SETUP, "sh", setup, *argv) if setup else argv, stdin
        )

    def way(self, folder: str) -> Argv:
        """The words of OpenSSH's client that lead there, by the same keys and the same host key as ours."""
        return client(self.machine.route, Path(folder))

    async def aclose(self) -> None:
        await self._when_closed(self)


async def _first_of(asked: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until some of these have ended well, and the others have had as long again, or all have ended."""
    clock = asyncio.get_running_loop().time
    began, waits_for = clock(), set(asked)
    while waits_for:
        done, waits_for = await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() is None for task in done):
            break
    if waits_for:
        await asyncio.wait(waits_for, timeout=max(HURRY, clock() - began))


class Machine:
    """A server, the connection to it, and what it last said it has."""

    def __init__(
        self,
        route: Route,
        root: str,
        python: str,
        slots: int,
        address: str = "",
        *,
        link: Link | None = None,
        setup: str = "",
    ) -> None:
        self.route, self.python, self.slots, self.address, self.setup = (
            route,
            python,
            slots,
            address,
            setup,
        )
        self.link = link or Link(route)
        self._root = root
        self._told: machine.Facts | None = None
        self._asked = 0.0
        self._connecting: asyncio.Task[object] | None = None
        """A connection that was begun ahead; why it failed is told once, to who asks next."""
        self._question: asyncio.Task[machine.Facts] | None = None

    @property
    def folder(self) -> str:
        """Our root there, absolute or from the login's home."""
        return (
            self._root.removeprefix("~").lstrip("/") if self._root.startswith("~") else self._root
        )

    def connect(self) -> asyncio.Task[object]:
        """Begin to connect ahead of the first question."""
        self._connecting = asyncio.ensure_future(self.link.connection())
        return self._connecting

    def ask(self) -> asyncio.Task[machine.Facts]:
        """Begin to ask what it has, unless that was begun already: `take_answer` once it is done."""
        if self._question is None:
            self._question = asyncio.create_task(self.facts())
        return self._question

    def take_answer(self) -> machine.Facts:
        """The answer to the question, which is asked anew from now on.  Raises DriverError."""
        assert self._question is not None
        answered, self._question = self._question, None
        return answered.result()

    async def aclose(self) -> None:
        """Ask nothing any more, and let go of the connection."""
        begun = [task for task in (self._connecting, self._question) if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await self.link.aclose()

    async def facts(self) -> machine.Facts:
        """What it has, as it was not long ago."""
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
                    f"{self.route} did not say within {ANSWERS:g} s what it has: a disk there does not answer (`df`), or `setup` waits"
                ) from error
            if not told.get("root", ("",))[0].startswith("/"):
                raise Denied(
                    f"{self.route}: the login has no home directory to put {self._root} in: name an absolute `root` in the settings"
                )
            self._told, self._asked = told, time.monotonic()
        return self._told

    def forget(self) -> None:
        """Ask again next time: its places are about to change."""
        self._asked = float("-inf")

    def data(self, told: machine.Facts) -> dict[str, str]:
        """What a lease must know to find its way back."""
        found = {"host": str(self.route), "root": told["root"][0], "python": self.python}
        return {**found, "hung": told["hung"][0]} if "hung" in told else found

    async def places(self, verb: str, *others: str) -> str:
        """Do something about its places, all said in PLACES."""
        root = (self._told or await self.facts())["root"][0]
        return (
            (await self._run_command(("/bin/sh", "-c", PLACES, "sh", root, verb, *others)))
            .decode("utf-8", "surrogateescape")
            .strip()
        )

    async def _run_command(self, argv: Argv) -> bytes:
        return b"".join([data async for data in self.link.call(argv)])


def _lines(given: object) -> str:
    """Lines of shell as one text."""
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
    """The way to `[user@]name[:port]`: what the address says, then the settings, then the configuration, then what is usual.

    Raises Rejected for what is no address, Denied where the way goes through too many servers.
    """
    user, name, port = _parse_address(address)
    said = config.settings_of(name, user, port) if config else Said()
    reads_agent = config is not None and config.agents and said.agent is not None
    route = replace(
        pattern,
        user=user or said.user or getpass.getuser(),
        host=said.host or name,
        port=port or said.port or PORT,
        known_hosts=pattern.known_hosts or said.known_hosts or KNOWN_HOSTS,
        identity=pattern.identity or said.identity,
        identities_only=bool(pattern.identity) or said.identities_only,
        lenient=not pattern.identity,
        certificates=() if pattern.identity else said.certificates,
        agent=(said.agent if reads_agent else pattern.agent) or None,
        alias=said.alias,
        family=said.family,
        patience=said.patience or pattern.patience,
    )
    hops = _split_hops(jump or said.jump)
    if not hops:
        return route if jump else replace(route, proxy=said.proxy)
    if hops == [name]:
        return route  # a `Host *` that names the way for all names it for that server, too
    if depth == LONGEST_WAY:
        raise Denied(
            f"the way to {route} goes through more than {LONGEST_WAY} servers, or in a circle"
        )
    # The last hop is the one next to the server, and is itself reached through those before it.
    before = ",".join(hops[:-1]) or None
    return replace(route, jump=_route(hops[-1], pattern, before, config, depth + 1))


def _parse_address(address: str) -> tuple[str, str, int]:
    """User, name and port of `[user@]name[:port]`: empty and 0 where it says none.  Raises Rejected."""
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
    """The servers of a ProxyJump, in the order in which they are passed."""
    return [hop.strip().removeprefix("ssh://") for hop in jump.split(",") if hop.strip()]


class _Configured:
    """OpenSSH's configuration, and what of it has no effect.  `agents`: whether its IdentityAgent counts."""

    def __init__(self, agents: bool) -> None:
        self.agents = agents
        self._config = Config(Path.home())
        self._passed_over: dict[str, list[str]] = {}

    def settings_of(self, name: str, user: str, port: int) -> Said:
        """What it says of a server.  Raises Denied where it cannot be read."""
        try:
            said = self._config.settings_of(name, user, port)
        except (OSError, ValueError) as error:
            raise Denied(
                f"the configuration of ssh cannot be used for {name}: {error}\n"
                "correct it, or leave it out: use_config = false under [drivers.ssh]"
            ) from error
        for word in said.passed_over:
            names = self._passed_over.setdefault(word, [])
            if name not in names:
                names.append(name)
        return said

    def notices(self) -> list[str]:
        """A line for each directive that a server has and recipe does not follow."""
        return [
            f"{word}, which the configuration of ssh has for {', '.join(names)}, has no effect"
            for word, names in self._passed_over.items()
        ]
