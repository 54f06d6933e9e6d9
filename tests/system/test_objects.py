"""Content put away is given out as it was, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import Corrupt, Infrastructure
from runner.storage.content import files, giving
from runner.storage.content.digest_cache import DigestCache
from runner.storage.content.disk import SYNCED, delete
from runner.storage.content.files import Content, scan
from runner.storage.content.manifests import Manifests
from runner.storage.content.objects import SMALL, Objects
from runner.storage.content.seals import Seal

SIZES = [0, 1, SMALL, SMALL + 1, SYNCED + 3]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("objects", "partial"):
        (tmp_path / ".recipe" / folder).mkdir(parents=True)
    return tmp_path / ".recipe"


@pytest.fixture
def objects(root: Path) -> Objects:
    return Objects(root)


def take(objects: Objects, path: Path) -> Content:
    """Put away what is at a path, which is needed no more."""
    content = objects.take(path)
    delete(path)
    return content


def given_out(objects: Objects, content: Content, path: Path) -> Path:
    """What a step is given of an object."""
    path.parent.mkdir(exist_ok=True)
    objects.demand(content)
    assert objects.give(content, str(path)) == ""
    return path


def tree(at: Path, big: int = 10) -> Path:
    (at / "a/b/empty").mkdir(parents=True)
    (at / "a/f.txt").write_text("f")
    (at / "a/run").write_text("#!/bin/sh\n")
    (at / "a/run").chmod(0o755)
    (at / "a/b/l").symlink_to("../f.txt")
    (at / "big").write_bytes(b"b" * big)
    return at


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_what_is_taken_comes_back(objects: Objects, tmp_path: Path, size: int, mode: int) -> None:
    source = tmp_path / "out"
    source.write_bytes(os.urandom(size))
    source.chmod(mode)
    data, content = source.read_bytes(), scan(source)
    assert objects.take(source) == content
    assert (
        source.read_bytes() == data
        and objects.has(content)
        and objects.intact(content)
        and objects.verify(content)
    )
    assert stat.S_IMODE(objects.path(content).stat().st_mode) == mode & 0o555 | 0o444
    objects.copy_to(content, tmp_path / "new/deep/file")
    for found in (
        tmp_path / "new/deep/file",
        given_out(objects, content, tmp_path / "attempt/in"),
    ):
        assert found.read_bytes() == data and scan(found) == content
    assert os.access(tmp_path / "new/deep/file", os.W_OK)
    assert os.path.samefile(tmp_path / "attempt/in", objects.path(content))
    assert list(objects.all()) == [content]


@pytest.mark.parametrize("big", [10, SYNCED + 1])
def test_a_tree_comes_back(objects: Objects, tmp_path: Path, big: int) -> None:
    source = tree(tmp_path / "t", big)
    content = scan(source)
    assert objects.take(source) == content and objects.intact(content)
    objects.copy_to(content, tmp_path / "copy")
    assert scan(tmp_path / "copy") == content and (tmp_path / "copy/a/f.txt").stat().st_mode & 0o200
    (tmp_path / "copy/more").touch()
    objects.copy_to(content, tmp_path / "copy")
    assert scan(tmp_path / "copy") == content
    assert scan(given_out(objects, content, tmp_path / "attempt/t")) == content
    assert [entry.path for entry in objects.manifests.match(content, "a/*")] == [
        "a/f.txt",
        "a/run",
    ]
    os.unlink(f"{objects.path(content)}.json")
    assert [entry.path for entry in objects.manifests.entries(content)] == [
        "a/b/empty",
        "a/b/l",
        "a/f.txt",
        "a/run",
        "big",
    ]
    assert list(objects.all()) == [content]
    assert objects.remove(content) and not objects.has(content) and list(objects.all()) == []


def test_a_file_replaces_a_tree_and_a_tree_a_file(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    one, other = take(objects, tmp_path / "f"), take(objects, tree(tmp_path / "t"))
    for content in (one, other, one, other):
        objects.copy_to(content, tmp_path / "target")
        assert scan(tmp_path / "target") == content
    (tmp_path / "target/a").chmod(0o555)
    (tmp_path / "link").symlink_to("target")
    objects.copy_to(one, tmp_path / "link")
    assert not (tmp_path / "link").is_symlink() and scan(tmp_path / "target") == other
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".recipe",
        "link",
        "target",
    ] and not list((tmp_path / ".recipe/partial").iterdir())


@pytest.mark.parametrize("size", [5, SMALL + 1, SYNCED])
def test_an_edited_object_is_never_given_out(
    root: Path, objects: Objects, tmp_path: Path, size: int
) -> None:
    (tmp_path / "f").write_bytes(b"a" * size)
    content = take(objects, tmp_path / "f")
    path = objects.path(content)
    path.chmod(0o644)
    was = path.stat()
    path.write_bytes(b"a" * (size - 1) + b"b")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    assert not objects.intact(content)
    for mine in (Objects(root), Objects(root, lambda content: Seal(content, "1:2", "", size, 0.0))):
        assert not mine.intact(content)
        with pytest.raises(Corrupt, match="does not match its digest"):
            mine.copy_to(content, tmp_path / "x")
        with pytest.raises(Corrupt):
            mine.demand(content)
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()
    (tmp_path / "f").write_bytes(b"a" * size)
    assert objects.take(tmp_path / "f") == content
    objects.copy_to(content, tmp_path / "x")
    assert scan(tmp_path / "x") == content


def test_a_small_file_is_still_readable_after_it_was_taken(
    objects: Objects, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"taken")
    content = objects.take(tmp_path / "f")
    objects.path(content).chmod(0o644)
    objects.path(content).write_bytes(b"edited")
    assert objects.small(content) == b"taken"


def test_an_edit_through_a_hard_link_is_noticed(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * (SMALL + 1))
    content = objects.take(tmp_path / "f")
    objects.copy_to(content, tmp_path / "linked", link=True)
    objects.copy_to(content, tmp_path / "linked", link=True)
    assert os.path.samefile(tmp_path / "linked", objects.path(content)) and not list(
        (tmp_path / ".recipe/partial").iterdir()
    )
    assert objects.intact(content)
    (tmp_path / "linked").chmod(0o644)
    (tmp_path / "linked").write_bytes(b"b" * (SMALL + 1))
    assert not objects.intact(content)


def test_a_sealed_object_is_not_read_again_until_the_next_boot(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seals: dict[Content, Seal] = {}
    objects = Objects(root, seals.get)
    made = []
    for name, data in (("m", b"m" * (SMALL + 1)), ("l", b"l" * SYNCED)):
        (tmp_path / name).write_bytes(data)
        made.append(objects.take(tmp_path / name))
    made.append(objects.take(tree(tmp_path / "t", SYNCED)))
    seals.update({seal.content: seal for seal in objects.seals.changes()})
    assert sorted(seals) == sorted(made) and objects.seals.changes() == []
    reads: list[str] = []
    real = files._hash
    monkeypatch.setattr(
        files, "_hash", lambda path, *more: (reads.append(path), real(path, *more))[1]
    )
    assert all(Objects(root, seals.get).intact(content) for content in made) and not reads
    monkeypatch.setattr("runner.storage.content.seals._boot_id", lambda: "the next boot")
    later = Objects(root, seals.get)
    assert all(later.intact(content) for content in made)
    assert [os.path.basename(path) for path in reads] == [
        made[0][2:],
        "f.txt",
        "run",
    ]  # what was synced is believed
    assert all(later.intact(content) for content in made) and len(reads) == 3


def test_hard_links_to_an_object_break_no_seal(
    objects: Objects, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this process, and of another that has seen it before: none reads its bytes again."""
    made = [take(objects, tree(tmp_path / "t", SMALL + 1))]
    (tmp_path / "f").write_bytes(b"f" * (SMALL + 1))
    made.append(take(objects, tmp_path / "f"))
    seals = {seal.content: seal for seal in objects.seals.changes()}
    other = Objects(root, seals.get)
    assert all(other.intact(content) for content in made)
    monkeypatch.setattr(files, "_hash", None)
    for n, content in enumerate(made):
        given_out(objects, content, tmp_path / f"attempt/{n}")
        assert objects.intact(content) and other.intact(content)
        delete(tmp_path / f"attempt/{n}")
        assert objects.intact(content) and other.intact(content)


