"""What an attempt says of inputs that would not hold still."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runner.execution.staging import Attempt
from runner.storage.artifacts import Objects
from runner.storage.files import Changed, Content, DigestCache


class Restless(DigestCache):
    """A disk on which everything changes while it is read."""

    def contents(self, paths: Iterable[str]) -> dict[str, Content | None]:
        raise Changed(next(iter(paths)))


def test_a_source_that_does_not_hold_still_is_stale(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path / "a"), sources={"in.txt": "f:0"}, doubtful=["other"])
    assert attempt.stale(Restless(tmp_path)) == ["other", "in.txt"]


def test_a_link_whose_target_does_not_hold_still_was_changed(tmp_path: Path) -> None:
    attempt = Attempt(str(tmp_path / "a"), links={"data": ("in", "t:0")})
    assert attempt.tampered(Restless(tmp_path), Objects(tmp_path)) == ["data"]
