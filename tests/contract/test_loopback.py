"""The loopback driver keeps the contract, whatever shell its machines have."""

from __future__ import annotations

from pathlib import Path

from driver_contract import DriverContract

from drivers.loopback import Loopback


class TestLoopback(DriverContract):
    measures_memory = False

    def make(self, place: Path) -> Loopback:
        return Loopback(place / "root", shell="dash")


class TestBash(TestLoopback):
    def make(self, place: Path) -> Loopback:
        return Loopback(place / "root", shell="bash --posix")


class TestBusybox(TestLoopback):
    def make(self, place: Path) -> Loopback:
        return Loopback(place / "root", shell="busybox sh")
