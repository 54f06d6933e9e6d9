"""What a path holds: read when in doubt, never read for nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.agent import tree_hash
from runner.storage.content import digest_cache, files, listings
from runner.storage.content.digest_cache import DigestCache
from runner.storage.content.files import Content, Unhashable, entries, identity, scan

OLD = 1_700_000_000_123_456_789


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were read, as they are read."""
    seen: list[str] = []
    real = files._hash
    monkeypatch.setattr(
        files,
        "_hash",
        lambda path, *more: (seen.append(os.path.basename(path)), real(path, *more))[1],
    )
    return seen


def aged(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The clock by which a digest is begun runs ahead, so that files just written are old."""
    real = files.time.time_ns
    monkeypatch.setattr(files.time, "time_ns", lambda: real() + int(seconds * 1e9))


def test_a_file_that_did_not_change_is_read_once(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_few_small_files_are_cheap_to_hash_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(monkeypatch, 3)
    cache = DigestCache(tmp_path)
    for n in range(digest_cache.CHEAP_FILES + 1):
        assert not cache.is_costly_to_repeat
        (tmp_path / f"small{n}").write_text("x")
        cache.content_of(f"small{n}")
    assert cache.is_costly_to_repeat
    assert cache.changes() and not cache.is_costly_to_repeat
    (tmp_path / "large").write_bytes(bytes(digest_cache.CHEAP_BYTES + 1))
    cache.content_of("large")
    assert cache.is_costly_to_repeat


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["same size", "restore mtime", "replace", "future", "chmod", "nothing"]),
        max_size=6,
    )
)
def test_a_digest_is_never_stale(
    tmp_path_factory: pytest.TempPathFactory, edits: list[str]
) -> None:
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


def test_a_file_of_our_making_is_believed_at_once_and_an_edit_of_it_is_seen(
    tmp_path: Path, reads: list[str]
) -> None:
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


def test_an_edit_that_restores_size_and_mtime_shows_in_the_ctime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [(entry.path, entry.kind) for entry in entries(tree)] == [
        ("a/b", "d"),
        ("a/l", "l"),
        ("f", "f"),
    ]
    before = scan(tree)
    (tree / "a/l").unlink()
    (tree / "a/l").symlink_to("../a")
    assert scan(tree) != before
    (tmp_path / "link").symlink_to("t")
    assert scan(tmp_path / "link") == scan(tree)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "up/../../../outside", "sub/out/.."]
)
def test_a_link_out_of_a_tree_is_named(tmp_path: Path, target: str) -> None:
    tree = tmp_path / "t"
    (tree / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("")
    (tree / "sub/out").symlink_to("../../t2/x") if target.startswith("sub") else None
    (tree / "l").symlink_to(target)
    with pytest.raises(Unhashable, match="points outside"):
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
    with pytest.raises(Unhashable, match="does not exist"):
        scan(tmp_path / "none")


def test_nothing_is_distinguished_from_something_empty(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("none")
    (tmp_path / "empty").touch()
    answer = DigestCache(tmp_path).contents(["none", "dangling", "empty/below", "empty"])
    assert [answer[name] is None for name in ("none", "dangling", "empty/below", "empty")] == [
        True,
        True,
        True,
        False,
    ]
    assert identity(tmp_path / "none") is None


def test_an_unchanged_tree_is_not_read_again(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_large_files_are_hashed_on_two_threads_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(6):
        (tmp_path / str(n)).write_bytes(bytes([n]) * (1 << 20))
    seen: set[int] = set()
    real = files._hash
    monkeypatch.setattr(
        files, "_hash", lambda *what: (seen.add(threading.get_ident()), real(*what))[1]
    )
    answer = DigestCache(tmp_path).contents([str(n) for n in range(6)])
    assert answer == {str(n): scan(tmp_path / str(n)) for n in range(6)}
    (tmp_path / "5").unlink()
    os.mkfifo(tmp_path / "5")
    with pytest.raises(Unhashable):
        DigestCache(tmp_path).contents([str(n) for n in range(6)])


def test_an_interrupt_does_not_wait_for_large_files(tmp_path: Path) -> None:
    for name in "ab":
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 30)
    heard: list[int] = []

    def told(done: int, _total: int) -> None:
        heard.append(done)
        raise KeyboardInterrupt

    cache = DigestCache(tmp_path)
    cache.progress = told
    with pytest.raises(KeyboardInterrupt):
        cache.contents(["a", "b"])
    assert len(heard) <= 2 and heard[-1] <= 2 << 20


def test_a_content_id_is_a_string_of_kind_and_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert scan(tmp_path / "a") == Content(
        "f:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


# -- large trees -------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a listing, of files that are old."""
    monkeypatch.setattr(digest_cache, "FEW", 20)
    aged(monkeypatch, 3)
    for n in range(50):
        (tmp_path / f"t/{n % 5}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"t/{n % 5}/{n}").write_text(str(n))
    (tmp_path / "t/link").symlink_to("0/5")
    (tmp_path / "t/empty").mkdir()
    return tmp_path


def known(folder: Path) -> DigestCache:
    """As the next process has it."""
    return DigestCache(folder, (), folder / "listings")


def test_a_large_tree_is_remembered_in_a_listing_and_not_in_rows(
    large: Path, reads: list[str]
) -> None:
    cache = known(large)
    first = cache.content_of("t")
    assert first == scan(large / "t") and cache.changes() == []
    del reads[:]
    assert known(large).content_of("t") == first == files.tree_id(known(large).entries("t"))
    assert reads == []
    (large / "t/3/8").write_text("changed")
    (large / "t/3/new").write_text("new")
    (large / "t/0/0").unlink()
    cache = known(large)
    assert cache.content_of("t") == cache.content_of("t") != first
    assert sorted(reads) == ["8", "new"]
    cache.changes()
    assert known(large).entries("t") == cache.entries("t") and len(reads) == 2
    assert cache.content_of("t") == scan(large / "t")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:200],
        lambda data: data[:-9] + b"x" + data[-8:],
        lambda data: b"",
    ],
)
def test_a_damaged_listing_is_no_listing(
    large: Path, reads: list[str], damage: Callable[[bytes], bytes]
) -> None:
    cache = known(large)
    first = cache.content_of("t")
    cache.changes()
    (listing,) = (large / "listings").iterdir()
    listing.write_bytes(damage(listing.read_bytes()))
    del reads[:]
    assert known(large).content_of("t") == first
    assert len(reads) == 50


