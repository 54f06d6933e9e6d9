"""Claims about reading the metrics of runs: their curves over time, and how often attempts are read for a list of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.api.metrics import read_curves
from runner.planning.schedule import Move
from runner.storage.records.runs import AttemptId, AttemptRow, RunRow
from runner.storage.workspace import Workspace
from runner.survey import summaries


@pytest.fixture
def ws(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(tmp_path) as found:
        yield found


def started(ws: Workspace, run: str, **more: Any) -> Path:
    """A run that this process works on, with one attempt under way; the path of its log."""
    ws.store.runs.submit(RunRow(run, "t@1", "p", {}, str(ws.root)))
    fence = ws.store.runs.claim(run, "test")
    assert fence is not None
    log = ws.root / f"{run}.log"
    began = Move("step", "s", "QUEUED", "RUNNING", "", {"log": str(log), "attempt": 1})
    ws.store.runs.group(run, fence, [began], run_state=("ACTIVE", ""), **more)
    return log


def write_samples(log: Path, *samples: object) -> None:
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.with_suffix(".host").write_text(lines)


def test_samples_of_a_machine_are_curves_over_the_elapsed_time(ws: Workspace) -> None:
    log = started(ws, "r")
    write_samples(log, {"at": 105.0, "cpu_percent": 7}, {"at": 110.0, "cpu_percent": 9})
    row = ws.store.runs.get("r")
    (found,) = read_curves(ws, row, "elapsed", "machine")
    assert found.curves == {"cpu_percent": ([0, 5], [7, 9])}
    (found,) = read_curves(ws, row, "at", "machine")
    assert found.curves == {"cpu_percent": ([105, 110], [7, 9])}


def test_a_sample_without_a_time_has_no_place_on_a_time_axis(ws: Workspace) -> None:
    log = started(ws, "r")
    write_samples(log, {"cpu_percent": 1}, {"at": "?", "cpu_percent": 2})
    row = ws.store.runs.get("r")
    for axis in ("elapsed", "at"):
        assert not any(each.curves for each in read_curves(ws, row, axis, "machine"))
    write_samples(log, {"cpu_percent": 1}, {"at": 3.0, "cpu_percent": 2})
    (found,) = read_curves(ws, row, "elapsed", "machine")
    assert found.curves == {"cpu_percent": ([0], [2])}


def test_the_elapsed_time_of_a_machine_begins_with_the_first_attempt_of_its_step(
    ws: Workspace,
) -> None:
    first = AttemptRow("1", "r", "s", 1, started=100.0, ended=200.0, outcome="failed")
    started(ws, "r", attempts=[first])
    write_samples(ws.kept_path("r", "s", 1, ".log"), {"at": 105.0, "cpu_percent": 7})
    (found,) = read_curves(ws, ws.store.runs.get("r"), "elapsed", "machine")
    assert found.curves["cpu_percent"].x == [5]


def test_for_a_list_of_runs_the_attempts_are_gone_through_once(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = ws.store.runs
    for n in range(20):
        attempt = AttemptRow(str(n), f"r{n}", "s", 1, started=1.0, ended=2.0, outcome="done")
        started(ws, f"r{n}", attempts=[attempt])
    gone_through = [0]

    class Counted(list[AttemptId]):
        def __iter__(self) -> Iterator[AttemptId]:
            gone_through[0] += 1
            return super().__iter__()

    asked = runs.finished_attempts
    monkeypatch.setattr(runs, "finished_attempts", lambda ids: Counted(asked(ids)))
    rows = runs.latest()
    assert len(rows) == 20 and summaries.summarize_runs(ws, rows).keys() == {row.id for row in rows}
    assert gone_through[0] < 4
