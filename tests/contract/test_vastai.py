"""The vastai driver keeps the contract, against the fake provider whose machines are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_contract import (
    AccountedContract,
    ClosingContract,
    DriverContract,
    ExcludingContract,
    MarkingContract,
    PausingContract,
    RentingContract,
    VitalContract,
)

import drivers
from drivers.vastai import Vastai
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


class TestVastai(
    AccountedContract,
    ClosingContract,
    ExcludingContract,
    MarkingContract,
    VitalContract,
    PausingContract,
    RentingContract,
):
    @pytest.fixture(autouse=True)
    def settings(
        self, place: Path, running: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        monkeypatch.setenv("RENTING", str(place / "renting"))
        monkeypatch.setenv("VAST_API_KEY", running.exports["VAST_API_KEY"])
        (place / "settings.json").write_text(
            json.dumps(
                {
                    "api": running.url,
                    "installation": str(place / "installation"),
                    "poll": 0.05,
                    "settles": 0.1,
                }
            )
        )
        yield
        asyncio.run(ended(self.make(place)))

    def make(self, place: Path) -> Vastai:
        return Vastai(**json.loads((place / "settings.json").read_text()))


@pytest.mark.proof
class TestJobsAtVastai(TestVastai, DriverContract):
    """Its hosts are those of ssh."""


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("vastai") is Vastai
