"""How an attempt ends, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit, HostLost, Unreachable
from runner.errors import CannotRun, Infrastructure
from runner.execution.steps.attempt_executor import AttemptExecutor
from runner.execution.steps.bell import Bell
from runner.execution.steps.running_attempts import RunningAttempts
from runner.language.step_options import StepOptions


class SharedStates:
    @contextlib.asynccontextmanager
    async def upload_during(self, _attempt: Any, _spec: Any) -> AsyncIterator[None]:
        yield


class World:
    """An attempt whose host does something."""

    def __init__(self, root: Path, does: object, *, job: object = None) -> None:
        self.does, self.stops, self.entered = does, 0, list[Any]()
        self.left = list[Any]()
        capacity = Of(
            reserve=lambda *words: self.entered.append(words),
            release=lambda *words: self.left.append(words),
        )
        place = Of(run_attempt=self._run, lost="", capacity=capacity)
        self.attempt: Any = Of(
            place=place,
            task=Of(job=job),
            spec=Of(options=StepOptions()),
            name="x",
            log=str(root / "x.log"),
        )
        self.attempt.save_asked = self.attempt.stop_asked = False
        self.attempt.wants, self.attempt.devices, self.attempt.stop = {"cpus": 1}, (), self._stop
        self.running = RunningAttempts(Bell())
        self.order = list[str]()

    async def _run(self, task: Any) -> Any:
        if isinstance(self.does, Exception):
            raise self.does
        if self.does is None:
            await asyncio.sleep(3600)
        await task.make_room()
        self.order.append("collected")
        return Of(exit=self.does)

    def _free(self, _id: str) -> bool:
        """Launch a queued step as the loop does: in one turn, and its command in the next."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.order.append, "launched")
        return True

    async def _stop(self) -> None:
        self.stops += 1

    def end(self, *, cancel: bool = False) -> Any:
        async def execute() -> Any:
            shared: Any = SharedStates()
            schedule: Any = Of(make_room=self._free)
            AttemptExecutor(schedule, self.running, shared).begin("a", self.attempt)
            assert "a" in self.running and self.entered == [({"cpus": 1}, ())]
            await asyncio.sleep(0)
            if cancel:
                self.attempt.execution.cancel()
            await asyncio.wait({self.attempt.execution})
            return self.running.next_end() if self.running.has_ended else None

        return asyncio.run(execute())


def test_the_exit_of_a_job_is_its_end_and_its_result_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, Exit(0))
    assert world.end() == ("a", Exit(0)) and world.attempt.result.exit == Exit(0)


def test_the_capacity_of_an_ended_command_is_freed_once_before_its_result(tmp_path: Path) -> None:
    world = World(tmp_path, Exit(0))
    world.end()
    assert world.left == [({"cpus": 1}, ())] and world.order == ["launched", "collected"]
    assert world.running.pop("a") is world.attempt and len(world.left) == 1


@pytest.mark.parametrize("may_fail", ["stopped", "nan"])
def test_an_attempt_that_may_still_fail_keeps_its_capacity(tmp_path: Path, may_fail: str) -> None:
    world = World(tmp_path, Exit(0))
    world.attempt.stop_asked = may_fail == "stopped"
    world.attempt.spec.options = StepOptions(ends_on_nan=may_fail == "nan")
    world.end()
    assert world.left == []
    world.running.pop("a")
    assert world.left == [({"cpus": 1}, ())]


@pytest.mark.parametrize(
    ("exit", "reason"),
    [
        (Exit(1), "stopped"),
        (Exit(0), "exit"),
        (Exit(1, reason="oom"), "oom"),
        (Exit(-9, signal=9, reason="signal"), "stopped"),
    ],
)
def test_a_program_that_saved_when_asked_and_ended_badly_was_stopped(
    tmp_path: Path, exit: Exit, reason: str
) -> None:
    world = World(tmp_path, exit)
    world.attempt.save_asked = True
    assert world.end()[1].reason == reason
    assert World(tmp_path, Exit(1)).end()[1].reason == "exit"


@pytest.mark.parametrize("error", [CannotRun("no"), HostLost("gone"), Unreachable("far")])
def test_an_error_of_the_host_or_of_the_recipe_is_the_end(tmp_path: Path, error: Exception) -> None:
    assert World(tmp_path, error).end() == ("a", error)


def test_an_error_of_the_disk_is_told_with_the_file(tmp_path: Path) -> None:
    (_, end) = World(tmp_path, OSError(28, "No space left on device", "/x/y")).end()
    assert isinstance(end, Infrastructure) and "/x/y" in str(end)
    (_, end) = World(tmp_path, OSError(28, "No space left on device")).end()
    assert "x" in str(end)


@pytest.mark.parametrize(("job", "stops"), [(None, 0), (object(), 1)])
def test_an_error_of_our_own_stops_the_job_and_is_in_the_log(
    tmp_path: Path, job: object, stops: int
) -> None:
    world = World(tmp_path, ValueError("oops"), job=job)
    (_, end) = world.end()
    assert str(end) == "internal error of recipe: ValueError: oops" and world.stops == stops
    assert "Traceback" in (tmp_path / "x.log").read_text()


def test_a_job_whose_stop_was_asked_for_ends_stopped_or_with_its_host(tmp_path: Path) -> None:
    world = World(tmp_path, None)
    world.attempt.stop_asked = True
    assert world.end(cancel=True) == ("a", Exit(None, reason="stopped"))
    world = World(tmp_path, None)
    world.attempt.stop_asked, world.attempt.place.lost = True, "switched off"
    (_, end) = world.end(cancel=True)
    assert isinstance(end, HostLost) and str(end) == "switched off"
    assert World(tmp_path, None).end(cancel=True) is None
