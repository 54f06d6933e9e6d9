"""The local driver keeps the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from driver_contract import WakingContract

import drivers
from drivers.base import Command, Rejected
from drivers.local import Local


class TestLocal(WakingContract):
    def make(self, place: Path) -> Local:
        return Local(place / "root")


class TestLocalOutlivingItsAgent(TestLocal):
    """The same of jobs that run below a shell."""

    def command(self, script: str, place: Path, **others: object) -> Command:
        return replace(super().command(script, place, **others), outlives=True)


def test_a_driver_is_loaded_by_its_name() -> None:
    assert drivers.load("local") is Local


def test_an_unknown_driver_is_answered_with_the_nearest_and_the_known() -> None:
    with pytest.raises(Rejected, match=r'no driver "locla", did you mean "local"\? \(known: local'):
        drivers.load("locla")
