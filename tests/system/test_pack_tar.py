"""Tar as we write it is read by everybody."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import RecipeError
from runner.storage.content import tar
from runner.storage.content.files import Changed, Entry, Unhashable, entries, scan
from runner.storage.content.manifests import unsafe
from runner.storage.content.tar import END, member_size, tar_stream
from tests.tools import needs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One of everything that a tree may hold."""
    root = tmp_path / "in"
    top = os.fsencode(root)
    os.makedirs(root / "a/b/empty")
    (root / "plain").write_bytes(b"plain\n")
    (root / "nothing").touch()
    (root / "a/tool").write_bytes(b"#!/bin/sh\n")
    (root / "a/tool").chmod(0o755)
    (root / "a/block").write_bytes(bytes(512))
    (root / "a/large").write_bytes(random.Random(1).randbytes(2_500_000))
    (root / "a/b/link").symlink_to("../tool")
    (root / "-rf").write_bytes(b"dash")
    (root / "line\nbreak\tand tab ").write_bytes(b"1")
    (root / "späße.txt").write_bytes(b"2")
    Path(os.fsdecode(top + b"/\xff\xfe")).write_bytes(b"3")
    deep = root / ("d" * 90) / ("e" * 90) / ("f" * 200)
    deep.mkdir(parents=True)
    (deep / ("g" * 255)).write_bytes(b"long")
    (deep / "empty").mkdir()
    (deep.parent / ("h" * 100)).write_bytes(b"prefix")
    (root / "far").symlink_to(f"{'d' * 90}/{'e' * 90}/{'f' * 200}/{'g' * 255}")
    (root / "dangling").symlink_to("not/there")
    return root


def archive(root: Path) -> bytes:
    return b"".join(tar_stream(root, entries(root)))


def extracted(data: bytes, to: Path) -> list[Entry]:
    """What Python makes of an archive."""
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        opened.extraction_filter = getattr(
            tarfile, "tar_filter", None
        )  # Python 3.11.0 to 3.11.3 have none
        opened.extractall(to)
    return entries(to)


def test_a_checked_tree_is_the_same_bytes_of_a_size_known_beforehand(tree: Path) -> None:
    manifest = entries(tree)
    assert b"".join(tar_stream(tree, manifest, check=True)) == archive(tree)
    assert sum(map(member_size, manifest)) + len(END) == len(archive(tree))


READERS = {
    "gnu": ["tar", "-xf", "-", "-C"],
    "gnu in C": ["env", "LC_ALL=C", "tar", "-xf", "-", "-C"],
    "busybox": ["busybox", "tar", "-xf", "-", "-C"],
    "bsd": ["bsdtar", "-xf", "-", "-C"],
}


@pytest.mark.parametrize("reader", READERS)
def test_ordinary_tars_read_it_without_a_word(tree: Path, tmp_path: Path, reader: str) -> None:
    words = READERS[reader]
    needs(words[2 if words[0] == "env" else 0])
    (tmp_path / "out").mkdir()
    done = subprocess.run([*words, tmp_path / "out"], input=archive(tree), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert entries(tmp_path / "out") == entries(tree)


def test_python_reads_it(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive(tree))) as opened:
        assert {(member.uid, member.mtime, member.uname) for member in opened} == {
            (0, 315532800, "")
        }
    assert extracted(archive(tree), tmp_path / "out") == entries(tree)


def test_the_bytes_of_a_tar_never_change() -> None:
    """They follow from a shard's name, also in the packs that were written with an earlier version."""
    rows = [Entry("a/" + "b" * n, "d", 0, "") for n in (1, 97, 98, 99, 100, 155, 254)] + [
        Entry("l", "l", 120, "t" * 120),
        Entry("ü", "l", 1, "a"),
    ]
    assert (
        hashlib.sha256(b"".join(tar_stream("/nowhere", rows))).hexdigest()
        == "82353a99439534043070255450bebb696e57b0e05ff7901d8a4216bc80c6fab9"
    )


def test_a_size_beyond_octal_is_written_in_binary() -> None:
    size = 9 << 30
    head = tar.member_header(Entry("huge", "f", size, ""))
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == size


NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=4).map(tuple),
        st.binary(max_size=700) | st.none(),
        max_size=8,
    )
)
def test_any_tree_comes_back(
    tmp_path_factory: pytest.TempPathFactory, found: dict[tuple[bytes, ...], bytes | None]
) -> None:
    top = tmp_path_factory.mktemp("t")
    (top / "in").mkdir()
    for parts, content in found.items():
        path = os.fsencode(top / "in") + b"/" + b"/".join(parts)
        try:
            if content is None:
                os.makedirs(path)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as file:
                    file.write(content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            pass
    (top / "out").mkdir()
    assert extracted(archive(top / "in"), top / "out") == entries(top / "in")


def test_the_parts_of_a_manifest_in_several_archives_make_one_tree(
    tree: Path, tmp_path: Path
) -> None:
    manifest = entries(tree)
    for part in (manifest[:5], manifest[5:]):
        extracted(b"".join(tar_stream(tree, part)), tmp_path / "out")
    assert entries(tmp_path / "out") == manifest


# -- a tree that does not hold still -----------------------------------------------------------------------------------------------------------------


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _swap(path: Path) -> None:
    path.unlink()
    path.symlink_to("plain")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "edit",
    [
        _grow,
        lambda path: path.write_bytes(b""),
        _swap,
        _pipe,
        Path.unlink,
        lambda path: path.chmod(0o755),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_named(
    tree: Path, edit: Callable[[Path], None]
) -> None:
    for name in ("a/large", "a/block"):
        manifest = entries(tree)
        edit(tree / name)
        with pytest.raises(Changed, match=name):
            list(tar_stream(tree, manifest))
        if (tree / name).is_fifo():
            (tree / name).unlink()


def test_a_file_written_to_while_it_is_read_is_named(tree: Path) -> None:
    for name, edit in (("a/large", b"x"), ("a/large", b"")):
        os.utime(tree / name, ns=(0, 0))  # so that any clock tells what follows apart
        manifest = [entry for entry in entries(tree) if entry.path == name]
        stream = tar_stream(tree, manifest)
        next(stream), next(stream)
        with (tree / name).open("r+b") as file:
            file.write(edit) if edit else file.truncate(100)
        with pytest.raises(Changed, match=name):
            list(stream)


def test_with_a_check_other_bytes_of_the_same_size_are_named(tree: Path) -> None:
    for name in ("plain", "a/large"):
        manifest = entries(tree)
        data = bytearray((tree / name).read_bytes())
        data[0] ^= 1
        (tree / name).write_bytes(data)
        list(tar_stream(tree, manifest))
        with pytest.raises(Changed, match=name):
            list(tar_stream(tree, manifest, check=True))


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "a/../x", "a/..", "a/./b", "a//b", "", ".", "a/", "a\0b"]
)
def test_a_name_that_leads_out_of_a_tree_is_none(name: str) -> None:
    assert "outside its directory" in (unsafe([Entry(name, "f", 0, "0" * 64)]) or "")


def test_a_fault_is_one_of_ours() -> None:
    assert issubclass(Changed, Unhashable) and issubclass(Unhashable, RecipeError)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unhashable, match="pipe: a named pipe"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(Unhashable, match="a socket"):
            scan(tmp_path)
