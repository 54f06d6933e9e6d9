"""Files of an upload: find the data that exists on the host, and track the missing data.

Data is compared by grains.  Uploads nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...agent.tree_hash import hash_file
from ...storage.content.files import Changed, Entry
from ..link.read_range import find_different, hash_chunks
from ..link.wire import Wire, ignore_answer, parse_digests
from .manifests import links_and_folders, list_folders, tree_stamp

GRAINS = 4
"""Grains per chunk.  A grain is the unit in which large files are compared and repeated."""


class GrainDigests(NamedTuple):
    """The grain digests of a large file: its bytes on the host, the digests there, and the local
    digests.
    """

    size: int
    on_host: Sequence[str]
    local: Sequence[str]


class BaseFile(NamedTuple):
    """A large file on the host, which an upload can build on."""

    path: str
    """Path relative to the root."""
    digest: str
    grains: GrainDigests | None = None
    """The grain digests if they are known and not used yet."""


@dataclass(slots=True)
class Upload:
    """Files to upload into one directory of the host: a tree, or one or more files."""

    name: str  # object name of the tree or the first file
    folder: str  # directory on the host, relative to the root; empty if nothing is left to do
    size: int  # bytes of all files
    origin: Callable[[Entry], str]  # local path of a file
    root: str = ""  # local root of a tree
    content: str = ""  # of a tree, or of a file that may be damaged on the host
    manifest: Sequence[Entry] = ()
    missing: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)  # all files by object name, unless a tree
    # large file -> a similar file on the host
    bases: dict[str, BaseFile] = field(default_factory=dict)
    # large file -> known digests of its grains
    grains: dict[str, dict[int, str]] = field(default_factory=dict)
    # large file -> (first grain, number of grains) that are missing
    holes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    links: list[Entry] = field(default_factory=list)  # including empty directories
    lacks_manifest: bool = False  # the links and the manifest are still missing
    had_data: bool = False  # a part existed on the host, or was damaged
    is_named: bool = False  # the host has given the objects their names
    _described: tuple[bytes, str] | None = None

    def small_files(self, chunk: int) -> list[Entry]:
        """Return the missing files of at most one chunk, which are uploaded in tars."""
        return [entry for entry in self.missing.values() if entry.size <= chunk]

    def large_files(self, chunk: int) -> list[Entry]:
        """Return the missing files of several chunks, which are uploaded by holes."""
        return [entry for entry in self.missing.values() if entry.size > chunk]

    def missing_bytes(self, grain: int) -> int:
        """Return the missing bytes, for grains of this size."""
        return sum(self._missing_bytes_of(entry, grain) for entry in self.missing.values())

    def required_space(self) -> int:
        """Return the bytes of disk space required on the host."""
        return sum(entry.size for entry in self.missing.values())

    def _missing_bytes_of(self, entry: Entry, grain: int) -> int:
        holes = self.holes.get(entry.path)
        if not holes:
            return entry.size
        # The last grain of a file may be shorter than the others.
        return min(entry.size, grain * sum(count for _, count in holes))

    def describe_tree(self) -> tuple[bytes, str]:
        """Return a tree's manifest as stored beside it, and the digest of its names and links."""
        if self._described is None:
            text = json.dumps(self.manifest, ensure_ascii=False, separators=(",", ":"))
            self._described = text.encode("utf-8", "surrogateescape"), tree_stamp(self.manifest)
        return self._described


