"""Hosts over SSH when things break: connections at any byte, servers, keep-alives, logins that talk too much, too few channels, places that are taken.

`RECIPE_SSH_CUTS` is at how many bytes of a start and of a handshake the connection is cut (default 10).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import asyncssh
import pytest

from drivers import cloud, ssh, sshlink
from drivers import machine as machine_question
from drivers.base import (
    Denied,
    DriverError,
    HostLost,
    Lease,
    Need,
    NoCapacity,
    Rejected,
    Unreachable,
    Wish,
)
from drivers.ssh import Ssh
from drivers.sshlink import Route, SshLink
from runner.hosts.link import stream
from tests.servers.logins import (
    hosted,
    known_through,
    leased,
    linked,
    order,
    route,
    run,
    said,
    script,
    through,
)
from tests.servers.proxy import Fault, Proxy
from tests.servers.sshd import Sshd, free_port, make_key, sshd  # noqa: F401  # a fixture
from tests.support import until
from tests.tools import needs

CUTS = int(os.environ.get("RECIPE_SSH_CUTS", "4"))
AT_ONCE, LONG = timedelta(0), timedelta(seconds=30)
SECRET = "canary-77ab31"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A machine that stays up."""
    with Sshd(tmp_path_factory.mktemp("machine") / "sshd") as machine:
        yield machine


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[int]:
    """Write to it, and the job that reads `gate` goes on."""
    os.mkfifo(tmp_path / "gate")
    fd = os.open(tmp_path / "gate", os.O_RDWR)
    yield fd
    os.close(fd)


# --- connections that break


def test_a_command_whose_connection_breaks_is_unreachable_and_the_next_connects_anew(
    server: Sshd,
) -> None:
    with Proxy(server.port) as proxy:

        async def meet() -> None:
            async with linked(
                route(server, port=proxy.port, known_hosts=(known_through(server, proxy),))
            ) as link:
                for breaks in (proxy.cut, proxy.reset):
                    call = link.call(("sh", "-c", "echo begun; exec sleep 1000"))
                    assert await anext(call) == b"begun\n"
                    breaks()
                    with pytest.raises(Unreachable, match="while sh ran"):
                        await anext(call)
                    assert await said(link, "echo", "again") == "again\n"
            assert len(proxy.connections) == 3

        run(meet())


def test_what_feeds_a_command_ends_with_its_connection_though_its_output_is_not_read_on(
    server: Sshd,
) -> None:
    fed = asyncio.Event()

    async def words() -> AsyncIterator[bytes]:
        try:
            yield b"word\n"
            await asyncio.Event().wait()
        finally:
            fed.set()

    with Proxy(server.port) as proxy:

        async def meet() -> None:
            async with linked(
                route(server, port=proxy.port, known_hosts=(known_through(server, proxy),))
            ) as link:
                call = link.call(("cat",), words())
                assert await anext(call) == b"word\n"
                proxy.cut()
                await fed.wait()
                with pytest.raises(Unreachable):
                    await anext(call)

        run(meet())


@pytest.mark.parametrize("breaks", ["cut", "reset", "stop"])
def test_a_job_is_found_again_after_its_connection_broke(
    sshd: Sshd,  # noqa: F811
    tmp_path: Path,
    gate: int,
    breaks: str,
) -> None:
    with Proxy(sshd.port) as proxy:

        async def meet() -> None:
            async with hosted(through(sshd, proxy, root=str(tmp_path / "root"))) as host:
                work = script(
                    "echo x >> count; echo before; read line < gate; echo after; exit 7", tmp_path
                )
                job = await host.start(work, "job")
                waiting = asyncio.ensure_future(host.wait(job, LONG))
                while await host.log(job, 0) != b"before\n":
                    pass
                if breaks == "stop":
                    await asyncio.to_thread(sshd.stop)
                    await asyncio.to_thread(sshd.start)
                else:
                    getattr(proxy, breaks)()
                os.write(gate, b"\n")
                end = await waiting
                assert end is not None
                assert end.code == 7
                assert await again(lambda: host.log(job, 7)) == b"after\n"
                assert await again(lambda: host.start(work, "job")) == job
                assert (tmp_path / "count").read_text() == "x\n"

        run(meet())


