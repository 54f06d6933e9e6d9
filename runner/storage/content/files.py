"""Content ids of files and trees, with a single read per file.

A content id is `f:<sha256>` for a plain file, `x:<sha256>` for an executable file, and `t:<sha256>`
for a tree. A tree's digest covers its sorted entries: files, links within the tree, and empty
directories. Owners, times and other permissions are not part of the content.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NewType, TypeAlias

from ... import digest
from ...agent.tree_hash import TreeScan, hash_open, scan_tree, sort_rows
from ...errors import CannotRun, DiskFull, Infrastructure

Content = NewType("Content", str)
"""Content id: `f:`, `x:` or `t:` and 64 lowercase hex digits."""

Progress: TypeAlias = "Callable[[int, int], None]"
"""Callback for finished and total bytes, from any thread but never concurrently."""

FileRow: TypeAlias = "tuple[str, int, int, int, int, int, str]"
"""Stored file digest: path, dev, ino, size, mtime_ns, ctime_ns, content."""

SLACK_NS = 20_000_000  # longer than a tick of any kernel's file clock
COARSE_SLACK_NS = 2_000_000_000  # FAT has a resolution of two seconds
_CHUNK = 1 << 20
_WORTH_THREADS = 4 << 20
_TRIES = 3


class Unhashable(CannotRun):
    """The path has no content that can be hashed."""

    def __init__(self, path: str, why: str, *, fix: str = "") -> None:
        super().__init__(f"{path}: {why}", fix=fix)
        self.path = path


class Changed(Unhashable):
    """The file changed during the read."""

    def __init__(self, path: str, why: str = "the file changed while recipe read it") -> None:
        super().__init__(
            path, why, fix="do not modify the file while recipe reads it, and try again"
        )


class Identity(NamedTuple):
    """File status fields that change when the bytes of the file change."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Entry(NamedTuple):
    """Manifest entry of one file, link or empty directory.

    `kind`: f plain, x executable, l link, d empty directory. `value`: the SHA-256, or the link's
    target.
    """

    path: str
    kind: str
    size: int
    value: str


def identity(path: str | Path) -> Identity | None:
    """Return the status fields of the file at `path` (links followed), or None if missing."""
    try:
        return identity_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def scan(path: str | Path) -> Content:
    """Hash the file or tree at `path`, and return its content id.

    A link at the top is followed.
    """
    name = str(path)
    found = stat_of(name)
    if found is None:
        raise Unhashable(name, "does not exist")
    if stat.S_ISDIR(found.st_mode):
        return tree_id(entries(name))
    return content_id(*_hash(name, regular(name, found)))


def entries(path: str | Path) -> list[Entry]:
    """Read and hash the tree at `path`, and return its manifest."""
    top = str(path)
    return read_manifest(top, see(top), {})[0]


def tree_id(manifest: Sequence[Entry]) -> Content:
    """Return the content id of a tree with these sorted entries."""
    return Content("t:" + digest.of_value("tree/1", manifest))


def is_settled(found: Identity, at_ns: int) -> bool:
    """Return True if a file is old enough that any change after `at_ns` alters its status.

    A digest whose read started at `at_ns` can then be cached.
    """
    return at_ns - max(found.mtime_ns, found.ctime_ns) > slack(found.mtime_ns)


def identity_of(found: os.stat_result) -> Identity:
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def stat_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def slack(mtime_ns: int) -> int:
    return SLACK_NS if mtime_ns % 1_000_000 else COARSE_SLACK_NS


def content_id(found: os.stat_result, sha256: str) -> Content:
    return Content(("x:" if found.st_mode & stat.S_IXUSR else "f:") + sha256)


def unreadable(path: str, error: OSError) -> Unhashable:
    if isinstance(error, FileNotFoundError):
        return Changed(path, "the file disappeared while recipe read it")
    return Unhashable(path, f"cannot be read: {error.strerror}")


def regular(path: str, found: os.stat_result) -> Identity:
    if not stat.S_ISREG(found.st_mode):
        raise Unhashable(
            path, f"{_kind(found.st_mode)} has no content to hash", fix="use a file or a directory"
        )
    return identity_of(found)


def _hash(
    path: str, found: Identity, done: Callable[[int], None] = lambda _count: None
) -> tuple[os.stat_result, str]:
    """Hash a regular file, and return its status and SHA-256.

    Raises Changed if the file changes during the read.
    """
    try:
        # Do not block if the path was replaced by a pipe after the stat.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size, mtime_ns, ctime_ns = found.size, found.mtime_ns, found.ctime_ns
            for _ in range(_TRIES):
                if size < _CHUNK:
                    value = hashlib.sha256(os.read(handle, size + 1)).hexdigest()
                    done(size)
                else:
                    value = hash_open(handle, size, done)
                now = os.fstat(handle)
                same = now.st_mtime_ns == mtime_ns and now.st_size == size
                # A concurrent hard link, as for an attempt, also changes the ctime.
                if same and (now.st_ctime_ns == ctime_ns or not now.st_mode & 0o222):
                    return now, value
                regular(path, now)
                size, mtime_ns, ctime_ns = now.st_size, now.st_mtime_ns, now.st_ctime_ns
                os.lseek(handle, 0, os.SEEK_SET)
        finally:
            os.close(handle)
    except OSError as error:
        raise unreadable(path, error) from error
    raise Changed(path)


