"""The local driver keeps the contract."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from driver_contract import WakingContract

import drivers
from drivers.base import DriverError, Exit, Host, Rejected
from drivers.local import Local, LocalHost


class TestLocal(WakingContract):
    def make(self, place: Path) -> Local:
        return Local(place / "root")

    def test_who_listens_for_an_end_hears_it_once_also_when_it_was_long_ago(self, place: Path) -> None:
        async def act(host: Host) -> None:
            assert isinstance(host, LocalHost)
            told: asyncio.Queue[Exit | DriverError] = asyncio.Queue()
            jobs = [await host.start(self.command(f"exit {code}", place), f"job-{code}") for code in range(20)]
            for job in jobs:
                host.hear(job, told.put_nowait)
            ends = [await told.get() for _ in jobs]
            assert sorted(end.code for end in ends if isinstance(end, Exit) and end.code is not None) == list(range(20))
            host.hear(jobs[3], told.put_nowait)
            assert await told.get() == await host.wait(jobs[3], timedelta(0)) and told.empty()

        self.on_host(place, act)

    def test_who_listens_hears_of_a_supervisor_that_was_killed(self, place: Path) -> None:
        async def act(host: Host) -> None:
            assert isinstance(host, LocalHost)
            told: asyncio.Queue[Exit | DriverError] = asyncio.Queue()
            job = await host.start(self.command("ps -o ppid= -p $$ > gate; exec sleep 600", place), "job")
            host.hear(job, told.put_nowait)
            supervisor = await asyncio.to_thread((place / "gate").read_text)
            os.kill(int(supervisor), signal.SIGKILL)
            end = await told.get()
            assert isinstance(end, Exit) and end.reason == "lost"

        self.on_host(place, act)


def test_a_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("local") is Local


def test_an_unknown_driver_is_answered_with_the_nearest_and_the_known() -> None:
    with pytest.raises(Rejected, match=r'no driver "locla", did you mean "local"\? \(known: local'):
        drivers.load("locla")
