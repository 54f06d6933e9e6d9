"""Where shards begin: a pure function of paths and sizes, in which only neighbours have a say."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.storage.content.files import Entry
from runner.storage.content.pack import Shard, shards
from runner.storage.content.tar import END, member_size

TARGET = 64 << 10
SIZES = st.one_of(
    st.integers(0, 2000),
    st.integers(0, 40_000),
    st.sampled_from([0, TARGET, 2 * TARGET - 512, 2 * TARGET, 5 * TARGET]),
)


def manifest(sizes: list[int]) -> list[Entry]:
    return [Entry(f"d{n // 7:03}/f{n:04}", "f", size, f"{n:064x}") for n, size in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, max_size=200))
def test_every_entry_is_in_one_shard_in_order_and_sizes_are_those_of_the_tar(
    sizes: list[int],
) -> None:
    entries = manifest(sizes)
    cut = shards(entries, TARGET)
    assert [entry for shard in cut for entry in shard.entries] == entries
    assert all(shard.size == sum(map(member_size, shard.entries)) + len(END) for shard in cut)
    assert len({shard.name for shard in cut}) == len(cut)
    assert all(shard.size <= 2 * TARGET + 1024 or len(shard.entries) == 1 for shard in cut)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=150, max_size=400), st.data())
def test_one_file_more_less_or_other_leaves_all_but_its_neighbourhood(
    sizes: list[int], data: st.DataObject
) -> None:
    entries = manifest(sizes)
    at = data.draw(st.integers(0, len(entries) - 1))
    edit = data.draw(st.sampled_from(["add", "remove", "change"]))
    edited = list(entries)
    if edit == "add":
        edited.insert(
            at + 1, Entry(f"{entries[at].path}a", "f", data.draw(st.integers(0, 3000)), "a" * 64)
        )
    elif edit == "remove":
        del edited[at]
    else:
        edited[at] = entries[at]._replace(value="b" * 64)
    assert len(_new(shards(entries, TARGET), shards(edited, TARGET))) <= 3


def test_one_file_nearly_always_changes_one_shard() -> None:
    entries = manifest([1000 + n * 7919 % 1000 for n in range(3000)])
    before = shards(entries, TARGET)
    changed = [
        len(_new(before, shards([*entries[:at], *entries[at + 1 :]], TARGET)))
        for at in range(0, 3000, 50)
    ]
    assert len(before) > 40
    assert max(changed) <= 2 and changed.count(1) > 0.9 * len(changed)


def _new(before: list[Shard], after: list[Shard]) -> set[str]:
    return {shard.name for shard in after} - {shard.name for shard in before}


def told(manifest: list[Entry], target: int) -> list[list[Entry]]:
    """The rules of docs/packs.md, word by word."""

    def rank(entry: Entry) -> bytes:
        return hashlib.sha256(entry.path.encode("utf-8", "surrogateescape")).digest()

    def weight(entry: Entry) -> int:
        return member_size(entry)

    def in_two(piece: list[Entry]) -> list[list[Entry]]:
        whole = sum(map(weight, piece))
        if whole <= 2 * target:
            return [piece]
        places = [sum(map(weight, piece[:n])) for n in range(len(piece))]
        inner = range(1, len(piece))
        good = [n for n in inner if target / 4 <= places[n] <= whole - target / 4] or inner
        n = min(good, key=lambda n: rank(piece[n]))
        return [*in_two(piece[:n]), *in_two(piece[n:])]

    runs: list[list[Entry]] = [[]]
    for entry in manifest:
        if weight(entry) > 2 * target:
            runs += [[entry], []]
        else:
            runs[-1].append(entry)
    pieces: list[list[Entry]] = []
    for run in filter(None, runs):
        places = [sum(map(weight, run[:n])) for n in range(len(run) + 1)]
        begins = [0]
        if places[-1] > target / 2:
            for n, place in enumerate(places[:-1]):
                near = [
                    entry
                    for entry, other in zip(run, places, strict=False)
                    if abs(other - place) <= target / 2
                ]
                if (
                    rank(run[n]) == min(map(rank, near))
                    and target / 4 <= place <= places[-1] - target / 4
                ):
                    begins.append(n)
        for begin, end in zip(begins, [*begins[1:], len(run)], strict=True):
            pieces += in_two(run[begin:end]) if len(run) > 1 else [run]
    return pieces


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, max_size=60))
def test_the_document_says_where_shards_begin(sizes: list[int]) -> None:
    entries = manifest(sizes)
    assert [list(shard.entries) for shard in shards(entries, TARGET)] == told(entries, TARGET)
