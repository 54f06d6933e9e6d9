"""This machine keeps the contract: its agent, to which a socket leads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from driver_contract import Attached, DriverContract

import drivers
from drivers import machine
from drivers.base import (
    Command,
    Driver,
    Host,
    HostLost,
    Lease,
    Offer,
    Order,
    Rejected,
    Traits,
    Wish,
    file_name,
)
from drivers.local import LocalHost
from runner.agent import reach
from runner.hosts.link.client import SocketLine
from tests.support import old_python

OLD = old_python()


class Local(Driver):
    """This machine as if places on it were taken, each a file."""

    traits = Traits(replays=True, comes_up=timedelta(0))

    def __init__(self, root: Path) -> None:
        self._root, self._host = root, LocalHost(root)
        (root / "leases").mkdir(parents=True, exist_ok=True)

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        said = b"".join([data async for data in self._host.call(machine.question(str(self._root)))])
        have = machine.parse_resources(machine.facts(said))
        return (Offer("local", "local", have),) if machine.satisfies(have, wish) else ()

    async def acquire(self, order: Order) -> Lease:
        (self._root / "leases" / file_name(order.key)).write_text(order.key)
        return Lease("local", file_name(order.key), order.key)

    async def hosts(self, lease: Lease) -> Sequence[LocalHost]:
        if not (self._root / "leases" / lease.id).exists():
            raise HostLost(f"{lease.key} was given back")
        return (self._host,)

    async def release(self, lease: Lease) -> bool:
        (self._root / "leases" / lease.id).unlink(missing_ok=True)
        return True

    async def leases(self) -> Sequence[Lease]:
        return [
            Lease("local", path.name, path.read_text())
            for path in sorted((self._root / "leases").iterdir())
        ]


class TestLocal(DriverContract):
    def attached(self, host: Host) -> Attached:
        return Attached(SocketLine(host))

    def make(self, place: Path) -> Local:
        return Local(place / "root")


class TestLocalOutlivingItsAgent(TestLocal):
    """The same of jobs that run below a shell."""

    def command(self, script: str, place: Path, **others: object) -> Command:
        return replace(super().command(script, place, **others), outlives=True)


@pytest.mark.skipif(OLD is None, reason="there is no Python 3.9 here")
class TestLocalWithAnAgentOfPython39(TestLocal):
    @pytest.fixture(autouse=True)
    def old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reach, "sys", SimpleNamespace(executable=OLD))


def test_an_unknown_driver_is_answered_with_the_nearest_and_the_known() -> None:
    with pytest.raises(
        Rejected, match=r'unknown driver "locla", did you mean "local"\? \(known: gcp, local'
    ):
        drivers.load("locla")
