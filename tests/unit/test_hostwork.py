"""Answers of hosts are believed when they are whole, and manifests when they stay inside."""

from __future__ import annotations

import hashlib
import posixpath

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runner.hosts import hostwork
from runner.hosts.hostwork import Garbled
from runner.storage.files import Entry

WORD = "00ff"
PARTS = st.sampled_from(["a", "b", "..", ".", "", "c d", "/", "a\0b", "é", "x" * 256])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


def answer(body: bytes) -> bytes:
    return f"\n{WORD} {hashlib.sha256(body).hexdigest()}\n".encode() + body


@given(noise=st.binary(max_size=40), body=st.binary(max_size=200))
def test_an_answer_is_found_behind_noise(noise: bytes, body: bytes) -> None:
    assume(f"\n{WORD} ".encode() not in noise)
    assert hostwork.answer(noise + answer(body), WORD) == body


@given(body=st.binary(max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_in_an_answer_is_believed(body: bytes, at: int, bit: int) -> None:
    whole = bytearray(answer(body))
    whole[at % len(whole)] ^= 1 << bit
    with pytest.raises(Garbled):
        hostwork.answer(bytes(whole), WORD)


@given(body=st.binary(min_size=1, max_size=200), at=st.integers(0, 10_000))
def test_no_answer_that_was_cut_is_believed(body: bytes, at: int) -> None:
    whole = answer(body)
    with pytest.raises(Garbled):
        hostwork.answer(whole[: at % len(whole)], WORD)


@given(body=st.binary(max_size=300), count=st.integers(0, 3))
def test_an_answer_without_sense_is_garbled_and_nothing_worse(body: bytes, count: int) -> None:
    for read in (lambda: hostwork.seen(body, count), lambda: hostwork.listing(body)):
        try:
            read()
        except Garbled:
            pass


@given(paths=st.lists(PATHS, max_size=5), targets=st.lists(PATHS, max_size=3))
def test_a_manifest_that_is_trusted_stays_inside(paths: list[str], targets: list[str]) -> None:
    links = {f"link{n}": target for n, target in enumerate(targets)}
    entries = [Entry(path, "f", 1, "0" * 64) for path in paths] + [Entry(path, "l", 1, target) for path, target in links.items()]
    if hostwork.untrusted(entries):
        return
    for path in paths:
        assert posixpath.normpath(path) == path and not path.startswith(("/", ".."))
    for target in links.values():
        at = target
        for _ in range(10):  # through other links, all of which lie at the top
            head, _, rest = at.partition("/")
            at = posixpath.join(links[head], rest) if head in links else at
        assert not posixpath.normpath(at).startswith(("/", ".."))


@given(st.lists(st.sampled_from(["a", "b/c", "b/d/e", "f"]), unique=True))
def test_the_digest_of_a_tree_depends_on_every_name_and_kind(names: list[str]) -> None:
    entries = [Entry(name, "f", 1, "0" * 64) for name in names]
    digest = hostwork.tree_digest(entries)
    assert digest == hostwork.tree_digest(entries[::-1])
    for n, entry in enumerate(entries):
        for other in (
            entries[:n] + entries[n + 1 :],
            [*entries, entry._replace(path="z")],
            [*entries[:n], entry._replace(kind="x"), *entries[n + 1 :]],
        ):
            assert hostwork.tree_digest(other) != digest


def test_what_a_failed_attempt_left_is_read_by_name_and_length() -> None:
    body = b"4\n./a/b\n3\n1\n2./c\n0\n"
    assert hostwork.remains(body) == ({"a/b": b"1\n2", "c": b""}, 2)
    assert hostwork.remains(b"0\n") == ({}, 0)


@pytest.mark.parametrize("body", [b"1\n./../x\n1\n1", b"1\n.//etc/x\n1\n1", b"2\n./a\n1\n1./a/b\n1\n1", b"1\n./a\nmany\n", b"", b"1\n./a\0b\n1\n1"])
def test_what_a_host_makes_up_of_a_failed_attempt_is_refused(body: bytes) -> None:
    with pytest.raises(Garbled):
        hostwork.remains(body)
