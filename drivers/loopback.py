"""Other machines that are directories of this one: real commands with an empty environment, and no file of ours in sight.  The model of a driver."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

from . import calls
from .base import Argv, HostLost, Lease, NoCapacity, Offer, Order, Resources, Traits
from .shell import ShellHost, _name


class Loopback:
    """`hosts` machines below `root`, each with its own home directory."""

    traits = Traits(replays=True)

    def __init__(self, root: Path, *, hosts: int = 1) -> None:
        self._root = root.absolute()
        self._hosts = hosts
        self._made: dict[str, ShellHost] = {}

    async def offers(self, need: Resources) -> Sequence[Offer]:
        have = Resources(cpus=float(os.cpu_count() or 1))
        if need.cpus is not None and need.cpus > (have.cpus or 0):
            return ()
        return tuple(Offer("loopback", f"host-{number}", have) for number in range(1, self._hosts + 1))

    async def acquire(self, order: Order) -> Lease:
        lease = Lease("loopback", _name(order.key), order.key, {"host": order.offer.id})
        leases = self._root / "leases"
        leases.mkdir(parents=True, exist_ok=True)
        if not order.offer.id:
            raise NoCapacity
        path = leases / lease.id
        if not path.exists():
            path.write_text(json.dumps({"key": lease.key, "data": dict(lease.data)}), encoding="utf-8")
        return lease

    async def hosts(self, lease: Lease) -> Sequence[ShellHost] | None:
        if not (self._root / "leases" / lease.id).exists():
            raise HostLost(f'the lease "{lease.key}" was given back')
        home = self._root / lease.data["host"]
        home.mkdir(exist_ok=True)

        def call(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
            return calls.call(argv, stdin, {"PATH": os.defpath, "HOME": str(home)}, home)

        host = self._made.get(home.name)
        if host is None:
            host = self._made[home.name] = ShellHost(call)
        return (host,)

    async def release(self, lease: Lease) -> bool:
        (self._root / "leases" / lease.id).unlink(missing_ok=True)
        return True

    async def leases(self) -> Sequence[Lease]:
        found = []
        with suppress(FileNotFoundError):
            for path in sorted((self._root / "leases").iterdir()):
                told = json.loads(path.read_text(encoding="utf-8"))
                found.append(Lease("loopback", path.name, told["key"], told["data"]))
        return found
