"""The slurm driver keeps the contract, on a cluster of two nodes.  All claims on both ways to find processes take two minutes: `make proof`."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from driver_contract import ClosingContract, DriverContract, ExcludingContract

from drivers.base import Driver, Order, Wish
from drivers.slurm import Slurm
from runner.hosts.link.client import Client
from tests.servers.slurm import CGROUPS
from tests.servers.slurm import Slurm as Cluster

RENTS = (
    "test_what_is_offered_can_be_rented_is_listed_and_given_back",
    "test_a_lease_that_was_given_back_has_no_hosts",
)
OF_THIS_DRIVER = (
    *RENTS,
    "test_nothing_is_offered_to_a_need_that_nothing_satisfies",
    "test_an_optional_member_has_its_part_of_this_suite",
    "test_what_was_left_out_is_counted_by_its_reason",
    "test_what_is_kept_on_a_host_is_below_its_root",
    "test_a_command_gets_its_arguments_directory_and_environment_and_nothing_else",
    "test_a_job_outlives_its_worker_and_is_found_again",
    "test_what_a_command_leaves_behind_is_ended_with_it_and_counted",
    "test_a_tree_travels_through_calls",
    "test_a_call_that_fails_is_rejected_with_what_it_said",
    "test_a_call_whose_input_breaks_off_raises_what_broke_it",
    "test_a_call_need_not_read_all_it_is_given",
    "test_a_call_that_is_given_up_is_ended",
)
"""The others are of the agent, which is the same on every host: they are for `make proof`."""


@pytest.fixture(scope="class")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.cls.proctrack) as cluster:
        yield cluster


class OnSlurm(DriverContract, ExcludingContract, ClosingContract):
    """An allocation takes a second to begin: those claims that are of jobs share one, and its agent."""

    proctrack: Literal["cgroup", "linuxproc"] = "cgroup" if CGROUPS else "linuxproc"

    @pytest.fixture(autouse=True)
    def found(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        yield
        if request.function.__name__ in RENTS:
            cluster.clear()

    def make(self, place: Path) -> Slurm:
        return Slurm(root=str(place / "root"))

    async def host(self, driver: Driver) -> Client:
        held = Slurm(root=str(Path(os.environ["SLURM_CONF"]).parent / "held"))
        order = Order(
            (await held.offers(Wish()))[0], "held", datetime.now(UTC) + timedelta(hours=1)
        )
        lease = await held.acquire(order)
        while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])


class TestSlurm(OnSlurm):
    pass


@pytest.mark.proof
class TestLinuxproc(OnSlurm):
    proctrack = "linuxproc"


def _for_proof(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def tried(*arguments: object, **more: object) -> None:
        test(*arguments, **more)

    return pytest.mark.proof(tried)


for _name in {name for name in dir(OnSlurm) if name.startswith("test_")} - set(OF_THIS_DRIVER):
    setattr(TestSlurm, _name, _for_proof(getattr(OnSlurm, _name)))
