"""Moves are noted as they are made, and steps rest before another try."""

from __future__ import annotations

import pytest

from runner.execution.steps.run_schedule import RunSchedule
from runner.planning.schedule import AttemptOutcome, Scheduler, State, Task
from tests.unit.execution.fakes import Journal
from tests.virtual import virtual


def schedule_of(*tasks: Task, **more: object) -> tuple[RunSchedule, Journal]:
    journal = Journal()
    scheduler = Scheduler(tasks, {}, jobs=4, keep_going=True, **more)  # type: ignore[arg-type]
    return RunSchedule(scheduler, journal), journal


def test_each_move_is_noted_once_with_what_is_said_of_its_step() -> None:
    schedule, journal = schedule_of(Task("a"), Task("b", ("a",)))
    assert schedule.ready() == ["a"]
    schedule.judge("a", "run", "it is new", {"extra": 1})
    schedule.start("a", {"log": "a.log"})
    own = schedule.end("a", AttemptOutcome(True), {"seconds": 2})
    assert (own.id, own.after, own.data) == ("a", "DONE", {})
    assert journal.states[-4:] == [("a", "QUEUED"), ("a", "RUNNING"), ("a", "DONE"), ("b", "READY")]
    assert [move.data for move in journal.moves[-4:]] == [
        {"extra": 1},
        {"log": "a.log"},
        {"seconds": 2},
        {},
    ]
    assert schedule.counts == {"DONE": 1, "READY": 1} and schedule.open_steps() == {"b": "READY"}
    assert not schedule.is_finished and schedule.result == "ACTIVE"


@pytest.mark.parametrize(("retries", "said"), [(1, {"x": 1}), (0, {"x": 1, "tail": ["end"]})])
def test_the_tail_is_stored_of_a_step_that_is_not_tried_again(
    retries: int, said: dict[str, object]
) -> None:
    schedule, journal = schedule_of(Task("a", retries=retries))
    schedule.judge("a", "run", "")
    schedule.start("a")
    outcome = AttemptOutcome(False, "exit")
    schedule.end("a", outcome, {"x": 1}, if_failed={"tail": ["end"]})
    data = {name: value for name, value in journal.moves[-1].data.items() if name != "wait"}
    assert data == said


def test_a_step_that_rests_is_left_out_until_its_time() -> None:
    with virtual() as loop:
        schedule, _ = schedule_of(Task("a"), Task("b"))
        for id in "ab":
            schedule.judge(id, "run", "")
        schedule.rest("a", 10.0)
        assert list(schedule.startable()) == ["b"]
        loop.now += 11
        assert sorted(schedule.startable()) == ["a", "b"]


def test_after_a_failure_or_a_request_what_may_start_is_asked_again() -> None:
    schedule, _ = schedule_of(Task("a"), Task("b"))
    for id in "ab":
        schedule.judge(id, "run", "")
    found = []
    for id in schedule.startable():
        found.append(id)
        schedule.disturb()
    assert len(found) == 1 and schedule.is_disturbed
    assert len(list(schedule.startable())) == 2 and not schedule.is_disturbed


def test_what_an_earlier_worker_had_begun_is_judged_again() -> None:
    states = {"a": State.RUNNING, "b": State.QUEUED, "c": State.DONE, "d": State.WAITING}
    tasks = [Task(id) for id in "abc"] + [Task("d", ("a", "b", "c"))]
    schedule, journal = schedule_of(*tasks, states=states)
    schedule.take_over(states)
    assert {id: str(schedule.state(id)) for id in "abcd"} == {
        "a": "READY",
        "b": "READY",
        "c": "READY",
        "d": "WAITING",
    }
    assert ("c", "QUEUED") in journal.states


def test_a_pause_holds_back_and_a_cancel_ends() -> None:
    schedule, journal = schedule_of(Task("a"))
    schedule.judge("a", "run", "")
    schedule.pause()
    assert schedule.starts_nothing and not list(schedule.startable())
    schedule.resume()
    assert not schedule.starts_nothing and list(schedule.startable()) == ["a"]
    schedule.cancel("cancelled")
    assert schedule.is_finished and journal.states[-1] == ("a", "CANCELLED")
