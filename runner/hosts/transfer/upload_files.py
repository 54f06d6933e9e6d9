"""Files of an upload: find the data that exists on the host, and track the missing data.

Data is compared by grains.  Uploads nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...agent.trees import digest_of
from ...storage.content.files import Changed, Entry
from ..link.read_range import hash_chunks
from ..link.wire import Wire, ignore_answer, parse_digests
from .manifests import list_folders, tree_stamp

GRAINS = 4
"""Grains per chunk.  A grain is the unit in which large files are compared and repeated."""


class GrainDigests(NamedTuple):
    """The grain digests of a large file: its bytes on the host, the digests there, and the local digests."""

    size: int
    theirs: Sequence[str]
    ours: Sequence[str]


class BaseFile(NamedTuple):
    """A large file on the host, which an upload can build on."""

    path: str
    """Path relative to the root."""
    digest: str
    grains: GrainDigests | None = None
    """The grain digests if they are known and not used yet."""


@dataclass(slots=True)
class Upload:
    """Files to upload into one directory of the host."""

    name: str
    folder: str
    size: int
    origin: Callable[[Entry], str]
    root: str = ""  # local root of a tree
    content: str = ""
    manifest: Sequence[Entry] = ()
    missing: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)  # all files, if this is no tree
    bases: dict[str, BaseFile] = field(
        default_factory=dict
    )  # large file -> a similar file on the host
    grains: dict[str, dict[int, str]] = field(
        default_factory=dict
    )  # large file -> known digests of its grains
    holes: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # large file -> (first grain, number of grains) that are missing
    links: list[Entry] = field(default_factory=list)  # including empty directories
    lacks_manifest: bool = False  # the links and the manifest are still missing
    had_data: bool = False  # a part existed on the host, or was damaged
    is_named: bool = False
    _described: tuple[bytes, str] | None = None

    def missing_bytes(self, grain: int) -> int:
        """Return the missing bytes."""
        return sum(self._missing_bytes_of(entry, grain) for entry in self.missing.values())

    def required_space(self) -> int:
        """Return the bytes of disk space required on the host."""
        return sum(entry.size for entry in self.missing.values())

    def _missing_bytes_of(self, entry: Entry, grain: int) -> int:
        holes = self.holes.get(entry.path)
        return min(entry.size, grain * sum(count for _, count in holes)) if holes else entry.size

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
    """The uploaded data on one host."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def survey(self, cargo: Upload) -> None:
        """Ask which missing files have arrived, and remove correct ones from `missing`."""
        cargo.had_data = True
        small = [entry for entry in cargo.missing.values() if entry.size <= self._wire.chunk]
        if small:
            there = await self._wire.ask(
                "survey",
                cargo.folder,
                [entry.path for entry in small],
                read=lambda answer: [(kind, value) for kind, value in answer],
            )
            for entry, (kind, value) in zip(small, there, strict=False):
                if kind == entry.kind and value == entry.value:
                    del cargo.missing[entry.path]
        await self.compare_files(
            cargo, [path for path, entry in cargo.missing.items() if entry.size > self._wire.chunk]
        )

    async def compare_files(self, cargo: Upload, paths: Sequence[str]) -> None:
        todo = iter([cargo.missing[path] for path in paths])

        async def some() -> None:
            for entry in todo:
                await self._compare(cargo, entry)

        await asyncio.gather(*(some() for _ in range(self._wire.open_lanes(0, len(paths)))))

    async def _compare(self, cargo: Upload, entry: Entry) -> None:
        """Find the grains of a large file that differ on the host.  A file with an older version starts with its data."""
        size, theirs, ours = await self._digest_grains(cargo, entry)
        cargo.grains[entry.path] = dict(enumerate(ours))
        if size > entry.size:
            await self._wire.ask("delete", cargo.folder, [entry.path], read=ignore_answer)
            theirs = []
        if not theirs:
            cargo.holes[entry.path] = []
            return
        wrong = [at for at, digest in enumerate(ours) if at >= len(theirs) or theirs[at] != digest]
        if not wrong and await asyncio.to_thread(digest_of, cargo.origin(entry)) != entry.value:
            raise Changed(cargo.origin(entry))
        if not wrong and entry.path in cargo.bases:
            wrong = [
                len(ours) - 1
            ]  # the bytes are equal, but the mode may differ: the last grain sets it
        if not wrong:
            del cargo.missing[entry.path]
            cargo.holes.pop(entry.path, None)
            return
        holes: list[tuple[int, int]] = []
        for at in wrong:
            if holes and sum(holes[-1]) == at:
                holes[-1] = (holes[-1][0], holes[-1][1] + 1)
            else:
                holes.append((at, 1))
        cargo.holes[entry.path] = holes

    async def _digest_grains(self, cargo: Upload, entry: Entry) -> GrainDigests:
        """Return the digests of a large file on the host and here.  Known digests of its base are used once."""
        grain, older = grain_size(self._wire), cargo.bases.get(entry.path, BaseFile("", ""))
        if older.grains is not None:
            cargo.bases[entry.path] = older._replace(grains=None)
            size = min(older.grains.size, entry.size)
            return older.grains._replace(size=size, theirs=older.grains.theirs[: -(-size // grain)])
        asked = self._wire.ask(
            "chunks",
            cargo.folder,
            entry.path,
            grain,
            older.path,
            older.digest,
            entry.size,
            read=parse_digests,
        )
        (size, theirs), ours = await asyncio.gather(
            asked, asyncio.to_thread(hash_chunks, cargo.origin(entry), entry.size, grain)
        )
        return GrainDigests(size, theirs, ours)

    async def delete_extra(self, cargo: Upload) -> None:
        """Delete entries that do not belong to a tree, and find its missing links and empty directories."""
        below, pointing = await self._wire.ask("listing", cargo.folder, read=_parse_listing)
        above = set(list_folders(cargo.manifest))
        wanted = {entry.path: entry for entry in cargo.manifest}
        wrong = []
        for path, kind in below.items():
            entry = wanted.get(path)
            right = (
                path in above
                if kind == "d"
                else entry is not None
                and entry.kind == kind
                and (kind != "l" or pointing[path] == entry.value)
            )
            if not right:
                wrong.append(path)
        if wrong:
            await self._wire.ask("delete", cargo.folder, wrong, read=ignore_answer)
        gone = set(wrong)
        cargo.links = [
            entry
            for entry in cargo.manifest
            if entry.kind in "ld" and (entry.path not in below or entry.path in gone)
        ]
        cargo.lacks_manifest = True


def _parse_listing(answer: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Parse a tree listing: the kind of each entry, and the targets of links."""
    return {str(path): str(kind) for path, kind, _ in answer}, {
        str(path): str(target) for path, kind, target in answer if kind == "l"
    }
