"""The gcp driver keeps the contract, against the fake provider whose machines are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from driver_contract import (
    AccountedContract,
    ClosingContract,
    DriverContract,
    EnsuringContract,
    ExcludingContract,
    ExportingContract,
    ListingContract,
    MarkingContract,
    PausingContract,
    RentedContract,
    VitalContract,
)

import drivers
from drivers.gcp import Gcp
from tests.fake_provider import Provider, provider
from tests.servers.price_catalog import both, mirror, publish


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with provider(
        "gcp", "--hosts", "real", "--clock", "real", "--faults", "boot=0,takes=0.05"
    ) as found:
        yield found


async def ended(driver: Gcp) -> None:
    """End what a test rented."""
    for lease in await driver.leases():
        assert await driver.release(lease)
    await driver.aclose()


class TestGcp(
    AccountedContract,
    ClosingContract,
    EnsuringContract,
    ExcludingContract,
    ExportingContract,
    ListingContract,
    MarkingContract,
    PausingContract,
    RentedContract,
    VitalContract,
):
    narrowed = MappingProxyType({"gpu": "L4", "zone": "us-central1-a"})

    @pytest.fixture(autouse=True)
    def settings(
        self, place: Path, running: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setenv("RENTING", str(place / "renting"))
        for name, value in running.exports.items():
            monkeypatch.setenv(name, value)
        (place / "settings.json").write_text(
            json.dumps({"installation": str(place / "installation"), "poll": 0.05, "settles": 0.1})
        )
        with mirror(place / "mirror") as url:
            monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
            yield
        asyncio.run(ended(self.make(place)))

    def publish(self, place: Path) -> None:
        publish(place / "mirror", both("g2-standard-4", "us-central1-a", "L4", 9.0, 8.0))

    def make(self, place: Path) -> Gcp:
        return Gcp(**json.loads((place / "settings.json").read_text()))


@pytest.mark.proof
class TestJobsAtGcp(TestGcp, DriverContract):
    """Its hosts are those of ssh."""


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("gcp") is Gcp
