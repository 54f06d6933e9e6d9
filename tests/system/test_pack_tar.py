"""Tar as we write it is read by everybody, and tar as others write it is read without believing it."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.errors import Infrastructure, RecipeError
from runner.storage import tar
from runner.storage.files import Changed, Entry, Unhashable, entries, scan, tree_id
from runner.storage.tar import END, BadArchive, Budget, member_size, tar_stream, unpack
from tests.tools import needs

ROOM = Budget(1 << 30, 100_000)
FUZZ = int(os.environ.get("RECIPE_TAR_FUZZ", "200"))


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


def test_a_tree_comes_back_as_it_was(tree: Path, tmp_path: Path) -> None:
    manifest = entries(tree)
    assert unpack([tar_stream(tree, manifest, check=True)], tmp_path / "out", manifest) == manifest
    assert unpack([tar_stream(tree, manifest)], tmp_path / "free", ROOM) == manifest
    assert entries(tmp_path / "out") == entries(tmp_path / "free") == manifest
    assert sum(map(member_size, manifest)) + len(END) == len(archive(tree))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "in", "out"]


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
        assert {(member.uid, member.mtime, member.uname) for member in opened} == {(0, 315532800, "")}
        opened.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.0 to 3.11.3 have none
        opened.extractall(tmp_path / "out")
    assert entries(tmp_path / "out") == entries(tree)


WRITERS = {
    "gnu": ["tar", "-cf", "-", "-C"],
    "pax": ["tar", "--format=pax", "-cf", "-", "-C"],
    "sorted": ["tar", "--format=gnu", "--sort=name", "--owner=7", "-b", "100", "-cf", "-", "-C"],
    "busybox": ["busybox", "tar", "-cf", "-", "-C"],
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_ordinary_tars_write_is_read(tree: Path, tmp_path: Path, writer: str) -> None:
    needs(WRITERS[writer][0])
    data = subprocess.run([*WRITERS[writer], tree, "."], capture_output=True, check=True).stdout
    manifest = entries(tree)
    assert unpack([[data]], tmp_path / "free", ROOM) == manifest
    assert unpack([[data]], tmp_path / "out", manifest) == manifest == entries(tmp_path / "out")


def test_the_bytes_of_a_tar_never_change() -> None:
    """They follow from a shard's name, also in the packs that were written with an earlier version."""
    rows = [Entry("a/" + "b" * n, "d", 0, "") for n in (1, 97, 98, 99, 100, 155, 254)] + [Entry("l", "l", 120, "t" * 120), Entry("ü", "l", 1, "a")]
    assert hashlib.sha256(b"".join(tar_stream("/nowhere", rows))).hexdigest() == "82353a99439534043070255450bebb696e57b0e05ff7901d8a4216bc80c6fab9"


def test_a_size_beyond_octal_is_written_in_binary() -> None:
    size = 9 << 30
    head = tar.member_header(Entry("huge", "f", size, ""))
    assert tarfile.TarInfo.frombuf(head, "utf-8", "strict").size == size


NAMES = st.binary(min_size=1, max_size=12).filter(lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b".."))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=4).map(tuple), st.binary(max_size=700) | st.none(), max_size=8), st.data())
def test_any_tree_comes_back_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, found: dict[tuple[bytes, ...], bytes | None], data: st.DataObject
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
    manifest = entries(top / "in")
    whole = archive(top / "in")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert unpack([pieces], top / "out", data.draw(st.sampled_from([manifest, ROOM]))) == manifest == entries(top / "out")


def test_several_archives_make_one_tree_byte_by_byte(tree: Path, tmp_path: Path) -> None:
    manifest = [entry for entry in entries(tree) if entry.size < 10_000]
    archives = ((bytes([byte]) for byte in b"".join(tar_stream(tree, part))) for part in (manifest[:5], manifest[5:]))
    assert unpack(archives, tmp_path / "out", manifest) == manifest == entries(tmp_path / "out")


# -- a tree that does not hold still -----------------------------------------------------------------------------------------------------------------


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _swap(path: Path) -> None:
    path.unlink()
    path.symlink_to("plain")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("edit", [_grow, lambda path: path.write_bytes(b""), _swap, _pipe, Path.unlink, lambda path: path.chmod(0o755)])
