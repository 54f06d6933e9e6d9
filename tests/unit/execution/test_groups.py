"""When a run's state changes are stored, and what a refused write does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.errors import Corrupt, Infrastructure
from runner.execution.steps import groups
from runner.execution.steps.groups import GROUP_MOVES, GROUP_SECONDS, Groups
from runner.planning.schedule import Move

MOVE = Move("step", "a", "PENDING", "READY", "")


class Commits:
    """A journal whose disk takes some time, or refuses."""

    def __init__(self) -> None:
        self.moves, self.sent, self.words = list[Move](), list[int](), list[str]()
        self.busy = False
        self.refuses: Exception | None = None

    @property
    def size(self) -> int:
        return len(self.moves)

    def add_move(self, move: Move) -> None:
        self.moves.append(move)

    def add_metrics(self, step: str, _numbers: str) -> None:
        self.moves.append(MOVE._replace(id=step))

    def send(self, landed: Callable[[], None]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(len(self.moves))
        self.moves, self.busy, self.landed = [], True, landed

    def land(self) -> None:
        self.busy = False
        if self.refuses is not None:
            raise self.refuses

    def say(self, text: str) -> None:
        self.words.append(text)


def groups_of(commits: Commits, running: tuple[str, ...] = ()) -> tuple[Groups, list[str]]:
    woken: list[str] = []
    journal: Any = commits
    return Groups(journal, running, lambda: woken.append("woken")), woken


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time of the groups, as its only item."""
    now = [100.0]
    monkeypatch.setattr(groups, "time", Of(monotonic=lambda: now[0]))
    return now


def test_a_group_is_due_after_its_time_or_when_it_is_full(clock: list[float]) -> None:
    commits = Commits()
    timed, _ = groups_of(commits)
    assert not timed.due
    timed.record([MOVE])
    clock[0] += GROUP_SECONDS / 2
    timed.record([MOVE])
    assert not timed.due
    clock[0] += GROUP_SECONDS / 2 + 0.001  # the time counts from the first change
    assert timed.due
    commits.busy = True
    assert not timed.due
    full = Commits()
    timed, _ = groups_of(full)
    timed.record([MOVE] * (GROUP_MOVES - 1))
    assert not timed.due
    timed.record([MOVE])
    assert timed.due


def test_metrics_alone_are_a_group(clock: list[float]) -> None:
    timed, _ = groups_of(Commits())
    timed.report("train", "loss 1")
    clock[0] += GROUP_SECONDS / 2
    timed.report("train", "loss 0.5")
    assert not timed.due
    clock[0] += GROUP_SECONDS / 2 + 0.001  # the time counts from the first of them
    assert timed.due


def test_a_written_group_wakes_the_run_from_the_thread_that_wrote_it() -> None:
    commits = Commits()
    timed, woken = groups_of(commits)

    async def write() -> None:
        timed.record([MOVE])
        timed.send()
        await asyncio.to_thread(commits.landed)
        await asyncio.sleep(0)

    asyncio.run(write())
    assert woken == ["woken"] and timed.landed
    timed.land()
    assert not timed.landed and commits.sent == [1]
    commits.landed()  # the run is over, and nobody waits
    assert woken == ["woken"]


def test_a_slow_disk_gets_larger_groups(clock: list[float]) -> None:
    commits = Commits()
    timed, _ = groups_of(commits)

    async def write(seconds: float) -> None:
        timed.record([MOVE])
        timed.send()
        clock[0] += seconds
        timed.land()

    asyncio.run(write(0.5))
    timed.record([MOVE])
    clock[0] += 4.9
    assert not timed.due
    clock[0] += 0.2
    assert timed.due
    asyncio.run(write(0.0))  # as fast as a disk can be
    timed.record([MOVE])
    assert not timed.due
    clock[0] += GROUP_SECONDS + 0.001
    assert timed.due


def test_a_full_disk_is_waited_for_while_a_step_may_free_it(clock: list[float]) -> None:
    commits = Commits()
    timed, _ = groups_of(commits, ("train",))
    commits.refuses = Infrastructure("no space left")

    async def write() -> None:
        timed.record([MOVE])
        clock[0] += 5
        timed.send()

    asyncio.run(write())
    clock[0] += 0.5
    assert not timed.due and commits.size == 1
    clock[0] += 0.6
    assert timed.due
    asyncio.run(write())
    assert commits.words == ["waiting for the running steps: no space left"]  # said once


def test_a_group_that_found_no_space_in_its_thread_is_tried_again_in_a_second(
    clock: list[float],
) -> None:
    commits = Commits()
    timed, _ = groups_of(commits, ("train",))

    async def write() -> None:
        timed.record([MOVE])
        timed.send()

    asyncio.run(write())
    commits.refuses = Infrastructure("no space left")
    timed.land()
    timed.record([MOVE])
    clock[0] += 0.5
    assert not timed.due
    clock[0] += 0.6
    assert timed.due


@pytest.mark.parametrize(
    ("running", "error"),
    [((), Infrastructure("no space left")), (("train",), Corrupt("the store is damaged"))],
)
def test_without_a_step_that_may_free_it_the_run_ends(
    running: tuple[str, ...], error: Exception
) -> None:
    commits = Commits()
    timed, _ = groups_of(commits, running)
    commits.refuses = error

    async def write() -> None:
        timed.record([MOVE])
        timed.send()

    with pytest.raises(type(error)):
        asyncio.run(write())
