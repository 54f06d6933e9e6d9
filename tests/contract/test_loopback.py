"""The loopback driver keeps the contract, whatever shell its machines have, and fails to order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from driver_contract import (
    ENV,
    LONG,
    SH,
    DriverContract,
    PausingContract,
    VisitingContract,
    gathered,
    heard,
    over,
    reading,
)

from drivers.base import (
    Command,
    Denied,
    DriverError,
    Host,
    HostLost,
    Lease,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Throttled,
    Unreachable,
    Wish,
)
from drivers.loopback import Faults, Loopback
from runner.hosts.link.client import Client, StreamLine
from runner.hosts.link.wire import Wire


class TestLoopback(PausingContract, VisitingContract, DriverContract):
    def make(self, place: Path) -> Loopback:
        return Loopback(place / "root")


# --- machines, places and faults


def test_places_are_shared_by_all_processes_and_given_back(tmp_path: Path) -> None:
    async def rent() -> None:
        driver, other = Loopback(tmp_path, hosts=2, slots=1), Loopback(tmp_path, hosts=2, slots=1)
        first, second = await driver.offers(Wish())
        lease = await driver.acquire(order(first, "one"))
        assert (await other.offers(Wish()))[
            0
        ].id == second.id  # the one with a free place comes first
        with pytest.raises(NoCapacity, match=r"all slots on host-1 are in use \(1\)"):
            await other.acquire(order(first, "two"))
        assert await other.acquire(order(first, "one")) == lease
        assert await other.leases() == [lease] == await driver.leases()
        await other.release(lease)
        await driver.acquire(order(first, "two"))

    asyncio.run(rent())


def test_a_place_is_free_again_when_its_time_is_over(tmp_path: Path) -> None:
    async def rent() -> None:
        driver = Loopback(tmp_path)
        offers = await driver.offers(Wish())
        forgotten = await driver.acquire(
            order(offers[0], "forgotten")._replace(until=datetime.now(UTC) - timedelta(seconds=1))
        )
        assert await driver.leases() == []
        assert await driver.acquire(order(offers[0], "forgotten")) == forgotten  # renewed
        assert await driver.leases() == [forgotten]
        with pytest.raises(NoCapacity):
            await driver.acquire(order(offers[0], "next"))

    asyncio.run(rent())


def test_a_machine_has_an_empty_environment_and_a_home_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "secret")

    async def look(driver: Loopback, host: Client, lease: Lease) -> None:
        said = (
            await gathered(
                host.call(("sh", "-c", 'cd ~; pwd; env | sed "s/=.*//" | sort | tr "\\n" " "'))
            )
        ).decode()
        assert said.split() == [str(tmp_path / "host-1"), "HOME", "OLDPWD", "PATH", "PWD"]

    on_machine(tmp_path, {}, look)


def test_orders_are_refused_as_often_as_was_asked_for(tmp_path: Path) -> None:
    faults = {"no_offers": 1, "throttled": 2, "after": 0.5, "denied": 1, "no_capacity": 1}

    async def rent() -> None:
        assert await Loopback(tmp_path, faults=faults).offers(Wish()) == ()
        offers = await Loopback(tmp_path, faults=faults).offers(Wish())
        told = []
        for _ in range(5):
            driver = Loopback(tmp_path, faults=faults)  # a process that begins anew counts on
            try:
                await driver.acquire(order(offers[0], "k"))
                told.append("had")
            except DriverError as error:
                told.append(type(error).__name__)
                assert not isinstance(error, Throttled) or error.after == timedelta(seconds=0.5)
        assert told == ["Throttled", "Throttled", "Denied", "NoCapacity", "had"]

    asyncio.run(rent())


def test_a_host_may_take_its_time_to_come(tmp_path: Path) -> None:
    async def rent() -> None:
        driver = Loopback(tmp_path, faults=Faults(coming=2))
        lease = await driver.acquire(order((await driver.offers(Wish()))[0], "k"))
        assert [await driver.hosts(lease) is None for _ in range(3)] == [True, True, False]

    asyncio.run(rent())


@pytest.mark.parametrize("keeps", [True, False])
def test_a_lost_host_takes_its_jobs_with_it_and_its_disk_unless_set_otherwise(
    tmp_path: Path, keeps: bool
) -> None:
    async def lose(driver: Loopback, host: Client, lease: Lease) -> None:
        held = tmp_path / "held"
        os.mkfifo(held)
        with reading(held) as fd:
            job = await host.start(
                Command(
                    (SH, "-c", f"exec 3>{held}; echo >&3; sleep 1000 & setsid sleep 1000 & wait"),
                    cwd="/",
                    env=ENV,
                ),
                "job",
            )
            assert await heard(fd, 1) == b"\n"
            waiting = asyncio.ensure_future(host.wait(job, LONG))
            with pytest.raises(HostLost):
                while True:
                    await gathered(host.call(("true",)))
            assert await heard(fd) == b""
        with pytest.raises(HostLost):
            await waiting
        with pytest.raises(HostLost):
            await driver.hosts(lease)
        assert await driver.leases() == [] and await driver.release(lease)
        assert (tmp_path / "host-1/.recipe-host").exists() is keeps
        again = await driver.acquire(order((await driver.offers(Wish()))[0], "again"))
        host = attached(await driver.hosts(again))
        assert (await over(host, job)).reason == "lost"
        await host.aclose()

    on_machine(tmp_path, {"lost_on_call": 9, "keeps_disk": keeps}, lose)


def test_a_host_is_lost_as_it_is_asked_for(tmp_path: Path) -> None:
    async def rent() -> None:
        driver = Loopback(tmp_path, faults={"lost_on_poll": 2})
        lease = await driver.acquire(order((await driver.offers(Wish()))[0], "k"))
        assert await driver.hosts(lease)
        with pytest.raises(HostLost):
            await driver.hosts(lease)

    asyncio.run(rent())


def test_calls_do_not_get_through_for_a_while(tmp_path: Path) -> None:
    async def call(driver: Loopback, host: Client, lease: Lease) -> None:
        told = []
        for _ in range(5):
            try:
                told.append(await gathered(host.call(("echo", "x"))))
            except Unreachable:
                told.append(b"")
        assert told == [b"x\n", b"", b"", b"", b"x\n"]

    on_machine(tmp_path, {"unreachable_on_call": 2, "unreachable": 3}, call)


def test_a_call_is_cut_after_so_many_bytes_both_ways(tmp_path: Path) -> None:
    async def call(driver: Loopback, host: Client, lease: Lease) -> None:
        read = b""
        with pytest.raises(Unreachable, match="connection lost"):
            async for data in host.call(("head", "-c", "100000", "/dev/zero")):
                read += data
        assert 0 < len(read) <= 1000
        assert len(await gathered(host.call(("head", "-c", "100000", "/dev/zero")))) == 100_000

    async def send(driver: Loopback, host: Client, lease: Lease) -> None:
        with pytest.raises(Unreachable, match="connection lost"):
            await gathered(
                host.call(("sh", "-c", "cat > half && mv half whole"), pieces(b"x" * 100, 50))
            )
        assert not (tmp_path / "two/host-1/whole").exists()

    on_machine(tmp_path / "one", {"cut_on_call": 1, "cut_after": 1000}, call)
    on_machine(tmp_path / "two", {"cut_on_call": 1, "cut_after": 1000}, send)


def test_a_full_disk_takes_no_more_bytes(tmp_path: Path) -> None:
    async def send(driver: Loopback, host: Client, lease: Lease) -> None:
        await gathered(host.call(("sh", "-c", "cat > first"), pieces(b"x" * 100, 9)))
        for _ in range(2):
            with pytest.raises(Denied, match="No space left on device"):
                await gathered(
                    host.call(("sh", "-c", "cat > half && mv half whole"), pieces(b"x" * 100, 2))
                )
        assert (tmp_path / "host-1/first").stat().st_size == 900
        assert not (tmp_path / "host-1/whole").exists()

    on_machine(tmp_path, {"disk": 1000}, send)


def test_a_slow_connection_takes_its_time(tmp_path: Path) -> None:
    async def call(driver: Loopback, host: Client, lease: Lease) -> None:
        began = time.monotonic()
        await gathered(host.call(("head", "-c", "20000", "/dev/zero")))
        assert time.monotonic() - began >= 0.2

    on_machine(tmp_path, {"bytes_per_second": 100_000}, call)


def test_faults_are_read_from_settings_and_mistakes_are_named() -> None:
    assert Faults.read('{"no_capacity": 2, "after": 1}') == Faults(no_capacity=2, after=1)
    for given, words in (
        ('{"no_capcity": 2}', 'no fault "no_capcity", did you mean "no_capacity"'),
        ({"xyz": 2}, "known: no_offers"),
        ({"coming": "2"}, "coming is a int|coming is an int"),
        ({"coming": True}, "not True"),
        ({"coming": -1}, "not -1"),
        ("{", "not JSON"),
        ("[]", "a table"),
    ):
        with pytest.raises(Rejected, match=words):
            Faults.read(given)  # type: ignore[arg-type]


def order(offer: Offer, key: str) -> Order:
    return Order(offer, key, datetime.now(UTC) + timedelta(hours=1))


def attached(hosts: Sequence[Host] | None) -> Client:
    assert hosts is not None
    return Client(StreamLine(Wire(hosts[0], hosts[0].root)))


def on_machine(
    place: Path,
    faults: dict[str, object],
    act: Callable[[Loopback, Client, Lease], Coroutine[None, None, None]],
) -> None:
    async def acting() -> None:
        driver = Loopback(place, faults=faults)
        lease = await driver.acquire(order((await driver.offers(Wish()))[0], "the lease"))
        host = attached(await driver.hosts(lease))
        try:
            async with asyncio.timeout(60):
                await act(driver, host, lease)
        finally:
            await host.aclose()

    asyncio.run(acting())


async def pieces(data: bytes, several: int) -> AsyncIterator[bytes]:
    for _ in range(several):
        yield data
