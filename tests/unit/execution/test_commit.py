"""What a run notes is stored in groups, in order and once, also when the disk refuses one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runner.errors import Infrastructure
from runner.execution.steps.commit import GroupCommit, Keys
from runner.planning.schedule import Move
from runner.secrets import Masker
from runner.storage.records.database import Database
from runner.storage.records.runs import Event, RunRow
from runner.storage.workspace import Workspace


class Heard:
    """What a listener was told: numbers and steps."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []

    def events(self, batch: Sequence[Event]) -> None:
        self.told += [(event.seq, event.id) for event in batch]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def commits(tmp_path: Path, heard: Heard) -> Iterator[GroupCommit]:
    with Workspace.open(tmp_path) as ws:
        ws.store.runs.submit(RunRow("r1", "tool@1", "p", {}, str(tmp_path)))
        fence = ws.store.runs.claim("r1", "w")
        assert fence is not None
        commits = GroupCommit(ws, "r1", fence, "tool@1", heard, {}, lambda _text: None, Masker())
        yield commits
        commits.keys.close()


def _sent(commits: GroupCommit) -> None:
    landed = threading.Event()
    commits.send(landed.set)
    assert landed.wait(60)


def _refuse(database: Database, landed: Callable[[], None]) -> None:
    database._connection.execute("ROLLBACK")
    database._failed = Infrastructure("the disk is full")
    landed()


def test_what_a_full_disk_refused_is_stored_with_the_next_group_before_it(
    commits: GroupCommit, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Database, "_wait_for_disk", _refuse)
        commits.add_move(Move("step", "a", "WAITING", "READY"))
        commits.after_flush(lambda: done.append("a"))
        _sent(commits)
        commits.add_move(Move("step", "b", "WAITING", "READY"))
        commits.after_flush(lambda: done.append("b"))
        with pytest.raises(Infrastructure):
            commits.land()
    assert not commits.busy and not heard.told and not done and commits.size == 2
    _sent(commits)
    assert not done  # stored, and nobody has been told
    commits.land()
    numbers = [number for number, _ in heard.told]
    assert [step for _, step in heard.told] == done == ["a", "b"] and numbers == [
        numbers[0],
        numbers[0] + 1,
    ]
    assert [event.id for event in commits.ws.store.runs.events("r1", after=numbers[0] - 1)] == [
        "a",
        "b",
    ]


def test_what_is_noted_while_the_disk_is_waited_for_waits_for_its_own_group(
    commits: GroupCommit, heard: Heard
) -> None:
    done: list[str] = []
    commits.add_move(Move("step", "a", "WAITING", "READY"))
    _sent(commits)
    commits.add_move(Move("step", "b", "WAITING", "READY"))
    commits.after_flush(lambda: done.append("b"))
    commits.land()
    assert [step for _, step in heard.told] == ["a"] and not done
    commits.flush()
    assert [step for _, step in heard.told] == ["a", "b"] and done == ["b"]


def test_a_key_that_is_about_to_be_let_go_is_kept_when_it_is_held_again(
    commits: GroupCommit,
) -> None:
    key = "ab" * 32
    assert commits.hold(key, "a")
    commits.release_after_flush(key)
    commits.add_move(Move("step", "a", "WAITING", "READY"))
    _sent(commits)
    let_go: list[str] = []
    commits.keys.release = let_go.append  # type: ignore[method-assign]
    assert commits.hold(key, "a")
    commits.land()
    assert not let_go


def test_a_key_that_one_step_holds_is_refused_to_another_until_it_is_let_go(
    commits: GroupCommit,
) -> None:
    key = "ab" * 32
    assert commits.hold(key, "a") and not commits.hold(key, "b")
    commits.release_after_flush(key)
    assert not commits.hold(key, "b")  # what the first made is not stored yet
    commits.flush()
    assert commits.hold(key, "b") and not commits.hold(key, "a")


def test_what_a_run_holds_is_held_against_the_other_threads_of_its_process(tmp_path: Path) -> None:
    one, other, third = (
        Keys(str(tmp_path / "keys")),
        Keys(str(tmp_path / "keys")),
        Keys(str(tmp_path / "keys")),
    )
    assert (
        one.try_hold("ab" * 32)
        and not other.try_hold("ab" * 32)
        and not one.alone()
        and not other.alone()
    )
    third.close()
    assert not other.try_hold("ab" * 32)
    one.release("ab" * 32)
    assert other.try_hold("ab" * 32)
    one.close()
    other.close()
    last = Keys(str(tmp_path / "keys"))
    assert last.alone()
    last.close()
