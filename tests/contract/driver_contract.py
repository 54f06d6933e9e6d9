"""What every driver and every host must do, as tests to inherit: a subclass says how its driver is made in a directory, and nothing else.

class TestLocal(DriverContract):
    def make(self, place):
        return Local(place)

What only some drivers have is tested by a class of its own, which the test of such a driver inherits, too: `PARTS` names them.
"""

from __future__ import annotations

import ast
import asyncio
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from drivers.base import (
    Command,
    Driver,
    DriverError,
    Exit,
    Host,
    HostLost,
    Job,
    Need,
    Order,
    Rejected,
    Wish,
)
from drivers.installation import Installation
from runner.hosts.link.client import Client, StreamLine
from runner.hosts.link.wire import Wire

AT_ONCE = timedelta(0)
LONG = timedelta(seconds=60)
ENV = {"PATH": os.environ["PATH"]}
SH = "/bin/sh"

SIZE = int(os.environ.get("RECIPE_LOG_MB", "64")) * 1_000_000  # bytes of a huge log

# A worker that begins one job, says so, and is killed as it waits.  Hosts that are shared have jobs of other claims, so it has the name of its place.
WORKER = """
import asyncio, importlib, json, sys
from pathlib import Path
from typing import Any
sys.path[:0] = json.loads(sys.argv[1])
contract = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])()
async def work():
    driver = contract.make(Path(sys.argv[4]))
    host = await contract.host(driver)
    job = await host.start(contract.command(sys.argv[5], Path(sys.argv[4]), locks=tuple(sys.argv[6:])), Path(sys.argv[4]).name)
    await host.wait(job, contract.moment)
    print(json.dumps([job.key, dict(job.data)]), flush=True)
    await asyncio.Event().wait()
asyncio.run(work())
"""


class Attached(Client):
    """Jobs on a host that nobody else uses."""

    async def aclose(self) -> None:
        await super().aclose()
        await self._line.host().aclose()


