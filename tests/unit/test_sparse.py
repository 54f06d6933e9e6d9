"""What is copied or comes over a wire has the same bytes, and takes no more of the disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.agent import sparse, squeeze, trees

BLOCK = 4096
RUNS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 3 * BLOCK)) | st.tuples(st.booleans(), st.just(BLOCK)),
    max_size=8,
)
"""A file as runs: of data or a hole, and so many bytes."""


def made(path: Path, runs: Sequence[tuple[bool, int]]) -> bytes:
    """Make a file of these runs; its bytes."""
    held = b"".join(b"\7" * size if data else bytes(size) for data, size in runs)
    with path.open("wb") as file:
        for data, size in runs:
            if data:
                file.write(b"\7" * size)
            else:
                file.seek(size, os.SEEK_CUR)
        file.truncate(len(held))
    return held


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@given(RUNS, st.booleans())
@settings(deadline=None, max_examples=50)
def test_a_copy_has_the_same_bytes_and_holes(runs: list[tuple[bool, int]], by_system: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not by_system:
            patch.delattr(os, "copy_file_range")
        source, target = Path(folder, "source"), Path(folder, "target")
        held = made(source, runs)
        trees.copy(str(source), str(target))
        assert target.read_bytes() == held
        assert on_disk(target) <= on_disk(source) + BLOCK


@given(RUNS, st.integers(0, 8 * BLOCK))
@settings(deadline=None, max_examples=30)
def test_the_first_bytes_of_a_file_are_copied(runs: list[tuple[bool, int]], most: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        held = made(source, runs)
        trees.copy(str(source), str(target), most)
        assert target.read_bytes() == held[:most]


@given(RUNS, RUNS, st.integers(1, 3 * BLOCK))
@settings(deadline=None, max_examples=50)
def test_what_is_written_over_a_file_is_what_stands_there(
    before: list[tuple[bool, int]], after: list[tuple[bool, int]], piece: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        old = made(path, before)
        new = b"".join(b"\t" * size if data else bytes(size) for data, size in after)
        fd = os.open(path, os.O_RDWR)
        for at in range(0, len(new), piece):
            sparse.write(fd, new[at : at + piece])
        sparse.extend(fd, len(new))
        os.close(fd)
        assert path.read_bytes() == new + old[len(new) :]


def test_zeros_that_are_written_take_no_room(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for _ in range(64):
        sparse.write(fd, bytes(1 << 18))
    sparse.extend(fd, 64 << 18)
    os.close(fd)
    assert (tmp_path / "file").stat().st_size == 64 << 18 and on_disk(tmp_path / "file") <= BLOCK


def test_a_file_that_another_writes_further_is_not_cut(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x", 100_000)
    sparse.extend(fd, 50)
    os.close(fd)
    assert (tmp_path / "file").stat().st_size == 100_001


@given(st.integers(0, squeeze.MOST), st.booleans())
@settings(deadline=None, max_examples=30)
def test_a_hole_is_a_few_bytes_on_the_wire(size: int, zeros: bool) -> None:
    data = bytes(size) if zeros else b"\1" * size
    payload = b"".join(squeeze.plain([data]))
    assert squeeze.bytes_of(payload) == data
    assert not (zeros and size >= sparse.LEAST) or len(payload) < 2000


def test_a_file_system_that_cannot_copy_by_itself_gets_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = made(tmp_path / "source", [(True, 5000), (False, 1 << 20), (True, 10)])

    def cannot(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", cannot)
    trees.copy(str(tmp_path / "source"), str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == held
    assert on_disk(tmp_path / "target") < 1 << 16


def test_a_full_disk_is_an_error_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "source", [(True, 5000)])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space"):
        trees.copy(str(tmp_path / "source"), str(tmp_path / "target"))
