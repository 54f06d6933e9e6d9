"""The loopback driver keeps the contract."""

from __future__ import annotations

from pathlib import Path

from driver_contract import DriverContract

from drivers.loopback import Loopback


class TestLoopback(DriverContract):
    measures_memory = False

    def make(self, place: Path) -> Loopback:
        return Loopback(place / "root")
