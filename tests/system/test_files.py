"""What a path holds: read when in doubt, never read for nothing."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.storage import files
from runner.storage.files import Content, DigestCache, Unhashable, entries, identity, scan

OLD = 1_700_000_000_123_456_789


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were read, as they are read."""
    seen: list[str] = []
    real = files._hash
    monkeypatch.setattr(files, "_hash", lambda path, found: (seen.append(os.path.basename(path)), real(path, found))[1])
    return seen


def aged(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The clock by which a digest is begun runs ahead, so that files just written are old."""
    real = files.time.time_ns
    monkeypatch.setattr(files.time, "time_ns", lambda: real() + int(seconds * 1e9))


def test_a_file_that_did_not_change_is_read_once(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    aged(monkeypatch, 3)
    (tmp_path / "a").write_text("one")
    cache = DigestCache(tmp_path)
    first = cache.content_of("a")
    assert cache.content_of("a") == first == scan(tmp_path / "a")
    assert DigestCache(tmp_path, cache.changes()).content_of("a") == first
    assert reads == ["a", "a"]  # once by the cache, once by `scan`


def test_a_file_written_just_now_is_not_believed(tmp_path: Path, reads: list[str]) -> None:
    cache = DigestCache(tmp_path)
    (tmp_path / "a").write_text("one")
    cache.content_of("a")
    assert cache.changes() == []
    (tmp_path / "a").write_text("two")
    assert cache.content_of("a") == scan(tmp_path / "a")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["same size", "restore mtime", "replace", "future", "chmod", "nothing"]), max_size=6))
def test_a_digest_is_never_stale(tmp_path_factory: pytest.TempPathFactory, edits: list[str]) -> None:
    folder = tmp_path_factory.mktemp("w")
    path, cache = folder / "a", DigestCache(folder)
    path.write_text("00")
    for n, edit in enumerate(edits):
        was = path.stat()
        if edit == "same size":
            path.write_text(f"{n:02}")
        elif edit == "restore mtime":
            path.write_text(f"{n + 10:02}")
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        elif edit == "replace":
            (folder / "b").write_text(f"{n + 20:02}")
            os.utime(folder / "b", ns=(was.st_atime_ns, was.st_mtime_ns))
            (folder / "b").rename(path)
        elif edit == "future":
            os.utime(path, ns=(OLD, 4_000_000_000_000_000_001))
        elif edit == "chmod":
            path.chmod(was.st_mode ^ 0o100)
        assert cache.content_of("a") == scan(path)
        cache = DigestCache(folder, [*cache._rows.values()])


def test_a_file_of_our_making_is_believed_at_once_and_an_edit_of_it_is_seen(tmp_path: Path, reads: list[str]) -> None:
    cache = DigestCache(tmp_path)
    (tmp_path / "a").write_text("one")
    now = files.time.time_ns()
    os.utime(tmp_path / "a", ns=(now, now - 2 * files.SLACK_NS + 1))
    cache.note("a", scan(tmp_path / "a"))
    del reads[:]
    cache.content_of("a")
    assert reads == []
    (tmp_path / "a").write_text("two")
    assert cache.content_of("a") == scan(tmp_path / "a")


def test_an_edit_that_restores_size_and_mtime_shows_in_the_ctime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(monkeypatch, 3)
    path = tmp_path / "a"
    path.write_text("00")
    cache, was = DigestCache(tmp_path), path.stat()
    assert cache.content_of("a") is not None and len(cache.changes()) == 1
    while path.stat().st_ctime_ns == was.st_ctime_ns:  # until the file system's clock ticks
        path.write_text("11")
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert cache.content_of("a") == scan(path)


def test_a_file_that_is_not_dated_back_is_not_believed_on_our_word(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    cache = DigestCache(tmp_path)
    cache.note("a", Content("f:" + "0" * 64))
    assert cache.content_of("a") == scan(tmp_path / "a")


def test_the_executable_bit_is_content_and_other_bits_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    plain = scan(path)
    path.chmod(0o600)
    assert scan(path) == plain
    path.chmod(0o755)
    assert scan(path) == "x:" + plain[2:]


def test_an_empty_directory_and_an_inner_link_are_content(tmp_path: Path) -> None:
    tree = tmp_path / "t"
    (tree / "a/b").mkdir(parents=True)
    (tree / "f").write_text("x")
    (tree / "a/l").symlink_to("../f")
    assert [(entry.path, entry.kind) for entry in entries(tree)] == [("a/b", "d"), ("a/l", "l"), ("f", "f")]
    before = scan(tree)
    (tree / "a/l").unlink()
    (tree / "a/l").symlink_to("../a")
    assert scan(tree) != before
    (tmp_path / "link").symlink_to("t")
    assert scan(tmp_path / "link") == scan(tree)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "up/../../../outside", "sub/out/.."])
def test_a_link_out_of_a_tree_is_named(tmp_path: Path, target: str) -> None:
    tree = tmp_path / "t"
    (tree / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("")
    (tree / "sub/out").symlink_to("../../t2/x") if target.startswith("sub") else None
    (tree / "l").symlink_to(target)
    with pytest.raises(Unhashable, match="leads out of"):
        scan(tree)


def test_what_has_no_content_is_named_and_never_hangs(tmp_path: Path) -> None:
    tree = tmp_path / "t"
    tree.mkdir()
    os.mkfifo(tree / "pipe")
    with pytest.raises(Unhashable, match="pipe: a named pipe"):
        scan(tree)
    with pytest.raises(Unhashable, match="a named pipe"):
        DigestCache(tmp_path).content_of("t/pipe")
    (tree / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "s"))
        with pytest.raises(Unhashable, match="a socket"):
            scan(tree)
    with pytest.raises(Unhashable, match="a device"):
        scan("/dev/null")
    with pytest.raises(Unhashable, match="nothing here"):
        scan(tmp_path / "none")


def test_nothing_is_told_apart_from_something_empty(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("none")
    (tmp_path / "empty").touch()
    answer = DigestCache(tmp_path).contents(["none", "dangling", "empty/below", "empty"])
    assert [answer[name] is None for name in ("none", "dangling", "empty/below", "empty")] == [True, True, True, False]
    assert identity(tmp_path / "none") is None


def test_an_unchanged_tree_is_not_read_again(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    aged(monkeypatch, 3)
    for n in range(50):
        (tmp_path / f"t/{n % 5}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"t/{n % 5}/{n}").write_text(str(n))
    cache = DigestCache(tmp_path)
    first = cache.content_of("t")
    assert len(reads) == 50
    (tmp_path / "t/0/0").write_text("changed")
    assert DigestCache(tmp_path, cache.changes()).content_of("t") != first
    assert len(reads) == 51


def test_names_that_are_not_text_have_a_content(tmp_path: Path) -> None:
    os.makedirs(os.fsencode(tmp_path) + b"/t/\xff\n")
    open(os.fsencode(tmp_path) + b"/t/\xff\n/\xfe", "w").close()
    assert scan(tmp_path / "t").startswith("t:")
    cache = DigestCache(tmp_path)
    assert cache.content_of("t") == scan(tmp_path / "t") and cache.changes() == []


def test_large_files_are_hashed_on_two_threads_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        (tmp_path / str(n)).write_bytes(bytes([n]) * (1 << 20))
    seen: set[int] = set()
    real = files._hash
    monkeypatch.setattr(files, "_hash", lambda path, found: (seen.add(threading.get_ident()), real(path, found))[1])
    answer = DigestCache(tmp_path).contents([str(n) for n in range(6)])
    assert answer == {str(n): scan(tmp_path / str(n)) for n in range(6)}
    (tmp_path / "5").unlink()
    os.mkfifo(tmp_path / "5")
    with pytest.raises(Unhashable):
        DigestCache(tmp_path).contents([str(n) for n in range(6)])


def test_a_content_id_is_a_string_of_kind_and_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert scan(tmp_path / "a") == Content("f:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