async def again(ask):  # type: ignore[no-untyped-def]
    """What it answers once it can be reached."""
    for _ in range(20):
        with contextlib.suppress(Unreachable):
            return await ask()
    return await ask()


def test_a_job_of_a_host_that_was_switched_off_and_on_is_lost_and_the_host_is_used_again(
    sshd: Sshd,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def meet() -> None:
        async with hosted(sshd.settings(root=str(tmp_path / "root"))) as host:
            job = await host.start(script("echo begun; exec sleep 1000", tmp_path), "job")
            while await host.log(job, 0) != b"begun\n":
                pass
            waiting = asyncio.ensure_future(host.wait(job, LONG))
            await asyncio.to_thread(sshd.reboot)
            end = await waiting
            assert end is not None
            assert (end.code, end.reason) == (None, "lost")
            assert await again(lambda: host.log(job, 0)) == b"begun\n"
            other = await again(lambda: host.start(script("echo back", tmp_path), "other"))
            end = await host.wait(other, LONG)
            assert end is not None
            assert end.code == 0

    run(meet())


@pytest.mark.longer
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_start_cut_at_any_byte_begins_the_job_at_most_once_and_asked_again_exactly_once(
    server: Sshd, tmp_path: Path, way: str
) -> None:
    with Proxy(server.port) as proxy:
        settings = through(server, proxy, root=str(tmp_path / "root"))

        async def one(number: int, *faults: Fault) -> tuple[int, int]:
            """Bytes that had passed when the start began, and when it had ended."""
            work = script(f"echo x >> count{number}", tmp_path)
            proxy.next(*faults)
            driver = Ssh(**settings)
            try:
                host = await again(lambda: leased(driver, "key"))
                connection = proxy.connections[-1]
                before = getattr(connection, f"passed_{way}")
                with contextlib.suppress(Unreachable):
                    await host.start(work, f"job{number}")
                passed = before, getattr(connection, f"passed_{way}")
                job = await again(lambda: host.start(work, f"job{number}"))
                end = await host.wait(job, LONG)
                assert end is not None
                assert end.code == 0
                assert (tmp_path / f"count{number}").read_text() == "x\n"
                return passed
            finally:
                await driver.aclose()

        async def all() -> None:
            await one(0)
            begin, end = await one(1)
            spots = (
                range(begin, end)
                if end - begin <= CUTS
                else sorted(random.Random(7).sample(range(begin, end), CUTS))
            )
            for number, at in enumerate(spots, 2):
                await one(number, Fault(random.Random(at).choice(["cut", "reset"]), at, way))

        run(all(), 20 + 5 * CUTS)


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["cut", "reset", "half", "flip"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_handshake_that_breaks_anywhere_is_an_error_of_ours(
    server: Sshd, way: str, kind: str
) -> None:
    with Proxy(server.port) as proxy:
        way_there = route(
            server,
            port=proxy.port,
            known_hosts=(known_through(server, proxy),),
            patience=1.5,
            keep_alive=0.3,
        )

        async def one(*faults: Fault) -> bool:
            proxy.next(*faults)
            async with linked(way_there) as link:
                try:
                    return await said(link, "echo", "in") == "in\n"
                except DriverError:
                    return False

        async def all() -> None:
            assert await one()
            size = len(getattr(proxy.connections[0], way))
            spots = random.Random(3).sample(range(size), min(size, max(2, CUTS // 3)))
            worked = await asyncio.gather(*(one(Fault(kind, at, way, bit=at % 8)) for at in spots))
            assert len(worked) == len(spots)
            assert await one()

        run(all(), 20 + CUTS)


@pytest.mark.longer
def test_bytes_that_were_changed_on_the_way_are_never_taken(server: Sshd) -> None:
    """Flips behind the handshake: the connection ends, and what came before is right.  The exit status may have come before the last of the output."""
    size = 300_000

    async def data() -> AsyncIterator[bytes]:
        yield bytes(size)

    with Proxy(server.port, record=0) as proxy:

        async def one(at: int, way: str) -> None:
            proxy.next(Fault("flip", at, way, bit=at % 8))
            async with linked(
                route(
                    server,
                    port=proxy.port,
                    known_hosts=(known_through(server, proxy),),
                    keep_alive=0.3,
                )
            ) as link:
                got = b""
                with pytest.raises(Unreachable):
                    async for piece in link.call(("cat",), data()):
                        got += piece
                assert got == bytes(len(got))

        async def all() -> None:
            for at in random.Random(5).sample(range(10_000, size), max(2, CUTS // 3)):
                for way in ("up", "down"):
                    await one(at, way)

        run(all(), 20 + CUTS)


def test_a_connection_that_fell_silent_is_found_by_its_keep_alive(server: Sshd) -> None:
    with Proxy(server.port) as proxy:

        async def meet() -> None:
            async with linked(
                route(
                    server,
                    port=proxy.port,
                    known_hosts=(known_through(server, proxy),),
                    keep_alive=0.1,
                )
            ) as link:
                call = link.call(("sh", "-c", "echo begun; exec sleep 1000"))
                assert await anext(call) == b"begun\n"
                proxy.stall()
                began = time.monotonic()
                with pytest.raises(Unreachable):
                    await anext(call)
                assert time.monotonic() - began > 0.3
                proxy.resume()
                assert await said(link, "echo", "again") == "again\n"

        run(meet())


def test_no_server_and_a_server_that_does_not_speak_ssh_are_unreachable(server: Sshd) -> None:
    def odd(answer: bytes) -> tuple[socket.socket, int]:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)

        def serve() -> None:
            held = []
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(answer)
                    held.append(connection)
                    if answer:
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        return listener, listener.getsockname()[1]

    async def meet(port: int, patience: float = 10) -> None:
        async with linked(route(server, port=port, patience=patience)) as link:
            with pytest.raises(Unreachable):
                await said(link, "true")

    run(meet(free_port()))
    for answer in (
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50,
        b"SSH-2.0-odd\r\n" + os.urandom(3000),
        bytes(100_000),
    ):
        listener, port = odd(answer)
        with listener:
            run(meet(port, 1.0))
            listener.shutdown(socket.SHUT_RDWR)


def test_a_failing_host_is_not_hammered(server: Sshd) -> None:
    async def meet() -> None:
        async with linked(route(server, port=free_port())) as link:
            began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
            for _ in range(4):
                with pytest.raises(Unreachable):
                    await said(link, "true")
            assert loop.time() - began > 0.1 + 0.2 + 0.4

    run(meet())


# --- many at once


@pytest.mark.parametrize("sessions", [10, 2])
def test_more_jobs_than_channels_run_at_once(tmp_path: Path, sessions: int, gate: int) -> None:
    with Sshd(tmp_path / "sshd", options=[f"MaxSessions {sessions}"]) as machine:

        async def meet() -> None:
            async with hosted(machine.settings(root=str(tmp_path / "root"))) as host:
                work = script("echo here; read line < gate", tmp_path)
                jobs = await asyncio.gather(
                    *(host.start(work, f"job{number}") for number in range(20))
                )
                waits = [asyncio.ensure_future(host.wait(job, LONG)) for job in jobs]
                while not all([await host.log(job, 0) for job in jobs]):
                    pass
                os.write(gate, b"\n" * 20)
                assert [end.code for end in await asyncio.gather(*waits) if end is not None] == [
                    0
                ] * 20

        run(meet())


def test_a_server_without_requests_for_longer_than_its_setting_says_ends_our_jobs_there(
    server: Sshd, tmp_path: Path
) -> None:
    journal = server.home / ".recipe-host/agent/journal"

    async def meet() -> None:
        async with hosted(server.settings(deadman=1)) as host:
            job = await host.start(script("exec sleep 1000", tmp_path), "alone")
            assert await host.wait(job, AT_ONCE) is None  # the start has arrived
        await asyncio.to_thread(
            until, lambda: journal.exists() and b'"reason": "stopped"' in journal.read_bytes()
        )
        async with hosted(server.settings()) as host:
            exit = await host.wait(job, LONG)
        assert exit is not None
        assert (exit.reason, exit.detail) == (
            "stopped",
            "no client contacted the agent about the job for 1 seconds",
        )

    run(meet())


def test_a_job_that_the_agent_of_yesterday_began_is_waited_for_with_the_program_of_today(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round: who comes with an older program finds the agent of a newer one."""
    settings = server.settings(root=str(tmp_path / "root"))
    today = stream.agent_program()
    with zipfile.ZipFile(io.BytesIO(today.data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data + b"# of yesterday\n")
    yesterday = stream.Program(made.getvalue(), hashlib.sha256(made.getvalue()).hexdigest())

    async def meet() -> None:
        for first, then in ((yesterday, today), (today, yesterday)):
            gate = tmp_path / first.digest
            monkeypatch.setattr(stream, "agent_program", lambda first=first: first)
            async with hosted(settings) as host:
                job = await host.start(
                    script(f"while ! test -e {gate}; do sleep 0.01; done; echo done", tmp_path),
                    first.digest,
                )
                assert await host.wait(job, timedelta(0)) is None
            monkeypatch.setattr(stream, "agent_program", lambda then=then: then)
            async with hosted(settings) as host:
                gate.touch()
                exit = await host.wait(job, LONG)
                assert exit is not None and exit.code == 0 and await host.log(job, 0) == b"done\n"
            stop_agents(tmp_path / "root")

    run(meet())
    assert {path.name for path in (tmp_path / "root/agent").iterdir() if len(path.name) == 64} == {
        today.digest,
        yesterday.digest,
    }


def stop_agents(root: Path) -> None:
    """Kill what serves a root; the next client begins another."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if str(root / "agent").encode() in Path("/proc", name, "cmdline").read_bytes().split(
                b"\0"
            ):
                os.kill(int(name), signal.SIGKILL)


def test_calls_that_are_given_up_at_any_moment_leave_nothing_behind(
    server: Sshd, tmp_path: Path
) -> None:
    async def meet() -> None:
        async with linked(route(server)) as link:
            for number in range(24):
                call = asyncio.ensure_future(
                    said(link, "sh", "-c", f"exec sleep 99999.{os.getpid()}")
                )
                for _ in range(number * 2):
                    await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert (
                await asyncio.gather(*(said(link, "echo", "in") for _ in range(20)))
                == ["in\n"] * 20
            )
            deadline = time.monotonic() + 120
            while (
                left := await said(
                    link, "sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
                )
            ).count(f"99999.{os.getpid()}"):
                assert time.monotonic() < deadline, left

    run(meet())


def test_secrets_are_in_no_list_of_processes_and_in_no_file(
    server: Sshd, tmp_path: Path, gate: int
) -> None:
    seen: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    data = Path("/proc", name, "cmdline").read_bytes()
                    if SECRET.encode() in data:
                        seen.add(data)

    watcher = threading.Thread(target=watch)
    watcher.start()

    async def meet() -> None:
        async with hosted(server.settings(root=str(tmp_path / "root"))) as host:
            work = script(
                '[ "${#TOKEN}" = 13 ]; read line < gate', tmp_path, secrets={"TOKEN": SECRET}
            )
            job = await host.start(work, "job")
            assert await host.wait(job, AT_ONCE) is None
            kept = [
                path
                for path in (tmp_path / "root").rglob("*")
                if path.is_file() and SECRET.encode() in path.read_bytes()
            ]
            os.write(gate, b"\n")
            end = await host.wait(job, LONG)
            assert end is not None
            assert end.code == 0
            assert kept == []

    try:
        run(meet())
    finally:
        over.set()
        watcher.join()
    assert seen == set()


# --- logins of all kinds

SHELLS = {
    "dash": "/usr/bin/dash",
    "bash": "/bin/bash",
    "zsh": "/usr/bin/zsh",
    "fish": "/usr/bin/fish",
    "tcsh": "/usr/bin/tcsh",
    "csh": "/bin/csh",
}


@pytest.mark.parametrize("shell", [*SHELLS, "busybox"])
def test_any_login_shell_will_do_and_whatever_it_prints_is_not_taken_for_an_answer(
    tmp_path: Path, shell: str
) -> None:
    program = "/bin/busybox sh" if shell == "busybox" else SHELLS[shell]
    needs(program.split()[0])
    noisy = tmp_path / "login"
    noisy.write_text(
        "#!/bin/sh\nprintf '\\036welcome\\n'; echo oops >&2; head -c 70000 /dev/zero | tr '\\0' x\n"
        f'cd /; umask 000; export TAR_OPTIONS=--bad CDPATH=/tmp; exec {program} -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    noisy.chmod(0o755)
    odd = (
        "",
        "a b",
        "'\"$HOME`!!^",
        "line\nline\n",
        "é\udcff",
        "\\0101\\n",
        "%s%b",
        "-n",
        "~",
        "*",
        "\x1e",
        "\t",
    )
    with Sshd(tmp_path / "sshd", options=[f"ForceCommand {noisy}"]) as machine:

        async def meet() -> None:
            async with hosted(machine.settings(root=str(tmp_path / "root"))) as host:
                data = b"".join([piece async for piece in host.call(("printf", "%s\\0", *odd))])
                assert data.decode("utf-8", "surrogateescape").split("\0")[:-1] == list(odd)
                with pytest.raises(Rejected) as told:
                    await said(host, "sh", "-c", "echo own words >&2; exit 3")
                assert str(told.value) == "sh ended with 3: own words"
                job = await host.start(script("echo hello", tmp_path), "job")
                end = await host.wait(job, LONG)
                assert end is not None
                assert end.code == 0
                assert await host.log(job, 0) == b"hello\n"

        run(meet())


def test_a_login_that_runs_no_commands_is_denied_with_its_own_words(tmp_path: Path) -> None:
    with Sshd(
        tmp_path / "sshd", options=["ForceCommand echo 'This account is not available'; exit 1"]
    ) as machine:

        async def meet() -> None:
            async with linked(route(machine)) as link:
                with pytest.raises(
                    Denied, match=r"does not run commands.*This account is not available"
                ):
                    await said(link, "true")

        run(meet())


def test_a_server_that_opens_no_sessions_is_denied(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", options=["MaxSessions 0"]) as machine:

        async def meet() -> None:
            async with linked(route(machine)) as link:
                with pytest.raises(Denied, match="does not allow commands"):
                    await said(link, "true")

        run(meet())


def test_a_login_that_never_stops_talking_is_rejected(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", options=["ForceCommand cat /dev/zero"]) as machine:

        async def meet() -> None:
            async with linked(route(machine)) as link:
                with pytest.raises(Rejected, match="silence its start-up files"):
                    await said(link, "true")

        run(meet())


START_UPS = {
    "reads a line": "read line",
    "reads all": "cat >/dev/null",
    "sleeps": "exec sleep 900",
    "prints now and then": "while :; do echo busy; sleep 0.1; done",
    "is another shell": "exec cat",
}


@pytest.mark.parametrize("does", START_UPS)
def test_start_up_files_that_do_not_end_are_named_in_time_and_leave_the_other_hosts(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(sshlink, "LOGIN", 1.0)
    monkeypatch.setattr(ssh, "HURRY", 0.0)
    with Sshd(tmp_path / "sshd") as stuck:
        (stuck.home / ".bashrc").write_text(START_UPS[does] + "\n")
        known = tmp_path / "known"
        known.write_text(server.known_hosts.read_text() + stuck.known_hosts.read_text())
        settings = server.settings(
            hosts=[stuck.address, server.address],
            known_hosts=str(known),
            identity=[str(server.identity), str(stuck.identity)],
        )

        async def meet() -> None:
            driver = Ssh(**settings)
            try:
                offers = await driver.offers(Wish(hurry=True))
                assert [offer.id for offer in offers] == [server.address]
                assert (driver.late, driver.left_out) == ([stuck.address], {})
                offers = await driver.offers(Wish())
            finally:
                await driver.aclose()
            assert [offer.id for offer in offers] == [server.address]
            assert driver.late == [] and "start-up files" in driver.left_out[stuck.address]

        run(meet(), limit=10)


def test_a_rented_machine_whose_start_up_files_do_not_end_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sshlink, "LOGIN", 0.5)
    monkeypatch.setattr(cloud, "BOOTING", 0.1)

    async def alive(lease: Lease) -> None:
        return None

    with Sshd(tmp_path / "sshd") as stuck:
        (stuck.home / ".bashrc").write_text("read line\n")
        ways = {"trust": stuck.host_key, "login": stuck.identity.read_bytes()}

        async def meet() -> None:
            logins = cloud.Logins(cloud.InstallationKeys(b"secret", tmp_path), alive, AT_ONCE)
            lease = Lease("rented", "1", "key")
            assert await logins.open(lease, stuck.user, "127.0.0.1", stuck.port, **ways) is None
            with pytest.raises(HostLost, match="start-up files"):
                await logins.open(lease, stuck.user, "127.0.0.1", stuck.port, **ways)

        run(meet(), limit=10)


def test_what_is_sent_to_a_command_is_not_read_by_the_start_up_files(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd") as machine:
        (machine.home / ".bashrc").write_text("read -t 0.3 line\n")

        async def words() -> AsyncIterator[bytes]:
            yield b"one\ntwo\n"

        async def meet() -> None:
            async with linked(route(machine)) as link:
                said = b"".join([data async for data in link.call(("cat",), words())])
                assert said == b"one\ntwo\n"

        run(meet())


def test_an_nvidia_smi_that_does_not_end_costs_its_gpus_and_not_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine_question, "SCRIPT", machine_question.SCRIPT.replace("sleep 6", "sleep 1")
    )
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA A100, 40960'; exec sleep 30\n")
    program.chmod(0o755)
    with Sshd(tmp_path / "sshd") as server:
        (server.home / ".bashrc").write_text(f"PATH={tmp_path}:$PATH\n")

        async def meet() -> None:
            driver = Ssh(**server.settings())
            try:
                (offer,) = await driver.offers(Wish())
                assert offer.resources.gpus == 0
                assert list(await driver.offers(Wish(Need(gpus=1)))) == []
            finally:
                await driver.aclose()

        run(meet(), limit=10)


# --- a server that means us harm


EVIL = {
    "a flood of words": lambda process: (
        [process.stderr.write(b"\x1b[2J" + b"x" * 65_000) for _ in range(200)] and process.exit(1)
    ),
    "a signal of its own": lambda process: process.exit_with_signal(
        "\x1b]0;title\x07", False, "words", ""
    ),
    "a status and nothing else": lambda process: process.exit(0),
    "bytes that are no text": lambda process: (
        process.stdout.write(bytes(range(256)) * 100) or process.exit(255)
    ),
    "an end without a status": lambda process: process.close(),
}


@pytest.mark.parametrize("does", EVIL)
def test_a_server_that_means_harm_gets_an_error_of_ours_and_a_clean_terminal(
    tmp_path: Path, does: str
) -> None:
    make_key(tmp_path / "host")
    make_key(tmp_path / "client")

    async def meet() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[str(tmp_path / "host")],
            authorized_client_keys=str(tmp_path / "client.pub"),
            process_factory=EVIL[does],
            encoding=None,
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pinned = " ".join((tmp_path / "host.pub").read_text().split()[:2])
        way = Route(
            "u",
            "127.0.0.1",
            server.get_port(),
            host_key=pinned,
            identity=(str(tmp_path / "client"),),
        )
        async with linked(way) as link:
            with pytest.raises(DriverError) as told:
                await said(link, "true")
        assert all(character.isprintable() or character in "\n\t" for character in str(told.value))
        assert len(str(told.value)) < 6000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32_000  # kilobytes
        server.close()
        await server.wait_closed()

    run(meet())


# --- several servers


def test_a_pool_gives_out_its_places_and_no_more(server: Sshd, tmp_path: Path) -> None:
    settings = server.settings(root=str(tmp_path / "root"), slots=3)

    async def meet() -> None:
        drivers = [Ssh(**settings) for _ in range(2)]
        offers = await drivers[0].offers(Wish())
        assert len(offers) == 1
        taken = await asyncio.gather(
            *(drivers[n % 2].acquire(order(offers, f"run{n}")) for n in range(8)),
            return_exceptions=True,
        )
        leases = [lease for lease in taken if not isinstance(lease, BaseException)]
        assert len(leases) == 3
        assert all(
            isinstance(error, NoCapacity) for error in taken if isinstance(error, BaseException)
        )
        assert sorted(lease.id for lease in await drivers[1].leases()) == sorted(
            lease.id for lease in leases
        )
        assert len(await drivers[0].offers(Wish())) == 1  # what is taken may be ours: acquire tells
        assert [await driver.hosts(leases[0]) is not None for driver in drivers] == [True, True]
        assert await drivers[1].release(leases[0])
        with pytest.raises(HostLost, match="was released"):
            await drivers[0].hosts(leases[0])
        assert (await drivers[0].acquire(order(offers, "late"))).key == "late"
        for driver in drivers:
            await driver.aclose()

    run(meet())


@pytest.mark.parametrize("slots", [1, 4])
def test_one_key_is_one_place_for_every_caller(server: Sshd, tmp_path: Path, slots: int) -> None:
    settings = server.settings(root=str(tmp_path / "root"), slots=slots)

    async def meet() -> None:
        drivers = [Ssh(**settings) for _ in range(3)]
        offers = await drivers[0].offers(Wish())
        leases = await asyncio.gather(
            *(driver.acquire(order(offers, "same")) for driver in drivers for _ in range(3))
        )
        assert all(lease == leases[0] for lease in leases)
        assert list(await drivers[2].leases()) == [leases[0]]
        for driver in drivers:
            await driver.aclose()

    run(meet())


def test_a_place_whose_time_is_over_is_free(server: Sshd, tmp_path: Path) -> None:
    settings = server.settings(root=str(tmp_path / "root"))

    async def meet() -> None:
        driver = Ssh(**settings)
        offers = await driver.offers(Wish())
        old = await driver.acquire(order(offers, "old", hours=-1))
        new = await driver.acquire(order(offers, "new"))
        assert list(await driver.leases()) == [new]
        with pytest.raises(NoCapacity):
            await driver.acquire(order(offers, "old"))
        assert await driver.release(old)
        assert list(await driver.leases()) == [new]
        await driver.aclose()

    run(meet())


def test_a_server_whose_clock_is_days_off_gives_no_place_twice(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/date").write_text(
        f'#!/bin/sh\nexec {shutil.which("date")} -d "+3 days" "$@"\n'
    )
    (tmp_path / "bin/date").chmod(0o755)
    environment = (
        f"SetEnv PATH={tmp_path / 'bin'}:{os.environ['PATH']} HOME={tmp_path / 'sshd/home'}"
    )

    async def meet(server: Sshd) -> None:
        async with hosted(server.settings(), "one") as host:
            assert int(await said(host, "date", "+%s")) > time.time() + 200_000
            async with contextlib.AsyncExitStack() as stack:
                with pytest.raises(NoCapacity):
                    await stack.enter_async_context(hosted(server.settings(), "another"))

    with Sshd(tmp_path / "sshd", options=[environment]) as server:
        run(meet(server))


def test_a_server_that_cannot_be_asked_is_left_out_with_the_reason_and_makes_the_list_of_leases_fail(
    server: Sshd, tmp_path: Path
) -> None:
    with Sshd(tmp_path / "sshd") as other:
        other.trust((server.place / "client.pub").read_text())
        known = tmp_path / "known"
        known.write_text(server.known_hosts.read_text() + other.known_hosts.read_text())
        here = {"host": server.address, "root": str(tmp_path / "here")}
        there = {
            "host": other.address,
            "root": str(tmp_path / "there"),
            "slots": 2,
            "python": "/opt/python",
        }
        settings = server.settings(hosts=[here, there], known_hosts=str(known))

        async def meet() -> None:
            driver = Ssh(**settings)
            offers = await driver.offers(Wish(Need(cpus=1)))
            assert {offer.id for offer in offers} == {server.address, other.address}
            lease = await driver.acquire(
                order([offer for offer in offers if offer.id == other.address], "key")
            )
            assert lease.data == {
                "host": other.address,
                "root": str(tmp_path / "there"),
                "python": "/opt/python",
            }
            assert list(await driver.leases()) == [lease]
            await asyncio.to_thread(other.stop)
            fresh = Ssh(**settings)
            assert [offer.id for offer in await fresh.offers(Wish())] == [server.address]
            assert "cannot reach" in fresh.left_out[other.address]
            for ask in (fresh.leases(), fresh.release(lease)):
                with pytest.raises(Unreachable):
                    await ask
            await asyncio.to_thread(server.place.chmod, 0o700)
            await asyncio.to_thread(other.start)
            assert list(await fresh.leases()) == [lease]
            await driver.aclose()
            await fresh.aclose()

        run(meet())


def test_rubbish_among_the_leases_is_no_empty_list(server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "root" / "leases").mkdir(parents=True)
    (tmp_path / "root" / "leases" / "slot.0").write_text("99999999999\nid\nrubbish\n")

    async def meet() -> None:
        driver = Ssh(**server.settings(root=str(tmp_path / "root")))
        with pytest.raises(Denied, match="contains unknown files"):
            await driver.leases()
        await driver.aclose()

    run(meet())


def test_what_was_wrong_when_it_connected_ahead_is_reported_once_and_then_asked_again(
    tmp_path: Path,
) -> None:
    async def meet() -> None:
        driver = Ssh(**machine.settings())
        machine.stop()
        await driver.connect()
        assert not driver.connected_hosts()
        machine.start()
        with pytest.raises(Unreachable):
            await driver.offers(Wish())
        assert len(await driver.offers(Wish())) == 1
        await driver.aclose()

    with Sshd(tmp_path / "sshd") as machine:
        run(meet())


def test_when_no_server_can_be_asked_the_reasons_are_the_error(server: Sshd) -> None:
    async def meet() -> None:
        with pytest.raises(Unreachable, match=r"cannot reach a@(.|\n)*cannot reach b@"):
            await Ssh(
                **server.settings(
                    hosts=[f"a@127.0.0.1:{free_port()}", f"b@127.0.0.1:{free_port()}"]
                )
            ).offers(Wish())
        with pytest.raises(Denied, match="not known here"):
            await Ssh(
                **server.settings(
                    hosts=[server.address, f"b@127.0.0.1:{free_port()}"], known_hosts="/nowhere"
                )
            ).offers(Wish())

    run(meet())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "@",
        "a b",
        "user@",
        "name:",
        "name:0",
        "name:99999",
        "name:x",
        "-oProxyCommand=touch",
        "a@b@c",
        "[::1",
        "x/y:1:2",
    ],
)
def test_what_is_no_address_is_rejected(address: str) -> None:
    with pytest.raises(Rejected, match="is not the address of a server"):
        Ssh(hosts=[address])


def test_no_hosts_is_rejected_with_how_to_name_one() -> None:
    with pytest.raises(Rejected, match="--host user@name"):
        Ssh()


def test_a_command_too_long_for_the_other_side_is_rejected_before_it_is_sent() -> None:
    async def meet() -> None:
        with pytest.raises(Rejected, match="send them on standard input"):
            await said(
                SshLink(route(Sshd(Path("/nowhere")), known_hosts=(), identity=())),
                "echo",
                "x" * 200_000,
            )
        with pytest.raises(Rejected, match="NUL"):
            await said(
                SshLink(route(Sshd(Path("/nowhere")), known_hosts=(), identity=())), "echo", "a\0b"
            )

    run(meet())
