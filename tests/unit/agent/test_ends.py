"""The exit of a job is on disk before its slot is used again, and is told in any case."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.agent import ends as module
from runner.agent.ends import Ends


class Slots:
    def __init__(self) -> None:
        self.free: list[int] = []

    def give(self, number: int) -> None:
        self.free.append(number)


class Disk:
    """A disk that takes as many bytes of each write as a test says; None for all."""

    def __init__(self) -> None:
        self.room: int | None = None

    def write(self, handle: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        return os.write(handle, data[: self.room])


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()

    class Os:
        write = staticmethod(disk.write)

    monkeypatch.setattr(module, "os", Os)
    return disk


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: Slots, disk: Disk) -> Ends:
    monkeypatch.chdir(tmp_path)
    given: Any = slots
    return Ends(given)


def journal() -> bytes:
    return Path("journal").read_bytes()


def test_an_end_is_written_told_once_and_frees_its_slot(ends: Ends, slots: Slots) -> None:
    ends.record(b"a", b"a ended\n", 3)
    ends.record(b"b", b"b ended\n")
    ends.record(b"c", b"c ended\n", 0)
    assert ends.has_pending and slots.free == [] and journal() == b""
    lines = b"a ended\nb ended\nc ended\n"
    assert ends.publish() == lines and journal() == lines
    assert sorted(slots.free) == [0, 3] and not ends.has_pending and ends.publish() == b""
    assert ends.over == {b"a": b"a ended\n", b"b": b"b ended\n", b"c": b"c ended\n"}


def test_a_message_for_clients_is_not_written(ends: Ends) -> None:
    ends.tell(b"a is going\n")
    assert ends.has_pending and not ends.has_unwritten
    assert ends.publish() == b"a is going\n" and journal() == b""


@pytest.mark.parametrize("room", [0, 5])
def test_on_a_full_disk_an_end_is_told_and_its_slot_waits(
    ends: Ends, slots: Slots, disk: Disk, room: int
) -> None:
    disk.room = room
    ends.record(b"a", b"a ended\n", 3)
    assert ends.publish() == b"a ended\n" and slots.free == []
    assert ends.has_unwritten and ends.has_pending
    disk.room = None
    ends.write(b"")
    assert journal() == b"a ended\n" and slots.free == [3] and not ends.has_unwritten


def test_more_lines_go_behind_what_the_disk_refused(ends: Ends, disk: Disk) -> None:
    disk.room = 0
    ends.record(b"a", b"a ended\n")
    ends.publish()
    disk.room = None
    ends.write(b"b began\n")
    assert journal() == b"a ended\nb began\n"


def test_the_oldest_ends_are_forgotten(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    for name in (b"a", b"b", b"c"):
        ends.record(name, name)
    assert list(ends.over) == [b"b", b"c"]
