"""Claims about how `sft@1` packs documents and orders sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

TRAINERS = Path(__file__).resolve().parents[2] / "recipes" / "trainers"


@pytest.fixture(scope="module", autouse=True)
def siblings() -> Iterator[None]:
    sys.path.insert(0, str(TRAINERS))
    yield
    sys.path.remove(str(TRAINERS))
    sys.modules.pop("tokens", None)


@given(st.lists(st.integers(2, 50), max_size=60), st.data())
def test_packing_uses_every_document_once_and_overfills_nothing(
    lengths: list[int], data: st.DataObject
) -> None:
    from tokens import pack  # type: ignore[import-not-found]

    documents = data.draw(
        st.sets(st.sampled_from(range(len(lengths)))) if lengths else st.just(set())
    )
    sequences = pack(lengths, sorted(documents), 50)
    assert sorted(document for sequence in sequences for document in sequence) == sorted(documents)
    fill = [sum(lengths[document] for document in sequence) for sequence in sequences]
    assert all(total <= 50 for total in fill)
    # No two could be one: best fit leaves at most one sequence less than half full.
    assert sum(total <= 25 for total in fill) <= 1


@given(
    st.integers(1, 30),
    st.integers(0, 5),
    st.integers(0, 100),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_the_order_is_one_endless_reading_however_it_is_cut(
    length: int, seed: int, first: int, cuts: list[int]
) -> None:
    from tokens import order

    whole = order(length, seed, first, sum(cuts))
    parts, at = [], first
    for cut in cuts:
        parts += order(length, seed, at, cut)
        at += cut
    assert parts == whole


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 5))
def test_each_epoch_reads_everything_once(length: int, seed: int, epoch: int) -> None:
    from tokens import order

    assert sorted(order(length, seed, epoch * length, length)) == list(range(length))


def test_epochs_and_seeds_differ_and_the_order_never_changes() -> None:
    from tokens import order

    assert order(8, 0, 0, 8) == [0, 2, 6, 7, 1, 4, 5, 3]
    assert (
        len({tuple(order(8, seed, 8 * epoch, 8)) for seed in range(3) for epoch in range(3)}) == 9
    )
