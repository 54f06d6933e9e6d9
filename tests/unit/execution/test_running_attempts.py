"""Attempts that run, the capacity that they hold, and their ends in order."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit, HostLost
from runner.execution.steps.running_attempts import RunningAttempts


class Room:
    """A host's capacity, and a bell."""

    def __init__(self) -> None:
        self.calls, self.rings = list[Any](), 0
        bell: Any = Of(wake=self._wake)
        self.running = RunningAttempts(bell)

    def _wake(self) -> None:
        self.rings += 1

    def attempt(self) -> Any:
        capacity = Of(
            reserve=lambda wants, devices: self.calls.append(("reserve", wants, devices)),
            release=lambda wants, devices: self.calls.append(("release", wants, devices)),
        )
        return Of(place=Of(capacity=capacity), wants={"cpus": 2}, devices=("gpu0",), number=0)

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def room() -> Room:
    return Room()


def test_an_attempt_holds_its_capacity_from_start_to_end(room: Room) -> None:
    attempt = room.attempt()
    room.running.add("a", attempt)
    assert room.calls == [("reserve", {"cpus": 2}, ("gpu0",))]
    assert room.running["a"] is attempt and [*room.running] == ["a"] and len(room.running) == 1
    assert room.running.pop("a") is attempt and not room.running
    assert room.calls[1:] == [("release", {"cpus": 2}, ("gpu0",))] and room.rings == 0


def test_capacity_that_was_freed_early_is_not_freed_again(room: Room) -> None:
    room.running.add("a", room.attempt())
    room.running.make_room("a")
    assert room.names == ["reserve", "release"] and room.rings == 1 and "a" in room.running
    room.running.make_room("a")
    room.running.pop("a")
    assert room.names == ["reserve", "release"]


def test_the_next_attempt_of_a_step_holds_capacity_of_its_own(room: Room) -> None:
    room.running.add("a", room.attempt())
    room.running.make_room("a")
    room.running.pop("a")
    room.running.add("a", room.attempt())
    room.running.pop("a")
    assert room.names == ["reserve", "release"] * 2


def test_ends_are_taken_in_the_order_in_which_they_came(room: Room) -> None:
    assert not room.running.has_ended
    gone = HostLost("gone")
    room.running.note_end("b", Exit(0))
    room.running.note_end("a", gone)
    assert room.rings == 2 and room.running.has_ended
    assert room.running.next_end() == ("b", Exit(0)) and room.running.next_end() == ("a", gone)
    assert not room.running.has_ended
    with pytest.raises(IndexError):
        room.running.next_end()


def test_attempts_follow_their_steps_into_a_grown_plan(room: Room) -> None:
    attempt = room.attempt()
    room.running.add("a", attempt)
    plan: Any = Of(index={"new": 0, "a": 1}, nodes=["the new step", "the step"])
    room.running.renumber(plan)
    assert (attempt.number, attempt.node) == (1, "the step")
