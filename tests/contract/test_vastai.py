"""The vastai driver keeps the contract, against the fake provider whose machines are real."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from driver_contract import ClosingContract, ExcludingContract, RentingContract

import drivers
from drivers.base import Driver, Order, Wish
from drivers.vastai import Vastai
from runner.hosts.client import Client
from tests.fake_provider import Provider, provider


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with provider("vastai", "--hosts", "real", "--clock", "real", "--faults", "boot=0") as found:
        yield found


async def ended(driver: Vastai) -> None:
    """End what a test rented."""
    for lease in await driver.leases():
        assert await driver.release(lease)
    await driver.aclose()


class TestVastai(ClosingContract, ExcludingContract, RentingContract):
    @pytest.fixture(autouse=True)
    def settings(self, place: Path, running: Provider, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("RENTING", str(place / "renting"))
        monkeypatch.setenv("VAST_API_KEY", running.exports["VAST_API_KEY"])
        (place / "settings.json").write_text(
            json.dumps({"api": running.url, "installation": str(place / "installation"), "poll": 0.05, "settles": 0.1})
        )
        yield
        asyncio.run(ended(self.make(place)))

    async def host(self, driver: Driver) -> Client:
        """Vast.ai gives out another machine for each order: as `Leases` does, one that is there is found by its key."""
        with open(os.environ["RENTING"], "w") as lock:  # noqa: ASYNC230
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = [lease for lease in await driver.leases() if lease.key == "the-lease"]
            order = Order((await driver.offers(Wish()))[0], "the-lease", datetime.now(UTC) + timedelta(hours=1))
            lease = found[0] if found else await driver.acquire(order)
        while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])

    def make(self, place: Path) -> Vastai:
        return Vastai(**json.loads((place / "settings.json").read_text()))


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("vastai") is Vastai
