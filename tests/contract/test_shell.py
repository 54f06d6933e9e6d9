"""Jobs outlive everything that can be cut or killed, under every shell that a host may have."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from driver_contract import AT_ONCE, ENV, LONG, SH, gathered, over, printed, release

from drivers import calls, shell
from drivers.base import Argv, Command, Denied, DriverError, HostLost, Job, Rejected, Unreachable
from drivers.shell import ShellHost
from tests.tools import needs

SHELLS = ("dash", "bash --posix", "busybox sh")
CUTS = int(os.environ.get("RECIPE_CUTS", "4"))  # places in a start's program where the connection is cut
T = TypeVar("T")
Act = Callable[[ShellHost], Coroutine[None, None, None]]


class Machine:
    """A home directory, a shell, and a connection that can be told to misbehave."""

    def __init__(self, home: Path, shell: str) -> None:
        self.home, self.shell = home, shell
        self.noise = b""
        self.argvs: list[Argv] = []
        self.open = self.most_open = 0
        self.cut_after: list[int] = []  # bytes of output of the next calls
        self.lose_replies = 0
        self.refuse = 0
        self.late: Callable[[], bool] | None = None  # starts with locks are answered when it is true

    def host(self, **settings: object) -> ShellHost:
        return ShellHost(self.call, shell=self.shell, **settings)  # type: ignore[arg-type]

    async def call(self, argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        self.argvs.append(argv)
        if self.refuse:
            self.refuse -= 1
            raise Unreachable("no way there")
        left = self.cut_after.pop(0) if self.cut_after else None
        mute, self.lose_replies = self.lose_replies > 0, max(0, self.lose_replies - 1)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            if self.noise:
                yield self.noise
            async with aclosing(calls.call(argv, stdin, {"PATH": os.environ["PATH"], "HOME": str(self.home)}, self.home)) as stream:
                async for data in stream:
                    if self.late and "hold" in argv:
                        await asyncio.to_thread(patiently, self.late)
                    if left is not None and left < len(data):
                        yield data[:left]
                        raise Unreachable("cut")
                    left = left if left is None else left - len(data)
                    if not mute:
                        yield data
            if mute:
                raise Unreachable("the reply was lost")
        finally:
            self.open -= 1

    def run(self, act: Act, **settings: object) -> None:
        async def acting() -> None:
            host = self.host(**settings)
            try:
                async with asyncio.timeout(60):
                    await act(host)
            finally:
                await host.aclose()

        asyncio.run(acting())

    def job(self, name: str) -> Path:
        return self.home / ".recipe-host/jobs" / name

    def owners(self, name: str) -> tuple[int, int]:
        """The processes of a job: who looks after it, and its first."""
        words = patiently(lambda: (self.job(name) / "pid").read_text().split())
        return int(words[0]), int(words[2])

    def keeper(self) -> int:
        return int(patiently(lambda: (self.home / ".recipe-host/keeper/pid").read_text().split()[0]))


@pytest.fixture(params=SHELLS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    needs(request.param.split()[0])
    os.mkfifo(tmp_path / "gate")
    return Machine(tmp_path, request.param)


@pytest.fixture
def plain(tmp_path: Path) -> Machine:
    os.mkfifo(tmp_path / "gate")
    return Machine(tmp_path, "/bin/sh")


def patiently(look: Callable[[], T]) -> T:
    """What `look` sees once it does not fail."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            if seen := look():
                return seen
        except (OSError, LookupError):
            pass
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.005)


def command(script: str, machine: Machine, **others: object) -> Command:
    return Command((SH, "-euc", script), cwd=str(machine.home), env=ENV, **others)  # type: ignore[arg-type]


# --- starting


