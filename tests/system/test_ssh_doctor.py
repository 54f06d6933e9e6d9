"""`recipe doctor --driver ssh --host …`: what a host has, what it lacks, what to do, and that nothing is left there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.sshd import Sshd
from tests.support import RECIPE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("machine") / "sshd") as sshd:
        yield sshd


def doctor(
    place: Path, server: Sshd, *words: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    table = {"known_hosts": str(server.known_hosts), "identity": str(server.identity), **settings}
    (place / "recipe.toml").write_text(
        "[drivers.ssh]\n"
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
    )
    env = {**os.environ, "HOME": str(place)}
    return subprocess.run(
        [*RECIPE, "doctor", "-C", str(place), *words], capture_output=True, text=True, env=env
    )


def test_doctor_says_what_a_host_has_and_leaves_nothing_there(server: Sshd, tmp_path: Path) -> None:
    done = doctor(tmp_path, server, "--driver", "ssh", "--host", server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{server.address}:\nok ")
    for word in ("shell", "coreutils", "agent", "cores", "memory", "disk", "gpus"):
        assert f" {word} " in done.stdout, word
    assert list(server.home.iterdir()) == []


def test_doctor_goes_on_where_a_host_cannot_be_asked_and_fails(
    server: Sshd, tmp_path: Path
) -> None:
    done = doctor(
        tmp_path, server, "--host", "nobody@127.0.0.1:1", "--host", server.address, "--json"
    )
    found = json.loads(done.stdout)
    assert done.returncode == 2
    assert {finding["host"] for finding in found if finding["state"] == "missing"} == {
        "nobody@127.0.0.1:1"
    }
    assert [finding["found"] for finding in found if finding["what"] == "connection"] == [
        "cannot reach nobody@127.0.0.1:1: Connection refused"
    ]
    assert {finding["what"] for finding in found if finding["host"] == server.address} >= {
        "shell",
        "root",
        "agent",
    }


def test_doctor_says_what_is_missing_where_programs_are_and_where_nothing_can_be_written(
    tmp_path: Path,
) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("sh", "uname", "id", "head", "date", "df", "cat", "rm", "mkdir", "rmdir"):
        (bare / program).symlink_to(f"/bin/{program}")
    with Sshd(
        tmp_path / "sshd", options=[f"SetEnv PATH={bare} HOME={tmp_path / 'sshd' / 'home'}"]
    ) as server:
        hidden = doctor(tmp_path, server, "--host", server.address, root="/proc/nowhere")
    assert hidden.returncode == 2
    assert "missing  root" in hidden.stdout
    assert "/proc/nowhere is not writable: set another `root`" in hidden.stdout


def test_doctor_of_an_unknown_host_key_says_how_to_trust_it(server: Sshd, tmp_path: Path) -> None:
    done = doctor(
        tmp_path,
        server,
        "--driver",
        "ssh",
        "--host",
        server.address,
        known_hosts=str(tmp_path / "none"),
    )
    assert done.returncode == 2
    assert "is not known here, and nothing was sent" in done.stdout
    assert "ssh-keyscan" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--driver", "shs"], 3, 'did you mean "ssh"?'),
        (["--driver", "ssh"], 3, "--host user@name"),
        (["--host", "a b"], 3, "is not the address of a server"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_question(
    server: Sshd, tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    done = doctor(tmp_path, server, *words)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr


def test_doctor_of_loopback_looks_at_its_hosts(tmp_path: Path, server: Sshd) -> None:
    done = doctor(tmp_path, server, "--driver", "loopback")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("host-1:\n")
