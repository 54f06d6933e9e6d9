"""Hosts over SSH, through a real sshd: whom we believe, and who we are.  What breaks is in test_ssh_faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drivers.base import Denied, Offer
from drivers.ssh import Ssh
from drivers.sshlink import Route
from tests.servers.logins import hosted, leased, linked, order, route, run, said, script, through
from tests.servers.proxy import Proxy
from tests.servers.sshd import Sshd, make_key
from tests.tools import needs

CANARY = "canary-3b1d9e"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A machine that nobody breaks."""
    with Sshd(tmp_path_factory.mktemp("machine") / "sshd") as sshd:
        yield sshd


# --- whom we believe


async def denial(way: Route) -> str:
    async with linked(way) as link:
        with pytest.raises(Denied) as told:
            await said(link, "true")
    return str(told.value)


def test_a_host_whose_key_is_not_known_is_denied_with_what_to_do(server: Sshd) -> None:
    first, second = run(denial(route(server, known_hosts=("/nowhere",)))).split("\n")
    shown = subprocess.run(
        [needs("ssh-keygen"), "-lf", str(server.place / "host_key.pub")],
        capture_output=True,
        text=True,
    ).stdout.split()[1]
    assert f"[127.0.0.1]:{server.port} is not known here, and nothing was sent" in first
    assert shown in first
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in second
    assert f"ssh-keyscan -p {server.port} -t ed25519 127.0.0.1 >> /nowhere" in second


def test_what_the_denial_says_to_do_is_all_that_it_takes(server: Sshd, tmp_path: Path) -> None:
    way = route(server, known_hosts=(str(tmp_path / "known_hosts"),))
    subprocess.run(
        run(denial(way)).rpartition(": ")[2], shell=True, check=True, stderr=subprocess.DEVNULL
    )

    async def meet() -> str:
        async with linked(way) as link:
            return await said(link, "echo", "in")

    assert run(meet()) == "in\n"


