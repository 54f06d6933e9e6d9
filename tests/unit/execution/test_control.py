"""What signals, limits and requests do to a run."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps.bell import Bell
from runner.execution.steps.control import Handover, Stopper
from runner.execution.steps.run_schedule import RunSchedule
from runner.planning.schedule import Scheduler, State, Task
from runner.storage.records.runs import Stale
from tests.unit.execution.fakes import Journal
from tests.virtual import virtual


class Requests:
    """The requests of one run in the store."""

    def __init__(self) -> None:
        self.version, self.what, self.looks = 1, "", 0
        self.keep_hosts = self.is_taken = False

    def news(self) -> int:
        return self.version

    def take_request(self, _run: str, _fence: int) -> str:
        self.looks += 1
        if self.is_taken:
            raise Stale("another worker has it")
        return self.what

    def events(self, _run: str) -> list[Any]:
        return [Of(subject="request", data={"keep_hosts": self.keep_hosts})]

    def ask(self, what: str) -> None:
        self.version, self.what = self.version + 1, what


class Running(dict[str, Any]):
    """One attempt that runs, and how it was stopped."""

    def __init__(self) -> None:
        self.stops: list[tuple[float, bool]] = []
        super().__init__(a=Of(id="a", stop=self._stop, state=None, place=Of(elsewhere="")))

    async def _stop(self, grace: Any, *, may_save: bool = False) -> None:
        self.stops.append((grace.total_seconds(), may_save))


class World:
    """A run with one attempt under way, and another step that waits for it."""

    def __init__(self, handover: Handover | None = None) -> None:
        self.requests, self.running, self.said = Requests(), Running(), list[str]()
        self.journal = Journal()
        tasks = [Task("a"), Task("b", ("a",))]
        states = {"a": State.RUNNING, "b": State.WAITING}
        self.schedule = RunSchedule(
            Scheduler(tasks, {}, jobs=1, keep_going=False, states=states), self.journal
        )
        self.commits: Any = Of(
            say=self.said.append, busy=False, run="r", fence=1, answers="", store=None
        )
        self.hooks = list[Any]()
        parts: list[Any] = [
            Of(store=Of(runs=self.requests)),
            Of(spec=lambda _id: Of(state=())),
            self.schedule,
            self.commits,
            self.running,
            self.hooks,
        ]
        self.bell = Bell()
        self.stopper = Stopper(*parts, self.bell, handover)

    def poll(self, *asked: str) -> None:
        """Look once after each of these requests; then all that goes on beside it ends."""
        for what in asked:
            self.requests.ask(what)
            self.stopper.poll_requests()


@pytest.fixture
def world() -> Any:
    with virtual() as loop:
        made = World()

        async def run(action: Any) -> None:
            action()
            await made.bell.settle(1)

        made.act = lambda action: loop.run_until_complete(run(action))  # type: ignore[attr-defined]
        yield made


def test_a_cancel_stops_what_runs_and_cancels_the_rest(world: Any) -> None:
    world.act(lambda: world.poll("cancel", "pause"))
    assert world.running.stops == [(30, False)] and world.stopper.is_stopping
    assert ("b", "CANCELLED") in world.journal.states and world.commits.answers == "cancel"
    assert world.said == ["cancelled: stopping 1 running step(s)"]
    assert world.schedule.is_disturbed and not world.stopper.is_interrupted


@pytest.mark.parametrize("keeps", [True, False])
def test_a_pause_lets_trainings_save_and_may_keep_the_hosts(world: Any, keeps: bool) -> None:
    world.requests.keep_hosts = keeps
    world.act(lambda: world.poll("pause"))
    assert world.running.stops == [(30, True)] and world.schedule.starts_nothing
    assert world.stopper.keeps_hosts is keeps and world.commits.answers == "pause"
    world.act(lambda: world.poll("resume"))
    assert not world.schedule.starts_nothing and not world.stopper.is_stopping
    assert world.said[-1] == "the pause was cancelled"


def test_a_resume_without_a_pause_does_nothing(world: Any) -> None:
    world.act(lambda: world.poll("resume"))
    assert not world.said and not world.running.stops


def test_the_store_is_asked_only_when_there_is_news_and_no_group_is_on_its_way(
    world: Any,
) -> None:
    world.act(lambda: world.poll(""))
    world.act(world.stopper.poll_requests)
    assert world.requests.looks == 1
    world.commits.busy = True
    world.act(lambda: world.poll("cancel"))
    assert world.requests.looks == 1 and not world.running.stops


def test_a_run_that_another_worker_has_is_left(world: Any) -> None:
    world.requests.is_taken = True
    world.act(lambda: world.poll("cancel"))
    assert world.stopper.is_abandoned and not world.running.stops


def test_each_interrupt_does_more(world: Any) -> None:
    installs: list[object] = []

    async def stop(*what: object) -> None:
        installs.append(what)

    world.hooks.append(Of(stop=stop))
    stopper = world.stopper
    world.act(stopper.interrupt)
    assert stopper.is_interrupted and not stopper.is_stopping and not world.running.stops
    assert len(installs) == 1 and world.said[0].startswith("finishing 1 running step(s)")
    world.act(stopper.interrupt)
    assert world.running.stops == [(10, False)] and not stopper.is_abandoned
    assert ("b", "CANCELLED") in world.journal.states
    world.act(stopper.interrupt)
    assert stopper.is_abandoned and len(world.said) == 2


def test_a_sigterm_counts_as_two_interrupts(world: Any) -> None:
    world.act(world.stopper.terminate)
    assert world.running.stops == [(10, False)]
    world.act(world.stopper.interrupt)
    assert world.stopper.is_abandoned


def test_a_limit_is_said_once_and_stops_what_runs(world: Any) -> None:
    world.act(lambda: world.stopper.money_is_spent(2.5))
    world.act(lambda: world.stopper.money_is_spent(2.5))
    assert world.stopper.limit == "the limit of the whole run is 2.50 USD (`limits.cost`)"
    assert world.running.stops == [(30, False)] and len(world.said) == 1
    world.act(lambda: world.stopper.time_is_up(60))
    assert world.stopper.limit == "the limit of the whole run is 60 s (`limits.time`)"
    assert world.running.stops[1:] == [(10, False)]


def test_a_worker_that_is_asked_to_end_waits_twenty_seconds_and_then_leaves() -> None:
    handover = Handover()
    with virtual() as loop:
        world = World(handover)

        async def beat(seconds: float) -> None:
            import asyncio

            world.stopper.hand_over()
            await asyncio.sleep(seconds)

        loop.run_until_complete(beat(1))
        assert not world.said
        handover()
        loop.run_until_complete(beat(19))
        loop.run_until_complete(beat(0))
        assert not world.stopper.is_abandoned and len(world.said) == 1
        assert world.schedule.starts_nothing and world.schedule.is_disturbed
        loop.run_until_complete(beat(2))
        assert world.stopper.is_abandoned and not world.running.stops


@pytest.mark.parametrize(("request_", "left"), [("", True), ("pause", False), ("cancel", False)])
def test_what_is_unfinished_is_left_unless_the_run_is_to_end(request_: str, left: bool) -> None:
    handover = Handover()
    handover()
    with virtual() as loop:
        world = World(handover)

        async def end() -> None:
            if request_:
                world.poll(request_)
            world.stopper.hand_over()
            world.stopper.leave_unfinished()

        loop.run_until_complete(end())
        assert world.stopper.is_abandoned is left


def test_without_a_handover_nothing_is_left(world: Any) -> None:
    world.act(world.stopper.hand_over)
    world.act(world.stopper.leave_unfinished)
    assert not world.stopper.is_abandoned
