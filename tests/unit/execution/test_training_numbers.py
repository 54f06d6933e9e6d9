"""What a running step reports: read on as it grows, bounded, masked, and nothing of what is no regular file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from runner.execution.steps import training_numbers
from runner.execution.steps.training_numbers import MOST, _Reports
from runner.secrets import Masker, Secret


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(training_numbers, "time", clock)
    return clock


def report(path: Path, *points: object) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(point)}\n" for point in points)


def reports(path: Path, pattern: str | None = None, masker: Masker | None = None) -> _Reports:
    return _Reports("a", str(path), masker or Masker(), None, pattern)


def test_the_end_is_foretold_by_the_pace_that_was_seen(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "a.metrics"
    found = reports(path)
    assert not found.read() and not found.text()
    report(path, {"step": 10, "max_steps": 100, "loss": 2.0})
    assert found.read() and "eta" not in found.text()
    assert not found.read()
    clock.now += 10
    report(path, {"step": 20, "max_steps": 100, "loss": 1.5})
    assert found.read()
    assert json.loads(found.text()) == {
        "at": 1010.0, "step": 20, "total": 100, "eta": 80.0, "values": {"loss": 1.5},
    }  # fmt: skip


def test_a_line_that_has_not_ended_waits(tmp_path: Path) -> None:
    path = tmp_path / "a.metrics"
    found = reports(path)
    path.write_text('{"step": 1}\n{"step": ')
    assert found.read()
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert found.read() and json.loads(found.text())["step"] == 2


def test_what_is_stored_is_small_and_masked(tmp_path: Path) -> None:
    path = tmp_path / "a.metrics"
    masker = Masker([Secret("t", "hunter2-hunter2")])
    report(path, {f"name{n}": n for n in range(5000)}, {"x" * 5000: 1, "step": 3})
    report(path, *({"warning": f"{n} hunter2-hunter2 " + "x" * 1000} for n in range(100)))
    found = reports(path, masker=masker)
    assert found.read()
    assert len(found.text()) < 16_000 and "hunter2" not in found.text()


def test_a_flood_costs_one_look_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.metrics"
    report(path, {"step": 1}, {"text": "x" * (3 * MOST)}, {"step": 2})
    found = reports(path)
    assert found.read() and json.loads(found.text())["step"] == 2
    assert not found.read()


def test_a_pattern_reads_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("step 7 of 9: loss 0.5\nbye\n")
    found = reports(path, r"step (?P<step>\d+) of (?P<total_steps>\d+): loss (?P<loss>\S+)")
    assert found.read()
    told = json.loads(found.text())
    assert (told["step"], told["total"], told["values"]) == (7, 9, {"loss": 0.5})


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, make: object) -> None:
    path = tmp_path / "a.metrics"
    assert callable(make)
    make(path)
    assert not reports(path).read()
