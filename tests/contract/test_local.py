"""The local driver keeps the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from driver_contract import Attached, DriverContract

import drivers
from drivers.base import Command, Host, Rejected
from drivers.local import Local
from runner.agent import reach
from runner.hosts.client import Socket
from tests.support import old_python

OLD = old_python()


class TestLocal(DriverContract):
    def attached(self, host: Host) -> Attached:
        return Attached(Socket(host))

    def make(self, place: Path) -> Local:
        return Local(place / "root")


class TestLocalOutlivingItsAgent(TestLocal):
    """The same of jobs that run below a shell."""

    def command(self, script: str, place: Path, **others: object) -> Command:
        return replace(super().command(script, place, **others), outlives=True)


@pytest.mark.skipif(OLD is None, reason="there is no Python 3.9 here")
class TestLocalWithAnAgentOfPython39(TestLocal):
    @pytest.fixture(autouse=True)
    def old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reach, "sys", SimpleNamespace(executable=OLD))


def test_a_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("local") is Local


def test_an_unknown_driver_is_answered_with_the_nearest_and_the_known() -> None:
    with pytest.raises(Rejected, match=r'no driver "locla", did you mean "local"\? \(known: gcp, local'):
        drivers.load("locla")
