"""What the agent sees of a folder that somebody else writes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.agent import attempts, tree_hash, trees
from runner.agent.request import AgentRequest


@pytest.fixture
def request_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentRequest:
    monkeypatch.chdir(tmp_path)
    return AgentRequest(str(tmp_path), "boot")


@pytest.mark.parametrize("gone", ["state/checkpoint-1", "state/checkpoint-1/weights", "state"])
def test_a_checkpoint_that_its_trainer_deletes_meanwhile_is_not_in_a_look(
    request_there: AgentRequest, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    for name in ("checkpoint-1", "checkpoint-2"):
        os.makedirs(f"state/{name}")
        Path(f"state/{name}/weights").write_text("four")
    Path("state/note").write_text("x")
    scan = os.scandir

    def scanned(path: str) -> Any:
        """A folder that goes does so before it is listed; a file after its folder was listed."""
        if os.path.normpath(path) == gone:
            os.rename(gone, "elsewhere")
        with scan(path) as items:
            listed = _Listed(items)
        if os.path.isfile(gone) and os.path.normpath(path) == os.path.dirname(gone):
            os.unlink(gone)
        return listed

    monkeypatch.setattr(trees.os, "scandir", scanned)
    found, free, total = attempts.look(request_there, "state")
    left = {"note": 1, "checkpoint-2/weights": 4}
    assert {name: size for name, size, _, _ in found} == ({} if gone == "state" else left)
    assert 0 < free <= total


def test_a_tree_that_is_to_be_hashed_whole_may_not_change_meanwhile(
    request_there: AgentRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs("tree/a")
    scan = os.scandir

    def vanishing(path: str) -> Any:
        if os.path.normpath(path) == "tree/a":
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(trees.os, "scandir", vanishing)
    with pytest.raises(FileNotFoundError):
        tree_hash.hash_tree("tree")


class _Listed(list[Any]):
    """What `os.scandir` answers."""

    def __enter__(self) -> _Listed:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_what_cannot_be_read_of_a_failed_attempt_keeps_nothing_else_from_coming(
    request_there: AgentRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs("attempt/shut")
    for name in ("shut/inner", "secret", "trace"):
        Path(f"attempt/{name}").write_text("why")
    scan = os.scandir

    def refused(path: str) -> Any:
        """Also to root, as on a file system of the network."""
        if os.path.basename(path) in ("shut", "secret"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(trees.os, "scandir", refused)
    opened = lambda path: refused(path) if "secret" in path else open(path, "rb")  # noqa: E731, SIM115
    monkeypatch.setattr(attempts, "open_regular", opened)
    assert attempts.remains(request_there, "attempt", 100, 1000, 10) == ([("trace", 3)], 1)


def test_an_attempt_that_an_older_agent_staged_has_no_marks_and_is_judged_by_time(
    request_there: AgentRequest,
) -> None:
    os.makedirs("attempts/a")
    at = f"{request_there.root}/attempts/a"
    for name in ("same", "later", "gone"):
        Path(f"{at}/{name}").write_text(name)
    Path(f"{at}.in").write_bytes(
        b"".join(f"{at}/{name}\0".encode() for name in ("same", "later", "gone"))
    )
    then = os.stat(f"{at}.in").st_mtime
    os.utime(f"{at}/later", (then + 1, then + 1))
    os.unlink(f"{at}/gone")
    outputs, changed = attempts.take(request_there, at, [])
    assert outputs == [] and changed == [f"{at}/later", f"{at}/gone"]
