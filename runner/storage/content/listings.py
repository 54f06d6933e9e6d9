"""Listings: files with the digests of large trees.

Only operations on the tree load its listing, and an unchanged tree costs one directory scan without
per-file lookups.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from ...agent.tree_hash import TreeScan
from ...paths import temporary_name
from .files import (
    Content,
    Entry,
    Progress,
    Read,
    identity_of,
    is_settled,
    read_manifest,
    slack,
    tree_id,
)

_STATS = Struct("<QQqqqq")  # device, inode, size, mtime, ctime, and 64 if executable
_UNKNOWN = bytes(32)
_UNKNOWN_HEX = _UNKNOWN.hex()
_HEAD = "recipe-listing 1"

_Packed: TypeAlias = "tuple[bytes, bytes]"
"""Files of a directory in packed form: NUL-separated names, and one `_STATS` record per file."""


class _Listing(NamedTuple):
    """Stored digests of a large tree: 32 bytes per file in `digests`, zeros if unknown.

    `content` is the tree's content id if all digests are known.
    """

    content: str
    folders: dict[str, _Packed]
    links: dict[str, str]
    empty: set[str]
    digests: dict[str, bytes]


class Listings:
    """Digest listings of a workspace's large trees.

    They are stored in a directory, or in memory only without a directory.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._listings: dict[str, _Listing] = {}
        self._unsaved: set[str] = set()

    def content(self, path: str, full: str, scan: TreeScan, progress: Progress | None) -> Content:
        """Return the content id of the tree at `full`, cached under the name `path`.

        An unchanged tree needs no manifest.
        """
        listing = self._listing(path)
        if listing is not None and listing.content and _shows(listing, scan, _pack(scan)):
            return Content(listing.content)
        content = tree_id(self.entries(path, full, scan, progress))
        listing = self._listings[path]
        if not any(_UNKNOWN in column for column in listing.digests.values()):
            self._keep(path, listing._replace(content=content))
        return content

    def entries(
        self, path: str, full: str, scan: TreeScan, progress: Progress | None
    ) -> list[Entry]:
        """Return the manifest of a tree, and update its digest listing."""
        old, packed = self._listing(path), _pack(scan)
        digests = {folder: _recall_digests(old, folder, seen) for folder, seen in packed.items()}
        known = {folder: _hexes(column) for folder, column in digests.items()}
        manifest, reads, begun = read_manifest(full, scan, known, progress)
        if reads or old is None or not _shows(old, scan, packed):
            digests |= _new_digests(digests, scan, reads, begun)
            self._keep(path, _Listing("", packed, scan.links, scan.empty, digests))
        return manifest

    def note(self, path: str, scan: TreeScan, manifest: Sequence[Entry]) -> None:
        """Store the digest listing of a tree that recipe just wrote at `path`."""
        values = {}
        for entry in manifest:
            if entry.kind in "fx":
                values[entry.path] = bytes.fromhex(entry.value)
        digests: dict[str, bytes] = {}
        for folder, seen in scan.folders.items():
            prefix = f"{folder}/" if folder else ""
            column = []
            for name, row in zip(seen.names, seen.rows, strict=True):
                # Only digests of backdated files are valid, as in `DigestCache.note`.
                mtime_ns, ctime_ns = row[3], row[4]
                is_backdated = ctime_ns - mtime_ns > slack(mtime_ns)
                column.append(values.get(prefix + name, _UNKNOWN) if is_backdated else _UNKNOWN)
            digests[folder] = b"".join(column)
        self._keep(path, _Listing("", _pack(scan), scan.links, scan.empty, digests))

    def save(self) -> None:
        """Save the changed digest listings to disk."""
        if self._folder is not None:
            for path in self._unsaved:
                _save_listing(self._folder, path, self._listings[path])
        self._unsaved = set()

    def _listing(self, path: str) -> _Listing | None:
        listing = self._listings.get(path)
        if listing is None and self._folder is not None:
            listing = _load_listing(self._folder, path)
            if listing is not None:
                self._listings[path] = listing
        return listing

    def _keep(self, path: str, listing: _Listing) -> None:
        self._listings[path] = listing
        self._unsaved.add(path)


def _pack(scan: TreeScan) -> dict[str, _Packed]:
    pack = _STATS.pack
    return {
        folder: (
            "\0".join(seen.names).encode("utf-8", "surrogateescape"),
            b"".join(starmap(pack, seen.rows)),
        )
        for folder, seen in scan.folders.items()
    }


def _shows(listing: _Listing, scan: TreeScan, packed: dict[str, _Packed]) -> bool:
    """Return True if a tree's scan equals its stored listing, so that no file has changed."""
    return listing.folders == packed and listing.links == scan.links and listing.empty == scan.empty


