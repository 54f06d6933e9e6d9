"""A tree's id depends on what is in it and on nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runner.paths import glob
from runner.storage.content.files import Entry, Identity, is_settled, tree_id

ENTRY = st.builds(
    Entry, st.text(max_size=6), st.sampled_from("fxld"), st.integers(0, 9), st.text(max_size=6)
)


@given(st.lists(ENTRY, max_size=4), st.lists(ENTRY, max_size=4))
def test_two_manifests_share_an_id_only_if_they_are_equal(
    one: list[Entry], other: list[Entry]
) -> None:
    assert (tree_id(one) == tree_id(other)) == (one == other)


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_no_digest_is_remembered_that_was_begun_in_the_tick_of_the_last_change(
    mtime: int, ctime: int, at: int
) -> None:
    found = Identity(1, 1, 1, mtime, ctime)
    if at <= max(mtime, ctime) + 10_000_000:
        assert not is_settled(found, at)
    if at > max(mtime, ctime) + 2_000_000_000:
        assert is_settled(found, at)


def test_a_star_stays_within_a_name_and_two_do_not() -> None:
    assert glob("a/*.txt")("a/b.txt") and not glob("a/*.txt")("a/c/b.txt")
    assert glob("**/*.txt")("b.txt") and glob("**/*.txt")("a/c/b.txt")
    assert glob("?[ab][!c]")("xab") and not glob("?[ab][!c]")("xac") and not glob("a.b")("axb")