def test_another_machine_on_the_same_port_gets_not_one_byte(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd") as sshd, Proxy(sshd.port) as proxy:

        async def swapped() -> None:
            driver = Ssh(**through(sshd, proxy))
            host = await leased(driver, "key")
            await driver.aclose()
            sshd.swap_host_key()
            before = len(proxy.connections)
            for attempt in (
                host.start(script("true", tmp_path, secrets={"TOKEN": CANARY}), CANARY),
                said(host, "cat", CANARY),
                driver.acquire(
                    order([Offer("ssh", f"{sshd.user}@127.0.0.1:{proxy.port}")], CANARY)
                ),
                driver.leases(),
            ):
                with pytest.raises(
                    Denied,
                    match=r"has changed, and nothing was sent(.|\n)*ssh-keygen -R '\[127.0.0.1\]:",
                ):
                    await attempt
            await driver.aclose()
            assert len(proxy.connections) > before
            for connection in proxy.connections[before:]:
                assert set(messages(bytes(connection.up))) <= {
                    1,
                    20,
                    30,
                }  # DISCONNECT, KEXINIT, ECDH_INIT: no NEWKEYS, so no data after it

        run(swapped())


def messages(sent: bytes) -> list[int]:
    """The kinds of the plain SSH messages after the greeting; one that was encrypted would make no sense here and fail."""
    _, _, rest = sent.partition(b"\r\n")
    kinds = []
    while rest:
        size = int.from_bytes(rest[:4], "big")
        assert 1 < size < 40_000
        assert len(rest) >= 4 + size
        kinds.append(rest[5])
        rest = rest[4 + size :]
    return kinds


def test_a_pinned_key_is_believed_and_no_other(server: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    pinned, other = server.host_key, " ".join((tmp_path / "other.pub").read_text().split()[:2])

    async def meet() -> None:
        async with linked(route(server, known_hosts=(), host_key=pinned)) as link:
            assert await said(link, "echo", "in") == "in\n"
        async with linked(route(server, host_key=other)) as link:
            with pytest.raises(Denied, match=r"has changed.*\n.*change `host_key`"):
                await said(link, "true")
        async with linked(route(server, host_key="nonsense")) as link:
            with pytest.raises(Denied, match="pinned host key"):
                await said(link, "true")

    run(meet())


def test_a_revoked_key_is_not_believed(server: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(server.known_hosts.read_text() + f"@revoked * {server.host_key}\n")

    async def meet() -> None:
        async with linked(route(server, known_hosts=(str(known),))) as link:
            with pytest.raises(
                Denied, match="is not accepted, and nothing was sent: Host key is revoked"
            ):
                await said(link, "true")

    run(meet())


def test_a_server_that_shows_a_key_of_another_kind_has_changed_its_key(
    server: Sshd, tmp_path: Path
) -> None:
    subprocess.run(
        [needs("ssh-keygen"), "-q", "-t", "ecdsa", "-N", "", "-f", str(tmp_path / "ecdsa")],
        check=True,
    )
    known = tmp_path / "known_hosts"
    known.write_text(
        f"[127.0.0.1]:{server.port} {' '.join((tmp_path / 'ecdsa.pub').read_text().split()[:2])}\n"
    )
    assert re.search(
        "has changed, and nothing was sent: it shows ssh-ed25519 SHA256.*known is ecdsa",
        run(denial(route(server, known_hosts=(str(known),)))),
    )


def test_of_several_keys_of_a_server_the_one_we_know_will_do(tmp_path: Path) -> None:
    for kind in ("ecdsa", "rsa"):
        subprocess.run(
            [needs("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", str(tmp_path / kind)],
            check=True,
        )
    with Sshd(
        tmp_path / "sshd", options=[f"HostKey {tmp_path / kind}" for kind in ("ecdsa", "rsa")]
    ) as sshd:
        for kind in ("ecdsa", "rsa"):
            known = tmp_path / f"known_{kind}"
            known.write_text(
                f"[127.0.0.1]:{sshd.port} {' '.join((tmp_path / f'{kind}.pub').read_text().split()[:2])}\n"
            )

            async def meet(known: Path = known) -> str:
                async with linked(route(sshd, known_hosts=(str(known),))) as link:
                    return await said(link, "echo", "in")

            assert run(meet()) == "in\n"


def test_a_host_with_a_certificate_of_an_authority_we_know_is_believed_under_its_names_only(
    tmp_path: Path,
) -> None:
    for name in ("authority", "machine"):
        make_key(tmp_path / name)
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {(tmp_path / 'authority.pub').read_text()}")
    signed = [f"HostKey {tmp_path / 'machine'}", f"HostCertificate {tmp_path / 'machine-cert.pub'}"]
    for named, believed in (("127.0.0.1", True), ("other.example.org", False)):
        sign = [
            needs("ssh-keygen"),
            "-q",
            "-s",
            str(tmp_path / "authority"),
            "-I",
            "id",
            "-h",
            "-n",
            named,
            str(tmp_path / "machine.pub"),
        ]
        subprocess.run(sign, check=True, stderr=subprocess.DEVNULL)
        with Sshd(tmp_path / named, options=signed) as sshd:

            async def meet(way: Route) -> str:
                async with linked(way) as link:
                    return await said(link, "echo", "in")

            if believed:
                assert run(meet(route(sshd, known_hosts=(str(known),)))) == "in\n"
            else:
                assert "nothing was sent" in run(denial(route(sshd, known_hosts=(str(known),))))


# --- who we are


@contextmanager
def agent(place: Path) -> Iterator[str]:
    """An agent without keys; the path of its socket."""
    path = str(place / "agent")
    with subprocess.Popen(
        [needs("ssh-agent"), "-D", "-a", path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
        try:
            yield path
        finally:
            process.terminate()


def test_a_key_of_the_agent_opens_the_door(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with agent(tmp_path) as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)

        async def meet(**settings: Any) -> str:
            async with hosted(
                server.settings(identity=(), root=str(tmp_path / "root"), **settings)
            ) as host:
                return await said(host, "echo", "in")

        with pytest.raises(
            Denied,
            match=r"rejected the keys in ~/.ssh and the keys of the agent: add the public key",
        ):
            run(meet(agent=True))
        subprocess.run(
            ["ssh-add", "-q", str(server.identity)], check=True, stderr=subprocess.DEVNULL
        )
        assert run(meet(agent=True)) == "in\n"
        monkeypatch.delenv("SSH_AUTH_SOCK")
        assert run(meet(agent=socket)) == "in\n"
        with pytest.raises(Denied):
            run(meet(agent=False))


def test_an_agent_with_too_many_keys_is_distinguished_from_one_without_the_right_one(
    server: Sshd, tmp_path: Path
) -> None:
    with agent(tmp_path) as socket:
        for number in range(7):
            make_key(tmp_path / f"key{number}")
        keys = [str(tmp_path / f"key{number}") for number in range(7)]
        subprocess.run(
            ["ssh-add", "-q", *keys, str(server.identity)],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "SSH_AUTH_SOCK": socket},
        )
        assert "set `identity` to the right key" in run(
            denial(route(server, identity=(), agent=socket))
        )

        async def meet() -> str:
            async with linked(route(server, agent=socket)) as link:
                return await said(link, "echo", "in")

        assert run(meet()) == "in\n"


def test_a_key_with_a_passphrase_is_used_by_the_agent_alone(server: Sshd, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    shutil.copy(server.identity, locked)
    shutil.copy(server.place / "client.pub", tmp_path / "locked.pub")
    subprocess.run(
        [needs("ssh-keygen"), "-q", "-p", "-N", "hush hush", "-f", str(locked)],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    async def meet(socket: str | None) -> str:
        async with linked(route(server, identity=(str(locked),), agent=socket)) as link:
            return await said(link, "echo", "in")

    with pytest.raises(
        Denied, match=r"has a passphrase: add the key to the agent first \(ssh-add .*locked\)"
    ):
        run(meet(None))
    with agent(tmp_path) as socket:
        subprocess.run(
            ["ssh-add", "-q", str(server.identity)],
            check=True,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "SSH_AUTH_SOCK": socket},
        )
        assert run(meet(socket)) == "in\n"


def test_where_a_key_is_named_those_of_the_home_folder_are_not_offered(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    shutil.copy(server.identity, tmp_path / ".ssh" / "id_ed25519")  # opens the door
    monkeypatch.setenv("HOME", str(tmp_path))
    named = tmp_path / "named"
    make_key(named)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "hush hush", "-f", str(named)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with agent(tmp_path) as socket:
        assert " rejected " in run(denial(route(server, identity=(str(named),), agent=socket)))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone", None, "cannot read the key .*: No such file"),
        ("rubbish", "rubbish", "is not a usable private key"),
        ("unknown", "", "rejected .*unknown"),
    ],
)
def test_a_key_that_does_not_work_is_named(
    server: Sshd, tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    key = tmp_path / name
    if content:
        key.write_text(content)
    elif content is not None:
        make_key(key)

    async def meet() -> None:
        async with linked(route(server, identity=(str(key),))) as link:
            with pytest.raises(Denied, match=words):
                await said(link, "true")

    run(meet())


def test_a_server_behind_another_is_reached_and_both_are_verified(
    server: Sshd, tmp_path: Path
) -> None:
    with Sshd(tmp_path / "behind") as behind, Sshd(tmp_path / "middle") as middle:
        for each in (behind, middle):
            each.trust((server.place / "client.pub").read_text())
        known = tmp_path / "known"
        lines = [each.known_hosts.read_text() for each in (server, middle, behind)]
        settings = server.settings(
            hosts=[behind.address],
            jump=f"{server.address},{middle.address}",
            known_hosts=str(known),
            root=str(tmp_path / "root"),
        )

        async def meet() -> str:
            async with hosted(settings) as host:
                return await said(host, "sh", "-c", "echo $SSH_CONNECTION")

        known.write_text("".join(lines))
        assert run(meet()).split()[3] == str(behind.port)
        assert (
            "direct-tcpip" in middle.log.read_text()
            or "Accepted publickey" in middle.log.read_text()
        )
        for missing, each in enumerate((server, middle, behind)):
            known.write_text("".join(line for n, line in enumerate(lines) if n != missing))
            with pytest.raises(Denied, match=rf"\[127.0.0.1\]:{each.port} is not known here"):
                run(meet())
