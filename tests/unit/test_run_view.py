"""How far a run is: the training's own numbers, else the time that its steps took before; never 100 % of one that failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.planning.run_view import ALMOST, Standing, Training, progress_of
from runner.planning.schedule import State

IDS = ("data", "train", "eval")


def test_the_numbers_of_the_training_count_while_it_runs() -> None:
    run = Standing(
        "ACTIVE", {"train": "RUNNING"}, total=1, trainings={"train": Training(60, 100, 40.0)}
    )
    assert progress_of(run) == (0, 1, 60.0, 40.0)


def test_a_long_training_outweighs_a_short_step() -> None:
    run = Standing(
        "ACTIVE",
        {"data": "DONE", "train": "RUNNING", "eval": "WAITING"},
        total=3,
        expected={"data": 10.0, "train": 500.0, "eval": 10.0},
        elapsed={"train": 240.0},
        trainings={"train": Training(50, 100, 240.0)},
    )
    # 10 s and half of 480 s are done, of 500 s.
    assert progress_of(run) == (1, 3, 50.0, 250.0)


def test_without_numbers_the_time_that_a_step_took_before_counts_down() -> None:
    run = Standing("ACTIVE", {"train": "RUNNING"}, total=1, expected={"train": 30.0})
    assert progress_of(run) == (0, 1, 0.0, 30.0)
    assert progress_of(run._replace(elapsed={"train": 12.0})) == (0, 1, 40.0, 18.0)
    assert progress_of(run._replace(elapsed={"train": 99.0})).eta == 0.0


def test_a_step_of_unknown_length_leaves_the_end_open() -> None:
    run = Standing("ACTIVE", {"data": "DONE", "train": "RUNNING"}, total=2)
    assert progress_of(run) == (1, 2, 50.0, None)
    assert progress_of(run._replace(total=None)) == (1, None, None, None)


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_a_run_that_failed_is_as_far_as_its_steps_that_ended_well(state: str) -> None:
    run = Standing(state, {"data": "DONE", "train": "FAILED"}, total=2)
    assert progress_of(run) == (2, 2, 50.0, 0.0)


def test_restored_steps_are_counted_once() -> None:
    run = Standing("ACTIVE", {"data": "FRESH", "train": "RUNNING"}, fresh=["data", "eval"], total=3)
    assert progress_of(run)[:3] == (2, 3, 66.7)


RUNS = st.builds(
    Standing,
    st.sampled_from(["QUEUED", "ACTIVE", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]),
    st.dictionaries(st.sampled_from(IDS), st.sampled_from([str(each) for each in State])),
    st.sets(st.sampled_from(IDS)),
    st.none() | st.integers(0, 5),
    st.dictionaries(st.sampled_from(IDS), st.floats(0, 1e6)),
    st.dictionaries(st.sampled_from(IDS), st.floats(0, 1e6)),
    st.dictionaries(
        st.sampled_from(IDS),
        st.builds(Training, st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.floats(0, 1e6)),
    ),
)


@given(RUNS)
def test_only_a_completed_run_is_100_percent(run: Standing) -> None:
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
    run: Standing, one: float, two: float
) -> None:
    run = run._replace(state="ACTIVE", states={**run.states, "train": "RUNNING"})
    less, more = sorted([one, two])
    at = [
        progress_of(run._replace(trainings={**run.trainings, "train": Training(part * 100, 100)}))
        for part in (less, more)
    ]
    assert (at[0].percent or 0.0) <= (at[1].percent or 0.0)
