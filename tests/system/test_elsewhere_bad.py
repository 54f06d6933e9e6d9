"""What goes wrong on the way to other machines is one clear line, and an exit status that says whose turn it is."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from drivers.ssh import Ssh
from runner.errors import Infrastructure
from runner.execution.terms import Settings
from runner.hosts import pool
from tests.servers.sshd import Sshd, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until


def test_places_that_another_run_has_are_busy(space: Space) -> None:
    gate = space.root / "gate"
    os.mkfifo(gate)
    space.recipe(
        f"steps:\n  s: {{run: 'echo 1 > {space.root}/began; read go < {gate}', outputs: {{o: o}}}}\n"
    )
    space.recipe("steps:\n  s: {run: 'echo 1 > p', outputs: {p: p}}\n", name="other.yaml")
    worker = space.start("run", "--driver", "loopback")
    until((space.root / "began").exists)
    code, _, said = space.command("run", "--driver", "loopback", "-f", "other.yaml")
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=60)
    assert code == 4, said
    assert "all slots on loopback are in use" in said and "Traceback" not in said


def test_a_root_that_cannot_be_written_is_reported_with_the_host_and_what_to_do(
    space: Space,
    sshd: Sshd,  # noqa: F811
) -> None:
    settings = sshd.settings()
    lines = [
        f"hosts = {settings['hosts']!r}",
        f"known_hosts = '{settings['known_hosts']}'",
        f"identity = '{settings['identity']}'",
        "agent = false",
    ]
    space.write("recipe.toml", "[drivers.ssh]\nroot = '/proc/none'\n" + "\n".join(lines) + "\n")
    space.recipe("steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}}\n")
    code, _, said = space.command("run", "--driver", "ssh")
    assert code == 2
    assert f"cannot use ssh {sshd.address}" in said and "`root`" in said and "Traceback" not in said


@pytest.mark.parametrize("call", [1, 2])
def test_a_host_that_cannot_be_opened_is_left_out_while_there_is_another(
    space: Space, call: int
) -> None:
    space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}")
    space.write(
        "recipe.toml",
        f"[drivers.loopback]\nhosts = 2\nfaults = {{unreachable_on_call = {call}, dark = 1}}\n",
    )
    code, _, said = space.command("run", "--driver", "loopback", "--jobs", "2")
    assert code == 0 and space.read("o") == "1\n"
    assert (
        "loopback host-1: host-1 does not answer; continuing without this host" in said
        and "Traceback" not in said
    )


def test_when_no_host_can_be_opened_each_has_its_reason(space: Space) -> None:
    space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}")
    space.write(
        "recipe.toml",
        "[drivers.loopback]\nhosts = 2\nfaults = {unreachable_on_call = 1, unreachable = 1000}\n",
    )
    with pytest.raises(
        Infrastructure, match=r"host-1 does not answer\nloopback host-2: host-2 does not answer"
    ):
        space.run(settings=Settings(driver="loopback", jobs=2))


@pytest.mark.proof
def test_a_server_that_dies_between_two_questions_is_not_waited_for_while_there_is_another(
    space: Space,
    sshd: Sshd,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = Ssh.offers
    with Sshd(tmp_path / "other") as other:
        other.trust((sshd.place / "client.pub").read_text())

        async def dies(driver: Ssh, wish: Any) -> Any:
            found = await offered(driver, wish)
            other.stop()
            return found

        monkeypatch.setattr(Ssh, "offers", dies)
        monkeypatch.setattr(pool, "OPENS", 1.0)
        both = [{"host": each.address, "host_key": each.host_key} for each in (other, sshd)]
        tables = ", ".join(
            "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in each.items()) + "}"
            for each in both
        )
        space.write(
            "recipe.toml",
            f"[drivers.ssh]\nhosts = [{tables}]\nidentity = '{sshd.settings()['identity']}'\nagent = false\n",
        )
        space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}")
        assert space.run(settings=Settings(driver="ssh", jobs=2)) == ["s"]