class LeaseContract:
    """What is rented, and given back."""

    moment = timedelta(seconds=0.05)

    def make(self, place: Path) -> Driver:
        """The driver, as any process would make it from the same settings: everything it remembers is in `place` or with its provider."""
        raise NotImplementedError

    # --- arranging

    async def host(self, driver: Driver) -> Client:
        offers = await driver.offers(Wish())
        lease = await driver.acquire(
            Order(offers[0], "the-lease", datetime.now(UTC) + timedelta(hours=1))
        )
        while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])

    def attached(self, host: Host) -> Client:
        """Jobs there."""
        return Attached(StreamLine(Wire(host, host.root)))

    def command(self, script: str, place: Path, **others: object) -> Command:
        return Command((SH, "-euc", script), cwd=str(place), env=ENV, **others)  # type: ignore[arg-type]

    @pytest.fixture
    def locks(self) -> Iterator[list[str]]:
        """Names that no other test has: locks are of this machine."""
        names = [f"test-{os.urandom(8).hex()}" for _ in range(16)]
        yield names
        for name in names:
            Path(f"/tmp/recipe-{os.geteuid()}/gpus/{name}.lock").unlink(missing_ok=True)

    async def begun(self, host: Client, command: Command, key: str) -> Job:
        """A job whose command, which begins with a word for its log, is running."""
        job = await host.start(command, key)
        while not await host.log(job, 0):
            assert await host.wait(job, self.moment) is None
        return job

    async def end(self, host: Client, job: Job) -> Exit:
        exit = await host.wait(job, LONG)
        assert exit is not None
        return exit

    def on_host(self, place: Path, act: Callable[[Client], Coroutine[None, None, None]]) -> None:
        async def acting() -> None:
            driver = self.make(place)
            host = await self.host(driver)
            try:
                async with asyncio.timeout(60):
                    await act(host)
            finally:
                await host.aclose()

        asyncio.run(acting())

    def killed_workers(
        self, place: Path, script: str, several: int, locks: Sequence[str] = ()
    ) -> list[Job]:
        """The jobs that workers, all at once, began under one key just before they were killed."""
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        argv = [
            sys.executable,
            "-c",
            WORKER,
            json.dumps(paths),
            type(self).__module__,
            type(self).__name__,
            str(place),
            script,
            *locks,
        ]
        with ExitStack() as stack:
            workers = [
                stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE))
                for _ in range(several)
            ]
            said = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
        return [Job(key, data) for key, data in map(json.loads, said)]

    def killed_worker(self, place: Path, script: str, locks: Sequence[str] = ()) -> Job:
        return self.killed_workers(place, script, 1, locks)[0]

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        os.mkfifo(tmp_path / "gate")
        return tmp_path

    # --- renting

    def test_what_is_offered_can_be_rented_is_listed_and_given_back(self, place: Path) -> None:
        async def rent() -> None:
            driver = self.make(place)
            offers = await driver.offers(Wish(Need(cpus=1)))
            order = Order(
                offers[0], "a/key with: odd characters", datetime.now(UTC) + timedelta(hours=1)
            )
            lease = await driver.acquire(order)
            assert lease.key == order.key
            assert lease in await self.make(place).leases()
            if driver.traits.replays:
                assert await driver.acquire(order) == lease
                assert list(await driver.leases()) == [lease]
            assert await driver.release(lease)
            assert await driver.release(lease)
            assert lease not in await driver.leases()

        asyncio.run(rent())

    def test_a_lease_that_was_given_back_has_no_hosts(self, place: Path) -> None:
        async def rent() -> None:
            driver = self.make(place)
            order = Order(
                (await driver.offers(Wish()))[0], "short", datetime.now(UTC) + timedelta(hours=1)
            )
            lease = await driver.acquire(order)
            await driver.release(lease)
            with pytest.raises(HostLost):
                await driver.hosts(lease)

        asyncio.run(rent())

    def test_nothing_is_offered_to_a_need_that_nothing_satisfies(self, place: Path) -> None:
        async def ask() -> None:
            driver = self.make(place)
            for wish in (Wish(Need(cpus=1e9)), Wish(Need(nodes=1000)), Wish(disk=1 << 60)):
                assert not await driver.offers(wish)

        asyncio.run(ask())

    def test_an_offer_is_on_the_market_that_was_asked_for_and_tells_its_price(
        self, place: Path
    ) -> None:
        async def ask() -> None:
            driver = self.make(place)
            for market in ("on-demand", "spot", "any"):
                for offer in await driver.offers(Wish(Need(market=market))):
                    assert market in (offer.market, "any")
                    assert (
                        offer.price > 0
                    ) is driver.traits.priced and 0 <= offer.disk_price <= offer.price
                    assert not driver.traits.priced or offer.fetched > 0
                    assert offer.reliability is None or 0 <= offer.reliability <= 1

        asyncio.run(ask())

    def test_a_machine_is_up_within_the_time_that_the_driver_names(self, place: Path) -> None:
        async def rent() -> None:
            traits = self.make(place).traits
            assert (
                traits.poll > AT_ONCE
                and traits.comes_up >= AT_ONCE
                and (traits.hosts_at_once or 1) >= 1
            )
            async with asyncio.timeout(traits.comes_up.total_seconds() + 10):
                await self.host(self.make(place))

        asyncio.run(rent())

    def test_an_optional_member_has_its_part_of_this_suite(self, place: Path) -> None:
        driver = self.make(place)
        assert {part for part in PARTS if isinstance(self, part)} == {
            part for part, member in PARTS.items() if _has(driver, member)
        }
        assert driver.traits.visits is _has(driver, "visit")
        assert driver.traits.prolongs is _has(driver, "prolong")
        assert driver.traits.pauses is _has(driver, "stop")
        assert driver.traits.works is _has(driver, "work")
        assert driver.traits.exports is _has(driver, "program")

    def test_what_is_kept_on_a_host_is_below_its_root(self, place: Path) -> None:
        async def act(host: Client) -> None:
            await over(host, await host.start(self.command("exit 0", place), "kept"))
            assert await gathered(host.call((SH, "-c", 'cd && ls -d "$1"/*', "sh", host.root)))

        self.on_host(place, act)


