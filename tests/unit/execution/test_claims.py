"""Keys and states are held by one attempt at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.digest import Digest
from runner.execution.steps.claims import KEY_ELSEWHERE, KEY_IN_USE, KeyClaims, StateClaims
from runner.execution.steps.commit import Keys
from runner.planning.step import StateSpec, StepSpec
from runner.storage import checkpoints
from tests.unit.execution.fakes import SimulatedRun, exits, runs_for, writes

SUB = """recipe: sub@1
summary: A test
inputs: {rank: {type: integer}}
steps:
  data: {run: "echo data", outputs: {o: data.txt}}
  train: {run: "echo {{ inputs.rank }} {{ steps.data.o }}"}
"""
TWINS = """
steps:
  s: {matrix: {rank: [4, 8]}, uses: ./sub.yaml, with: {rank: "{{ matrix.rank }}"}}
"""
DATA = ("s[rank=4]/data", "s[rank=8]/data")


def test_steps_that_make_the_same_run_once_and_both_publish(tmp_path: Path) -> None:
    (tmp_path / "sub.yaml").write_text(SUB)
    slow = runs_for(5, writes(data="1"))
    run = SimulatedRun(tmp_path, TWINS, dict.fromkeys(DATA, slow))
    assert run.run().state == "COMPLETED" and len(run.agents[""].started) == 3
    assert "another step of this run produced the result" in [event.reason for event in run.steps]
    found = [(tmp_path / f"s[rank={rank}]/data.txt").read_text() for rank in (4, 8)]
    assert found == ["1", "1"]


def test_the_second_runs_by_itself_when_the_first_fails(tmp_path: Path) -> None:
    (tmp_path / "sub.yaml").write_text(SUB)
    run = SimulatedRun(tmp_path, TWINS, dict.fromkeys(DATA, exits(1)))
    report = run.run()
    assert report.counts["FAILED"] >= 1 and set(run.started) <= set(DATA)


def test_a_key_that_another_run_holds_is_waited_for(tmp_path: Path) -> None:
    recipe = 'steps: {a: {run: "true", outputs: {o: a.txt}}}'
    SimulatedRun(tmp_path, recipe, {"a": exits(1)}).run()
    held: list[Keys] = []

    async def release(run: SimulatedRun) -> None:
        await run.until(lambda: run.loop)
        key = run.own.steps.verdicts["a"].key
        other = Keys(str(tmp_path / ".recipe" / "locks" / "keys"))
        assert other.try_hold(key)
        held.append(other)
        seen.append(len(run.agents[""].started))
        await run.until(lambda: run.own.schedule._resting)
        seen.append(len(run.agents[""].started))
        other.release(key)
        other.close()

    seen: list[int] = []
    run = SimulatedRun(tmp_path, recipe, {"a": writes(a="1")}, then=release)
    assert run.run().state == "COMPLETED" and run.agents[""].started == ["a"]
    assert seen == [0, 0]


KEY = Digest("k" * 64)


class Claiming:
    """A run that claims the key of step `a`, and what its owners are asked for."""

    def __init__(self, *, delivers: bool = False, contended: bool = False) -> None:
        self.calls = list[tuple[object, ...]]()
        self.is_free = self.is_alone = True
        self.is_ours = self.is_made_now = False
        self.made = set[str]()
        me: Any = self
        self.keys = Of(alone=lambda: self.is_alone)
        ws: Any = Of(delivers=delivers, remote_cache=None)
        self.claims = KeyClaims(ws, me, me, me, me, contended=contended)

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.calls.append((name, *words))

    def hold(self, _key: str, _id: str) -> bool:
        return self.is_free

    def holds(self, _key: str) -> bool:
        return self.is_ours

    def is_made(self, _n: int) -> bool:
        self.calls.append(("is_made",))
        return self.is_made_now

    def claim(self) -> bool:
        self.calls.clear()
        return self.claims.claim("a", 7, KEY)


@pytest.mark.parametrize(("delivers", "delay"), [(False, KEY_IN_USE), (True, KEY_ELSEWHERE)])
def test_a_step_whose_key_is_in_use_is_delayed(delivers: bool, delay: float) -> None:
    run = Claiming(delivers=delivers)
    run.is_free = False
    assert not run.claim() and run.calls == [("rest", "a", delay)]


@pytest.mark.parametrize(("is_ours", "looks"), [(True, 0), (False, 1)])
def test_after_a_key_of_another_run_results_and_left_attempts_are_looked_for(
    is_ours: bool, looks: int
) -> None:
    run = Claiming()
    assert run.claim() and run.calls == []
    run.is_free, run.is_ours = False, is_ours
    assert not run.claim()
    run.is_free = True
    assert run.claim() and run.calls == [("look_again",), ("is_made",)][: 2 * looks]


@pytest.mark.parametrize(
    ("made", "who"), [(set(), "another run"), ({KEY}, "another step of this run")]
)
def test_a_key_with_a_result_is_let_go_and_its_step_is_judged_again(
    made: set[str], who: str
) -> None:
    run = Claiming(contended=not made)
    run.made, run.is_made_now = made, True
    assert not run.claim()
    assert run.calls[-2:] == [("release", KEY), ("judge_again", "a", f"{who} produced the result")]


@pytest.mark.parametrize(
    ("holder", "is_running", "is_open"),
    [
        ("", True, True),
        ("k" * 24 + "-r0", True, True),
        ("other", False, True),
        ("other", True, False),
    ],
)
def test_a_checkpoint_directory_is_open_unless_another_attempt_runs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str, is_running: bool, is_open: bool
) -> None:
    async def insist(ask: Any) -> bool:
        return bool(ask())

    async def stop(job: Any, _grace: object) -> None:
        stopped.append(job.key)

    async def restore(*_words: object) -> None:
        pass

    stopped, released = list[str](), list[str]()
    lock = Of(release=lambda: released.append(""))
    place = Of(contact=Of(insist=insist), stop=stop)
    ws: Any = Of(home=tmp_path, locks=Of(try_hold=lambda _name: lock))
    orphans: Any = Of(
        is_unreachable=lambda _name: False,
        place_of=lambda _name: place,
        is_running=lambda _name: is_running,
    )
    preparer: Any = Of(processes=lambda *_words: None)
    shared: Any = Of(restore=restore)
    monkeypatch.setattr(checkpoints, "holder", lambda _root: holder)
    monkeypatch.setattr(checkpoints, "key", lambda *_words: "s")
    state = StateSpec("ckpt", "ckpt", "step-*", None, None)
    spec = StepSpec("r@1", "a", {})._replace(state=[state])
    attempt: Any = Of(spec=spec, number=0, place=None, world=None, id="a", key=KEY, lock=None)
    claims = StateClaims(ws, preparer, orphans, shared, {})
    assert asyncio.run(claims.open(attempt)) is is_open
    assert stopped == ([] if is_open else [holder]) and bool(released) is not is_open
    assert (attempt.lock is lock) is is_open
