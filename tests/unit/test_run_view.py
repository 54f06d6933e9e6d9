"""The view of a run: how far it is, which step failed and why, which step trains."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.planning.run_view import (
    ALMOST,
    WEIGHED,
    PlannedSteps,
    ProgressInput,
    RunView,
    TrainingReport,
    fold,
    progress_of,
)
from runner.planning.schedule import State
from runner.storage.records.runs import Event, RunRow, StepRow

IDS = ("data", "train", "eval")


def test_the_numbers_of_the_training_count_while_it_runs() -> None:
    run = ProgressInput(
        "ACTIVE", {"train": "RUNNING"}, total=1, trainings={"train": TrainingReport(60, 100, 40.0)}
    )
    assert progress_of(run) == (0, 1, 60.0, 40.0)


def test_a_long_training_outweighs_a_short_step() -> None:
    run = ProgressInput(
        "ACTIVE",
        {"data": "DONE", "train": "RUNNING", "eval": "WAITING"},
        total=3,
        expected={"data": 10.0, "train": 500.0, "eval": 10.0},
        elapsed={"train": 240.0},
        trainings={"train": TrainingReport(50, 100, 240.0)},
    )
    # 10 s and half of 480 s are done, of 500 s.
    assert progress_of(run) == (1, 3, 50.0, 250.0)


def test_without_numbers_the_time_that_a_step_took_before_counts_down() -> None:
    run = ProgressInput("ACTIVE", {"train": "RUNNING"}, total=1, expected={"train": 30.0})
    assert progress_of(run) == (0, 1, 0.0, 30.0)
    assert progress_of(run._replace(elapsed={"train": 12.0})) == (0, 1, 40.0, 18.0)
    assert progress_of(run._replace(elapsed={"train": 99.0})).eta == 0.0


def test_a_step_of_unknown_length_leaves_the_end_open() -> None:
    run = ProgressInput("ACTIVE", {"data": "DONE", "train": "RUNNING"}, total=2)
    assert progress_of(run) == (1, 2, 50.0, None)
    assert progress_of(run._replace(total=None)) == (1, None, None, None)


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_a_run_that_failed_is_as_far_as_its_steps_that_ended_well(state: str) -> None:
    run = ProgressInput(state, {"data": "DONE", "train": "FAILED"}, total=2)
    assert progress_of(run) == (2, 2, 50.0, 0.0)


def test_restored_steps_are_counted_once_and_are_no_work() -> None:
    run = ProgressInput(
        "ACTIVE", {"data": "FRESH", "train": "RUNNING"}, fresh=["data", "eval"], total=3
    )
    assert progress_of(run)[:3] == (2, 3, 0.0)


RUNS = st.builds(
    ProgressInput,
    st.sampled_from(["QUEUED", "ACTIVE", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]),
    st.dictionaries(st.sampled_from(IDS), st.sampled_from([str(each) for each in State])),
    st.sets(st.sampled_from(IDS)),
    st.none() | st.integers(0, 5),
    st.dictionaries(st.sampled_from(IDS), st.floats(0, 1e6)),
    st.dictionaries(st.sampled_from(IDS), st.floats(0, 1e6)),
    st.dictionaries(
        st.sampled_from(IDS),
        st.builds(
            TrainingReport, st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.floats(0, 1e6)
        ),
    ),
    st.dictionaries(st.sampled_from([str(each) for each in State]), st.integers(0, 9)),
)


@given(RUNS)
def test_only_a_completed_run_is_100_percent(run: ProgressInput) -> None:
    found = progress_of(run)
    if run.state == "COMPLETED":
        assert found.percent == 100.0 and found.eta == 0.0
    elif found.percent is not None:
        assert 0.0 <= found.percent <= ALMOST
    assert found.eta is None or found.eta >= 0.0
    if found.total is not None:
        assert found.step <= found.total


@given(RUNS, st.floats(0, 1), st.floats(0, 1))
def test_a_training_that_is_further_makes_the_run_no_less_far(
    run: ProgressInput, one: float, two: float
) -> None:
    run = run._replace(state="ACTIVE", states={**run.states, "train": "RUNNING"})
    less, more = sorted([one, two])
    at = [
        progress_of(
            run._replace(trainings={**run.trainings, "train": TrainingReport(part * 100, 100)})
        )
        for part in (less, more)
    ]
    assert (at[0].percent or 0.0) <= (at[1].percent or 0.0)


def row(state: str = "ACTIVE", **more: Any) -> RunRow:
    return RunRow("r", "tool@1", "", {}, "", state, claim="me", fence=1)._replace(**more)


def step(id: str, state: str, **more: Any) -> StepRow:
    return StepRow("r", id, state)._replace(**more)


def move(at: float, id: str, before: str, after: str, reason: str = "", **data: object) -> Event:
    return Event("r", int(at), at, "step", id, before, after, reason, data)


def view(run: RunRow, rows: Iterable[StepRow], *moves: Event, **more: Any) -> RunView:
    return fold(run, {each.step: each for each in rows}, moves, now=100.0, **{"live": True, **more})


def numbers(step: float, total: float | None = None, **more: object) -> str:
    known = {"step": step, "total": total, "at": 90.0, **more}
    return json.dumps({name: value for name, value in known.items() if value is not None})


def test_a_failure_has_its_exit_code_last_lines_and_fix() -> None:
    found = view(
        row("FAILED", failure="exit", reason="ValueError: no rows"),
        [
            step("data", "DONE"),
            step("train", "FAILED", reason="exit", detail="ValueError: no rows"),
            step("eval", "BLOCKED", reason="needs train"),
        ],
        move(1, "data", "QUEUED", "RUNNING", attempt=1),
        move(5, "data", "RUNNING", "DONE", seconds=3.5),
        move(10, "train", "QUEUED", "RUNNING", attempt=1, site="gpu-1"),
        move(20, "train", "RUNNING", "QUEUED", "exit", detail="exit 1"),
        move(30, "train", "QUEUED", "RUNNING", attempt=2, site="gpu-2"),
        move(35, "train", "RUNNING", "FAILED", "exit", detail="exit 1", error="ValueError: no rows",
             exit=1, tail=["Traceback", "ValueError: no rows"], fix="give it rows", warnings=["cut"]),
    )  # fmt: skip
    assert found.failed == (
        "exit", "ValueError: no rows", "train", 1, None, ["Traceback", "ValueError: no rows"], "give it rows",
    )  # fmt: skip
    train = found.steps["train"]
    assert (train.attempts, train.host, train.began, train.ended, train.seconds) == (
        2, "gpu-2", 30.0, 35.0, 15.0,
    )  # fmt: skip
    assert found.steps["data"].seconds == 3.5
    assert found.warnings == ["train: cut"]
    assert found.word == "FAILED" and found.progress[:3] == (3, 3, 33.3)


def test_a_run_without_a_machine_failed_provisioning() -> None:
    found = view(
        row("FAILED", failure="provisioning", reason="none is large enough"),
        [step("train", "FAILED", reason="unplaced", detail="none is large enough")],
        move(1, "train", "QUEUED", "RUNNING"),
        move(1, "train", "RUNNING", "FAILED", "unplaced", detail="none is large enough"),
    )
    assert found.word == "FAILED_PROVISIONING"
    assert found.failed is not None and found.failed.kind == "provisioning"
    assert found.failed.step == "train"
    assert found.steps["train"].attempts == 0 and found.steps["train"].began is None


def test_a_run_that_failed_before_its_steps_has_the_failure_of_the_run() -> None:
    found = view(row("FAILED", failure="poison", reason="its workers died"), [])
    assert found.failed is not None and found.failed[:3] == ("poison", "its workers died", "")
    assert "more memory" in found.failed.fix


def test_a_step_that_was_allowed_to_fail_is_no_failure_of_a_completed_run() -> None:
    found = view(row("COMPLETED"), [step("lint", "FAILED", reason="exit", detail="exit 1")])
    assert found.failed is None and found.steps["lint"].failure is not None
    assert found.progress == (1, 1, 100.0, 0.0)


def test_the_step_that_trains_is_not_the_last_that_reported() -> None:
    rows = [
        step("train", "DONE", numbers=numbers(20, 20, values={"loss": 0.5}), began=10.0),
        step("evaluate", "RUNNING", numbers=numbers(1, values={"perplexity": 8.0}), began=80.0),
    ]
    found = view(row(), rows)
    assert found.trains == "train"
    assert found.training is not None and found.training.values == {"loss": 0.5}
    rows[1] = step("evaluate", "RUNNING", numbers=numbers(3, 50, values={"eval_loss": 8.0}))
    assert view(row(), rows).trains == "evaluate"


def test_the_step_that_trains_is_that_of_the_plan() -> None:
    rows = [
        step("data", "DONE", numbers=numbers(9, 9, values={"loss": 3.0})),
        step("train[lr=1]", "RUNNING", numbers=numbers(2, values={"accuracy": 0.5})),
    ]
    found = view(row(), rows, planned=PlannedSteps(trains="train"))
    assert found.trains == "train[lr=1]", "its instances were not known when the run began"
    found = view(row(), rows[:1], planned=PlannedSteps(trains="train"))
    assert (found.trains, found.training) == ("train", None)


def test_a_training_that_is_restored_brings_its_numbers_along() -> None:
    planned = PlannedSteps(
        {"train": 1}, ["train"], 1, 0, "train", numbers(20, 20, values={"loss": 0.5})
    )
    for rows in ([], [step("train", "FRESH")]):
        found = view(row("COMPLETED"), rows, planned=planned)
        assert found.training is not None and found.training.values == {"loss": 0.5}
    again = view(row(), [step("train", "RUNNING")], planned=planned)
    assert again.training is None


def test_the_time_that_is_left_passes() -> None:
    rows = [step("train", "RUNNING", numbers=numbers(20, 80, eta=60.0), began=70.0)]
    found = view(row(), rows)
    assert found.progress == (0, None, None, None)
    found = view(row(), rows, planned=PlannedSteps({"train": 1}, (), 1))
    assert found.progress == (0, 1, 25.0, 50.0)
    assert found.steps["train"].seconds == 30.0


def test_steps_that_run_at_once_end_at_once() -> None:
    run = ProgressInput(
        "ACTIVE",
        {"a": "RUNNING", "b": "RUNNING", "c": "WAITING"},
        total=3,
        expected={"a": 40.0, "b": 40.0, "c": 40.0},
    )
    assert progress_of(run).eta == 60.0


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "PAUSED"])
def test_a_run_that_was_stopped_is_as_far_as_its_training_came(state: str) -> None:
    after = "QUEUED" if state == "PAUSED" else state
    planned = PlannedSteps({"train": 1}, (), 1)
    found = view(row(state), [step("train", after, numbers=numbers(60, 100))], planned=planned)
    assert found.progress.percent == 60.0


def test_a_run_whose_worker_died_says_no_end() -> None:
    rows = [step("train", "RUNNING", numbers=numbers(20, 80, eta=60.0), began=70.0)]
    found = view(row(), rows, live=False, planned=PlannedSteps({"train": 1}, (), 1))
    assert (found.word, found.progress.eta) == ("NEEDS_RECOVERY", None)


def test_a_start_that_came_to_nothing_is_no_attempt() -> None:
    rows = [step("train", "QUEUED")]
    moves = (
        move(1, "train", "QUEUED", "RUNNING", attempt=1),
        move(2, "train", "RUNNING", "QUEUED", "busy"),
    )
    assert view(row(), rows, *moves).steps["train"].attempts == 0


def test_a_large_run_is_as_far_by_the_number_of_its_steps() -> None:
    rows = [step(f"s{n}", "DONE" if n < 300 else "WAITING") for n in range(WEIGHED + 100)]
    planned = PlannedSteps(total=len(rows))
    expected = {"s0": 1e6}
    whole = view(row(), rows, planned=planned, expected=expected).progress
    tally = {("DONE", ""): 300, ("WAITING", ""): len(rows) - 300}
    summed = view(row(), [], planned=planned, expected=expected, others=tally).progress
    assert whole[:3] == summed[:3] == (300, 600, 50.0)


def test_a_run_whose_graph_is_elsewhere_counts_what_was_there_by_number() -> None:
    found = view(row(), [step("train", "RUNNING")], planned=PlannedSteps(total=3, unnamed=2))
    assert found.progress[:3] == (2, 3, 0.0)
