"""Promise: `recipe ssh` leads where a step runs, by OpenSSH's own client, with no more trust than the run has."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.cloud import cloud
from tests.fake_provider import provider
from tests.rented import rents
from tests.servers.sshd import Sshd
from tests.support import Space, until
from tests.system.test_stacks import stack
from tests.tools import needs


def waits(space: Space, more: str = "") -> None:
    """A step that waits."""
    os.mkfifo(space.root / "gate")
    space.recipe(
        f"steps:\n  s: {{run: 'read go < {space.root}/gate; echo 1 > o', outputs: {{o: o}}{more}}}\n"
    )


def running(space: Space) -> None:
    """Wait until the step is RUNNING on record."""
    until(lambda: "RUNNING" in space.command("report")[1])


def test_a_shell_and_a_port_of_a_rented_machine(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("ssh")
    with provider("vastai", "--hosts", "real", "--clock", "real", "--faults", "boot=0.1") as real:
        rents(space, real, monkeypatch)
        stack(space, "driver = 'vastai'")
        waits(space, ", resources: {gpus: 1}")
        worker = space.start("run", "--stack", "tiny")
        running(space)
        code, out, said = space.command(
            "ssh", "last/s", "--", "echo", "$CONTAINER_ID", ";", "exit", "7"
        )
        assert code == 7 and out.strip() == real.ledger()[0]["machine"], said
        (space.root / "gate").write_text("go\n")
        assert worker.wait(60) == 0
        worker.communicate()
        code, _, said = space.command("ssh", "last/s")
        assert code == 2 and "s is not running (state: DONE)" in said


def test_a_server_is_entered_with_the_keys_of_its_settings_and_a_port_of_it_is_here(
    space: Space, tmp_path: Path
) -> None:
    needs("ssh")
    with (
        Sshd(tmp_path / "sshd", options=["AllowTcpForwarding yes"]) as sshd,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        settings = sshd.settings()
        space.write(
            "recipe.toml",
            "[drivers.ssh]\n"
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()),
        )
        waits(space)
        worker = space.start("run", "--driver", "ssh")
        running(space)
        code, out, said = space.command("ssh", "last/s", "--", "echo", "$HOME")
        assert code == 0 and out.strip() == str(sshd.home), said
        here = free.getsockname()[1]
        free.close()
        forward = space.start("ssh", "last/s", "-L", f"{here}:localhost:{sshd.port}")

        def greeted() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", here), 5) as way:
                    return way.recv(4) == b"SSH-"
            except OSError:
                return False

        until(greeted)
        forward.send_signal(signal.SIGTERM)
        forward.communicate()
        (space.root / "gate").write_text("go\n")
        assert worker.wait(60) == 0
        worker.communicate()


def test_a_place_without_a_login_is_reported_with_its_folder(space: Space) -> None:
    cloud(space)
    waits(space)
    worker = space.start("run", "--driver", "loopback", "--everything-there")
    running(space)
    code, _, said = space.command("ssh", "last/s")
    assert (
        code == 2
        and "is a directory on this machine" in said
        and f"cd {space.root.parent / 'cloud' / 'host-1'}" in said
    )
    assert space.command("ssh", "s")[0] == 3 and space.command("ssh", "last/none")[0] == 3
    (space.root / "gate").write_text("go\n")
    assert worker.wait(60) == 0
    worker.communicate()
