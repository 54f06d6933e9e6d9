"""Files on their way into one folder of a host: what of them is there, and what is not.  Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..storage.files import Entry
from .manifests import stamp_of

CHUNK = 8 << 20
"""Bytes: smaller files travel together, larger ones are compared and sent again in pieces of this size."""
_GRAINS = 4  # of a chunk: pieces in which a large file is compared, and sent again


@dataclass(slots=True)
class Pieces:
    """In which pieces large files are compared and sent: bytes."""

    chunk: int = CHUNK

    @property
    def grain(self) -> int:
        return max(1, self.chunk // _GRAINS)


class Older(NamedTuple):
    """A large file that is there."""

    path: str
    """From the root."""
    digest: str


@dataclass(slots=True)
class Cargo:
    """Files on their way into one folder there."""

    name: str
    folder: str
    size: int
    origin: Callable[[Entry], str]
    root: str = ""  # of a tree, here
    content: str = ""
    manifest: Sequence[Entry] = ()
    missing: dict[str, Entry] = field(default_factory=dict)
    loose: dict[str, Entry] = field(default_factory=dict)  # all of them, when it is no tree
    older: dict[str, Older] = field(default_factory=dict)  # large file -> one there that may have grains in common with it
    grains: dict[str, dict[int, str]] = field(default_factory=dict)  # large file -> the digests of its grains, as far as they are known
    holes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # large file -> (first grain, grains) that are not there
    links: list[Entry] = field(default_factory=list)  # and empty folders
    bare: bool = False  # neither links nor the manifest are there yet
    rough: bool = False  # something of it was found there, or did not come as it should
    placed: bool = False
    _described: tuple[bytes, str] | None = None

    def owed(self, grain: int) -> int:
        """Bytes that are not there yet."""
        return sum(self._left(entry, grain) for entry in self.missing.values())

    def needs(self) -> int:
        """Bytes of the disk there."""
        return sum(entry.size for entry in self.missing.values())

    def _left(self, entry: Entry, grain: int) -> int:
        holes = self.holes.get(entry.path)
        return min(entry.size, grain * sum(count for _, count in holes)) if holes else entry.size

    def described(self) -> tuple[bytes, str]:
        """A tree's manifest as it is beside it, and the digest by which its names and links are recognized there."""
        if self._described is None:
            text = json.dumps(self.manifest, ensure_ascii=False, separators=(",", ":"))
            self._described = text.encode("utf-8", "surrogateescape"), stamp_of(self.manifest)
        return self._described
