"""What is done with an attempt that is over, by how it ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit, HostLost, Unreachable
from runner.errors import Infrastructure, StoreUnavailable
from runner.execution.steps.ending import Ender
from runner.execution.steps.failing import Cause
from runner.planning.schedule import EARLY


class Situation:
    """One running step `a`, and what its neighbours are asked when it is over."""

    def __init__(self, root: Path) -> None:
        self.calls, self.said = list[str](), list[str]()
        self.cause: Cause | Exception | None = None
        self.image, self.cleaning_fails = "", False
        self.key: str | None = "k"
        self.ends = list[Any]()
        self.path = root / "a"
        members = [
            Of(name=name, paths=lambda attempt: Of(cwd=f"/there/{attempt}"))
            for name in ("h0", "h1")
        ]
        self.place = Of(name="h0", members=members[:1])
        self.members = members
        self.parts: list[Any] = []

    # -- as each neighbour

    @property
    def has_ended(self) -> bool:
        return bool(self.ends)

    def next_end(self) -> Any:
        return self.ends.pop(0)

    def pop(self, id: str) -> Any:
        self.calls.append(f"pop {id}")
        return Of(
            spec=None, place=self.place, key=self.key, result="result",
            task=Of(attempt="a", parts=self.parts), directory=Of(path=str(self.path)),
            logs=[f"{self.path}.log"], release_lock=lambda: self.calls.append("unlock"),
        )  # fmt: skip

    def lose(self, place: Any, error: Exception) -> None:
        self.calls.append(f"lost {place.name}: {error}")

    def container_image(self, _spec: Any, _place: Any) -> str:
        return self.image

    def containers_of(self, place: Any) -> Any:
        async def clean_up(cwd: str, exit: Exit) -> None:
            self.calls.append(f"clean {place.name} {cwd} {exit.code}")
            if self.cleaning_fails:
                raise Unreachable("no answer")

        return Of(clean_up=clean_up)

    def forget(self, id: str) -> None:
        self.calls.append(f"forget {id}")

    async def cause_of(self, _id: str, _attempt: Any, _end: Any) -> Cause | None:
        if isinstance(self.cause, Exception):
            raise self.cause
        return self.cause

    def queue_again(self, id: str, _attempt: Any) -> None:
        self.calls.append(f"queue {id}")

    def stop_early(self, id: str, _attempt: Any, cause: Cause, exit: Exit | None) -> None:
        self.calls.append(f"stop {id}: {cause.words}, exit {exit and exit.code}")

    def fail(self, id: str, _attempt: Any, cause: Cause, exit: Exit | None) -> None:
        self.calls.append(f"fail {id}: {cause.words}, exit {exit and exit.code}")

    def store(self, id: str, _attempt: Any, exit: Exit, result: object) -> None:
        self.calls.append(f"store {id}: {result}, exit {exit.code}")

    def release_after_flush(self, key: str) -> None:
        self.calls.append(f"release {key}")

    def say(self, words: str) -> None:
        self.said.append(words)

    def end(self, end: Any) -> list[str]:
        me: Any = self
        self.ends.append(("a", end))
        ender = Ender(me, me, me, me, me, me, me, me)
        assert asyncio.run(ender.end_next())
        return self.calls


AFTER = ["forget a", "unlock", "release k"]


@pytest.fixture
def now(tmp_path: Path) -> Situation:
    return Situation(tmp_path)


def test_the_outputs_of_a_success_are_stored_and_its_claims_released(now: Situation) -> None:
    assert now.end(Exit(0)) == ["pop a", "store a: result, exit 0", *AFTER] and now.said == []


def test_nothing_is_done_while_no_attempt_is_over(now: Situation) -> None:
    me: Any = now
    assert not asyncio.run(Ender(me, me, me, me, me, me, me, me).end_next()) and not now.calls


def test_a_failure_is_recorded_with_its_exit_if_there_is_one(now: Situation) -> None:
    now.cause = Cause("exit", "exit 2")
    assert now.end(Exit(2)) == ["pop a", "fail a: exit 2, exit 2", *AFTER]
    now.calls = []
    now.cause = Cause("disk", "no space")
    assert now.end(Infrastructure("full")) == ["pop a", "fail a: no space, exit None", *AFTER]


def test_an_attempt_that_was_stopped_early_has_not_failed(now: Situation) -> None:
    now.cause = Cause(EARLY, "loss is behind")
    assert now.end(Exit(0)) == ["pop a", "stop a: loss is behind, exit 0", *AFTER]


def test_a_lost_host_is_reported_before_the_failure(now: Situation) -> None:
    now.cause = Cause("lost", "gone")
    end = HostLost("gone")
    assert now.end(end) == ["pop a", "lost h0: gone", "fail a: gone, exit None", *AFTER]


def test_an_attempt_that_never_began_is_queued_again_without_a_diagnosis(now: Situation) -> None:
    now.cause = ValueError("not asked")
    assert now.end(Exit(1, reason="busy")) == ["pop a", "queue a", *AFTER]


def test_an_attempt_without_a_key_releases_none(now: Situation) -> None:
    now.key = None
    assert now.end(Exit(0))[-1] == "unlock"


def test_claims_are_released_although_the_diagnosis_breaks(now: Situation) -> None:
    now.cause = ValueError("oops")
    with pytest.raises(ValueError, match="oops"):
        now.end(Exit(0))
    assert now.calls == ["pop a", *AFTER]


def test_a_store_without_an_answer_leaves_the_attempt_to_the_next_worker(now: Situation) -> None:
    with pytest.raises(StoreUnavailable):
        now.end(StoreUnavailable("no answer"))
    assert now.calls == []


def test_files_that_the_step_replaced_by_others_are_said(now: Situation) -> None:
    now.path.with_name("a.log").mkdir()
    now.path.with_name("a.metrics").write_text("{}")
    now.end(Exit(0))
    assert now.said == ["a: the step replaced its log by a special file; nothing is kept"]


@pytest.mark.parametrize("fails", [False, True])
def test_containers_are_removed_on_each_host_of_the_step(now: Situation, fails: bool) -> None:
    now.image, now.cleaning_fails = "pytorch", fails
    assert now.end(Exit(0))[1:3] == ["clean h0 /there/a 0", "store a: result, exit 0"]
    now.calls, now.place.members = [], now.members
    now.parts = [Of(attempt="a.0"), Of(attempt="a.1")]
    assert now.end(Exit(1))[1:3] == ["clean h0 /there/a.0 1", "clean h1 /there/a.1 1"]


def test_containers_of_an_attempt_without_an_exit_are_left(now: Situation) -> None:
    now.image, now.cause = "pytorch", Cause("driver", "far")
    assert now.end(Unreachable("far")) == ["pop a", "fail a: far, exit None", *AFTER]