def test_a_link_that_is_made_while_an_object_is_read_is_no_change(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"f" * (SMALL + 1))
    content = take(objects, tmp_path / "f")
    real = hashlib.sha256

    def linked(*data: bytes) -> object:
        given_out(objects, content, tmp_path / f"attempt/{len(os.listdir(tmp_path))}")
        (tmp_path / f"{len(os.listdir(tmp_path))}").touch()
        return real(*data)

    monkeypatch.setattr(files.hashlib, "sha256", linked)
    assert objects.verify(content)


def test_a_changed_mode_is_put_right_and_costs_one_look(objects: Objects, tmp_path: Path) -> None:
    content = take(objects, tree(tmp_path / "t", SMALL + 1))
    given = given_out(objects, content, tmp_path / "attempt/t")
    for name, mode in (("big", 0o755), ("a/run", 0o644), ("a/f.txt", 0o600)):
        (given / name).chmod(mode)
    assert objects.intact(content)
    assert stat.S_IMODE((given / "big").stat().st_mode) == 0o444
    assert stat.S_IMODE((given / "a/run").stat().st_mode) == 0o555


def test_a_part_of_a_tree_is_given_as_a_tree(objects: Objects, tmp_path: Path) -> None:
    content = take(objects, tree(tmp_path / "t"))
    (tmp_path / "attempt").mkdir()
    assert objects.give(content, str(tmp_path / "attempt/a"), "a") == ""
    assert scan(tmp_path / "attempt/a") == scan(objects.path(content) / "a")
    assert os.path.samefile(tmp_path / "attempt/a/f.txt", objects.path(content) / "a/f.txt")


