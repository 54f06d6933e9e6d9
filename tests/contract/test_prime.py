"""The prime driver keeps the contract, against the fake provider whose machines are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_contract import (
    AccountedContract,
    ChargingContract,
    ClosingContract,
    DriverContract,
    ExcludingContract,
    MarkingContract,
    VitalContract,
)

import drivers
from drivers.prime import Prime
from tests.fake_provider import Provider, provider
from tests.rented import key_of_the_account


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with provider("prime", "--hosts", "real", "--clock", "real", "--faults", "boot=0") as found:
        yield found


async def ended(driver: Prime) -> None:
    """End what a test rented."""
    for lease in await driver.leases():
        assert await driver.release(lease)
    await driver.aclose()


class TestPrime(
    AccountedContract,
    ClosingContract,
    ExcludingContract,
    MarkingContract,
    VitalContract,
    ChargingContract,
):
    @pytest.fixture(autouse=True)
    def settings(
        self, place: Path, running: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setenv("RENTING", str(place / "renting"))
        monkeypatch.setenv("PRIME_API_KEY", running.exports["PRIME_API_KEY"])
        given = {
            "api": running.url,
            "installation": str(place / "installation"),
            "key": key_of_the_account(running, place),
            "first_use": True,
        }
        (place / "settings.json").write_text(json.dumps({**given, "poll": 0.05, "settles": 0.1}))
        yield
        asyncio.run(ended(self.make(place)))

    def make(self, place: Path) -> Prime:
        return Prime(**json.loads((place / "settings.json").read_text()))


@pytest.mark.proof
class TestJobsAtPrime(TestPrime, DriverContract):
    """Its hosts are those of ssh."""


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("prime") is Prime
