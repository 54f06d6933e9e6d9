"""Cut a dataset into the shards that it travels in.

The content id of the dataset (`files.tree_id`) is the pack's name, in every key and on every host; shards are only how it travels.  Where one begins
is decided by the hashes of the paths near it, so that one file more, less or other changes one shard and leaves the rest where it was.

A shard's name is the SHA-256 of its member table.  A table holds the SHA-256 of every file, and what `tar_stream` writes follows from it: as good a
name as the digest of the tar's bytes, and known without reading the files a second time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ... import digest
from .files import Entry
from .tar import END, member_size

TARGET = 64 << 20
"""Bytes that a shard has about: seldom below a quarter of it, and above twice of it only where a single file is."""


class Shard(NamedTuple):
    """Entries next to each other in the manifest, as one tar of `size` bytes."""

    name: str
    entries: tuple[Entry, ...]
    size: int


def shards(manifest: Sequence[Entry], target: int = TARGET) -> list[Shard]:
    """The shards of a tree, in order.  An empty tree has none."""
    sizes = list(map(member_size, manifest))
    found: list[Shard] = []
    for first, last in _cuts(manifest, sizes, target):
        members = tuple(manifest[first:last])
        found.append(Shard(shard_name(members), members, sum(sizes[first:last]) + len(END)))
    return found


def shard_name(members: Sequence[Entry]) -> str:
    """The SHA-256 that a shard with these members is called by."""
    return digest.of_value("shard/1", members)


def _cuts(manifest: Sequence[Entry], sizes: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Ranges of entries, each a shard."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for n in (*(n for n, size in enumerate(sizes) if size > 2 * target), len(sizes)):
        if first < n:
            ranges += _cut_run(manifest, sizes, first, n, target)
        if n < len(sizes):
            ranges.append((n, n + 1))  # a file beyond all limits is a shard of its own
        first = n + 1
    return ranges


def _cut_run(
    manifest: Sequence[Entry], sizes: Sequence[int], first: int, last: int, target: int
) -> list[tuple[int, int]]:
    """A shard begins at an entry whose path has the lowest hash within half a target on both sides: what is farther away has no say in it."""
    starts: list[int] = [0]
    for size in sizes[first:last]:
        starts.append(starts[-1] + size)
    whole, reach, least = starts[-1], target // 2, target // 4
    if whole <= 2 * least:
        return [(first, last)]
    ranks = [
        hashlib.sha256(entry.path.encode("utf-8", "surrogateescape")).digest()
        for entry in manifest[first:last]
    ]
    begins = [
        n
        for n in _lowest(ranks, starts, reach)
        if starts[n] >= least and whole - starts[n] >= least
    ]
    ranges: list[tuple[int, int]] = []
    waiting = list(reversed(list(zip([0, *begins], [*begins, last - first], strict=True))))
    while waiting:
        begin, end = waiting.pop()
        if starts[end] - starts[begin] <= 2 * target:
            ranges.append((first + begin, first + end))
            continue
        # Too long: the same question, asked of this piece alone, so that nothing outside of it changes either.
        inner = range(begin + 1, end)
        good = [
            n
            for n in inner
            if starts[n] - starts[begin] >= least and starts[end] - starts[n] >= least
        ]
        middle = min(good or inner, key=ranks.__getitem__)
        waiting += [(middle, end), (begin, middle)]
    return ranges


def _lowest(ranks: Sequence[bytes], starts: Sequence[int], reach: int) -> list[int]:
    """The entries with the lowest rank among all that begin within `reach` bytes of them."""
    found: list[int] = []
    window: deque[int] = deque()  # ascending ranks; the first is the lowest in reach of `n`
    ahead = 0
    for n, start in enumerate(starts[:-1]):
        while ahead < len(ranks) and starts[ahead] <= start + reach:
            while window and ranks[window[-1]] > ranks[ahead]:
                window.pop()
            window.append(ahead)
            ahead += 1
        while starts[window[0]] < start - reach:
            window.popleft()
        if window[0] == n:
            found.append(n)
    return found
