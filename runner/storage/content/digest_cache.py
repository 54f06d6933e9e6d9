"""Digest cache of workspace files and trees, so that only changed files are hashed again.

A digest is stored with the file's identity (device, inode, size, mtime, ctime) from *before* the
read, and only if that identity was already old enough: a second change within one tick of the file
system's clock would be invisible. Large trees have a listing file instead.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...agent.tree_hash import TreeScan
from .files import (
    Content,
    Entry,
    FileRow,
    Progress,
    Unhashable,
    content_id,
    hash_all,
    identity_of,
    is_settled,
    read_manifest,
    regular,
    see,
    slack,
    stat_of,
    tree_id,
    unreadable,
)

if TYPE_CHECKING:
    from .listings import Listings

FEW = 1000  # maximum files of a tree with a row per file; larger trees have a listing
CHEAP_FILES, CHEAP_BYTES = 16, 1 << 20  # limits of files that are hashed in about a millisecond
_SQLITE_MAX = 1 << 63


class DigestCache:
    """Cache of the digests of workspace files and trees.

    Paths are relative to `root` or absolute, and are stored as given.

    `rows` come from the store's `files` table. `listings` is the directory of listing files; None
    keeps them in memory only.
    """

    progress: Progress | None
    """Callback for the hashing progress."""

    def __init__(
        self, root: str | Path, rows: Iterable[FileRow] = (), listings: str | Path | None = None
    ) -> None:
        self._prefix = str(root).rstrip("/") + "/"
        self._rows: dict[str, FileRow] = {row[0]: row for row in rows}
        self._new: dict[str, FileRow] = {}
        self._folder = None if listings is None else str(listings)
        self._listings: Listings | None = None
        self.progress: Progress | None = None

    def content_of(self, path: str) -> Content | None:
        """Return the content id of a path, hashing if necessary; None if nothing exists there."""
        return self.contents((path,))[path]

    def contents(self, paths: Iterable[str]) -> dict[str, Content | None]:
        """Return the content id of each path.

        Unknown files are hashed together, large files on two threads.
        """
        answer: dict[str, Content | None] = {}
        doubtful: list[tuple[str, os.stat_result]] = []
        known, prefix, look, is_dir = self._rows.get, self._prefix, os.stat, stat.S_ISDIR
        for path in paths:
            try:
                found = look(path if path[:1] == "/" else prefix + path)
            except OSError as error:
                self._absent(path, error)
                answer[path] = None
                continue
            row = known(path)
            # Compared here and not in a function: a run without changes does little else.
            if (
                row is not None
                and row[5] == found.st_ctime_ns
                and row[4] == found.st_mtime_ns
                and row[2] == found.st_ino
                and row[3] == found.st_size
                and row[1] == found.st_dev
            ):
                answer[path] = Content(row[6])
            elif is_dir(found.st_mode):
                answer[path] = self._tree(path)
            else:
                doubtful.append((path, found))
        if doubtful:
            begun = time.time_ns()
            digests = hash_all(
                [(self._full(path), regular(self._full(path), found)) for path, found in doubtful],
                self.progress,
            )
            for (path, _), (found, value) in zip(doubtful, digests, strict=True):
                answer[path] = self._remember(path, found, content_id(found, value), begun)
        return answer

    def entries(self, path: str) -> list[Entry]:
        """Return the manifest of the tree at `path`, and cache the digests of its files."""
        scan = see(self._full(path))
        if scan.files <= FEW:
            return self._digest_rows(path, scan)
        return self._large().entries(path, self._full(path), scan, self.progress)

    def note(self, path: str, content: Content) -> None:
        """Cache the digest of a file that recipe just wrote at `path`.

        Such a file has an mtime older than its creation (see `disk.backdated_times`), so that any
        later write is visible. A file without this margin is hashed on the next request.
        """
        found = stat_of(self._full(path))
        if found is not None and stat.S_ISREG(found.st_mode):
            self._note(path, found, content)

    def note_tree(self, path: str, manifest: Sequence[Entry]) -> None:
        """Cache the digests of a tree that recipe just wrote at `path`."""
        if len(manifest) <= FEW:
            for entry in manifest:
                if entry.kind in "fx":
                    self.note(f"{path}/{entry.path}", Content(f"{entry.kind}:{entry.value}"))
            return
        try:
            scan = see(self._full(path))
        except Unhashable:
            return  # another process changed the tree; the next request detects it
        self._large().note(path, scan, manifest)

    @property
    def is_costly_to_repeat(self) -> bool:
        """Return True if hashing the new files again takes longer than storing their digests."""
        if self._listings is not None or len(self._new) > CHEAP_FILES:
            return True
        return sum(row[3] for row in self._new.values()) > CHEAP_BYTES

    def changes(self) -> list[FileRow]:
        """Return the new digest rows since the last call, for the store's `files` table.

        Also saves the listings.
        """
        rows = [row for row in self._new.values() if _fits_table(row)]
        self._new = {}
        if self._listings is not None:
            self._listings.save()
        return rows

    def _tree(self, path: str) -> Content:
        """Return the content id of the tree at `path`.

        An unchanged large tree needs no manifest.
        """
        scan = see(self._full(path))
        if scan.files <= FEW:
            return tree_id(self._digest_rows(path, scan))
        return self._large().content(path, self._full(path), scan, self.progress)

    def _digest_rows(self, path: str, scan: TreeScan) -> list[Entry]:
        """Return the manifest of a tree, and cache a digest row for each file."""
        known: dict[str, list[str]] = {}
        recall = self._rows.get
        for folder, seen in scan.folders.items():
            prefix = f"{path}/{folder}/" if folder else f"{path}/"
            known[folder] = column = []
            for name, now in zip(seen.names, seen.rows, strict=True):
                row = recall(prefix + name)
                column.append(row[6][2:] if row is not None and row[1:6] == now[:5] else "")
        manifest, reads, begun = read_manifest(self._full(path), scan, known, self.progress)
        for folder, n, found, value in reads:
            name = scan.folders[folder].names[n]
            file = f"{path}/{folder}/{name}" if folder else f"{path}/{name}"
            self._remember(file, found, content_id(found, value), begun)
        return manifest

    def _large(self) -> Listings:
        """Return the listings of large trees, created on first use."""
        if self._listings is None:
            from .listings import Listings

            self._listings = Listings(self._folder)
        return self._listings

    def _note(self, path: str, found: os.stat_result, content: Content) -> None:
        if found.st_ctime_ns - found.st_mtime_ns > slack(found.st_mtime_ns):
            self._rows[path] = self._new[path] = (path, *identity_of(found), content)
        else:
            self._rows.pop(path, None)

    def _remember(self, path: str, found: os.stat_result, content: Content, begun: int) -> Content:
        if is_settled(identity_of(found), begun):
            self._rows[path] = self._new[path] = (path, *identity_of(found), content)
        return content

    def _absent(self, path: str, error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise unreadable(path, error) from error

    def _full(self, path: str) -> str:
        return path if path[:1] == "/" else self._prefix + path


def _fits_table(row: FileRow) -> bool:
    """Return True if SQLite can store a row: as 64-bit integers, and its path as UTF-8."""
    if row[1] >= _SQLITE_MAX or row[2] >= _SQLITE_MAX:
        return False
    return row[0].isprintable()
