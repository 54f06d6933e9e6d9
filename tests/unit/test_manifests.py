"""Frames are believed when they are whole, and manifests when they stay inside."""

from __future__ import annotations

import posixpath
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.agent import trees
from runner.agent.frames import BadFrame, FrameParser, frame
from runner.hosts.transfer import manifests
from runner.storage.content.files import Entry

PARTS = st.sampled_from(["a", "b", "..", ".", "", "c d", "/", "a\0b", "é", "x" * 256])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


@given(
    payloads=st.lists(st.binary(max_size=60), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream, frames, found = b"".join(map(frame, payloads)), FrameParser(), []
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    for start, end in zip([0, *ends], ends, strict=False):
        found += frames.feed(stream[start:end])
    assert found == payloads


@given(payload=st.binary(max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_is_believed(payload: bytes, at: int, bit: int) -> None:
    whole = bytearray(frame(payload))
    whole[at % len(whole)] ^= 1 << bit
    with pytest.raises(BadFrame):
        FrameParser().feed(bytes(whole))


@given(paths=st.lists(PATHS, max_size=5), targets=st.lists(PATHS, max_size=3))
def test_a_manifest_that_is_trusted_stays_inside(paths: list[str], targets: list[str]) -> None:
    links = {f"link{n}": target for n, target in enumerate(targets)}
    entries = [Entry(path, "f", 1, "0" * 64) for path in paths] + [
        Entry(path, "l", 1, target) for path, target in links.items()
    ]
    if manifests.find_fault(entries):
        return
    for path in paths:
        assert posixpath.normpath(path) == path and not path.startswith(("/", ".."))
    for target in links.values():
        at = target
        for _ in range(10):  # through other links, all of which lie at the top
            head, _, rest = at.partition("/")
            at = posixpath.join(links[head], rest) if head in links else at
        assert not posixpath.normpath(at).startswith(("/", ".."))


def test_what_is_whole_before_a_flipped_bit_is_given_and_nothing_behind_it() -> None:
    stream, frames = bytearray(frame(b"one") + frame(b"two") + frame(b"three")), FrameParser()
    stream[len(frame(b"one")) + 13] ^= 1
    assert frames.feed(bytes(stream)) == [b"one"] and frames.broken
    with pytest.raises(BadFrame):
        frames.feed(b"")


@given(st.lists(st.sampled_from(["a", "b/c", "b/d/e", "f"]), unique=True))
def test_the_digest_of_a_tree_depends_on_every_name_and_kind(names: list[str]) -> None:
    entries = [Entry(name, "f", 1, "0" * 64) for name in names]
    digest = manifests.tree_stamp(entries)
    assert digest == manifests.tree_stamp(entries[::-1])
    for n, entry in enumerate(entries):
        for other in (
            entries[:n] + entries[n + 1 :],
            [*entries, entry._replace(path="z")],
            [*entries[:n], entry._replace(kind="x"), *entries[n + 1 :]],
        ):
            assert manifests.tree_stamp(other) != digest


def test_the_stamp_of_a_tree_on_a_disk_is_that_of_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "run").write_text("x")
    (tmp_path / "a" / "run").chmod(0o755)
    (tmp_path / "link").symlink_to("a/run")
    entries = [
        Entry("a/b", "d", 0, ""),
        Entry("a/run", "x", 1, "0" * 64),
        Entry("link", "l", 5, "a/run"),
    ]
    assert manifests.tree_stamp(entries) == trees.stamp_of(str(tmp_path))
