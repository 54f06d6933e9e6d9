"""A masker shows everything but secrets, in however many pieces its text comes."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from runner.secrets import Masker, Secret

VALUES = ("correct-horse", "correct-horse-battery", "aaaaaaab")


@given(st.lists(st.sampled_from([*VALUES, "correct-", "horse", "aaaa", "x", "\n"])), st.lists(st.integers(0, 200)))
def test_pieces_are_masked_like_the_whole(words: list[str], cuts: list[int]) -> None:
    text = "".join(words).encode()
    masker = Masker([Secret(f"s{n}", value) for n, value in enumerate(VALUES)])
    shown, at = b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        shown += masker.feed(text[at:cut])
        at = cut
    shown += masker.end()
    assert shown == masker.mask(text)
    assert not any(value.encode() in shown for value in VALUES)


def test_what_cannot_be_a_secret_is_shown_at_once() -> None:
    masker = Masker([Secret("t", "correct-horse-battery")])
    assert masker.feed(b"step 10 loss 0.5\n") == b"step 10 loss 0.5\n"
    assert masker.feed(b"token corr") == b"token "
    assert masker.feed(b"upt") == b"corrupt"
    assert masker.end() == b""


def test_other_spellings_are_masked() -> None:
    masker = Masker([Secret("t", 'p"ss wörd/long')])
    for text in (base64.b64encode('user:p"ss wörd/long'.encode()), 'p"ss wörd/long'.encode().hex().encode(), b"p%22ss%20w%C3%B6rd%2Flong"):
        assert b"***" in masker.mask(text)