def _recall_digests(listing: _Listing | None, folder: str, seen: _Packed) -> bytes:
    """Return the digests of a directory's files, zeros for changed or unknown files."""
    before = listing.folders.get(folder) if listing is not None else None
    if listing is None or before is None:
        return _UNKNOWN * (len(seen[1]) // _STATS.size)
    column = listing.digests[folder]
    if before == seen:
        return column
    known = {row: column[32 * n : 32 * n + 32] for n, row in enumerate(_files(before))}
    return b"".join(known.get(row, _UNKNOWN) for row in _files(seen))


def _files(seen: _Packed) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and status record of each file of a packed directory."""
    names, stats = seen
    return zip(
        names.split(b"\0"),
        (stats[at : at + _STATS.size] for at in range(0, len(stats), _STATS.size)),
        strict=True,
    )


def _new_digests(
    digests: Mapping[str, bytes], scan: TreeScan, reads: Iterable[Read], begun: int
) -> dict[str, bytes]:
    """Return the digests of directories with newly hashed files.

    Only files that are old enough are updated. `begun` is the start time of the hashing.
    """
    columns: dict[str, bytearray] = {}
    for folder, n, found, value in reads:
        if folder not in columns:
            columns[folder] = bytearray(digests[folder])
        now = identity_of(found)
        if is_settled(now, begun) and now == scan.folders[folder].rows[n][:5]:
            columns[folder][32 * n : 32 * n + 32] = bytes.fromhex(value)
    return {folder: bytes(column) for folder, column in columns.items()}


def _hexes(column: bytes) -> list[str]:
    """Return the digests of a directory as hex text, "" for unknown digests."""
    text = column.hex()
    values = [text[at : at + 64] for at in range(0, len(text), 64)]
    if _UNKNOWN not in column:
        return values
    return ["" if value == _UNKNOWN_HEX else value for value in values]


def _listing_path(folder: str, path: str) -> str:
    return f"{folder}/{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _save_listing(folder: str, path: str, listing: _Listing) -> None:
    """Write a digest listing atomically.

    The file has a line with `_HEAD` and the CRC of the rest, a line of JSON, and for each directory
    of the JSON's `folders` its names, its `_STATS` records, and 32 bytes of digest per file. Errors
    are ignored, because a missing listing only costs time.
    """
    table = [[name, len(names), len(stats)] for name, (names, stats) in listing.folders.items()]
    about = {
        "path": path,
        "content": listing.content,
        "links": listing.links,
        "empty": sorted(listing.empty),
        "folders": table,
    }
    parts = [json.dumps(about).encode(), b"\n"]
    for name, seen in listing.folders.items():
        parts += [*seen, listing.digests[name]]
    body = b"".join(parts)
    target = _listing_path(folder, path)
    temporary = temporary_name(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(f"{_HEAD} {zlib.crc32(body):08x}\n".encode())
            file.write(body)
        os.replace(temporary, target)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass


def _load_listing(folder: str, path: str) -> _Listing | None:
    """Load a stored digest listing; return None if missing or damaged."""
    try:
        with open(_listing_path(folder, path), "rb") as file:
            data = file.read()
        head, about, at = _listing_head(data)
        if (
            head != f"{_HEAD} {zlib.crc32(memoryview(data)[len(head) + 1 :]):08x}"
            or about["path"] != path
        ):
            return None
        folders: dict[str, _Packed] = {}
        digests: dict[str, bytes] = {}
        for name, names, stats in about["folders"]:
            end = at + names + stats
            folders[name] = data[at : at + names], data[at + names : end]
            at = end + 32 * (stats // _STATS.size)
            digests[name] = data[end:at]
        return _Listing(about["content"], folders, about["links"], set(about["empty"]), digests)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _listing_head(data: bytes) -> tuple[str, Any, int]:
    first = data.index(b"\n")
    second = data.index(b"\n", first + 1)
    return data[:first].decode(), json.loads(data[first + 1 : second]), second + 1


def forget_listings(folder: str | Path, root: str | Path) -> None:
    """Delete the digest listings of trees that no longer exist.

    Paths are relative to `root`.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            with open(f"{folder}/{name}", "rb") as file:
                _, about, _ = _listing_head(file.readline() + file.readline())
            gone = not os.path.isdir(os.path.join(root, about["path"]))
        except (OSError, ValueError, KeyError, TypeError):
            gone = True
        if gone:
            try:
                os.unlink(f"{folder}/{name}")
            except OSError:
                pass
