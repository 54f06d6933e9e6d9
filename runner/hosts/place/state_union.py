"""The state of a multi-node attempt: the union of all nodes' files.

It is collected here, and is complete on each node before a resume.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from drivers.base import HostLost, Rejected

from ...storage.content import files
from ...storage.content.disk import delete
from ..transfer.download import HashedOutput
from ..transfer.host_store import MissingDirectory
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
        looks = await self._ask_nodes(lambda node: node.list_files(path))
        merged: dict[str, tuple[int, int]] = {}
        for look in reversed(list(looks.values())):
            merged.update(look.files)
        return _with_tightest_disk(merged, list(looks.values()))

    async def list_resumable(self, path: str) -> DirectoryListing:
        """List the files that are equal on all nodes, with the first node's times.

        A directory counts only if it is completely equal.
        """
        listings = list((await self._ask_nodes(lambda node: node.list_files(path))).values())
        first, others = listings[0], listings[1:]
        same = {
            name: known
            for name, known in first.files.items()
            if all(other.files.get(name, ())[:1] == known[:1] for other in others)
        }
        for checkpoint in sorted({name.partition("/")[0] for name in same}):
            if not await self._is_equal(f"{path}/{checkpoint}"):
                same = {
                    name: known
                    for name, known in same.items()
                    if name.partition("/")[0] != checkpoint
                }
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
        known = {entry.path: entry for entry in whole.entries}
        for rank, output in others:
            new = [entry for entry in output.entries if entry.path not in known]
            different = [
                entry.path
                for entry in output.entries
                if entry.kind in "fx" and known.get(entry.path, entry) != entry
            ]
            if different:
                self._report_difference(path, different, first, rank)
            if new and whole.content[0] == output.content[0] == "t":
                size += await self._merge_files(rank, path, output, new, target)
            known |= {entry.path: entry for entry in new}
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
        self, rank: int, path: str, taken: HashedOutput, new: Sequence[files.Entry], target: Path
    ) -> int:
        """Download the files that only this node has, and merge them into the target."""
        part = Path(f"{target}.node-{rank}")
        delete(part)
        some = replace(
            taken,
            entries=tuple(new),
            content=files.tree_id(new),
            size=sum(entry.size for entry in new if entry.kind in "fx"),
        )
        size = await self._nodes[rank].download_hashed(path, some, part)
        for entry in new:
            place = target / entry.path
            place.parent.mkdir(parents=True, exist_ok=True)
            if entry.kind == "d":
                place.mkdir(exist_ok=True)
            else:
                os.rename(part / entry.path, place)
        delete(part)
        return size

    def _report_difference(self, path: str, names: Sequence[str], first: int, rank: int) -> None:
        called = path.rpartition("/")[2]
        if called not in self._warned:
            self._warned.add(called)
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            self._say(
                f"{called} differs between node {rank} and node {first} in {some or called}; keeping the copy of node {first}"
            )

    async def _ask_nodes(self, ask: Callable[[HostCheckpoints], Awaitable[_T]]) -> dict[int, _T]:
        """Return each node's answer by rank, without lost nodes."""
        lost: list[HostLost] = []

        async def one(rank: int) -> tuple[int, _T] | None:
            try:
                return rank, await ask(self._nodes[rank])
            except HostLost as error:
                lost.append(error)
                self.partial = True
                return None

        found = await gather_all(map(one, range(len(self._nodes))))
        if len(lost) == len(found):
            raise lost[0]
        return dict(each for each in found if each is not None)


def _with_tightest_disk(
    known: dict[str, tuple[int, int]], looks: Sequence[DirectoryListing]
) -> DirectoryListing:
    tightest = min(looks, key=lambda look: look.free)
    return DirectoryListing(known, tightest.free, tightest.total)