def hash_all(
    files: Sequence[tuple[str, Identity]], progress: Progress | None = None
) -> list[tuple[os.stat_result, str]]:
    """Hash many files in order, on two threads for large totals (hashing releases the GIL)."""
    total = sum(found.size for _, found in files)
    if total < _WORTH_THREADS:
        return [_hash(path, found) for path, found in files]
    from ..crew import Crew

    crew = Crew(2, progress, total)

    def hash_batch(batch: range) -> list[tuple[os.stat_result, str]]:
        return [_hash(*files[index], crew.done) for index in batch]

    found = crew.map(hash_batch, list(_batches(files)))
    return list(itertools.chain.from_iterable(found))


def _batches(files: Sequence[tuple[str, Identity]]) -> Iterator[range]:
    """Group files into batches of about a mebibyte, to amortize locking."""
    first = size = 0
    for n, (_, found) in enumerate(files):
        size += found.size + 4096
        if size >= _CHUNK:
            yield range(first, n + 1)
            first, size = n + 1, 0
    yield range(first, len(files))


# -- trees


Read: TypeAlias = "tuple[str, int, os.stat_result, str]"
"""Hashed file: its directory, its index there, its status, and its SHA-256."""


def see(top: str) -> TreeScan:
    """Scan the tree at `top` without opening its files.

    Raises Unhashable for special files, and for links that lead out of the tree.
    """
    if sys.getfilesystemencoding() != "utf-8":
        raise CannotRun(
            f"the locale reads file names as {sys.getfilesystemencoding()}, so directories would get different IDs than on other machines",
            fix="set PYTHONUTF8=1",
        )
    try:
        seen = scan_tree(top)
    except OSError as error:
        raise unreadable(os.fspath(error.filename), error) from error
    for name, mode in seen.special.items():
        raise Unhashable(
            f"{top}/{name}",
            f"{_kind(mode)} has no content to hash",
            fix="move it out of this directory",
        )
    for name, target in seen.links.items():
        if link_leads_out(top, name, target, seen.links):
            raise Unhashable(
                f"{top}/{name}",
                f"a link to {target} points outside {top}",
                fix="replace the link by its target, or declare the target as well",
            )
    return seen


def read_manifest(
    top: str, seen: TreeScan, known: Mapping[str, Sequence[str]], progress: Progress | None = None
) -> tuple[list[Entry], list[Read], int]:
    """Return the manifest of a tree, its newly hashed files, and the start time of the hashing.

    `known` has the SHA-256 of each file per directory, or "".
    """
    manifest: list[Entry] = []
    doubtful: list[tuple[str, int, str, Identity]] = []
    for folder, found in seen.folders.items():
        prefix = f"{folder}/" if folder else ""
        digests = known.get(folder) or [""] * len(found.names)
        rows = enumerate(zip(found.names, found.rows, digests, strict=True))
        for n, (name, row, value) in rows:
            if value:
                manifest.append(Entry(prefix + name, "x" if row[5] else "f", row[2], value))
            else:
                doubtful.append((folder, n, prefix + name, Identity(*row[:5])))
    begun = time.time_ns()
    reads: list[Read] = []
    if doubtful:
        hashed = hash_all([(f"{top}/{name}", before) for _, _, name, before in doubtful], progress)
        for (folder, n, name, _), (now, value) in zip(doubtful, hashed, strict=True):
            manifest.append(
                Entry(name, "x" if now.st_mode & stat.S_IXUSR else "f", now.st_size, value)
            )
            reads.append((folder, n, now, value))
    manifest += map(Entry._make, seen.iterate_others())
    return sort_rows(manifest), reads, begun


def link_leads_out(top: str, name: str, target: str, links: Container[str]) -> bool:
    """Return True if a symbolic link points out of its tree.

    It may do so by its text (the tree may be moved), or through other `links`.
    """
    parts: list[str] = name.split("/")[:-1]
    through = False
    if target.startswith("/"):
        return True
    for part in target.split("/"):
        if part == "..":
            if not parts:
                return True
            parts.pop()
        elif part and part != ".":
            parts.append(part)
            through = through or "/".join(parts) in links
    if not through:
        return False
    real_top, real = (
        os.path.realpath(top),
        os.path.realpath(f"{os.path.dirname(f'{top}/{name}')}/{target}"),
    )
    return real != real_top and not real.startswith(real_top.rstrip("/") + "/")


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def is_full(error: OSError) -> bool:
    """Return True if the error means a full disk or an exceeded quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(error: OSError, path: str) -> Infrastructure:
    """Convert a file system error to Infrastructure.

    For a full disk, the message has the free space.
    """
    if not is_full(error):
        return Infrastructure(f"{path}: {error.strerror}")
    folder = os.path.dirname(path)
    while not os.path.exists(folder or "/"):
        folder = os.path.dirname(folder)
    free = os.statvfs(folder or "/")
    message = f"the disk is full: {path}: {error.strerror}, {free.f_bavail * free.f_frsize} bytes are free and {free.f_favail} inodes"
    return DiskFull(
        message,
        fix="free disk space, for example with `recipe gc`, and run again; finished steps are kept",
    )