@pytest.mark.parametrize(
    "number, why", [(errno.EMLINK, giving.FULL), (errno.EPERM, giving.REFUSED)]
)
def test_a_file_that_can_have_no_other_name_is_a_copy_or_a_link(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    content = take(objects, tree(tmp_path / "t"))

    def refused(source: str, target: str, **handles: int) -> None:
        raise OSError(number, os.strerror(number), source)

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "attempt").mkdir()
    given = tmp_path / "attempt/t"
    assert objects.give(content, str(given)) == why
    assert (given / "a/f.txt").read_text() == "f" and (given / "a/b/l").read_text() == "f"
    assert (given / "big").is_symlink() == (number == errno.EPERM)
    assert not given.is_symlink() and os.access(given / "a/run", os.X_OK)
    if number == errno.EMLINK:
        assert stat.S_IMODE((given / "big").stat().st_mode) == 0o444


def test_an_object_with_as_many_names_as_the_file_system_allows_is_copied(
    objects: Objects, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"f" * (SMALL + 1))
    content = take(objects, tmp_path / "f")
    (tmp_path / "names").mkdir()
    try:
        for n in range(66_000):
            os.link(objects.path(content), tmp_path / f"names/{n}")
        pytest.skip("this file system allows more than 66,000 names of a file")
    except OSError as error:
        assert error.errno == errno.EMLINK
    assert objects.give(content, str(tmp_path / "x")) == giving.FULL
    assert scan(tmp_path / "x") == content and objects.intact(content)


def test_bytes_with_a_second_name_are_copied_not_moved(objects: Objects, tmp_path: Path) -> None:
    for size in (5, SMALL + 1):
        (tmp_path / "f").write_bytes(b"f" * size)
        (tmp_path / "other").unlink(missing_ok=True)
        os.link(tmp_path / "f", tmp_path / "other")
        content = objects.take(tmp_path / "f")
        (tmp_path / "other").write_bytes(b"g" * size)
        assert objects.verify(content)
    (tmp_path / "link").symlink_to("other")
    assert objects.verify(objects.take(tmp_path / "link")) and (tmp_path / "other").exists()


@pytest.mark.parametrize("size", [SMALL + 1, SYNCED])
@pytest.mark.parametrize("edited", [False, True])
def test_what_was_taken_and_deleted_is_believed_unread_unless_it_was_edited_meanwhile(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, edited: bool
) -> None:
    content = objects.take(tree(tmp_path / "t", size))
    held = tmp_path / "t/big"
    if edited:
        was = held.stat()
        held.chmod(0o644)
        held.write_bytes(b"c" * size)
        os.utime(held, ns=(was.st_atime_ns, was.st_mtime_ns))
    delete(tmp_path / "t")
    if edited:
        assert not objects.intact(content)
    else:
        monkeypatch.setattr(files, "_hash", None)
        assert objects.intact(content)