def test_a_file_that_is_not_what_the_manifest_says_is_named(tree: Path, edit: Callable[[Path], None]) -> None:
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


# -- archives that nobody vouches for ----------------------------------------------------------------------------------------------------------------


def member(
    name: str | bytes, data: bytes = b"", *, kind: bytes = b"0", link: bytes = b"", size: int | bytes | None = None, mode: int = 0o644
) -> bytes:
    """One member by hand, of whatever kind and name."""
    raw = name if isinstance(name, bytes) else name.encode()
    number = size if isinstance(size, bytes) else b"%011o\0" % (len(data) if size is None else size)
    head = bytearray(raw.ljust(100, b"\0")[:100] + b"%07o\0" % mode + b"0000000\0" * 2 + number + b"%011o\0" % 0 + b" " * 8 + kind)
    head += link.ljust(100, b"\0") + b"ustar\x0000"
    head += bytes(512 - len(head))
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + data + bytes(-len(data) % 512)


def pax(*records: tuple[str, str], kind: bytes = b"x") -> bytes:
    body = b""
    for key, value in records:
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        body += str(length).encode() + rest
    return member("pax", body, kind=kind)


def links_beyond_a_path() -> bytes:
    """A link that leads out, through links whose real path is longer than a system call takes (CVE-2025-4517)."""
    steps, path, found = "abcdefghijklmnop", "", b""
    for step in steps:
        found += pax(("path", f"{path}{'d' * 247}")) + member("x", kind=b"5")
        found += pax(("path", f"{path}{step}"), ("linkpath", "d" * 247)) + member("x", kind=b"2")
        path += f"{'d' * 247}/"
    through = "/".join(steps) + "/" + "l" * 254
    found += pax(("path", through), ("linkpath", "../" * len(steps))) + member("x", kind=b"2")
    return found + pax(("linkpath", through + "/.." * 7)) + member("escape", kind=b"2") + member("escape/evil", b"x")


