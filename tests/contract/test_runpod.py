"""The runpod driver keeps the contract, against the fake provider whose machines are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
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
from drivers.base import HostLost, Order, Wish
from drivers.runpod import Runpod
from tests.fake_provider import Provider, provider


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with provider("runpod", "--hosts", "real", "--clock", "real", "--faults", "boot=0") as found:
        yield found


async def ended(driver: Runpod) -> None:
    """End what a test rented."""
    for lease in await driver.leases():
        assert await driver.release(lease)
    await driver.aclose()


class TestRunpod(
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
        monkeypatch.setenv("RUNPOD_API_KEY", running.exports["RUNPOD_API_KEY"])
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

    def make(self, place: Path) -> Runpod:
        return Runpod(**json.loads((place / "settings.json").read_text()))


@pytest.mark.proof
class TestJobsAtRunpod(TestRunpod, DriverContract):
    """Its hosts are those of ssh."""


def test_a_pod_that_is_started_without_a_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its volume is billed at twice the rate while it stands still."""

    async def rent(driver: Runpod) -> None:
        (offer, *_) = await driver.offers(Wish(keep=True))
        assert offer.disk_price == pytest.approx(2 * 0.10 / 30 / 24 * float(offer.data["disk"]))
        order = Order(offer, "kept", datetime.now(UTC) + timedelta(hours=1), keep=True)
        lease = await driver.acquire(order)
        assert await driver.stop(lease)
        (stopped,) = await driver.leases()
        assert stopped.price == pytest.approx(offer.disk_price, abs=1e-5)
        with pytest.raises(HostLost, match="without a GPU"):
            await driver.start(lease, order.until)
        assert await driver.release(lease) and await driver.stands(lease) == "gone"
        await driver.aclose()

    with provider(
        "runpod", "--hosts", "none", "--clock", "real", "--faults", "boot=0.05,fewer=1"
    ) as found:
        monkeypatch.setenv("RUNPOD_API_KEY", found.exports["RUNPOD_API_KEY"])
        asyncio.run(
            rent(
                Runpod(
                    api=found.url,
                    installation=str(tmp_path / "installation"),
                    poll=0.05,
                    settles=0.1,
                )
            )
        )


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("runpod") is Runpod
