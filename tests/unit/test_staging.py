"""Which undeclared file an error names, and what an attempt directory that is done with is good for."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.digest import of_value
from runner.execution.scrap import Scrap
from runner.execution.staging import Attempt, undeclared
from runner.planning.plan import OPTIONAL, Node
from runner.storage.artifacts import Objects


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("cat: data/rows.csv: No such file or directory", "data/rows.csv"),
        ("python: can't open file 'ATTEMPT/helper.py'", "helper.py"),
        ("WORKSPACE/helper.py is not there", "helper.py"),
        ("FileNotFoundError: 'declared.txt'", None),
        ("nothing.txt is not in the workspace", None),
        ("folder/inner.txt lies in what is declared", None),
    ],
)
def test_a_name_that_is_in_the_workspace_and_was_not_declared_is_found(tmp_path: Path, said: str, named: str | None) -> None:
    for name in ("data/rows.csv", "helper.py", "declared.txt", "folder/inner.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    attempt = f"{tmp_path}/.recipe/attempts/a-1"
    words = said.replace("ATTEMPT", attempt).replace("WORKSPACE", str(tmp_path))
    assert undeclared(words, tmp_path, attempt, ["declared.txt", "folder"]) == named


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    for name in ("objects", "partial", "attempts"):
        (tmp_path / name).mkdir()
    return tmp_path / "attempts"


def _staged(path: Path, scrap: Scrap, *names: str) -> Attempt:
    attempt = Attempt(str(path))
    attempt.begin(scrap)
    for name in names:
        attempt.staged[name] = attempt._put(attempt.place(name), name.encode(), executable=False)
    attempt.ready()
    return attempt


def _node(*outputs: tuple[str, str, int]) -> Node:
    return Node("step", of_value("test", []), [], [], 0, [], [], [], [], [list(output) for output in outputs], "", "", 0)


def test_an_attempt_is_hollow_once_what_it_made_was_moved_away_and_no_note_says_where(attempts: Path, tmp_path: Path) -> None:
    objects, node = Objects(tmp_path), _node(("o", "o.txt", 0))
    for noted in (False, True):
        attempt = _staged(attempts / f"a-{noted}", Scrap(str(attempts), "tag", 9), "in.txt")
        (attempts / f"a-{noted}" / "o.txt").write_text(f"made {noted}")
        assert not attempt.hollow
        attempt.collect(node, objects, noted=noted)
        assert attempt.hollow is not noted
    nothing = _staged(attempts / "b", Scrap(str(attempts), "tag", 9))
    nothing.collect(_node(("o", "o.txt", OPTIONAL)), objects)
    assert not nothing.hollow  # it has done what it was for, and nothing but its directory says so


def test_a_directory_that_holds_more_than_was_put_there_is_not_used_again(attempts: Path) -> None:
    scrap = Scrap(str(attempts), "tag", 9)
    _staged(attempts / "a", scrap, "in.txt", "folder/in.txt").retire(scrap)
    again = _staged(attempts / "b", scrap, "folder/other.txt")
    assert sorted(path.name for path in (attempts / "b").rglob("*")) == ["folder", "other.txt"]
    assert not (attempts / "a").exists() and (attempts / "b/folder/other.txt").read_text() == "folder/other.txt"
    (attempts / "b/folder/left.txt").touch()
    again.retire(scrap)
    assert not (attempts / "b").exists() and scrap.take(str(attempts / "c")) is None


def test_a_spare_that_somebody_deleted_is_passed_over(attempts: Path) -> None:
    scrap = Scrap(str(attempts), "tag", 9)
    older, younger = (_staged(attempts / name, scrap, "in.txt") for name in "ab")
    older.retire(scrap)
    younger.retire(scrap)
    (attempts / "b/in.txt").unlink()
    (attempts / "b").rmdir()
    _staged(attempts / "c", scrap, "in.txt")
    assert (attempts / "c/in.txt").read_text() == "in.txt" and not (attempts / "a").exists()
