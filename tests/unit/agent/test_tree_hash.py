"""The agent and the store list a tree alike, and as the documented manifest says."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.agent import tree_hash
from runner.storage.content.files import Entry, entries, scan, tree_id

NAMES = st.sampled_from(["a", "B", "é", "z.txt", "a b", "-", "\udcff", "\U0001f600"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from(["f", "x", "l", "d"])
MANY = 130
"""More files than are scanned without a directory handle."""


def make_tree(top: Path, wanted: Mapping[str, str], count: int) -> list[Entry]:
    """Make a tree, and return its manifest as documented: by plain listing, reading and sorting."""
    for n in range(count):
        (top / f"many{n:03}").write_bytes(b"%d" % n)
    for path, kind in wanted.items():
        at = top / path
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            if kind == "d":
                at.mkdir()
            elif kind == "l":
                at.symlink_to("../a")
            else:
                at.write_bytes(os.fsencode(path) * 3)
                at.chmod(0o755 if kind == "x" else 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue
    found = []
    for folder, folders, names in os.walk(os.fsencode(top)):
        for name in [*names, *folders]:
            at_ = os.path.join(folder, name)
            path = os.fsdecode(os.path.relpath(at_, os.fsencode(top)))
            if os.path.islink(at_):
                target = os.fsdecode(os.readlink(at_))
                found.append(Entry(path, "l", len(target), target))
            elif os.path.isfile(at_):
                data = Path(os.fsdecode(at_)).read_bytes()
                kind = "x" if os.stat(at_).st_mode & 0o100 else "f"
                found.append(Entry(path, kind, len(data), hashlib.sha256(data).hexdigest()))
            elif not os.listdir(at_):
                found.append(Entry(path, "d", 0, ""))
    return sorted(found, key=lambda entry: os.fsencode(entry.path))


@given(st.dictionaries(PATHS, KINDS, max_size=8), st.sampled_from([0, 0, 0, MANY]))
@settings(deadline=None, max_examples=60)
def test_the_agent_and_the_store_list_a_tree_as_documented(
    wanted: dict[str, str], count: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder, "top", "tree")
        top.mkdir(parents=True)
        wanted = {path: kind for path, kind in wanted.items() if kind != "l" or "/" in path}
        expected = make_tree(top, wanted, count)
        assert tree_hash.hash_tree(str(top)) == expected
        assert entries(top) == expected
        assert scan(top) == tree_id(expected)


def test_the_id_of_a_known_tree_never_changes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").write_text("#!/bin/sh\n")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("1,2\n")
    (tmp_path / "link").symlink_to("data/rows.csv")
    assert scan(tmp_path) == "t:eeb174a9e0296057393ff82484ae617ba954802b8d046e9b144259f4e1bc091b"
    rows = [Entry(*row) for row in tree_hash.hash_tree(str(tmp_path))]
    assert tree_id(rows) == scan(tmp_path)


def test_a_special_file_is_listed_by_the_agent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert tree_hash.hash_tree(str(tmp_path)) == [("pipe", "o", 0, "")]


@pytest.mark.parametrize("many", [0, MANY])
def test_an_error_names_the_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    for n in range(many):
        (tmp_path / f"file{n}").touch()
    (tmp_path / "inner").mkdir()
    real = os.open if many else os.scandir

    def refuse(path: str, *more: int) -> object:
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *more)

    monkeypatch.setattr(tree_hash.os, "open" if many else "scandir", refuse)
    with pytest.raises(PermissionError) as caught:
        tree_hash.hash_tree(str(tmp_path))
    assert caught.value.filename == str(tmp_path / "inner")


def test_a_file_that_shrinks_while_it_is_hashed_ends_the_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with open(tmp_path / "file", "rb") as file:
        assert tree_hash.hash_open(file.fileno(), 100) == hashlib.sha256(b"abc").hexdigest()


@given(st.binary(max_size=300), st.integers(1, 100), st.integers(0, 400))
@settings(deadline=None)
def test_a_file_is_hashed_block_by_block(data: bytes, block: int, size: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        found = tree_hash.hash_blocks(file.fileno(), size, block)
    whole = [data[at : at + block] for at in range(0, min(size, len(data)), block)]
    whole = [each[: size - n * block] for n, each in enumerate(whole)]
    if size > len(data):  # the last block is cut off
        whole = [each for each in whole if len(each) == block]
    assert found == [hashlib.sha256(each).hexdigest() for each in whole]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700_000)), max_size=5))
@settings(deadline=None, max_examples=30)
def test_a_sparse_file_is_hashed_like_a_dense_one(runs: list[tuple[bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        with path.open("wb") as file:
            for is_data, size in runs:
                if is_data:
                    file.write(b"\7" * size)
                else:
                    file.seek(size, os.SEEK_CUR)
            file.truncate(sum(size for _, size in runs))
        data = path.read_bytes()
        counted: list[int] = []
        with path.open("rb") as file:
            digest = tree_hash.hash_open(file.fileno(), len(data), counted.append)
        assert digest == hashlib.sha256(data).hexdigest() == tree_hash.hash_file(str(path))
        assert sum(counted) == len(data)
