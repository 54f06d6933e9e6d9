"""Find similar data on a host as the base of an upload.

A tree starts with the most similar tree, a large file with the most similar file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...storage.content import files
from ...storage.content.files import Entry
from ..link.read_range import hash_chunks, read_part
from ..link.wire import LONGEST_ANSWER, Wire, parse_digests, parse_strings
from .manifests import list_folders, object_path
from .upload_files import BaseFile, GrainDigests, Upload, grain_size

_MANIFESTS = 8
_WORTH = 256 << 10  # minimum bytes of a tree for the search of a base
_ASKED = 4  # maximum manifests to read from the host
_SAMPLE, _SAMPLES = (
    64 << 10,
    6,
)  # bytes of a sample, and samples per file, to find similar large files
_ALIKE = 2  # minimum number of equal samples


class BaseFinder:
    """Searches one host for similar data.  `recall` returns the manifest of a tree that the host may have, if it is known here."""

    def __init__(self, wire: Wire, recall: Callable[[str], Sequence[Entry] | None]) -> None:
        self._wire, self.recall = wire, recall
        self._manifests: dict[str, Sequence[Entry]] = {}

    async def choose_tree_base(self, cargo: Upload, trees: Sequence[str]) -> None:
        """Start the upload of a tree with the common files of the most similar tree on the host."""
        wanted = {(entry.path, entry.kind, entry.value): entry.size for entry in cargo.manifest}
        large = {
            entry.path: entry.size
            for entry in cargo.manifest
            if entry.kind in "fx" and entry.size > self._wire.chunk
        }
        best, common = "", 0
        if cargo.size < _WORTH:
            return
        unknown = 0
        for name in trees:
            unknown += f"t:{name[:64]}" not in self._manifests
            if unknown > _ASKED:
                break
            older = await self._load_manifest(name)
            shared = sum(wanted.get((entry.path, entry.kind, entry.value), 0) for entry in older)
            shared += sum(
                min(entry.size, large.get(entry.path, 0)) // 2 for entry in older
            )  # they may have common chunks
            if shared > common:
                best, common = name, shared
        if not best or common * 10 < cargo.size:
            return
        older = await self._load_manifest(best)
        same = {entry.path for entry in older if (entry.path, entry.kind, entry.value) in wanted}
        superfluous = [entry.path for entry in older if entry.path not in same]
        superfluous += sorted(set(list_folders(older)) - set(list_folders(cargo.manifest)))
        values, grain = {entry.path: entry.value for entry in older}, grain_size(self._wire)
        alike = [cargo.missing[path] for path in superfluous if path in large]
        asked = (
            "base",
            cargo.name,
            best,
            superfluous,
            grain,
            [(entry.path, values[entry.path]) for entry in alike],
        )
        # In parallel: many names and large files take a while on both sides.
        hashing = asyncio.gather(
            *(
                asyncio.to_thread(hash_chunks, cargo.origin(entry), entry.size, grain)
                for entry in alike
            )
        )
        known, _, ours = await asyncio.gather(
            self._wire.ask(*asked, read=_parse_grains),
            asyncio.to_thread(cargo.describe_tree),
            hashing,
        )
        if known is not None:
            cargo.missing = {
                path: entry for path, entry in cargo.missing.items() if path not in same
            }
            cargo.links = [entry for entry in cargo.links if entry.path not in same]
            for entry, own in zip(alike, ours, strict=True):
                grains = GrainDigests(*known[entry.path], own) if entry.path in known else None
                cargo.bases[entry.path] = BaseFile(
                    f"{object_path(f't:{best[:64]}')}/{entry.path}", values[entry.path], grains
                )

    async def choose_file_bases(self, cargo: Upload, free: int, began: Collection[str]) -> None:
        """Start each large file with the most similar one on the host.

        That file is chosen by samples, because the names differ, and is compared by chunks.
        """
        for entry in list(cargo.missing.values()):
            if (
                entry.size <= max(4 * self._wire.chunk, _SAMPLE * _SAMPLES)
                or f"{entry.kind}:{entry.value}" in began
            ):
                continue
            if cargo.size > free:
                return
            blocks = [number * entry.size // _SAMPLES // _SAMPLE for number in range(_SAMPLES)]
            there = await self._wire.ask(
                "alike", self._wire.chunk, _SAMPLE, blocks, read=_parse_alike
            )
            ours = await asyncio.to_thread(_samples, cargo.origin(entry), entry.size, blocks)
            likeness = {
                name: sum(mine == its for mine, its in zip(ours, theirs, strict=False))
                for name, theirs in there.items()
            }
            best = max(likeness, key=lambda name: likeness[name], default="")
            if best and likeness[best] >= _ALIKE:
                cargo.bases[entry.path] = BaseFile(f"objects/{best[:2]}/{best}", best[:64])

    async def _load_manifest(self, name: str) -> Sequence[Entry]:
        """Return the manifest of a tree on the host; empty if unknown."""
        content = f"t:{name[:64]}"
        if (known := self._manifests.get(content)) is None:
            known = self.recall(content)
            if known is None:
                _, data = await self._wire.read(
                    "read", f"{object_path(content)}.json", 0, LONGEST_ANSWER
                )
                try:
                    known = [
                        Entry(*row) for row in json.loads(data.decode("utf-8", "surrogateescape"))
                    ]
                    known = known if files.tree_id(known) == content else ()
                except (ValueError, TypeError):
                    known = ()
            self.remember(content, known)
        return known

    def remember(self, content: str, manifest: Sequence[Entry]) -> None:
        """Record the manifest of a tree on the host."""
        self._manifests[content] = manifest
        if len(self._manifests) > _MANIFESTS:
            del self._manifests[next(iter(self._manifests))]


def _parse_grains(answer: Any) -> dict[str, tuple[int, list[str]]] | None:
    return (
        None
        if answer is None
        else {str(path): parse_digests(known) for path, known in answer.items()}
    )


def _parse_alike(answer: Any) -> dict[str, list[str]]:
    return {str(name): parse_strings(digests) for name, digests in answer.items()}


def _samples(path: str, size: int, blocks: Sequence[int]) -> list[str]:
    """Return the digests of some blocks of a local file."""
    found = []
    for block in blocks:
        data = b"".join(
            read_part(path, size, block * _SAMPLE, min(_SAMPLE, size - block * _SAMPLE))
        )
        found.append(hashlib.sha256(data).hexdigest())
    return found
