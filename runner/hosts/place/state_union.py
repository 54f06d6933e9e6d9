"""The state of a multi-node attempt: the union of all nodes' files.

It is collected here, and is complete on each node before a resume.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from drivers.base import HostLost, Rejected

from ...storage.content import files
from ...storage.content.disk import delete
from ..transfer.download import HashedOutput
from ..transfer.host_store import MissingDirectory
from ..transfer.manifests import files_size
from .checkpoint_sync import DirectoryListing, HostCheckpoints
from .rendezvous import gather_all

_T = TypeVar("_T")


class NodesCheckpoints:
    """`checkpoint_sync.CheckpointHost` on the nodes of one attempt, by rank.

    A lost host counts as empty; if all are lost, HostLost is raised.  A replacement host is still
    empty.
    """

    def __init__(self, nodes: Sequence[HostCheckpoints], say: Callable[[str], None]) -> None:
        self._nodes, self._say = nodes, say
        self._warned: set[str] = set()
        self.partial = False

    async def list_files(self, path: str) -> DirectoryListing:
        """List the files of all nodes; for equal names, the first node counts."""
        listings = list((await self._ask_nodes(lambda node: node.list_files(path))).values())
        merged: dict[str, tuple[int, int]] = {}
        for listing in reversed(listings):
            merged.update(listing.files)
        return _with_tightest_disk(merged, listings)

    async def list_resumable(self, path: str) -> DirectoryListing:
        """List the files that are equal on all nodes, with the first node's times.

        A directory counts only if it is completely equal.
        """
        listings = list((await self._ask_nodes(lambda node: node.list_files(path))).values())
        first, others = listings[0], listings[1:]
        same: dict[str, tuple[int, int]] = {}
        for name, (size, changed) in first.files.items():
            if all(_has_file(other, name, size) for other in others):
                same[name] = size, changed
        unequal: set[str] = set()
        # Files of equal sizes may have different contents.
        for checkpoint in sorted({_checkpoint_of(name) for name in same}):
            if not await self._is_equal(f"{path}/{checkpoint}"):
                unequal.add(checkpoint)
        same = {name: known for name, known in same.items() if _checkpoint_of(name) not in unequal}
        return _with_tightest_disk(same, listings)

    async def _is_equal(self, path: str) -> bool:
        """Return whether a file or directory has the same content on all nodes."""
        outputs = await self._hash_on_nodes(path)
        return len({output.content for output in outputs.values()}) <= 1

    async def download(self, path: str, target: Path) -> int:
        """Download the union of a checkpoint's files on all nodes.

        For a file that differs, the first node counts.
        """
        outputs = await self._hash_on_nodes(path)
        existing = [(rank, output) for rank, output in outputs.items() if output.content]
        if not existing:
            raise Rejected(f"{path} no longer exists")
        (first, whole), *others = existing
        size = await self._nodes[first].download_hashed(path, whole, target)
        union = {entry.path: entry for entry in whole.entries}
        for rank, output in others:
            different = _find_different_files(output.entries, union)
            if different:
                self._report_difference(path, different, first, rank)
            new = [entry for entry in output.entries if entry.path not in union]
            if new and whole.content[0] == output.content[0] == "t":
                size += await self._merge_files(rank, path, output, new, target)
            union |= {entry.path: entry for entry in new}
        return size

    async def upload(self, source: Path, path: str) -> int:
        return sum((await self._ask_nodes(lambda node: node.upload(source, path))).values())

    async def remove(self, paths: Sequence[str]) -> None:
        await self._ask_nodes(lambda node: node.remove(paths))

    async def _hash_on_nodes(self, path: str) -> dict[int, HashedOutput]:
        """Return the digest and manifest of a path on each node.

        A node without the state directory has no files.
        """

        async def hash_path(node: HostCheckpoints) -> HashedOutput:
            try:
                return await node.hash_path(path)
            except MissingDirectory:
                self.partial = True
                return HashedOutput()

        return await self._ask_nodes(hash_path)

    async def _merge_files(
        self, rank: int, path: str, output: HashedOutput, new: Sequence[files.Entry], target: Path
    ) -> int:
        """Download the files that only this node has, and merge them into the target."""
        part = Path(f"{target}.node-{rank}")
        delete(part)
        wanted = replace(
            output, entries=tuple(new), content=files.tree_id(new), size=files_size(new)
        )
        size = await self._nodes[rank].download_hashed(path, wanted, part)
        for entry in new:
            merged = target / entry.path
            merged.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "d":
                merged.mkdir(exist_ok=True)
            else:
                os.rename(part / entry.path, merged)
        delete(part)
        return size

    def _report_difference(self, path: str, names: Sequence[str], first: int, rank: int) -> None:
        checkpoint = path.rpartition("/")[2]
        if checkpoint in self._warned:
            return
        self._warned.add(checkpoint)
        shown = ", ".join(names[:3])
        if len(names) > 3:
            shown += f" and {len(names) - 3} more"
        self._say(
            f"{checkpoint} differs between node {rank} and node {first} in {shown or checkpoint}; keeping the copy of node {first}"
        )

    async def _ask_nodes(self, ask: Callable[[HostCheckpoints], Awaitable[_T]]) -> dict[int, _T]:
        """Return each node's answer by rank, without lost nodes."""
        lost: list[HostLost] = []

        async def ask_node(rank: int) -> tuple[int, _T] | None:
            try:
                return rank, await ask(self._nodes[rank])
            except HostLost as error:
                lost.append(error)
                self.partial = True
                return None

        answers = await gather_all(map(ask_node, range(len(self._nodes))))
        if len(lost) == len(answers):
            raise lost[0]
        return dict(answer for answer in answers if answer is not None)


def _checkpoint_of(name: str) -> str:
    return name.partition("/")[0]


def _has_file(listing: DirectoryListing, name: str, size: int) -> bool:
    return name in listing.files and listing.files[name][0] == size


def _find_different_files(
    entries: Sequence[files.Entry], union: Mapping[str, files.Entry]
) -> list[str]:
    """Return the paths of the files that another node has with another content."""
    different: list[str] = []
    for entry in entries:
        if entry.kind in "fx" and union.get(entry.path, entry) != entry:
            different.append(entry.path)
    return different


def _with_tightest_disk(
    files: dict[str, tuple[int, int]], listings: Sequence[DirectoryListing]
) -> DirectoryListing:
    tightest = min(listings, key=lambda listing: listing.free)
    return DirectoryListing(files, tightest.free, tightest.total)