def test_a_start_is_one_call_once_we_are_at_home_there(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        await host.start(command("true", machine), "first")
        assert len(machine.argvs) == 3  # ask, bring what is missing, ask again
        await host.start(command("true", machine), "second")
        await machine.host().start(command("true", machine), "third")
        assert len(machine.argvs) == 5

    machine.run(act)


@pytest.mark.longer
def test_a_start_that_is_cut_anywhere_begins_nothing_or_the_whole(machine: Machine) -> None:
    made = command("echo ran >> count; read line < gate", machine, secrets={"S": "x'\n}\ny"})

    async def act(host: ShellHost) -> None:
        await host.start(command("true", machine), "warm")
        program = host._program("cut", made)
        argv = next(argv for argv in machine.argvs if argv[-1] == "start")
        for size in sorted({0, 1, len(program) - 1, *random.Random(7).sample(range(len(program)), min(CUTS, len(program)))}):
            with suppress(Rejected):  # the shell says that its program ended too early
                await gathered(machine.call(argv, given(program[:size])))
            assert size == len(program) - 1 or not machine.job("cut").exists()
        release(machine.home)
        assert (await over(host, await host.start(made, "cut"))).code == 0
        assert (machine.home / "count").read_text() == "ran\n"

    machine.run(act)


def test_a_start_whose_reply_was_lost_is_asked_again_and_is_one_job(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        await host.start(command("true", machine), "warm")
        machine.lose_replies = 1
        with pytest.raises(Unreachable):
            await host.start(command("echo ran >> count", machine), "lost")
        assert (await over(host, await host.start(command("echo ran >> count", machine), "lost"))).code == 0
        assert (machine.home / "count").read_text() == "ran\n"

    machine.run(act)


def test_what_a_login_shell_prints_is_no_answer(machine: Machine) -> None:
    machine.noise = b"Welcome!\nhere\nmissing\n\x1b[2J" + b"over x 0 - exit 0 0 0 0+0 0 0  .\n" * 5000

    async def act(host: ShellHost) -> None:
        job = await host.start(command("echo said; exit 3", machine), "noisy")
        assert (await over(host, job)).code == 3
        assert await printed(host, job) == b"said\n"
        assert await gathered(host.call(("printf", "\\nplain"))) == b"\nplain"
        await host.stop(job, AT_ONCE)

    machine.run(act)


def test_any_environment_arrives_as_it_is(machine: Machine) -> None:
    odd = {
        "A-B": "1\n",
        "UID": "x",
        "IFS": ":",
        "able": "y",
        "log": "z",
        "setsid": "no",
        "here": "",
        "LC_ALL": "xx_YY",
        "PS4": "$(exit)",
        "Q": "'\\\" \n\n",
    }
    every = bytes(byte for byte in range(1, 256)).decode("utf-8", "surrogateescape")

    async def act(host: ShellHost) -> None:
        show = "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], sys.stdout)"
        made = Command((sys.executable, "-c", show, every, *odd.values()), cwd=str(machine.home), env={**odd, "E": every}, secrets={"S": "'hush'"})
        job = await host.start(made, "odd")
        await over(host, job)
        env, argv = json.loads(await printed(host, job))
        env.pop("LC_CTYPE", None)
        assert env.pop("RECIPE_JOB").startswith("odd@")
        assert env == {**odd, "E": every, "S": "'hush'"}
        assert argv == [every, *odd.values()]

    machine.run(act)


def test_what_cannot_be_asked_of_a_shell_is_rejected(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        for made, words in (
            (Command(("true",), cwd="/", secrets={"A-B": "x"}), "A-B: a secret's variable needs a name"),
            (Command(("true",), cwd="/", env={"A=B": "x"}), '"A=B" cannot be the name'),
            (Command(("true", "a\0b"), cwd="/"), "NUL"),
            (Command((), cwd="/"), "name of a program"),
            (Command(("-x",), cwd="/"), "cannot begin with a dash"),
        ):
            with pytest.raises(Rejected, match=words):
                await host.start(made, "nonsense")
        assert plain.argvs == []

    plain.run(act)


def test_a_secret_is_in_no_argument_and_no_file(machine: Machine) -> None:
    secret = "hush-" + os.urandom(8).hex()

    async def act(host: ShellHost) -> None:
        job = await host.start(command('read line < gate; test "$S" = "$1"', machine, secrets={"S": secret}), "secretive")
        machine.owners("secretive")
        for path in machine.home.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes()
        assert not [line for line in shown() if secret.encode() in line]
        assert secret not in repr(machine.argvs)
        await host.stop(job, AT_ONCE)
        await over(host, job)

    machine.run(act)


def test_a_host_where_nothing_can_be_written_is_refused_with_its_words(plain: Machine) -> None:
    (plain.home / "file").write_text("")

    async def act(host: ShellHost) -> None:
        with pytest.raises(Rejected, match="Not a directory"):
            await host.start(command("true", plain), "nowhere")

    plain.run(act, root="file/ours")


# --- the ends of supervisors, jobs and machines


def test_a_job_whose_supervisor_is_killed_is_lost_and_nothing_of_it_is_left(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("sleep 1000 & read line < gate", machine), "orphan")
        supervisor, first = machine.owners("orphan")
        waiting = asyncio.ensure_future(host.wait(job, LONG))
        kill(supervisor)
        end = await waiting
        assert end is not None and (end.code, end.reason) == (None, "lost")
        assert not alive(first)
        assert await host.start(command("true", machine), "orphan") == job  # it is not begun again
        assert await over(host, job) == end

    machine.run(act)


def test_a_job_that_lost_everybody_who_cared_is_found_lost(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", machine), "forgotten")
        supervisor, first = machine.owners("forgotten")
        kill(machine.keeper())
        kill(supervisor)
        assert (await over(host, job)).reason == "lost"
        assert not alive(first)

    machine.run(act)


def test_a_killed_keeper_is_replaced_while_somebody_waits(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "PING", 0.05)

    async def act(host: ShellHost) -> None:
        job = await host.start(command("sleep 1000", machine, timeout=0.4), "timed")
        keeper = machine.keeper()
        kill(keeper)
        assert (await over(host, job)).reason == "timeout"
        assert machine.keeper() != keeper

    machine.run(act)


def test_a_killed_job_ended_by_a_signal(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", machine), "killed")
        os.kill(machine.owners("killed")[1], signal.SIGKILL)
        end = await over(host, job)
        assert (end.signal, end.reason) == (signal.SIGKILL, "signal")

    machine.run(act)


def test_after_a_reboot_a_job_is_lost_and_strangers_are_left_alone(machine: Machine) -> None:
    boot = machine.home / "boot_id"
    boot.write_text("first\n")

    with subprocess.Popen(("sleep", "1000")) as stranger:

        async def act(host: ShellHost) -> None:
            try:
                job = await host.start(command("exit 0", machine), "before")
                await over(host, job)
                running = await host.start(command("read line < gate", machine), "during")
                supervisor, first = machine.owners("during")
                path = machine.job("during") / "pid"
                path.write_text(path.read_text().replace(f" {first} ", f" {stranger.pid} "))
                for pid in (machine.keeper(), supervisor, first):
                    kill(pid)
                boot.write_text("second\n")
                assert (await over(machine.host(boot_id=str(boot)), running)).reason == "lost"
                assert (await over(machine.host(boot_id=str(boot)), job)).code == 0
                assert stranger.poll() is None
            finally:
                stranger.kill()

        machine.run(act, boot_id=str(boot))


def test_a_process_number_used_again_is_not_taken_for_the_supervisor(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", machine), "renumbered")
        supervisor, _ = machine.owners("renumbered")
        for pid in (machine.keeper(), supervisor):
            kill(pid)
        path = machine.job("renumbered") / "pid"
        _, born, rest = path.read_text().split(" ", 2)
        path.write_text(f"{os.getpid()} {born} {rest}")
        assert (await over(host, job)).reason == "lost"

    machine.run(act)


def test_half_an_end_is_not_believed(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate; exit 3", machine), "torn")
        machine.owners("torn")
        path = machine.job("torn") / "exit"
        path.write_text("0 - exit 17" + path.read_text()[11:])
        assert await host.wait(job, AT_ONCE) is None
        release(machine.home)
        assert (await over(host, job)).code == 3

    machine.run(act)


def test_an_end_is_kept_on_a_full_disk(machine: Machine, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    needs("mount")
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)), check=True)
    try:
        machine.home = disk

        async def act(host: ShellHost) -> None:
            job = await host.start(command("head -c 1000000 /dev/zero > full || exit 5", machine), "fills")
            assert (await over(host, job)).code == 5
            with pytest.raises(Denied, match="No space left"):
                await host.start(command("true", machine), "next")

        machine.run(act)
    finally:
        patiently(lambda: not subprocess.run(("umount", "-l", str(disk)), capture_output=True, check=False).returncode)


# --- waiting


def test_all_waits_share_one_call(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        jobs = [await host.start(command("read line < gate", machine), f"n{number}") for number in range(12)]
        machine.most_open = 0
        waits = [asyncio.ensure_future(over(host, job)) for job in jobs]
        assert await host.wait(jobs[0], AT_ONCE) is None
        for _ in jobs:
            release(machine.home)
        await asyncio.gather(*waits)
        assert machine.most_open == 1

    machine.run(act)


def test_nothing_stays_open_when_nobody_waits(plain: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "PING", 0.02)
    monkeypatch.setattr(shell, "LINGER", 0.0)

    async def act(host: ShellHost) -> None:
        await over(host, await host.start(command("true", plain), "only"))
        assert host._watching is not None
        await asyncio.wait([host._watching])
        assert plain.open == 0
        assert list((plain.home / ".recipe-host/watch").iterdir()) == []
        await over(host, await host.start(command("true", plain), "another"))

    plain.run(act)


def test_a_wait_goes_on_over_a_connection_that_breaks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "BACKOFF", (0.01,))

    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate; exit 8", machine), "far")
        machine.refuse = 3
        machine.cut_after = [0, 30, 60]
        waiting = asyncio.ensure_future(host.wait(job, LONG))
        await asyncio.to_thread(patiently, lambda: not machine.cut_after)
        release(machine.home)
        end = await waiting
        assert end is not None and end.code == 8

    machine.run(act)


def test_a_host_out_of_reach_is_not_a_failed_job(plain: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "BACKOFF", (0.01,))

    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", plain), "unseen")
        plain.refuse = 1_000_000
        began = time.monotonic()
        with pytest.raises(Unreachable):
            await host.wait(job, AT_ONCE)
        with pytest.raises(Unreachable):
            await host.wait(job, LONG)
        assert time.monotonic() - began < LONG.total_seconds()
        plain.refuse = 0
        assert await host.wait(job, AT_ONCE) is None
        release(plain.home)
        assert (await over(host, job)).code == 0

    plain.run(act, reach=timedelta(seconds=0.1))


def test_a_silent_connection_is_given_up(plain: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "SILENCE", 0.2)
    monkeypatch.setattr(shell, "BACKOFF", (0.01,))

    async def act(host: ShellHost) -> None:
        job = await host.start(command("exit 2", plain), "stalled")
        honest, host._call = host._call, silent
        waiting = asyncio.ensure_future(host.wait(job, LONG))
        await asyncio.to_thread(patiently, lambda: heard_silence)
        host._call = honest
        end = await waiting
        assert end is not None and end.code == 2

    heard_silence: list[Argv] = []

    async def silent(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        heard_silence.append(argv)
        await asyncio.Event().wait()
        yield b""

    plain.run(act)


def test_a_lost_host_is_told_to_all_who_wait(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        jobs = [await host.start(command("exit 0", plain), name) for name in ("a", "b")]
        host._call = gone
        for told in await asyncio.gather(*(host.wait(job, LONG) for job in jobs), return_exceptions=True):
            assert isinstance(told, HostLost)

    async def gone(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        raise HostLost
        yield b""

    plain.run(act)


@pytest.mark.parametrize(("text", "calls"), [("true", 0), ("echo hello", 1)])
def test_a_log_is_not_asked_for_beyond_its_end(text: str, calls: int, plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        for name in ("a job", "one that is over before anybody waits"):
            job = await host.start(command(text, plain), name)
            if name != "a job":
                other = plain.host()
                await over(other, job)
                await other.aclose()
            await over(host, job)
            before = len(plain.argvs)
            said = b""
            while data := await host.log(job, len(said)):
                said += data
            assert await host.log(job, len(said)) == b""
            assert said == (b"hello\n" if calls else b"")
            assert len(plain.argvs) == before + calls

    plain.run(act)


@pytest.mark.parametrize("fault", ["none", "cut", "expired"])
def test_a_start_that_was_begun_before_it_was_wanted_runs_the_job_once(fault: str, plain: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShellHost, "holds_spare", lambda _host: True)
    if fault == "expired":
        monkeypatch.setattr(shell, "LINGER", 0.01)

    async def act(host: ShellHost) -> None:
        for number in range(3):
            if fault == "cut":
                plain.cut_after = [40]  # the next spare, in its answer or before it
            job = await host.start(command(f"echo ran >>{number}", plain), f"job{number}")
            assert (await over(host, job)).code == 0
            assert host._spare is not None
            if fault == "expired":
                assert await host._spare.answer == b""
        assert [(plain.home / str(number)).read_text() for number in range(3)] == ["ran\n"] * 3

    plain.run(act)


def test_a_log_that_still_grows_is_asked_for_again(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("echo one; read line <gate; echo two", plain), "job")
        while await host.log(job, 0) != b"one\n":
            assert await host.wait(job, AT_ONCE) is None
        release(plain.home)
        await over(host, job)
        assert await host.log(job, 4) == b"two\n"
        assert await host.log(job, 8) == b""

    plain.run(act)


def test_a_host_that_talks_without_end_fills_no_memory(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("echo hello", plain), "job")
        await over(host, job)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        host._call = babbling
        assert len(await host.log(job, 0)) == shell.ROOM
        with pytest.raises(DriverError):
            await host.start(command("true", plain), "another")
        other = ShellHost(babbling, reach=timedelta(0))
        with pytest.raises(DriverError):
            await other.wait(job, AT_ONCE)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000  # kilobytes

    async def babbling(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        yield b"\n%s here\n" % host_nonce(argv)
        for _ in range(200):
            yield bytes(1 << 20)

    plain.run(act, reach=timedelta(0))


def test_an_end_that_makes_no_sense_is_no_end(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        host._call = nonsense
        with pytest.raises(Unreachable, match="does not say how a job ended"):
            await host.wait(Job("job"), LONG)

    async def nonsense(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        yield b"\n%s here\nready\nover job 0 - \x1b[31m\n" % host_nonce(argv)
        await asyncio.Event().wait()

    plain.run(act, reach=timedelta(0))


# --- logs and life


def test_a_log_is_exact_however_often_it_is_cut(machine: Machine) -> None:
    data = random.Random(3).randbytes(300_000)
    (machine.home / "data").write_bytes(data)

    async def act(host: ShellHost) -> None:
        job = await host.start(command("cat data", machine), "cut")
        await over(host, job)
        machine.cut_after = [random.Random(4).randrange(60_000) for _ in range(20)]
        read = b""
        while len(read) < len(data):
            with suppress(Unreachable):
                read += await host.log(job, len(read))
        assert read == data

    machine.run(act)


def test_a_running_job_shows_that_it_lives(machine: Machine) -> None:
    metrics = machine.home / "metrics"
    metrics.write_text('{"step": 3, "progress": 0.25, "loss": 1e-3}\n{"step": 4, "prog')

    async def act(host: ShellHost) -> None:
        made = Command((SH, "-c", "read line < gate"), cwd=str(machine.home), env={**ENV, "RECIPE_METRICS": "metrics"})
        job = await host.start(made, "alive")
        told = await asyncio.to_thread(patiently, lambda: json.loads((machine.job("alive") / "latest.json").read_text()))
        assert told["time"] == pytest.approx(time.time(), abs=20)
        assert (told["step"], told["progress"], told["metrics"]["loss"]) == (3, 0.25, 0.001)
        await asyncio.to_thread(patiently, (machine.job("alive") / "peak").exists)
        release(machine.home)
        assert (await over(host, job)).peak_memory > 100_000

    machine.run(act)


def test_without_contact_a_host_ends_its_jobs_and_says_its_last_words(machine: Machine) -> None:
    async def act(host: ShellHost) -> None:
        await host.start(command("sleep 1000", machine), "abandoned")
        first = machine.owners("abandoned")[1]
        await host.aclose()
        assert (await asyncio.to_thread(patiently, (machine.home / "last").read_text)) == "words\n"
        assert not alive(first)
        exit = await over(machine.host(), Job("abandoned"))
        assert (exit.reason, exit.detail) == ("stopped", "nobody asked after it for 1 seconds")

    machine.run(act, deadman=timedelta(seconds=1), last_words="echo words > ../last")


def test_a_timer_that_has_nothing_to_say_ends_with_the_last_job_and_begins_with_the_next(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = machine.home / "supervisor.sh"
    hasty.write_text(shell.SCRIPT.read_text().replace("\nlinger=500 ", "\nlinger=20 "))
    monkeypatch.setattr(shell, "SCRIPT", hasty)
    timer = machine.home / ".recipe-host/deadman"

    async def act(host: ShellHost) -> None:
        for name in ("first", "second"):
            job = await host.start(command("read line < gate", machine), name)
            assert timer.read_text() == "100000\n\n"
            await asyncio.to_thread(release, machine.home)
            assert (await over(host, job)).code == 0
            await host.aclose()
            await asyncio.to_thread(patiently, lambda: not timer.exists())

    machine.run(act, deadman=timedelta(seconds=1000))


def test_contact_keeps_a_host_alive(plain: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "PING", 0.05)

    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", plain), "cared")
        assert await host.wait(job, timedelta(seconds=4)) is None
        release(plain.home)
        assert (await over(host, job)).code == 0

    plain.run(act, deadman=timedelta(seconds=3))


def test_what_has_been_over_for_long_is_forgotten_and_what_goes_on_is_not(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        job = await host.start(command("read line < gate", plain), "old")
        plain.owners("old")
        for number in range(1005):
            done = plain.job(f"done{number}")
            done.mkdir()
            (done / "over").touch()
        os.utime(plain.job("old"), (1, 1))
        kill(plain.keeper())
        await host.stop(Job("nothing"), AT_ONCE)  # which finds the keeper gone
        await asyncio.to_thread(patiently, lambda: len(list(plain.job("old").parent.iterdir())) == 1001)
        assert await host.wait(job, AT_ONCE) is None
        release(plain.home)
        await over(host, job)

    plain.run(act)


def test_a_machine_with_nothing_but_busybox_does(tmp_path: Path) -> None:
    root = tmp_path / "machine"
    needs("root")
    needs("static busybox")
    busybox = needs("busybox")
    for name in ("bin", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for applet in subprocess.run((busybox, "--list"), capture_output=True, text=True, check=True).stdout.split():
        with suppress(FileExistsError):
            (root / "bin" / applet).symlink_to("busybox")
    (root / "dev/null").touch()

    async def act(host: ShellHost) -> None:
        job = await host.start(Command(("sh", "-c", 'echo "$PWD $A"; exit 3'), cwd="/tmp", env={"A": "é"}), "there")
        end = await over(host, job)
        assert (end.code, end.reason, await printed(host, job)) == (3, "exit", "/tmp é\n".encode())
        job = await host.start(Command(("sleep", "1000"), cwd="/tmp", timeout=0.2), "limited")
        assert (await over(host, job)).reason == "timeout"
        job = await host.start(Command(("sh", "-c", "sleep 1000 & sleep 1000"), cwd="/tmp"), "stopped")
        await host.stop(job, LONG)
        assert (await over(host, job)).signal == signal.SIGTERM

    async def call(argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        full = ("chroot", str(root), "/bin/sh", "-c", 'cd /tmp; exec "$@"', "sh", *argv)
        async with aclosing(calls.call(full, stdin, {"PATH": os.environ["PATH"]})) as stream:
            async for data in stream:
                yield data

    machine = Machine(tmp_path, "/bin/sh")
    machine.call = call  # type: ignore[method-assign, assignment]
    machine.run(act)


async def given(data: bytes) -> AsyncIterator[bytes]:
    yield data


def shown() -> list[bytes]:
    """What anybody can see of the arguments of all processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(entry.read_bytes())
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    patiently(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def host_nonce(argv: Argv) -> bytes:
    return argv[argv.index("recipe") + 3].encode()


# --- locks


def test_a_lock_is_held_by_a_job_under_every_shell(machine: Machine) -> None:
    lock = f"test-{os.urandom(8).hex()}"

    async def act(host: ShellHost) -> None:
        first = await host.start(command("read go < gate", machine, locks=(lock,)), "first")
        assert list(await host.free([lock])) == []
        second = await host.start(command("true", machine, locks=(lock,)), "second")
        assert (end := await host.wait(second, LONG)) is not None and end.reason == "busy"
        machine.keeper()  # it lives on after the job, and holds nothing of it
        (machine.home / "gate").write_text("go\n")
        assert (end := await host.wait(first, LONG)) is not None and end.code == 0
        assert list(await host.free([lock])) == [lock]

    try:
        machine.run(act)
    finally:
        Path(f"/tmp/recipe-{os.geteuid()}/gpus/{lock}.lock").unlink(missing_ok=True)


def test_a_job_that_found_no_lock_at_first_is_read_whole_though_it_ends_before_its_start_is_answered(plain: Machine) -> None:
    lock = f"test-{os.urandom(8).hex()}"

    async def act(host: ShellHost) -> None:
        first = await host.start(command("read go < gate", plain, locks=(lock,)), "first")
        said = command("echo second", plain, locks=(lock,))
        again = await host.start(said, "second")
        assert (await over(host, again)).reason == "busy" and await host.log(again, 0) == b""
        release(plain.home)
        await over(host, first)
        plain.late = lambda: host._over["second"].reason == "exit"
        assert (await over(host, await host.start(said, "second"))).code == 0
        assert await host.log(again, 0) == b"second\n"

    try:
        plain.run(act)
    finally:
        Path(f"/tmp/recipe-{os.geteuid()}/gpus/{lock}.lock").unlink(missing_ok=True)


def test_a_host_without_flock_refuses_a_job_with_locks_in_a_sentence(plain: Machine) -> None:
    async def act(host: ShellHost) -> None:
        host._script, host._digest = host._script.replace(b"command -v flock", b"command -v no-flock-here"), "0" * 16
        with pytest.raises(Rejected, match="flock is not installed there"):
            await host.start(command("true", plain, locks=("x",)), "job")
        with pytest.raises(Rejected, match="flock is not installed there"):
            await host.free(["x"])

    plain.run(act)