def test_young_files_of_a_listing_are_not_believed(
    large: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    aged(monkeypatch, 0)
    monkeypatch.setattr(files.time, "time_ns", lambda: (large / "t/0/0").stat().st_mtime_ns)
    cache = known(large)
    first = cache.content_of("t")
    cache.changes()
    del reads[:]
    assert known(large).content_of("t") == first
    assert len(reads) == 50


def test_a_listing_whose_tree_is_gone_is_removed(large: Path) -> None:
    cache = known(large)
    cache.content_of("t")
    cache.changes()
    listings.forget_listings(large / "listings", large)
    assert len(list((large / "listings").iterdir())) == 1
    (large / "t").rename(large / "elsewhere")
    (large / "listings/other").write_text("no listing")
    listings.forget_listings(large / "listings", large)
    assert list((large / "listings").iterdir()) == []


def test_a_large_tree_of_our_making_is_believed_at_once(large: Path, reads: list[str]) -> None:
    now = files.time.time_ns() - 3_000_000_000
    for path in (large / "t").rglob("*[0-9]"):
        if path.is_file():
            os.utime(path, ns=(now, now - 2 * files.SLACK_NS + 1))
    os.utime(large / "t/0/5", ns=(now, now + 10**9))  # not dated back
    manifest = entries(large / "t")
    del reads[:]
    cache = known(large)
    cache.note_tree("t", manifest)
    assert cache.entries("t") == manifest
    assert reads == ["5"]


def ticked(probe: Path) -> None:
    """The file system's clock goes on."""
    probe.touch()
    was = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == was:
        probe.touch()


EDITS = [
    "same size",
    "restore mtime",
    "replace",
    "add",
    "remove",
    "chmod",
    "retarget",
    "link for a file",
    "empty",
    "touch",
    "nothing",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 5), st.booleans()), max_size=8),
    st.sampled_from([0, 1000]),
)
def test_a_tree_is_never_stale(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, bool]], few: int
) -> None:
    folder = tmp_path_factory.mktemp("w")
    tree = folder / "t"
    for n in range(6):
        (tree / str(n % 2)).mkdir(parents=True, exist_ok=True)
        (tree / f"{n % 2}/{n}").write_text("00")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_cache, "FEW", few)
        patch.setattr(tree_hash, "_MANY", few)
        aged(patch, 3)
        cache = known(folder)
        for number, (edit, n, fresh) in enumerate(edits):
            ticked(folder / "probe")
            path = tree / f"{n % 2}/{n}"
            if edit in ("same size", "restore mtime", "touch", "chmod") and path.is_file():
                was = path.stat()
                if edit == "chmod":
                    path.chmod(was.st_mode ^ 0o100)
                elif edit == "touch":
                    path.touch()
                else:
                    path.write_text(f"{number:02}")
                if edit == "restore mtime":
                    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            elif edit == "replace":
                (folder / "b").write_text(f"{number + 20:02}")
                (folder / "b").rename(path)
            elif edit == "add":
                (tree / f"new{number}").write_text("new")
            elif edit == "remove":
                path.unlink(missing_ok=True)
            elif edit in ("retarget", "link for a file"):
                path.unlink(missing_ok=True)
                path.symlink_to(f"../{number % 2}")
            elif edit == "empty":
                (tree / f"e{n}").mkdir(exist_ok=True)
            assert cache.content_of("t") == scan(tree) == files.tree_id(cache.entries("t"))
            rows = cache.changes()
            if fresh:
                cache = DigestCache(folder, rows, folder / "listings")