BAD = {
    "absolute": member("/etc/evil", b"x"),
    "parent": member("../evil", b"x"),
    "parent inside": member("a/../../evil", b"x"),
    "parent at the end": member("a/..", kind=b"5"),
    "dot inside": member("a/./b", b"x"),
    "empty part": member("a//b", b"x"),
    "no name": member("", b"x"),
    "only a dot": member(".", b"x"),
    "a folder's name for a file": member("a/", b"x"),
    "NUL by pax": pax(("path", "a\0b")) + member("x", b"x"),
    "parent by pax": pax(("path", "../evil")) + member("x", b"x"),
    "parent by a long name": member("././@LongLink", b"../../evil\0", kind=b"L") + member("x", b"x"),
    "part of 256 bytes": pax(("path", "n" * 256)) + member("x", b"x"),
    "path of 5000 bytes": pax(("path", "n/" * 2500 + "n")) + member("x", b"x"),
    "hard link": member("a", b"x") + member("b", kind=b"1", link=b"a"),
    "hard link outwards": member("b", kind=b"1", link=b"/etc/passwd"),
    "character device": member("a", kind=b"3"),
    "block device": member("a", kind=b"4"),
    "named pipe": member("a", kind=b"6"),
    "sparse": member("a", b"x", kind=b"S"),
    "sparse by pax": pax(("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "10000000000000")) + member("a", b"x"),
    "unknown kind": member("a", kind=b"V"),
    "global header": pax(("path", "evil"), kind=b"g") + member("a", b"x"),
    "link with bytes": member("a", b"bytes", kind=b"2", link=b"b"),
    "folder with bytes": member("a", b"bytes", kind=b"5"),
    "link outwards": member("a", kind=b"2", link=b"../evil"),
    "absolute link": member("a", kind=b"2", link=b"/etc"),
    "empty link": member("a", kind=b"2"),
    "link outwards by a link": member("a/b/c/d", kind=b"2", link=b"../../..") + member("m", kind=b"2", link=b"a/b/c/d/.."),
    "links beyond a path": links_beyond_a_path(),
    "file through a link": member("a", kind=b"2", link=b".") + member("a/b", b"x"),
    "link in place of a folder": member("a/b", b"x") + member("a", kind=b"2", link=b"."),
    "file in place of a folder": member("a/b", b"x") + member("a", b"x"),
    "folder in place of a file": member("a", b"x") + member("a/b", b"x"),
    "folder after a file": member("a", b"x") + member("a", kind=b"5"),
    "file after a folder": member("a", kind=b"5") + member("a", b"x"),
    "twice": member("a", b"x") + member("a", b"y"),
    "link twice": member("a", kind=b"2", link=b"b") + member("a", kind=b"2", link=b"c"),
    "negative size": member("a", size=b"\xff" * 12),
    "negative octal": member("a", size=b"-0000000001\0"),
    "size beyond the budget": member("a", size=b"\x80" + b"\0" * 5 + b"\xff" * 6),
    "size in pax beyond the budget": pax(("size", "99999999999999")) + member("a"),
    "size in pax no number": pax(("size", "-5")) + member("a"),
    "damaged pax length": member("pax", b"99999 path=a\n", kind=b"x") + member("a"),
    "endless headers": pax(("path", "a")) * 9,
    "a header of a megabyte": member("pax", b"0" * (1 << 20), kind=b"x"),
    "goes on behind its end": member("a", b"x") + bytes(512) + member("b", b"x"),
    "old format": bytes(257).replace(b"\0", b"a", 1) + bytes(255),
    "not a tar": b"PK\x03\x04" * 200,
    "gzip": b"\x1f\x8b" * 400,
    "a wrong sum": member("a", b"x").replace(b"0000644", b"0000755", 1),
}


@pytest.mark.parametrize("name", BAD)
def test_an_archive_with_tricks_leaves_nothing(tmp_path: Path, name: str) -> None:
    for expect in (ROOM, [Entry("a", "f", 1, hashlib.sha256(b"x").hexdigest())]):
        with pytest.raises(BadArchive) as raised:
            unpack([[BAD[name] + bytes(1024)]], tmp_path / "out", expect)
        assert str(raised.value).isprintable()
        assert list(tmp_path.iterdir()) == []


def test_our_own_checks_hold_where_the_filter_of_python_lets_everything_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile, "data_filter", lambda member, _path: member, raising=False)
    for data in BAD.values():
        with pytest.raises(BadArchive):
            unpack([[data + END]], tmp_path / "out", ROOM)
        assert list(tmp_path.iterdir()) == []


ENDLESS = {
    "a name": member("././@LongLink", kind=b"L", size=b"\x80" + b"\0" * 4 + b"\xff" * 7),
    "headers": pax(("path", "a")),
    "a sparse map": pax(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")) + member("a", size=1 << 30) + b"99999999\n".ljust(512, b"1"),
    "zeros": bytes(512),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_headers_without_end_are_not_read_into_memory(tmp_path: Path, name: str) -> None:
    more = itertools.count()
    pieces = itertools.chain([ENDLESS[name]], ((b"1\n" * 256 if "map" in name else ENDLESS[name][:512]) for n in more if n < 100_000))
    with pytest.raises(BadArchive):
        unpack([pieces], tmp_path / "out", Budget(1 << 40, 100))
    assert next(more) < 20_000 and list(tmp_path.iterdir()) == []


def test_modes_of_others_are_not_taken_over(tmp_path: Path) -> None:
    data = member("s", b"x", mode=0o6777) + member("t", b"x", mode=0o1000) + member("d", kind=b"5", mode=0) + member("d/f", b"x", mode=0o055)
    assert [entry.kind for entry in unpack([[data + bytes(1024)]], tmp_path / "out", ROOM)] == ["f", "x", "f"]
    assert {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*")} == {"s": 0o755, "t": 0o644, "d": 0o755, "f": 0o644}


@pytest.mark.parametrize("manifest", [True, False])
def test_an_archive_cut_anywhere_leaves_nothing(tree: Path, tmp_path: Path, manifest: bool) -> None:
    shutil.rmtree(tree / "a")
    (tree / "mid").write_bytes(bytes(3000))
    whole, rows = archive(tree), entries(tree)
    for length in range(0, len(whole), 512):
        with pytest.raises(BadArchive):
            unpack([[whole[:length]]], tmp_path / "out", rows if manifest else ROOM)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_the_manifest_does_not_say_is_refused(tree: Path, tmp_path: Path) -> None:
    manifest, whole = entries(tree), archive(tree)
    by_path = {entry.path: entry for entry in manifest}
    for path, other in (("plain", {"value": "0" * 64}), ("a/large", {"value": "0" * 64}), ("plain", {"size": 7}), ("a/b/link", {"value": "../tooo"})):
        claimed = [entry._replace(**other) if entry.path == path else entry for entry in manifest]
        with pytest.raises(BadArchive, match=path):
            unpack([[whole]], tmp_path / "out", claimed)
    with pytest.raises(BadArchive, match="'plain' is not in the manifest"):
        unpack([[whole]], tmp_path / "out", [entry for entry in manifest if entry.path != "plain"])
    with pytest.raises(BadArchive, match="lacks 'extra'"):
        unpack([[whole]], tmp_path / "out", [*manifest, by_path["plain"]._replace(path="extra")])
    with pytest.raises(BadArchive, match="another kind"):
        unpack([[whole]], tmp_path / "out", [*(entry for entry in manifest if entry.path != "plain"), Entry("plain", "l", 6, "a/tool")])
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tree_of_a_thousand_levels_is_made_or_taken_back(tmp_path: Path) -> None:
    deep = "/".join("d" * 1500)
    good = member("././@LongLink", f"{deep}/f".encode() + b"\0", kind=b"L") + member("x", b"x")
    with pytest.raises(BadArchive, match="ends too early"):
        unpack([[good]], tmp_path / "out", ROOM)
    with pytest.raises(BadArchive, match="more directories"):
        unpack([[good + END]], tmp_path / "out", Budget(10, 1000))
    long = member("././@LongLink", b"/".join([b"n" * 200] * 20) + b"\0", kind=b"L") + member("x", b"x")
    with pytest.raises(BadArchive, match="too long a path here"):
        unpack([[long + END]], tmp_path / "out", ROOM)
    assert list(tmp_path.iterdir()) == []
    assert [entry.path for entry in unpack([[good + END]], tmp_path / "out", ROOM)] == [f"{deep}/f"]
    assert entries(tmp_path / "out")[0].path == f"{deep}/f"
    subprocess.run(["rm", "-rf", str(tmp_path / "out")], check=True)  # deeper than Python's own way to delete a tree can go


@pytest.mark.parametrize(("budget", "message"), [(Budget(100, 10), "more bytes"), (Budget(1 << 30, 3), "more members")])
def test_a_budget_holds(tree: Path, tmp_path: Path, budget: Budget, message: str) -> None:
    with pytest.raises(BadArchive, match=message):
        unpack([[archive(tree)]], tmp_path / "out", budget)


def test_what_is_there_is_not_replaced(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(Infrastructure, match="out"):
        unpack([[archive(tree)]], tmp_path / "out", ROOM)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_broken_stream_leaves_nothing(tree: Path, tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield archive(tree)[:2_000_000]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        unpack([broken()], tmp_path / "out", ROOM)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.longer
def test_no_mutated_archive_gets_through_or_out(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "a")
    manifest, whole = entries(tree), archive(tree)
    id, chance = tree_id(manifest), random.Random(7)
    heads = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    outside = sorted(os.listdir(tmp_path))
    for n in range(FUZZ):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.choice(heads) + chance.randrange(512) if chance.random() < 0.8 else chance.randrange(len(data))
            data[at % len(data)] = chance.choice((0, 0x2F, 0x2E, 0x31, 0x37, 0x80, 0xFF, chance.randrange(256)))
        if chance.random() < 0.7:  # a liar knows how to sum
            for at in heads:
                data[at + 148 : at + 156] = b" " * 8
                data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
        if chance.random() < 0.2:
            at = chance.choice(heads)
            data[at:at] = data[chance.choice(heads) :][:512]
        target = tmp_path / "out"
        try:
            found = unpack([[bytes(data)]], target, manifest if n % 2 else Budget(1 << 20, 100))
        except BadArchive:
            assert sorted(os.listdir(tmp_path)) == outside
            continue
        assert found == entries(target)
        assert not n % 2 or tree_id(found) == id
        shutil.rmtree(target)


def test_every_fault_is_one_of_ours() -> None:
    assert issubclass(BadArchive, RecipeError) and issubclass(Changed, Unhashable)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unhashable, match="pipe: a named pipe"):
        scan(tmp_path)
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(Unhashable, match="a socket"):
            scan(tmp_path)
