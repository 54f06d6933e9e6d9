"""An attempt that holds its claims begins, goes on, waits again or fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import HostLost, Unreachable
from runner.errors import CannotRun, StoreUnavailable
from runner.execution.steps.failing import Cause
from runner.execution.steps.launching import Launcher
from runner.execution.steps.reattaching import NotNow
from runner.planning.schedule import LIMIT


class Situation:
    """One step `a` to launch, and what its neighbours answer."""

    def __init__(self) -> None:
        self.calls, self.failed = list[str](), list[Cause]()
        self.trouble: dict[str, Exception] = {}
        self.found: Any = None
        self.gpus: Any = ("gpu0",)
        self.is_stopping = self.is_interrupted = False
        self.limit = ""
        self.attempt: Any = Of(
            id="a", name="", key="k", number=3, gpus=0, devices=(), place=Of(name="h1"),
            release_lock=lambda: self.calls.append("unlock"), stop=lambda: "stop a",
        )  # fmt: skip

    def _do(self, what: str) -> None:
        self.calls.append(what)
        for each, error in self.trouble.items():
            if what.startswith(each):
                raise error

    # -- as each neighbour

    def name_of(self, _attempt: Any) -> str:
        return "run-7"

    def record(self, id: str, attempt: Any) -> None:
        self.calls.append(f"record {attempt.name}")

    def check_targets(self, n: int) -> None:
        self._do(f"check {n}")

    async def pick_gpus(self, _id: str, _place: Any, number: int) -> Any:
        self._do(f"pick {number}")
        return self.gpus

    async def prepare(self, _attempt: Any) -> None:
        self._do("prepare")

    async def search(self, _attempt: Any) -> Any:
        self._do("find")
        return self.found

    def begin(self, _id: str, attempt: Any) -> None:
        self.calls.append(f"begin {attempt.name}")

    def run_in_background(self, what: Any) -> None:
        self.calls.append(what)

    def lose(self, place: Any, error: Exception) -> None:
        self.calls.append(f"lost {place.name}: {error}")

    def queue_again(self, id: str, key: Any) -> None:
        self.calls.append(f"queue {id} {key}")

    def fail(self, id: str, cause: Cause) -> None:
        self.calls.append(f"fail {id}")
        self.failed.append(cause)

    def release_after_flush(self, key: str) -> None:
        self.calls.append(f"release {key}")

    def launch(self) -> list[str]:
        me: Any = self
        finder: Any = Of(find=self.search)
        launcher = Launcher(me, me, me, me, finder, me, me, me, me, me, me)
        asyncio.run(launcher.launch("a", self.attempt))
        return self.calls


BEGINNING = ["check 3", "find", "record run-7"]


@pytest.fixture
def now() -> Situation:
    return Situation()


def test_a_new_attempt_is_recorded_prepared_and_begun(now: Situation) -> None:
    assert now.launch() == [*BEGINNING, "prepare", "begin run-7"]
    assert now.attempt.name == "run-7"


def test_an_attempt_of_an_earlier_worker_goes_on_as_it_is(now: Situation) -> None:
    now.found = Of(name="run-1", stop=lambda: "stop run-1")
    assert now.launch() == ["check 3", "find", "record run-1", "begin run-1"]


@pytest.mark.parametrize(("name", "stops"), [("run-1", "stop run-1"), ("", "stop a")])
def test_an_attempt_that_is_not_wanted_any_more_is_stopped_at_once(
    now: Situation, name: str, stops: str
) -> None:
    now.is_stopping = True
    now.found = Of(name=name, stop=lambda: f"stop {name}") if name else None
    assert now.launch()[-1] == stops


def test_gpus_that_an_earlier_attempt_held_are_picked_before_the_preparation(
    now: Situation,
) -> None:
    now.attempt.gpus = 2
    assert now.launch() == [*BEGINNING, "pick 2", "prepare", "begin run-7"]
    assert now.attempt.devices == ("gpu0",)


def test_gpus_that_are_picked_already_are_not_picked_again(now: Situation) -> None:
    now.attempt.gpus, now.attempt.devices = 2, ("gpu0", "gpu1")
    assert now.launch() == [*BEGINNING, "prepare", "begin run-7"]


def test_a_step_without_free_gpus_waits_again(now: Situation) -> None:
    now.attempt.gpus, now.gpus = 2, ()
    assert now.launch() == [*BEGINNING, "pick 2", "unlock", "queue a k"]


@pytest.mark.parametrize("when", ["check", "find", "prepare"])
@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (NotNow(), ["queue a k"]),
        (HostLost("gone"), ["lost h1: gone", "queue a k"]),
        (StoreUnavailable("no answer"), ["queue a k"]),
        (CannotRun("no", fix="do"), ["release k", "fail a"]),
        (Unreachable("far"), ["release k", "fail a"]),
        (OSError(13, "Permission denied", "/x/y"), ["release k", "fail a"]),
    ],
)
def test_an_attempt_that_cannot_begin_is_recorded_and_waits_or_fails(
    now: Situation, when: str, error: Exception, calls: list[str]
) -> None:
    now.trouble = {when: error}
    found = now.launch()
    assert found[-len(calls) - 1 :] == ["unlock", *calls]
    assert found.count("record run-7") == 1 and "begin run-7" not in found
    assert ("prepare" in found) == (when == "prepare")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (CannotRun("no", fix="do"), Cause("error", "no", "do")),
        (Unreachable("far"), Cause("error", "far")),
        (OSError(13, "Permission denied", "/x/y"), Cause("error", "/x/y: Permission denied")),
        (OSError(13, "Permission denied"), Cause("error", "run-7: Permission denied")),
    ],
)
def test_the_failure_of_a_launch_has_the_words_of_its_error(
    now: Situation, error: Exception, cause: Cause
) -> None:
    now.trouble = {"prepare": error}
    now.launch()
    assert now.failed == [cause]


def test_a_launch_without_a_key_releases_none(now: Situation) -> None:
    now.attempt.key, now.trouble = None, {"prepare": CannotRun("no")}
    assert now.launch()[-2:] == ["unlock", "fail a"]


@pytest.mark.parametrize(
    ("error", "limit", "interrupted", "cause"),
    [
        (CannotRun("no"), "60 s", False, Cause(LIMIT, "stopped: 60 s")),
        (CannotRun("no"), "60 s", True, Cause(LIMIT, "stopped: 60 s")),
        (CannotRun("no"), "", True, Cause("stopped", "interrupted")),
        (Unreachable("far"), "", True, Cause("error", "far")),
    ],
)
def test_an_installation_that_the_run_stopped_has_not_failed(
    now: Situation, error: Exception, limit: str, interrupted: bool, cause: Cause
) -> None:
    now.trouble, now.limit, now.is_interrupted = {"prepare": error}, limit, interrupted
    now.launch()
    assert now.failed == [cause]
