"""Hosts as `ssh` has them: the configuration and known_hosts of a HOME of its own, with OpenSSH's client and without, through a real sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivers.base import Denied, Rejected, Unreachable, Wish
from drivers.ssh import Ssh
from tests.servers.logins import hosted, run, said
from tests.servers.sshd import Sshd, make_key
from tests.support import Space
from tests.tools import needs

CANARY = "canary-7c20aa"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("machine") / "sshd", options=["AcceptEnv *"]) as sshd:
        yield sshd


@pytest.fixture
def home(server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A HOME whose known_hosts has the server, and no key and no agent."""
    place = tmp_path / "home"
    (place / ".ssh").mkdir(parents=True, mode=0o700)
    shutil.copy(server.known_hosts, place / ".ssh" / "known_hosts")
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return place


@pytest.fixture(params=["ssh", "no ssh"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With OpenSSH's client on the PATH, and without."""
    if request.param == "no ssh":
        monkeypatch.setattr("drivers.sshconfig.shutil", SimpleNamespace(which=lambda name: None))
    return str(request.param)


def configure(home: Path, text: str) -> None:
    (home / ".ssh" / "config").write_text(text)


def box(server: Sshd, *lines: str) -> str:
    """A configuration with the server as `box`."""
    own = ("HostName 127.0.0.1", f"User {server.user}", f"Port {server.port}", *lines)
    return "Host box\n" + "".join(f"  {line}\n" for line in own)


def meet(
    home: Path, host: str = "box", *, argv: tuple[str, ...] = ("echo", "in"), **settings: Any
) -> str:
    async def begin() -> str:
        async with hosted({"hosts": [host], "root": str(home / "root"), **settings}) as there:
            return await said(there, *argv)

    return run(begin())


@contextmanager
def agent(place: Path, *keys: Path) -> Iterator[str]:
    """An agent with these keys; the path of its socket."""
    path = str(place / "agent")
    with subprocess.Popen(
        [needs("ssh-agent"), "-D", "-a", path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it listens
        try:
            for key in keys:
                environment = {**os.environ, "SSH_AUTH_SOCK": path}
                subprocess.run(
                    ["ssh-add", "-q", str(key)],
                    check=True,
                    env=environment,
                    stderr=subprocess.DEVNULL,
                )
            yield path
        finally:
            process.terminate()


def test_an_alias_of_the_configuration_is_a_host(server: Sshd, home: Path, client: str) -> None:
    configure(home, box(server, f"IdentityFile {server.identity}"))
    assert meet(home) == "in\n"
    with pytest.raises(Unreachable, match='cannot resolve the name "box"'):
        meet(home, use_config=False)


def test_known_hosts_and_keys_may_be_elsewhere(server: Sshd, home: Path, client: str) -> None:
    key = home / f"key_{server.user}_127.0.0.1_box"
    shutil.copy(server.identity, key)
    os.rename(home / ".ssh" / "known_hosts", home / ".ssh" / "known_box")
    configure(
        home,
        box(server, "IdentityFile ${HOME}/key_%r_%h_%n", "UserKnownHostsFile ~/.ssh/known_%n"),
    )
    assert meet(home) == "in\n"


def test_a_key_file_that_is_not_there_is_no_obstacle(server: Sshd, home: Path, client: str) -> None:
    configure(
        home,
        box(server, f"IdentityFile {server.identity}") + "Host *\n  IdentityFile ~/.ssh/id_rsa\n",
    )
    assert meet(home) == "in\n"


def test_a_jump_host_goes_by_the_configuration_too(server: Sshd, home: Path, client: str) -> None:
    configure(
        home,
        box(server, f"IdentityFile {server.identity}", "ProxyJump hop")
        + box(server, f"IdentityFile {server.identity}").replace("Host box", "Host hop"),
    )
    assert meet(home) == "in\n"


def test_a_proxy_command_connects(server: Sshd, home: Path, client: str) -> None:
    through = (
        f"{needs('ssh')} -F none -i {server.identity} -o UserKnownHostsFile={server.known_hosts}"
    )
    configure(
        home,
        f"Host box\n  HostName 127.0.0.1\n  User {server.user}\n  Port {server.port}\n  IdentityFile {server.identity}\n"
        f"  ProxyCommand {through} -W %h:%p -p {server.port} %r@127.0.0.1; true\n",
    )
    assert meet(home) == "in\n"


def test_a_host_key_is_known_by_its_alias(server: Sshd, home: Path, client: str) -> None:
    (home / ".ssh" / "known_hosts").write_text(f"the-box {server.host_key}\n")
    configure(home, box(server, f"IdentityFile {server.identity}", "HostKeyAlias the-box"))
    assert meet(home) == "in\n"


def test_the_agent_is_asked_by_the_public_half_of_a_key(
    server: Sshd, home: Path, client: str
) -> None:
    public = home / "key.pub"
    shutil.copy(server.place / "client.pub", public)
    others = [home / f"other{number}" for number in range(7)]  # more than a server lets one try
    for other in others:
        make_key(other)
    with agent(home, *others, server.identity) as socket:
        for said_of_keys in (
            (f"IdentityFile {public}",),
            (f"IdentityFile {home}/key",),  # the private half is in the agent only
            (f"IdentityFile {public}", "IdentitiesOnly yes"),
        ):
            configure(home, box(server, *said_of_keys, f"IdentityAgent {socket}"))
            assert meet(home) == "in\n"


def test_a_directive_that_recipe_does_not_follow_is_named(
    server: Sshd, home: Path, client: str
) -> None:
    configure(
        home, box(server, "KnownHostsCommand /bin/echo", "ForwardAgent yes", "ControlMaster auto")
    )
    [notice] = Ssh(hosts=["box"]).notices
    assert notice == "knownhostscommand, which the configuration of ssh has for box, has no effect"


def test_a_configuration_that_cannot_be_read_is_an_error_with_its_place(
    server: Sshd, home: Path, client: str
) -> None:
    configure(home, box(server, "Port many"))
    (home / ".ssh" / "config").write_text("Host box\n  Port many\n")
    with pytest.raises(Denied, match=r"(?s)config.* line 2.*use_config = false"):
        Ssh(hosts=["box"])


def test_a_name_that_begins_with_a_hyphen_is_refused(home: Path) -> None:
    for name in ("-oProxyCommand=true", "me@-G", "[-G]"):
        with pytest.raises(Rejected, match=r"is not the (address|name) of a server"):
            Ssh(hosts=[name])


def test_a_name_that_a_shell_reads_is_no_word_of_a_proxy_command(
    home: Path, client: str, tmp_path: Path
) -> None:
    configure(home, f"Host *\n  ProxyCommand touch {tmp_path}/marker; nc %h %p\n")
    with pytest.raises(Denied, match=r"to the ProxyCommand|invalid characters"):
        Ssh(hosts=["$(touch${IFS}x)"])


def test_the_configuration_is_asked_once_a_run(
    space: Space, server: Sshd, home: Path, tmp_path: Path
) -> None:
    configure(
        home,
        box(server, f"IdentityFile {server.identity}")
        + f'Match exec "echo asked >> {tmp_path}/asked"\n  ForwardX11 no\n',
    )
    space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}")
    space.write("recipe.toml", f"[drivers.ssh]\nhosts = ['box']\nroot = '{home}/root'\n")
    code, _, words = space.command("run", "--driver", "ssh")
    assert code == 0, words
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_one_odd_line_of_known_hosts_is_passed_over_with_a_notice(
    server: Sshd, home: Path, client: str
) -> None:
    known = home / ".ssh" / "known_hosts"
    known.write_text(f"=\nlonely\n@foo * x y\n{known.read_text()}")
    configure(home, box(server, f"IdentityFile {server.identity}"))
    assert meet(home) == "in\n"
    [notice] = Ssh(hosts=["box"]).notices
    assert (
        notice.replace("~", str(home)) == f"{known}: lines 1, 2, 3 cannot be parsed and are ignored"
    )


HOSTILE = """\
Host *
    StrictHostKeyChecking no
    ForwardAgent yes
    ForwardX11 yes
    LocalCommand touch {marker}
    PermitLocalCommand yes
    RemoteCommand touch {marker}
    SendEnv *
    SetEnv CANARY={canary}
    KnownHostsCommand /bin/echo * {key}
"""


def test_a_configuration_forwards_nothing_runs_nothing_and_makes_no_host_known(
    server: Sshd, home: Path, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    text = HOSTILE.format(marker=marker, canary=CANARY, key=server.host_key)
    configure(home, box(server, f"IdentityFile {server.identity}") + text)
    with agent(home) as socket:
        for name, value in {"CANARY": CANARY, "SSH_AUTH_SOCK": socket, "DISPLAY": ":0"}.items():
            monkeypatch.setenv(name, value)
        there = meet(home, argv=("env",))
        assert not any(word in there for word in (CANARY, "SSH_AUTH_SOCK", "DISPLAY"))
    (home / ".ssh" / "known_hosts").unlink()
    with pytest.raises(Denied, match="not known here"):
        run(Ssh(hosts=["box"]).offers(Wish()))
    assert not marker.exists()


def test_a_python_may_be_the_folder_of_an_environment_on_the_host(
    space: Space, server: Sshd, home: Path
) -> None:
    configure(home, box(server, f"IdentityFile {server.identity}"))
    folder = server.home / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").symlink_to(shutil.which("python3") or "")
    space.recipe("steps: {s: {run: 'python -c 1; cat $(command -v python) > o', outputs: {o: o}}}")
    space.write("recipe.toml", f"[drivers.ssh]\nhosts = ['box']\nroot = '{home}/root'\n")
    for named in ("~/venv", str(folder.parent)):
        code, _, words = space.command("run", "--driver", "ssh", "--python", named, "--force")
        assert code == 0, words
        assert f"{folder}/python3" in space.read("o")