# -- files that do not hold still --------------------------------------------------------------------------------------------------------------------


def test_a_file_that_changes_while_it_is_read_is_read_again_and_named_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"start")
    os.utime(path, ns=(0, 0))
    changes = iter([b"first", b"second!"])
    real = os.fstat

    def moving(handle: int) -> os.stat_result:
        for change in changes:
            path.write_bytes(change)
            break
        return real(handle)

    monkeypatch.setattr(files.os, "fstat", moving)
    assert scan(path) == "f:" + hashlib.sha256(b"second!").hexdigest()
    changes = iter([b"1", b"22", b"333"])
    with pytest.raises(files.Changed, match=r"a: the file changed while recipe read it"):
        scan(path)


def test_a_file_that_vanishes_while_it_is_looked_at_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t/sub").mkdir(parents=True)
    (tmp_path / "t/sub/a").write_text("a")
    real = os.open
    monkeypatch.setattr(
        files.os,
        "open",
        lambda path, *more: ((tmp_path / "t/sub/a").unlink(), real(path, *more))[1],
    )
    with pytest.raises(files.Changed, match="t/sub/a: the file disappeared"):
        scan(tmp_path / "t")


@pytest.mark.parametrize(
    "layout", ["hole", "hole data", "data hole", "hole data hole", "data hole data"]
)
def test_a_sparse_file_has_the_content_of_a_dense_one(tmp_path: Path, layout: str) -> None:
    dense = b""
    with (tmp_path / "sparse").open("wb") as file:
        for n, part in enumerate(layout.split()):
            if part == "hole":
                file.seek(3 << 20, 1)
                dense += bytes(3 << 20)
            else:
                file.write(bytes([n + 65]) * 1_234_567)
                dense += bytes([n + 65]) * 1_234_567
        file.truncate(len(dense))
    assert (tmp_path / "sparse").stat().st_blocks * 512 < len(dense)
    assert scan(tmp_path / "sparse") == "f:" + hashlib.sha256(dense).hexdigest()


def test_a_hole_of_a_gigabyte_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 30)
    amount = 0
    real = os.read

    def counted(handle: int, size: int) -> bytes:
        nonlocal amount
        data = real(handle, size)
        amount += len(data)
        return data

    monkeypatch.setattr(files.os, "read", counted)
    scan(tmp_path / "hole")
    assert amount == 0