class DriverContract(LeaseContract):
    """What runs on a host, too."""

    memory = 32_000
    """Kilobytes by which a client may grow, however much a job prints."""

    # --- running

    def test_a_command_gets_its_arguments_directory_and_environment_and_nothing_else(
        self, place: Path
    ) -> None:
        odd = ("", "a b", "'\"$HOME`", "line\nline", "é\udcff")
        show = "import os, sys; print(sys.argv[1:], os.getcwd(), sorted(set(os.environ) - {'LC_CTYPE'}), sys.stdin.read(), os.environ['S'])"

        async def act(host: Client) -> None:
            command = Command(
                (sys.executable, "-c", show, *odd),
                cwd=str(place),
                env={"A": "1"},
                secrets={"S": "hush"},
            )
            assert "hush" not in repr(command)
            job = await host.start(command, "one")
            assert (await over(host, job)).code == 0
            assert (
                await printed(host, job)
            ).decode() == f"{list(odd)} {place} ['A', 'RECIPE_JOB', 'S']  hush\n"

        self.on_host(place, act)

    def test_an_end_tells_how_it_ended(self, place: Path) -> None:
        async def act(host: Client) -> None:
            done = await over(host, await host.start(self.command("exit 0", place), "zero"))
            failed = await over(host, await host.start(self.command("exit 3", place), "three"))
            killed = await over(
                host, await host.start(self.command("kill -SEGV $$", place), "killed")
            )
            assert (done.code, done.signal, done.reason) == (0, None, "exit")
            assert (failed.code, failed.signal, failed.reason) == (3, None, "exit")
            assert (killed.signal, killed.reason) == (signal.SIGSEGV, "signal")
            assert 0 < done.started <= done.ended <= failed.ended
            assert failed.ended <= time.time()
            assert done.peak_memory > 0

        self.on_host(place, act)

    def test_the_time_a_job_used_is_reported(self, place: Path) -> None:
        async def act(host: Client) -> None:
            end = await over(
                host,
                await host.start(
                    self.command("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done", place), "busy"
                ),
            )
            assert 0.01 < end.cpu < 30

        self.on_host(place, act)

    def test_a_program_that_does_not_exist_ends_with_127_and_says_so(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(
                Command(("no-such-program",), cwd=str(place), env=ENV), "nothing"
            )
            assert (await over(host, job)).code == 127
            assert b"no-such-program" in await printed(host, job)

        self.on_host(place, act)

    def test_the_same_key_is_the_same_job(self, place: Path) -> None:
        async def act(host: Client) -> None:
            command = self.command("echo ran >> count; read line < gate", place)
            first, second = await asyncio.gather(
                host.start(command, "same"), host.start(command, "same")
            )
            assert first == second
            assert await host.wait(first, self.moment) is None
            release(place)
            end = await over(host, first)
            assert await host.start(command, "same") == first
            assert await over(host, first) == end
            assert (place / "count").read_text() == "ran\n"

        self.on_host(place, act)

    def test_a_lock_is_held_until_nothing_of_its_job_lives(
        self, place: Path, locks: list[str]
    ) -> None:
        lock, other, *_ = locks

        async def act(host: Client) -> None:
            assert sorted(await host.find_free_locks([lock, other])) == sorted([lock, other])
            waits = self.command("echo began; read go < gate", place, locks=(lock,))
            first = await self.begun(host, waits, "first")
            assert await host.start(waits, "first") == first
            assert list(await host.find_free_locks([lock, other])) == [other]
            second = self.command("echo second", place, locks=(other, lock))
            refused = await self.end(host, await host.start(second, "second"))
            assert refused.reason == "busy" and await host.log(Job("second"), 0) == b""
            assert list(await host.find_free_locks([lock, other])) == [other], "all locks or none"
            await asyncio.to_thread((place / "gate").write_text, "go\n")
            assert (await self.end(host, first)).code == 0
            while lock not in await host.find_free_locks([lock]):  # noqa: ASYNC110  # a host over a shell frees it when that has ended, a moment later
                await asyncio.sleep(0.01)
            job = await host.start(second, "second")
            end = await self.end(host, job)
            assert (end.code, end.reason, await host.log(job, 0)) == (0, "exit", b"second\n"), end

        self.on_host(place, act)

    def test_a_lock_outlives_the_worker_that_asked_for_it(
        self, place: Path, locks: list[str]
    ) -> None:
        lock = locks[0]
        job = self.killed_worker(place, "echo began; read go < gate", (lock,))

        async def act(host: Client) -> None:
            while not await host.log(job, 0):  # noqa: ASYNC110  # a host is asked again, it does not call
                await asyncio.sleep(0.01)
            assert list(await host.find_free_locks([lock])) == []
            await asyncio.to_thread((place / "gate").write_text, "go\n")
            await self.end(host, job)
            assert list(await host.find_free_locks([lock])) == [lock]

        self.on_host(place, act)

    def test_a_job_holds_many_locks(self, place: Path, locks: list[str]) -> None:
        async def act(host: Client) -> None:
            job = await self.begun(
                host,
                self.command("echo began; read go < gate", place, locks=tuple(locks)),
                place.name,
            )
            assert list(await host.find_free_locks(locks)) == []
            await asyncio.to_thread((place / "gate").write_text, "go\n")
            assert (await self.end(host, job)).code == 0
            while len(await host.find_free_locks(locks)) < len(locks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        self.on_host(place, act)

    def test_a_command_that_cannot_begin_is_over_and_says_why(self, place: Path) -> None:
        async def act(host: Client) -> None:
            nowhere = await over(
                host,
                await host.start(Command(("true",), cwd=str(place / "nowhere"), env=ENV), "cwd"),
            )
            mute = await over(
                host,
                await host.start(self.command("true", place, log=str(place / "no" / "log")), "log"),
            )
            assert nowhere.code == mute.code == 126
            assert "nowhere" in nowhere.detail and "no/log" in mute.detail

        self.on_host(place, act)

    def test_a_job_can_be_interrupted(self, place: Path) -> None:
        async def act(host: Client) -> None:
            kept = "import signal; print([number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN])"
            job = await host.start(
                Command((sys.executable, "-c", kept), cwd=str(place), env=ENV), "ignores"
            )
            await over(host, job)
            assert (
                (await printed(host, job)).decode()
                == "[<Signals.SIGPIPE: 13>, <Signals.SIGXFSZ: 25>]\n"
            )  # which Python itself ignores

        self.on_host(place, act)

    def test_keys_may_hold_any_characters(self, place: Path) -> None:
        async def act(host: Client) -> None:
            keys = ["train[lr=0.0001,seed=1]", "a/../../b", ".", "x" * 500, 'q"\\\n', "ключ"]
            jobs = [
                await host.start(self.command(f"exit {index}", place), key)
                for index, key in enumerate(keys)
            ]
            assert [(await over(host, job)).code for job in jobs] == list(range(len(keys)))

        self.on_host(place, act)

    def test_many_jobs_at_once_each_get_their_own_end(self, place: Path) -> None:
        async def act(host: Client) -> None:
            jobs = [
                await host.start(self.command(f"echo {number}; exit {number}", place), f"n{number}")
                for number in range(50)
            ]
            ends = await asyncio.gather(*(over(host, job) for job in jobs))
            assert [end.code for end in ends] == list(range(50))
            assert [await printed(host, job) for job in jobs] == [
                b"%d\n" % number for number in range(50)
            ]

        self.on_host(place, act)

    def test_workers_that_race_for_one_key_begin_one_job(self, place: Path) -> None:
        script = "echo ran >> count; read line < gate; exit 4"
        jobs = self.killed_workers(place, script, 3)

        async def act(host: Client) -> None:
            assert (
                jobs[0]
                == jobs[1]
                == jobs[2]
                == await host.start(self.command(script, place), place.name)
            )
            release(place)
            assert (await over(host, jobs[0])).code == 4
            assert (place / "count").read_text() == "ran\n"

        self.on_host(place, act)

    # --- waiting

    def test_without_patience_a_wait_answers_at_once(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(self.command("read line < gate", place), "slow")
            assert await host.wait(job, AT_ONCE) is None
            release(place)
            await over(host, job)
            assert await host.wait(job, AT_ONCE) is not None

        self.on_host(place, act)

    def test_a_wait_wakes_when_the_job_ends(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(self.command("read line < gate", place), "woken")
            began = time.monotonic()
            waits = [asyncio.ensure_future(host.wait(job, LONG)) for _ in range(3)]
            assert await host.wait(job, self.moment) is None
            release(place)
            assert all(await asyncio.gather(*waits))
            assert time.monotonic() - began < LONG.total_seconds()  # woken, not at their time

        self.on_host(place, act)

    def test_a_job_that_never_began_left_no_status(self, place: Path) -> None:
        async def act(host: Client) -> None:
            end = await over(host, Job("unheard-of"))
            assert (end.code, end.reason) == (None, "lost")

        self.on_host(place, act)

    # --- surviving

    def test_a_job_outlives_its_worker_and_is_found_again(self, place: Path) -> None:
        script = "echo began; echo x >> count; read line < gate; echo done; exit 7"
        job = self.killed_worker(place, script)

        async def act(host: Client) -> None:
            assert await host.wait(job, AT_ONCE) is None
            assert await host.start(self.command(script, place), place.name) == job
            release(place)
            assert (await over(host, job)).code == 7
            assert await printed(host, job) == b"began\ndone\n"
            assert (place / "count").read_text() == "x\n"

        self.on_host(place, act)

    def test_an_end_without_a_client_is_kept(self, place: Path) -> None:
        job = self.killed_worker(place, "echo short; exit 5")

        async def act(host: Client) -> None:
            assert (await over(host, job)).code == 5
            assert await printed(host, job) == b"short\n"

        self.on_host(place, act)

    def test_a_closed_host_leaves_its_jobs_alone(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(self.command("read line < gate", place), "left")
            await host.aclose()
            again = await self.host(self.make(place))
            assert await again.wait(job, AT_ONCE) is None
            release(place)
            assert (await over(again, job)).code == 0
            await again.aclose()

        self.on_host(place, act)

    # --- ending

    def test_a_stop_ends_the_whole_group_and_may_be_asked_again(self, place: Path) -> None:
        async def act(host: Client) -> None:
            os.mkfifo(place / "held")
            with reading(place / "held") as held:
                job = await host.start(
                    self.command(
                        "(echo; sleep 1000) > held & (echo; sleep 1000) > held & wait", place
                    ),
                    "group",
                )
                assert await heard(held, 2) == b"\n\n"
                await host.stop(job, LONG)
                await host.stop(job, LONG)
                end = await over(host, job)
                assert end.reason == "stopped"
                assert await heard(held) == b""  # both sleeps are gone
            await host.stop(job, AT_ONCE)
            assert await over(host, job) == end

        self.on_host(place, act)

    def test_what_ignores_a_stop_is_killed_after_the_grace(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(
                self.command("trap '' TERM; echo > gate; while :; do sleep 1000; done", place),
                "deaf",
            )
            with reading(place / "gate") as gate:
                assert await heard(gate, 1) == b"\n"
            await host.stop(job, LONG)
            assert await host.wait(job, self.moment) is None
            await host.stop(job, self.moment)
            end = await over(host, job)
            assert (end.signal, end.reason) == (signal.SIGKILL, "stopped")

        self.on_host(place, act)

    def test_a_stop_lets_a_job_save_itself(self, place: Path) -> None:
        async def act(host: Client) -> None:
            # Naps: a child that a stop meets between fork and exec is deaf to it, and must not outlive the test.
            job = await host.start(
                self.command(
                    "trap 'echo saved; exit 9' TERM; echo > gate; while :; do sleep 0.01 & wait; done",
                    place,
                ),
                "saves",
            )
            with reading(place / "gate") as gate:
                assert await heard(gate, 1) == b"\n"
            await host.stop(job, LONG)
            end = await over(host, job)
            assert (end.code, end.reason) == (9, "stopped")
            assert await printed(host, job) == b"saved\n"

        self.on_host(place, act)

    @pytest.mark.parametrize(
        ("limits", "reason"), [({"timeout": 0.2}, "timeout"), ({"idle_timeout": 0.2}, "idle")]
    )
    def test_a_limit_ends_a_job_and_is_its_reason(
        self, place: Path, limits: dict[str, float], reason: str
    ) -> None:
        async def act(host: Client) -> None:
            end = await over(
                host, await host.start(self.command("sleep 1000", place, **limits), reason)
            )
            assert (end.reason, end.signal) == (reason, signal.SIGTERM)
            assert end.ended - end.started >= 0.2

        self.on_host(place, act)

    def test_a_stop_of_what_never_began_does_nothing(self, place: Path) -> None:
        async def act(host: Client) -> None:
            await host.stop(Job("never"), AT_ONCE)
            end = await over(host, await host.start(self.command("exit 6", place), "never"))
            assert end.code == 6, end

        self.on_host(place, act)

    def test_what_a_command_leaves_behind_is_ended_with_it_and_counted(self, place: Path) -> None:
        async def act(host: Client) -> None:
            os.mkfifo(place / "held")
            with reading(place / "held") as held:
                script = "exec 3> held; sleep 1000 & setsid sleep 1000 & (setsid sleep 1000 &) ; echo left; exit 5"
                end = await over(host, await host.start(self.command(script, place), "leaves"))
                assert (end.code, end.reason, end.strays) == (5, "exit", 3)
                assert await heard(held) == b""

        self.on_host(place, act)

    # --- logs

    def test_a_log_from_any_offset_is_the_rest_of_it(self, place: Path) -> None:
        data = bytes(range(256)) * 4
        (place / "data").write_bytes(data)

        async def act(host: Client) -> None:
            job = await host.start(
                self.command("head -c 512 data; head -c 512 data >&2", place), "logs"
            )
            await over(host, job)
            assert await printed(host, job) == data
            for offset in (0, 1, 511, 513, 1023):
                assert await host.log(job, offset) == data[offset:]
            assert await host.log(job, 1024) == await host.log(job, 5000) == b""
            assert await host.log(Job("never"), 0) == b""

        self.on_host(place, act)

    def test_a_log_can_be_read_while_the_job_runs(self, place: Path) -> None:
        async def act(host: Client) -> None:
            job = await host.start(
                self.command("echo first; echo > gate; read line < gate; echo second", place),
                "live",
            )
            with reading(place / "gate") as gate:
                assert await heard(gate, 1) == b"\n"
            assert await host.log(job, 0) == b"first\n"
            release(place)
            await over(host, job)
            assert await host.log(job, 6) == b"second\n"

        self.on_host(place, act)

    def test_a_flood_of_output_does_not_fill_memory(self, place: Path) -> None:
        async def act(host: Client) -> None:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            job = await host.start(self.command(f"head -c {SIZE} /dev/zero", place), "flood")
            await over(host, job)
            read = 0
            while data := await host.log(job, read):
                read += len(data)
            assert read == SIZE
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < self.memory, grown

        self.on_host(place, act)

    # --- calls

    def test_a_tree_travels_through_calls(self, place: Path) -> None:
        tree, there = place / "tree", place / "there"
        (tree / "deep/er").mkdir(parents=True)
        there.mkdir()
        (tree / "deep/er/big").write_bytes(os.urandom(3_000_000))
        (tree / "run").write_text("#!/bin/sh\n")
        (tree / "run").chmod(0o755)
        (tree / "link").symlink_to("deep/er")

        async def act(host: Client) -> None:
            packed = host.call(("tar", "-C", str(tree), "-cf", "-", "."))
            assert [
                data async for data in host.call(("tar", "-C", str(there), "-xf", "-"), packed)
            ] == []
            assert (there / "deep/er/big").read_bytes() == (tree / "deep/er/big").read_bytes()
            assert os.access(there / "run", os.X_OK)
            assert (there / "link").readlink() == Path("deep/er")

        self.on_host(place, act)

    def test_a_call_that_fails_is_rejected_with_what_it_said(self, place: Path) -> None:
        async def act(host: Client) -> None:
            with pytest.raises(Rejected, match="its own words"):
                await gathered(host.call((SH, "-c", "echo its own words >&2; exit 4")))
            with pytest.raises(Rejected, match="no-such-program"):
                await gathered(host.call(("no-such-program",)))

        self.on_host(place, act)

    def test_a_call_whose_input_breaks_off_raises_what_broke_it(self, place: Path) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield b"half"
            raise LookupError("the source is gone")

        async def act(host: Client) -> None:
            with pytest.raises(LookupError, match="the source is gone"):
                await gathered(host.call(("cat",), broken()))

        self.on_host(place, act)

    def test_a_call_need_not_read_all_it_is_given(self, place: Path) -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 16)

        async def act(host: Client) -> None:
            assert await gathered(host.call(("head", "-c", "5"), endless())) == bytes(5)

        self.on_host(place, act)

    def test_a_call_that_is_given_up_is_ended(self, place: Path) -> None:
        async def act(host: Client) -> None:
            with reading(place / "gate") as gate:
                call = host.call((SH, "-c", f"exec 3> {place}/gate; echo begun; sleep 1000"))
                assert await anext(call) == b"begun\n"
                await call.aclose()  # type: ignore[attr-defined]
                assert await heard(gate) == b""

        self.on_host(place, act)

    def test_a_call_that_is_given_up_in_a_flood_is_ended(
        self, place: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def act(host: Client) -> None:
            call = host.call((SH, "-c", "cat /dev/zero"))
            async with asyncio.timeout(60):
                await anext(call)
                with reading(place / "gate") as gate:  # time for more to arrive than anybody keeps
                    await host.wait(
                        await host.start(self.command("sleep 0.2; echo > gate", place), "later"),
                        LONG,
                    )
                    assert await heard(gate, 1) == b"\n"
                await call.aclose()  # type: ignore[attr-defined]

        self.on_host(place, act)
        assert caplog.text == ""


class SkippingContract(LeaseContract):
    def make_with_a_dead_machine(self, place: Path) -> tuple[Driver, str]:
        """The driver with one machine more, which cannot be asked, and that machine's name."""
        raise NotImplementedError

    def test_a_machine_that_cannot_be_asked_is_left_out_with_the_reason(self, place: Path) -> None:
        async def ask() -> None:
            whole = self.make(place)
            assert await whole.offers(Wish()) and not whole.left_out
            driver, dead = self.make_with_a_dead_machine(place)
            assert dead not in {offer.id for offer in await driver.offers(Wish())}
            assert list(driver.left_out) == [dead] and driver.left_out[dead]
            for each in (whole, driver):
                await each.aclose()

        asyncio.run(ask())


class VisitingContract(LeaseContract):
    def test_hosts_are_visited_without_a_lease(self, place: Path) -> None:
        async def look() -> None:
            driver = self.make(place)
            names = []
            async for name, host in driver.visit():
                assert not isinstance(host, DriverError)
                names.append(name)
                assert await gathered(host.call((SH, "-c", "echo here"))) == b"here\n"
                assert not await driver.leases()
                await host.aclose()
            assert names and len(names) == len(set(names))

        asyncio.run(look())


class ConnectingContract(LeaseContract):
    def test_machines_are_connected_to_and_prepared_before_a_place_is_taken(
        self, place: Path
    ) -> None:
        async def look() -> None:
            driver = self.make(place)
            await driver.connect()
            hosts = driver.connected_hosts()
            assert hosts.keys() == {offer.id for offer in await driver.offers(Wish())}
            for host in hosts.values():
                assert await gathered(host.call((SH, "-c", "echo here"))) == b"here\n"
            assert not await driver.leases()
            await (await self.host(driver)).aclose()  # a place on it is taken as ever
            for host in hosts.values():
                await host.aclose()

        asyncio.run(look())


class ClosingContract(LeaseContract):
    def test_closing_a_driver_leaves_leases_and_jobs(self, place: Path) -> None:
        async def act() -> None:
            driver = self.make(place)
            job = await self.begun(
                await self.host(driver),
                self.command("echo begun; read line < gate; exit 5", place),
                "long",
            )
            before = await driver.leases()
            await driver.aclose()
            await driver.aclose()
            again = self.make(place)
            assert await again.leases() == before
            host = await self.host(again)
            release(place)
            assert (await over(host, job)).code == 5
            await again.aclose()

        asyncio.run(act())


class ExcludingContract(LeaseContract):
    def test_what_was_left_out_is_counted_by_its_reason(self, place: Path) -> None:
        async def ask() -> None:
            driver = self.make(place)
            assert not await driver.offers(Wish(Need(gpus=1000)))
            assert driver.excluded and all(
                why and count > 0 for why, count in driver.excluded.items()
            )

        asyncio.run(ask())


class RentedContract(LeaseContract):
    """Of drivers that give out another machine for each order: as `Leases` does, one that is there is found by its key."""

    async def host(self, driver: Driver) -> Client:
        with open(os.environ["RENTING"], "w") as lock:  # noqa: ASYNC230
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = [lease for lease in await driver.leases() if lease.key == "the-lease"]
            order = Order(
                (await driver.offers(Wish()))[0],
                "the-lease",
                datetime.now(UTC) + timedelta(hours=1),
            )
            lease = found[0] if found else await driver.acquire(order)
        while (hosts := await driver.hosts(lease)) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
            await asyncio.sleep(0.05)
        return self.attached(hosts[0])

    def test_it_says_whence_the_host_key_of_a_machine_is_known(self, place: Path) -> None:
        assert self.make(place).traits.identity in ("given", "attested", "first_use")


class ProlongingContract(RentedContract):
    """Of drivers whose machines end themselves."""

    def test_a_machine_that_ends_itself_does_so_at_another_time_when_it_is_asked(
        self, place: Path
    ) -> None:
        async def rent() -> None:
            driver = self.make(place)
            order = Order(
                (await driver.offers(Wish()))[0],
                "prolonged",
                datetime.now(UTC) + timedelta(hours=1),
            )
            lease = await driver.acquire(order)
            while await driver.hosts(lease) is None:  # noqa: ASYNC110  # a provider is asked again, it does not call
                await asyncio.sleep(0.05)
            await driver.prolong(lease, order.until + timedelta(hours=1))
            assert lease in await driver.leases()

        asyncio.run(rent())


class PausingContract(LeaseContract):
    """Of drivers whose machines stand still and run again."""

    def test_a_machine_that_is_stopped_is_billed_for_its_disk_and_runs_again_with_it(
        self, place: Path
    ) -> None:
        async def rent() -> None:
            driver = self.make(place)
            order = Order(
                (await driver.offers(Wish()))[0],
                "kept",
                datetime.now(UTC) + timedelta(hours=1),
                keep=True,
            )
            lease = await driver.acquire(order)
            assert await driver.stands(lease) == "runs"
            while not await driver.stop(lease):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.05)
            assert (
                await driver.stands(lease) == "stopped"
                and await driver.stop(lease)
                and lease in await driver.leases()
            )
            with pytest.raises(HostLost):
                await driver.hosts(lease)
            await driver.start(lease, order.until)
            assert await driver.stands(lease) == "runs"
            await driver.start(lease, order.until)
            while not await driver.release(lease):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.05)
            assert await driver.stands(lease) == "gone" and await driver.stop(lease)
            with pytest.raises(HostLost):
                await driver.start(lease, order.until)

        asyncio.run(rent())


class EnsuringContract(LeaseContract):
    """Of drivers whose machines need something beside themselves."""

    def test_what_is_beside_the_machines_is_made_once_and_stays_while_one_uses_it(
        self, place: Path
    ) -> None:
        async def rent() -> None:
            driver = self.make(place)
            assert await driver.ensure() and not await driver.ensure()
            lease = await driver.acquire(
                Order(
                    (await driver.offers(Wish()))[0], "uses", datetime.now(UTC) + timedelta(hours=1)
                )
            )
            assert (
                all("kept" in words for words in await driver.drop())
                and not await self.make(place).ensure()
            )  # type: ignore[attr-defined]
            while not await driver.release(lease):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.05)
            assert (
                all("deleted" in words for words in await driver.drop()) and not await driver.drop()
            )
            assert await driver.ensure() and await driver.drop(), "it can be made anew"

        asyncio.run(rent())


class ExportingContract(LeaseContract):
    """Of drivers that say what they would rent as a program."""

    narrowed: Mapping[str, str] = {}
    """Settings under which there is one kind of machine."""

    def test_a_program_is_python_that_names_what_it_makes_and_holds_no_secret(
        self, place: Path
    ) -> None:
        settings = json.loads((place / "settings.json").read_text())
        (place / "settings.json").write_text(json.dumps({**settings, **self.narrowed}))
        driver = self.make(place)
        for keep, bucket, nodes in ((False, "", 1), (True, "results", 1), (False, "", 4)):
            words: dict[str, Any] = {"keep": keep, "bucket": bucket, "nodes": nodes}
            text = driver.program("tiny", market="on-demand", seconds=3600, **words)
            ast.parse(text)
            assert "tiny" in text and ("results" in text) is bool(bucket) and text != ""
            assert text == driver.program("tiny", market="on-demand", seconds=3600, **words)
            secret = (
                (place / "installation").read_text().strip()
                if (place / "installation").exists()
                else "no secret yet"
            )
            assert secret not in text

    def test_settings_that_name_no_one_machine_make_no_program(self, place: Path) -> None:
        driver = self.make(place)
        with pytest.raises(Rejected):
            driver.program("tiny", market="on-demand", keep=False, seconds=3600, nodes=1, bucket="")


class ChargingContract(RentedContract):
    """Of drivers whose provider says what it charged."""

    def test_what_was_charged_is_reported_of_the_lease_alone(self, place: Path) -> None:
        async def rent() -> None:
            driver = self.make(place)
            began = datetime.now(UTC)
            offers = await driver.offers(Wish())
            one, other = [
                await driver.acquire(Order(offer, key, began + timedelta(hours=1)))
                for offer, key in zip(offers, ("one", "other"), strict=False)
            ]
            await driver.release(one)
            charged = await driver.charges(one, began)
            assert all(charge.since <= charge.till and charge.usd >= 0 for charge in charged)
            assert await driver.charges(one, began) == charged != await driver.charges(other, began)

        asyncio.run(rent())


class RentingContract(ProlongingContract, ChargingContract):
    """Of drivers that rent: what is billed, until when, and to whom."""


class AccountedContract(LeaseContract):
    """Of drivers whose provider has an account for us."""

    def test_an_account_is_reported_in_words(self, place: Path) -> None:
        async def ask() -> None:
            driver = self.make(place)
            assert driver.console.startswith("https://")
            assert all(name and words for name, words in await driver.account())
            await driver.solvent()
            assert driver.find_lack() == ""

        asyncio.run(ask())


class VitalContract(LeaseContract):
    """Of drivers whose provider says how a machine is."""

    def test_what_the_provider_says_of_a_machine_is_a_line_also_when_it_is_gone(
        self, place: Path
    ) -> None:
        async def rent() -> None:
            driver = self.make(place)
            lease = await driver.acquire(
                Order(
                    (await driver.offers(Wish()))[0],
                    "vital",
                    datetime.now(UTC) + timedelta(hours=1),
                )
            )
            there = await driver.vitals(lease)
            while not await driver.release(lease):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.05)
            gone = await driver.vitals(lease)
            assert there.isprintable() and there and gone.isprintable() and gone != there

        asyncio.run(rent())


class ListingContract(LeaseContract):
    """Of drivers that offer by a list of prices."""

    def publish(self, place: Path) -> None:
        """Let there be a newer list, with other prices; there is none before."""
        raise NotImplementedError

    def test_a_newer_list_is_believed_by_every_later_driver_and_one_that_cannot_be_had_changes_nothing(
        self, place: Path
    ) -> None:
        async def update() -> None:
            driver = self.make(place)
            before = {offer.id: offer.price for offer in await driver.offers(Wish())}
            with pytest.raises(DriverError):
                await driver.update()
            assert {offer.id: offer.price for offer in await driver.offers(Wish())} == before
            self.publish(place)
            words = await driver.update()
            after = {offer.id: offer.price for offer in await driver.offers(Wish())}
            assert words and after and after != before
            assert {
                offer.id: offer.price for offer in await self.make(place).offers(Wish())
            } == after

        asyncio.run(update())


class MarkingContract(LeaseContract):
    """Of drivers whose machines bear the name of the installation that rented them, whose secret is in `place / "installation"`."""

    def test_the_machines_of_another_installation_are_listed_and_ended_by_its_name(
        self, place: Path
    ) -> None:
        async def rent() -> None:
            driver = self.make(place)
            lease = await driver.acquire(
                Order(
                    (await driver.offers(Wish()))[0],
                    "marked",
                    datetime.now(UTC) + timedelta(hours=1),
                )
            )
            name, other = Installation.of(str(place / "installation")).name, self.make(place)
            other.look_for("0" * 8)
            assert not await other.leases()
            other.look_for(name)
            (found,) = await other.leases()
            assert found == lease
            while not await other.release(found):  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.05)
            assert not await driver.leases()

        asyncio.run(rent())


PARTS: dict[type[LeaseContract], str] = {
    ExcludingContract: "excluded",
    ChargingContract: "charges",
    ProlongingContract: "prolong",
    AccountedContract: "account",
    SkippingContract: "left_out",
    VisitingContract: "visit",
    ConnectingContract: "connect",
    ClosingContract: "aclose",
    VitalContract: "vitals",
    ListingContract: "update",
    MarkingContract: "look_for",
    PausingContract: "stop",
    EnsuringContract: "ensure",
    ExportingContract: "program",
}
"""What only some drivers have: its part of this suite -> the member that they override."""


def _has(driver: Driver, member: str) -> bool:
    """Whether a driver has a member of its own in place of the default."""
    return member in vars(driver) or getattr(type(driver), member) is not getattr(Driver, member)


async def over(host: Client, job: Job) -> Exit:
    end = await host.wait(job, LONG)
    assert end is not None, f"{job.key} is still going"
    return end


async def printed(host: Client, job: Job) -> bytes:
    said = b""
    while data := await host.log(job, len(said)):
        said += data
    return said


async def gathered(call: AsyncIterator[bytes]) -> bytes:
    return b"".join([data async for data in call])


@contextmanager
def reading(fifo: Path) -> Iterator[int]:
    """The reading end, which waits for nobody: a test that fails must not hang."""
    fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


async def heard(fd: int, size: int | None = None) -> bytes:
    """`size` bytes, or everything until the last writer is gone."""
    loop, data = asyncio.get_running_loop(), b""
    while size is None or len(data) < size:
        ready = asyncio.Event()
        loop.add_reader(fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(fd)
        more = os.read(fd, 1 << 16)
        if not more:
            break
        data += more
    return data


def release(place: Path) -> None:
    """Let go the job that reads the gate, now or later: the descriptor stays open so that the word is not lost."""
    os.write(os.open(place / "gate", os.O_RDWR), b"go\n")
