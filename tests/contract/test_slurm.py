"""The slurm driver keeps the contract, on a cluster of two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from driver_contract import DriverContract, ExcludingContract

from drivers.base import Driver, Order, Wish
from drivers.slurm import Slurm
from runner.hosts.client import Client
from tests.servers.slurm import Slurm as Cluster
from tests.servers.slurm import slurm  # noqa: F401  (a fixture)


class OnSlurm(DriverContract):
    """An allocation that is begun takes a second: those claims that are of jobs share one, each with a folder of its own."""

    @pytest.fixture(autouse=True)
    def found(self, slurm: Cluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:  # noqa: F811
        monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
        if request.function.__name__ in RENTS:
            slurm.clear()
        yield
        if request.function.__name__ in RENTS:
            slurm.clear()

    def make(self, place: Path) -> Slurm:
        return Slurm(root=str(place / "root"))

    async def host(self, driver: Driver) -> Client:
        held = Slurm(root="/tmp/held")
        order = Order((await held.offers(Wish()))[0], "held", datetime.now(UTC) + timedelta(hours=1))
        lease = await held.acquire(order)
        while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])


RENTS = ("test_what_is_offered_can_be_rented_is_listed_and_given_back", "test_a_lease_that_was_given_back_has_no_hosts")


class TestSlurm(OnSlurm, ExcludingContract):
    """Whatever a step leaves behind dies with it."""
