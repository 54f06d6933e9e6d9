"""Division of a dataset into shards for transfer.

A pack is identified by the dataset's content id (`files.tree_id`) in every key and on every host.
Shard boundaries depend only on the hashes of nearby paths, so that adding, removing or changing a
file affects one shard.

A shard's name is the SHA-256 of its member table, which has the SHA-256 of every file.
`tar_stream` writes the same bytes for the same table, so the name identifies the shard without a
second read of the files.
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
"""Typical size of a shard in bytes.

Shards are rarely below a quarter of it, and above twice this size only for a single large file.
"""


class Shard(NamedTuple):
    """Consecutive manifest entries of a dataset, as one tar archive of `size` bytes."""

    name: str
    entries: tuple[Entry, ...]
    size: int


def shards(manifest: Sequence[Entry], target: int = TARGET) -> list[Shard]:
    """Return the shards of a tree in order.

    An empty tree has none.
    """
    sizes = list(map(member_size, manifest))
    found: list[Shard] = []
    for first, last in _cuts(manifest, sizes, target):
        members = tuple(manifest[first:last])
        found.append(Shard(shard_name(members), members, sum(sizes[first:last]) + len(END)))
    return found


def shard_name(members: Sequence[Entry]) -> str:
    """Return the name of a shard: the SHA-256 of its members."""
    return digest.of_value("shard/1", members)


def _cuts(manifest: Sequence[Entry], sizes: Sequence[int], target: int) -> list[tuple[int, int]]:
    """Return the index ranges of the manifest entries for each shard."""
    ranges: list[tuple[int, int]] = []
    first = 0
    oversized = [n for n, size in enumerate(sizes) if size > 2 * target]
    for n in (*oversized, len(sizes)):
        if first < n:
            ranges += _cut_run(manifest, sizes, first, n, target)
        if n < len(sizes):
            ranges.append((n, n + 1))  # an oversized file is a shard of its own
        first = n + 1
    return ranges


def _cut_run(
    manifest: Sequence[Entry], sizes: Sequence[int], first: int, last: int, target: int
) -> list[tuple[int, int]]:
    """Divide a range of manifest entries into shards.

    A shard starts at the entry whose path hash is the lowest within half a target size on both
    sides, so that distant entries have no influence.
    """
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
    begins = []
    for n in _lowest(ranks, starts, reach):
        if starts[n] >= least and whole - starts[n] >= least:
            begins.append(n)
    ranges: list[tuple[int, int]] = []
    waiting = list(reversed(list(zip([0, *begins], [*begins, last - first], strict=True))))
    while waiting:
        begin, end = waiting.pop()
        if starts[end] - starts[begin] <= 2 * target:
            ranges.append((first + begin, first + end))
            continue
        # A piece that is too long is cut by the same rule within itself, so that no other piece
        # changes.
        inner = range(begin + 1, end)
        good = []
        for n in inner:
            if starts[n] - starts[begin] >= least and starts[end] - starts[n] >= least:
                good.append(n)
        middle = min(good or inner, key=ranks.__getitem__)
        waiting += [(middle, end), (begin, middle)]
    return ranges


def _lowest(ranks: Sequence[bytes], starts: Sequence[int], reach: int) -> list[int]:
    """Return the indexes of entries whose hash is the lowest within `reach` bytes on both sides."""
    found: list[int] = []
    window: deque[int] = deque()  # ascending ranks; the first is the lowest within reach of `n`
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
