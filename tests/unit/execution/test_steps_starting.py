"""Queued steps start where they fit, and give back what they claimed if they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import HostLost, Unreachable
from runner.execution.steps import starting
from runner.execution.steps.attempt import Attempt
from runner.execution.steps.failing import Cause
from runner.execution.steps.starting import NO_ROOM, Starter
from runner.planning.step import ResourceSpec, StepSpec

PLAIN = StepSpec("", "a", {})
ON_GPUS = PLAIN._replace(resources=ResourceSpec(gpus=2))


class Situation:
    """One queued step `a`, and what its neighbours answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.failed = list[str](), list[Cause]()
        self.attempt: Attempt | None = None
        self.key: str | None = "k"
        self.spec, self.queue = PLAIN, ["a"]
        self.refusal: Cause | None = None
        self.refused = "a"
        self.is_disturbed = False
        self.out_of_reach = self.orphaned = self.settled = False
        self.claimed = self.opens = True
        self.place: Any = Of(name="h1", lost="")
        self.gpus: Any = ("gpu0", "gpu1")
        self.trouble: OSError | None = None
        monkeypatch.setattr(starting, "world_of", lambda *_words: (None, None))

    # -- as each neighbour

    def startable(self) -> Sequence[str]:
        return self.queue

    def rest(self, id: str, seconds: float) -> None:
        self.calls.append(f"{id} rests for {seconds}")

    def refusal_of(self, id: str) -> Cause | None:
        return self.refusal if id == self.refused else None

    def fail_unstarted(self, id: str, cause: Cause) -> None:
        self.calls.append(f"{id} fails")
        self.failed.append(cause)

    def is_out_of_reach(self, _id: str, _key: Any) -> bool:
        return self.out_of_reach

    def has_orphan(self, _key: Any) -> bool:
        return self.orphaned

    def claim(self, _id: str, _n: int, key: Any) -> bool:
        self.calls.append(f"claim {key}")
        return self.claimed

    def find(self, _node: Any, _spec: Any) -> Any:
        return self.place

    def settle_unplaced(self, _node: Any, _spec: Any) -> bool:
        self.calls.append("no place")
        return self.settled

    async def pick_gpus(self, _id: str, _place: Any, number: int) -> Any:
        self.calls.append(f"pick {number}")
        if isinstance(self.gpus, Exception):
            raise self.gpus
        return self.gpus

    def lose(self, place: Any, error: Exception) -> None:
        self.calls.append(f"lost {place.name}: {error}")

    async def open(self, attempt: Attempt) -> bool:
        attempt.lock = Of(release=lambda: self.calls.append("unlock"))  # type: ignore[assignment]
        if self.trouble is not None:
            raise self.trouble
        return self.opens

    def release(self, key: Any) -> None:
        self.calls.append(f"release {key}")

    async def launch(self, id: str, attempt: Attempt) -> None:
        self.attempt = attempt
        self.calls.append(f"launch {id}")

    def start(self) -> bool:
        verdicts = {"a": Of(key=self.key), "b": Of(key=self.key)}
        node: Any = Of(id="a")
        steps: Any = Of(
            number=lambda _id: 3, node=lambda _id: node, spec=lambda _id: self.spec,
            verdicts=verdicts, facts=None, made={},
        )  # fmt: skip
        me: Any = self
        return asyncio.run(Starter(steps, me, me, me, me, me, me, me, me, me).start_ready())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Situation:
    return Situation(monkeypatch)


def test_a_step_that_fits_is_claimed_and_launched(now: Situation) -> None:
    assert now.start() and now.calls == ["claim k", "launch a"]
    assert now.attempt is not None and now.attempt.number == 3 and now.attempt.place is now.place


def test_nothing_has_moved_if_nothing_is_queued(now: Situation) -> None:
    now.queue = []
    assert not now.start() and now.calls == []


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_step_that_waits_does_not_hide_that_another_moved(now: Situation, first: str) -> None:
    now.queue, now.refused = [first, "b" if first == "a" else "a"], "a"
    now.refusal, now.place = Cause("when", "no such metric"), None
    assert now.start() and sorted(now.calls)[0] == "a fails" and "no place" in now.calls


def test_a_step_without_a_key_claims_none(now: Situation) -> None:
    now.key, now.out_of_reach, now.claimed = None, True, False
    assert now.start() and now.calls == ["launch a"]


def test_a_refused_step_fails_with_the_reason(now: Situation) -> None:
    now.refusal = Cause("when", "no such metric")
    assert now.start() and now.calls == ["a fails"] and now.failed == [now.refusal]


def test_a_key_that_another_run_holds_is_waited_for(now: Situation) -> None:
    now.out_of_reach = True
    assert not now.start() and now.calls == []


@pytest.mark.parametrize("settled", [True, False])
def test_a_step_without_a_place_rests_and_has_moved_if_it_can_have_none(
    now: Situation, settled: bool
) -> None:
    now.place, now.settled = None, settled
    assert now.start() == settled and now.calls == [f"a rests for {NO_ROOM}", "no place"]


def test_gpus_are_picked_before_the_key_is_claimed(now: Situation) -> None:
    now.spec = ON_GPUS
    assert now.start() and now.calls == ["pick 2", "claim k", "launch a"]
    assert now.attempt is not None and [*now.attempt.devices] == [*now.gpus]


def test_an_attempt_of_an_earlier_worker_may_hold_the_gpus(now: Situation) -> None:
    now.spec, now.orphaned = ON_GPUS, True
    assert now.start() and now.calls == ["claim k", "launch a"]


@pytest.mark.parametrize(
    ("gpus", "moved", "calls"),
    [
        ((), False, []),
        (HostLost("gone"), True, ["lost h1: gone"]),
        (Unreachable("no answer"), True, ["a fails"]),
    ],
)
def test_a_step_without_gpus_claims_nothing(
    now: Situation, gpus: object, moved: bool, calls: list[str]
) -> None:
    now.spec, now.gpus = ON_GPUS, gpus
    assert now.start() == moved and now.calls == ["pick 2", *calls]
    assert now.failed == ([Cause("error", "no answer")] if calls == ["a fails"] else [])


def test_a_step_whose_result_another_step_makes_leaves_its_place(now: Situation) -> None:
    now.claimed = False
    assert now.start() and now.calls == ["claim k"]


def test_checkpoints_in_use_are_waited_for_without_the_key(now: Situation) -> None:
    now.opens = False
    assert not now.start()
    assert now.calls == ["claim k", f"a rests for {NO_ROOM}", "unlock", "release k"]


def test_after_a_failure_or_a_request_nothing_is_launched(now: Situation) -> None:
    now.is_disturbed = True
    assert not now.start() and now.calls == ["claim k", "unlock", "release k"]


def test_a_full_disk_fails_the_step_and_gives_back_its_claims(now: Situation) -> None:
    now.trouble = OSError(28, "No space left on device", "/states/x")
    assert now.start() and now.calls == ["claim k", "unlock", "release k", "a fails"]
    assert now.failed[0].reason == "disk" and "/states/x" in now.failed[0].words
    now.key, now.calls = None, []
    now.trouble = OSError(28, "No space left on device")
    assert now.start() and now.calls == ["unlock", "a fails"]
