"""Find similar data on a host as the base of an upload.

A tree starts with the most similar tree, a large file with the most similar file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...storage.content import files
from ...storage.content.files import Entry
from ..link.read_range import hash_chunks, read_part
from ..link.wire import LONGEST_ANSWER, Wire, parse_digests, parse_strings
from .manifests import content_of, list_folders, object_path
from .upload_files import BaseFile, GrainDigests, Upload, grain_size

_MANIFESTS = 8
_WORTH = 256 << 10  # minimum bytes of a tree for the search of a base
_ASKED = 4  # maximum manifests to read from the host
# Bytes of a sample, and samples per file, to find similar large files.
_SAMPLE, _SAMPLES = 64 << 10, 6
_ALIKE = 2  # minimum number of equal samples


class BaseFinder:
    """Searches one host for similar data.

    `recall` returns the manifest of a tree that the host may have, if it is known here.
    """

    def __init__(self, wire: Wire, recall: Callable[[str], Sequence[Entry] | None]) -> None:
        self._wire, self.recall = wire, recall
        self._manifests: dict[str, Sequence[Entry]] = {}

    async def choose_tree_base(self, upload: Upload, trees: Sequence[str]) -> None:
        """Start the upload of a tree with the common files of the most similar tree on the host."""
        if upload.size < _WORTH:
            return
        base = await self._find_similar_tree(upload, trees)
        if base:
            await self._copy_base(upload, base)

    async def _find_similar_tree(self, upload: Upload, trees: Sequence[str]) -> str:
        """Return the name of the tree with the most common bytes; empty if no tree has a tenth of the upload."""
        wanted = {_identity(entry): entry.size for entry in upload.manifest}
        large = {entry.path: entry.size for entry in self._large_files(upload)}
        best, most = "", 0
        unknown = 0
        for name in trees:
            unknown += f"t:{name[:64]}" not in self._manifests
            if unknown > _ASKED:
                break
            common = 0
            for entry in await self._load_manifest(name):
                common += wanted.get(_identity(entry), 0)
                # A large file of this path may have common chunks.
                common += min(entry.size, large.get(entry.path, 0)) // 2
            if common > most:
                best, most = name, common
        return best if most * 10 >= upload.size else ""

    async def _copy_base(self, upload: Upload, base: str) -> None:
        """Let the host copy a tree without the files that the upload does not have, and compare
        changed large files.

        Chunks and names are hashed here while the host copies.
        """
        older = await self._load_manifest(base)
        values = {entry.path: entry.value for entry in older}
        common, superfluous = _compare_trees(older, upload.manifest)
        large = {entry.path for entry in self._large_files(upload)}
        changed = [upload.missing[path] for path in superfluous if path in large]
        grain = grain_size(self._wire)
        to_compare = [(entry.path, values[entry.path]) for entry in changed]
        request = ("base", upload.name, base, superfluous, grain, to_compare)
        host_digests, _, local_digests = await asyncio.gather(
            self._wire.ask(*request, read=_parse_grains),
            asyncio.to_thread(upload.describe_tree),
            _hash_files(upload, changed, grain),
        )
        if host_digests is None:
            return  # the host no longer has the tree
        for path in common:
            upload.missing.pop(path, None)
        upload.links = [entry for entry in upload.links if entry.path not in common]
        folder = object_path(f"t:{base[:64]}")
        for entry, local in zip(changed, local_digests, strict=True):
            digests = None
            if entry.path in host_digests:
                digests = GrainDigests(*host_digests[entry.path], local)
            upload.bases[entry.path] = BaseFile(
                f"{folder}/{entry.path}", values[entry.path], digests
            )

    def _large_files(self, upload: Upload) -> list[Entry]:
        """Return the files of a tree that are compared by chunks."""
        chunk = self._wire.chunk
        return [entry for entry in upload.manifest if entry.kind in "fx" and entry.size > chunk]

    async def choose_file_bases(self, upload: Upload, free: int, started: Collection[str]) -> None:
        """Start each large file with the most similar file on the host, unless its upload is
        `started`.

        That file is chosen by samples, because the names differ, and is compared by chunks.
        """
        least = max(4 * self._wire.chunk, _SAMPLE * _SAMPLES)
        for entry in list(upload.missing.values()):
            if entry.size <= least or content_of(entry) in started:
                continue
            if upload.size > free:
                return
            blocks = [number * entry.size // _SAMPLES // _SAMPLE for number in range(_SAMPLES)]
            files_on_host = await self._wire.ask(
                "alike", self._wire.chunk, _SAMPLE, blocks, read=_parse_alike
            )
            samples = await asyncio.to_thread(_samples, upload.origin(entry), entry.size, blocks)
            best = _find_most_similar(samples, files_on_host)
            if best:
                upload.bases[entry.path] = BaseFile(f"objects/{best[:2]}/{best}", best[:64])

    async def _load_manifest(self, name: str) -> Sequence[Entry]:
        """Return the manifest of a tree on the host; empty if unknown."""
        content = f"t:{name[:64]}"
        known = self._manifests.get(content)
        if known is None:
            known = self.recall(content)
            if known is None:
                known = await self._download_manifest(content)
            self.remember(content, known)
        return known

    async def _download_manifest(self, content: str) -> Sequence[Entry]:
        """Return the manifest that the host stores beside a tree; empty if it is missing or wrong."""
        path = f"{object_path(content)}.json"
        _, data = await self._wire.read("read", path, 0, LONGEST_ANSWER)
        try:
            entries = [Entry(*row) for row in json.loads(data.decode("utf-8", "surrogateescape"))]
            return entries if files.tree_id(entries) == content else ()
        except (ValueError, TypeError):
            return ()

    def remember(self, content: str, manifest: Sequence[Entry]) -> None:
        """Record the manifest of a tree on the host."""
        self._manifests[content] = manifest
        if len(self._manifests) > _MANIFESTS:
            del self._manifests[next(iter(self._manifests))]


def _compare_trees(older: Sequence[Entry], newer: Sequence[Entry]) -> tuple[set[str], list[str]]:
    """Return the paths of an older tree that are equal in the newer tree, and all its others."""
    wanted = {_identity(entry) for entry in newer}
    common = {entry.path for entry in older if _identity(entry) in wanted}
    superfluous = [entry.path for entry in older if entry.path not in common]
    superfluous += sorted(set(list_folders(older)) - set(list_folders(newer)))
    return common, superfluous


async def _hash_files(
    upload: Upload, entries: Sequence[Entry], grain: int
) -> Sequence[Sequence[str]]:
    """Return the grain digests of some local files of an upload."""
    hashing = [
        asyncio.to_thread(hash_chunks, upload.origin(entry), entry.size, grain) for entry in entries
    ]
    return await asyncio.gather(*hashing)


def _identity(entry: Entry) -> tuple[str, str, str]:
    return entry.path, entry.kind, entry.value


def _find_most_similar(samples: Sequence[str], others: Mapping[str, Sequence[str]]) -> str:
    """Return the name of the file on the host with the most equal samples; empty if there are too
    few.
    """
    best, most = "", _ALIKE - 1
    for name, other_samples in others.items():
        equal = sum(map(operator.eq, samples, other_samples))
        if equal > most:
            best, most = name, equal
    return best


def _parse_grains(answer: Any) -> dict[str, tuple[int, list[str]]] | None:
    """Parse the digests of large files: path -> size and digests; None if the host has no such tree."""
    if answer is None:
        return None
    return {str(path): parse_digests(digests) for path, digests in answer.items()}


def _parse_alike(answer: Any) -> dict[str, list[str]]:
    return {str(name): parse_strings(digests) for name, digests in answer.items()}


def _samples(path: str, size: int, blocks: Sequence[int]) -> list[str]:
    """Return the digests of some blocks of a local file."""
    digests = []
    for block in blocks:
        start = block * _SAMPLE
        data = b"".join(read_part(path, size, start, min(_SAMPLE, size - start)))
        digests.append(hashlib.sha256(data).hexdigest())
    return digests