def grain_size(wire: Wire) -> int:
    """Return the bytes of a grain."""
    return max(1, wire.chunk // GRAINS)


class UploadChecker:
    """Compares uploads with the data on one host."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def survey(self, upload: Upload) -> None:
        """Remove the files that have arrived correctly from the missing files, and find the missing
        grains of large files.
        """
        upload.had_data = True
        small = upload.small_files(self._wire.chunk)
        if small:
            names = [entry.path for entry in small]
            arrived = await self._wire.ask("survey", upload.folder, names, read=_parse_survey)
            for entry, on_host in zip(small, arrived, strict=False):
                if on_host == (entry.kind, entry.value):
                    del upload.missing[entry.path]
        large = upload.large_files(self._wire.chunk)
        await self.compare_files(upload, [entry.path for entry in large])

    async def compare_files(self, upload: Upload, paths: Sequence[str]) -> None:
        """Find the missing grains of these large files, several at a time."""
        remaining = iter([upload.missing[path] for path in paths])

        async def compare_some() -> None:
            for entry in remaining:
                await self._compare(upload, entry)

        lanes = self._wire.open_lanes(0, len(paths))
        await asyncio.gather(*(compare_some() for _ in range(lanes)))

    async def _compare(self, upload: Upload, entry: Entry) -> None:
        """Find the grains of a large file that differ on the host.

        A file with a base starts with the data of the base.
        """
        size, on_host, local = await self._digest_grains(upload, entry)
        upload.grains[entry.path] = dict(enumerate(local))
        if size > entry.size:
            await self._wire.ask("delete", upload.folder, [entry.path], read=ignore_answer)
            on_host = []
        if not on_host:
            upload.holes[entry.path] = []
            return
        wrong = find_different(local, on_host)
        if not wrong:
            origin = upload.origin(entry)
            if await asyncio.to_thread(hash_file, origin) != entry.value:
                raise Changed(origin)
            if entry.path in upload.bases:
                # Base and file have equal bytes, but maybe another mode, which the last grain sets.
                wrong = [len(local) - 1]
        if wrong:
            upload.holes[entry.path] = _join_grains(wrong)
        else:
            del upload.missing[entry.path]
            upload.holes.pop(entry.path, None)

    async def _digest_grains(self, upload: Upload, entry: Entry) -> GrainDigests:
        """Return the digests of a large file on the host and here.

        Known digests of its base are used once.
        """
        grain, base = grain_size(self._wire), upload.bases.get(entry.path, BaseFile("", ""))
        if base.grains is not None:
            upload.bases[entry.path] = base._replace(grains=None)
            size = min(base.grains.size, entry.size)
            on_host = base.grains.on_host[: -(-size // grain)]
            return GrainDigests(size, on_host, base.grains.local)
        asking = self._wire.ask(
            "chunks",
            upload.folder,
            entry.path,
            grain,
            base.path,
            base.digest,
            entry.size,
            read=parse_digests,
        )
        hashing = asyncio.to_thread(hash_chunks, upload.origin(entry), entry.size, grain)
        (size, on_host), local = await asyncio.gather(asking, hashing)
        return GrainDigests(size, on_host, local)

    async def delete_extra(self, upload: Upload) -> None:
        """Delete entries on the host that do not belong to a tree, and find the tree's missing
        links and empty directories.
        """
        existing = await self._wire.ask("listing", upload.folder, read=_parse_listing)
        expected = dict.fromkeys(list_folders(upload.manifest), ("d", ""))
        for entry in upload.manifest:
            expected[entry.path] = _kind_and_target(entry.kind, entry.value)
        wrong = [path for path, actual in existing.items() if expected.get(path) != actual]
        if wrong:
            await self._wire.ask("delete", upload.folder, wrong, read=ignore_answer)
        missing = (expected.keys() - existing.keys()) | set(wrong)
        links = links_and_folders(upload.manifest)
        upload.links = [entry for entry in links if entry.path in missing]
        upload.lacks_manifest = True


def _join_grains(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Join ascending grain numbers into holes: (first grain, number of grains)."""
    holes: list[tuple[int, int]] = []
    for number in numbers:
        if holes and sum(holes[-1]) == number:
            first, count = holes[-1]
            holes[-1] = (first, count + 1)
        else:
            holes.append((number, 1))
    return holes


def _parse_survey(answer: Any) -> list[tuple[Any, Any]]:
    """Parse the kind and digest of each requested file."""
    return [(kind, value) for kind, value in answer]


def _kind_and_target(kind: str, value: str) -> tuple[str, str]:
    """Return the parts of an entry that a listing without digests shows."""
    return (kind, value) if kind == "l" else (kind, "")


def _parse_listing(answer: Any) -> dict[str, tuple[str, str]]:
    """Parse a tree listing: path -> the kind, and the target of a link."""
    return {str(path): _kind_and_target(str(kind), str(value)) for path, kind, value in answer}
