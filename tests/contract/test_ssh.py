"""The ssh driver keeps the contract, through a real sshd."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_contract import (
    ClosingContract,
    ConnectingContract,
    DriverContract,
    SkippingContract,
    VisitingContract,
)

import drivers
from drivers.ssh import Ssh
from tests.servers.sshd import Sshd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("machine") / "sshd") as sshd:
        yield sshd


class TestSsh(
    SkippingContract, VisitingContract, ConnectingContract, ClosingContract, DriverContract
):
    @pytest.fixture(autouse=True)
    def settings(self, place: Path, server: Sshd) -> None:
        (place / "settings.json").write_text(json.dumps(server.settings(root=str(place / "root"))))

    def make(self, place: Path) -> Ssh:
        return Ssh(**json.loads((place / "settings.json").read_text()))

    def make_with_a_dead_machine(self, place: Path) -> tuple[Ssh, str]:
        settings = json.loads((place / "settings.json").read_text())
        with socket.create_server(("127.0.0.1", 0)) as was:
            dead = f"nobody@127.0.0.1:{was.getsockname()[1]}"
        return Ssh(**{**settings, "hosts": [*settings["hosts"], dead]}), dead


def test_the_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("ssh") is Ssh
