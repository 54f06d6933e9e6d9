"""What a plan needs to know of the disk, without a workspace."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.survey.caller_files import GlobMatcher

NAMES = (
    "a",
    "ab",
    "b.txt",
    "a.txt",
    ".a",
    ".b.txt",
    "[a]",
    "é",
    "A",
    "sub",
    "sub/a.txt",
    "sub/.c",
    "sub/deep/b.txt",
    "other/a",
)
PARTS = st.sampled_from(
    [
        "*",
        "a*",
        "*.txt",
        "?",
        "[ab]*",
        "[!a]*",
        ".*",
        "sub",
        "**",
        "a",
        "[[]a]",
        "*b*",
        "A*",
        "s*",
        ".",
    ]
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in NAMES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if name != "sub" else path.mkdir()
    (root / "link").symlink_to("sub")
    return root


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
@given(
    patterns=st.lists(st.lists(PARTS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=4)
)
def test_patterns_match_what_glob_matches(tree: Path, patterns: list[str]) -> None:
    folders = GlobMatcher(tree)
    for pattern in [*patterns, f"{tree}/{patterns[0]}", f"none/{patterns[0]}", f"{patterns[0]}/"]:
        found = glob.glob(pattern, root_dir=tree, recursive=True)
        # `none/**` matches `none/` for `glob`, though that is not there.
        there = [each for each in found if each[-1] != "/" or (tree / each).is_dir()]
        assert folders.matches(pattern) == sorted(there), pattern


def test_a_folder_is_listed_once_for_a_thousand_patterns(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    found: Callable[..., list[str]] = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or found(path))
    folders = GlobMatcher(tree)
    assert sum(len(folders.matches(f"sub/a{number}*.txt")) for number in range(1000)) == 0
    assert folders.matches("sub/a*.txt") == ["sub/a.txt"]
    assert listed == [str(tree / "sub")]