def test_a_tree_that_another_process_puts_at_the_same_moment_stays_and_is_as_good_as_ours(
    objects: Objects, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, others = tree(tmp_path / "mine"), tree(tmp_path / "others")
    seen: list[int] = []
    write = Manifests.write

    def late(self: Manifests, target: str, manifest: list[files.Entry]) -> None:
        write(self, target, manifest)
        if self is objects.manifests:
            Objects(root).take(others)
            seen.append(os.stat(target).st_ino)

    monkeypatch.setattr(Manifests, "write", late)
    content = objects.take(mine)
    assert objects.verify(content) and seen == [
        objects.path(content).stat().st_ino
    ]  # a reader of it loses nothing
    assert (
        not list((root / "partial").iterdir())
        and len(list((root / "objects" / content[2:4]).iterdir())) == 2
    )


def test_a_tree_gets_its_place_however_often_another_process_is_faster(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = objects.take(tree(tmp_path / "t"))
    target, faster, rename = tmp_path / "out", [1, 2, 3], os.rename

    def late(source: str, to: str) -> None:
        if to == str(target) and faster:
            (target / f"by another {faster.pop()}").mkdir(parents=True)
        rename(source, to)

    monkeypatch.setattr(os, "rename", late)
    objects.copy_to(content, target)
    assert (
        not faster
        and scan(target) == content
        and sorted(os.listdir(tmp_path)) == [".recipe", "out", "t"]
    )


def test_a_put_by_copy_leaves_its_source(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    content = scan(tmp_path / "f")
    objects.put(tmp_path / "f", content, move=False)
    assert objects.verify(content) and scan(tmp_path / "f") == content
    (tmp_path / "f").write_text("changed")
    with pytest.raises(Corrupt, match="changed while"):
        objects.put(tmp_path / "f", Content("f:" + "0" * 64), move=False)


def test_a_file_that_changes_while_it_is_taken_is_refused(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"a" * (SMALL + 1))
    real = files.scan

    def meddle(path: str) -> Content:
        answer = real(path)
        with open(path, "ab") as file:
            file.write(b"more")
        return answer

    monkeypatch.setattr(files, "scan", meddle)
    with pytest.raises(Corrupt, match="changed while"):
        objects.take(tmp_path / "f")
    assert list(objects.all()) == []


def test_another_file_system_is_reached_by_copying(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is on the disk of the tests")
    import tempfile

    with tempfile.TemporaryDirectory(dir=elsewhere) as name:
        for folder in ("objects", "partial"):
            (Path(name) / folder).mkdir()
        objects = Objects(Path(name))
        for size in (3, SMALL + 1):
            (tmp_path / "f").write_bytes(b"f" * size)
            content = take(objects, tmp_path / "f")
            assert objects.verify(content) and not objects.path(content).stat().st_mode & 0o222
            objects.copy_to(content, tmp_path / "back", link=True)
            assert scan(tmp_path / "back") == content
        content = take(objects, tree(tmp_path / "t"))
        objects.copy_to(content, tmp_path / "back")
        assert objects.verify(content) and scan(tmp_path / "back") == content
        assert sorted(path.name for path in tmp_path.iterdir()) == ["back"]


def test_no_space_is_said_with_the_path_and_what_is_free(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("f")
    content = objects.take(tmp_path / "f")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Infrastructure, match=r"x: No space left on device, \d+ bytes are free"):
        objects.copy_to(content, tmp_path / "x")


def test_an_object_put_again_survives_a_removal_that_was_decided_before(
    objects: Objects, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"f" * (SMALL + 1))
    content = objects.take(tmp_path / "f")
    decided = objects.path(content).stat().st_ctime + 0.000001
    while objects.path(content).stat().st_ctime < decided:
        (tmp_path / "again").write_bytes(b"f" * (SMALL + 1))
        take(objects, tmp_path / "again")
    assert not objects.remove(content, before=decided) and objects.intact(content)
    assert objects.remove(content, before=decided + 3600) and not objects.remove(content)


def test_a_missing_object_is_said(objects: Objects, tmp_path: Path) -> None:
    for content in (Content("f:" + "0" * 64), Content("t:" + "0" * 64)):
        assert not objects.has(content) and not objects.intact(content)
        with pytest.raises(Corrupt, match="not in the store"):
            objects.copy_to(content, tmp_path / "x")
        with pytest.raises(Corrupt, match="not in the store"):
            objects.demand(content)


def test_a_published_file_is_believed_at_once(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    content = objects.take(tmp_path / "f")
    objects.copy_to(content, tmp_path / "out")
    cache = DigestCache(tmp_path)
    cache.note("out", content)
    assert len(cache.changes()) == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_manifest_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("w")
    for name in ("objects", "partial"):
        (folder / ".recipe" / name).mkdir(parents=True)
    objects = Objects(folder / ".recipe")
    content = objects.take(tree(folder / "t"))
    good = objects.manifests.entries(content)
    manifest = Path(f"{objects.path(content)}.json")
    data = bytearray(manifest.read_bytes())
    manifest.chmod(0o644)
    manifest.write_bytes(
        data[:at]
        if value % 2
        else bytes([*data[: at % len(data)], value, *data[at % len(data) + 1 :]])
    )
    assert objects.manifests.entries(content) == good
