"""The content of directory trees and files: the scan, the digests, and the order of the entries.

The agent lists the outputs of a host with this module, and `storage/content/files.py` computes
content ids with this module, so both sides get the same manifest for the same tree.
"""

from __future__ import annotations

import hashlib
import os
import stat
from operator import itemgetter

from . import sparse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    FileStatus = tuple[int, int, int, int, int, int]
    """Device, inode, size, mtime, ctime, and 64 for an executable file."""

    Row = tuple[str, str, int, str]
    """Path, kind, size and value of a file, link or empty directory.

    Kinds are f file, x executable, l link, d directory, o other. The value is a SHA-256 or a link
    target.
    """

    _Row = TypeVar("_Row", bound=Row)

_BLOCK = 1 << 18
_ZEROS = bytes(_BLOCK)
_FILE, _DIRECTORY, _LINK = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK
_MANY = 100  # minimum files before directories are scanned by handle


class DirectoryScan:
    """Names and status of one directory's files."""

    __slots__ = ("names", "rows")

    def __init__(self, names: list[str], rows: list[FileStatus]) -> None:
        self.names, self.rows = names, rows


class TreeScan:
    """Directory scan of a tree, before any file is opened."""

    __slots__ = ("empty", "files", "folders", "links", "special")

    def __init__(self) -> None:
        self.folders: dict[str, DirectoryScan] = {}
        """Directories that contain files."""
        self.links: dict[str, str] = {}
        """Path and target of each link."""
        self.empty: set[str] = set()
        """Empty directories."""
        self.special: dict[str, int] = {}
        """Path and mode of each pipe, socket and device."""
        self.files = 0
        """Number of regular files."""

    def iterate_files(self) -> Iterator[Row]:
        """Yield path, kind and size of the regular files, without digests."""
        for folder, seen in self.folders.items():
            prefix = f"{folder}/" if folder else ""
            for name, status in zip(seen.names, seen.rows):
                yield prefix + name, "x" if status[5] else "f", status[2], ""

    def iterate_others(self) -> Iterator[Row]:
        """Yield the rows of the links, empty directories and special files."""
        for path, target in self.links.items():
            yield path, "l", len(os.fsencode(target)), target
        for path in self.empty:
            yield path, "d", 0, ""
        for path in self.special:
            yield path, "o", 0, ""


def scan_tree(top: str) -> TreeScan:
    """Scan a directory and all directories below it.

    Raises OSError with the full path of the entry.
    """
    scan = TreeScan()
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        prefix, here = (f"{folder}/", f"{top}/{folder}") if folder else ("", top)
        try:
            waiting += _scan_directory(scan, folder, prefix, here)
        except OSError as error:
            last = error.filename
            error.filename = here if last is None else os.path.join(here, str(last))
            raise
    return scan


def _scan_directory(scan: TreeScan, folder: str, prefix: str, here: str) -> list[str]:
    """Add the entries of one directory to the scan, and return its subdirectories."""
    names: list[str] = []
    rows: list[FileStatus] = []
    inner: list[str] = []
    # A directory handle saves path resolution per stat. It does not pay off for a few files.
    handle = (
        os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if scan.files > _MANY else None
    )
    try:
        with os.scandir(here if handle is None else handle) as listing:
            item = None
            for item in listing:
                found = item.stat(follow_symlinks=False)
                mode = found.st_mode
                kind = mode & 0o170000
                if kind == _FILE:
                    names.append(item.name)
                    rows.append(
                        (
                            found.st_dev,
                            found.st_ino,
                            found.st_size,
                            found.st_mtime_ns,
                            found.st_ctime_ns,
                            mode & 0o100,
                        )
                    )
                elif kind == _DIRECTORY:
                    inner.append(prefix + item.name)
                elif kind == _LINK:
                    scan.links[prefix + item.name] = os.readlink(f"{here}/{item.name}")
                else:
                    scan.special[prefix + item.name] = mode
    finally:
        if handle is not None:
            os.close(handle)
    if names:
        scan.folders[folder] = DirectoryScan(names, rows)
        scan.files += len(names)
    elif item is None and folder:
        scan.empty.add(folder)
    return inner


def kind_of(mode: int) -> str:
    """Return the file type for a file mode, as one letter."""
    if stat.S_ISREG(mode):
        return "x" if mode & stat.S_IXUSR else "f"
    if stat.S_ISDIR(mode):
        return "d"
    return "l" if stat.S_ISLNK(mode) else "o"


def hash_tree(top: str) -> list[Row]:
    """Return the sorted rows of a tree, with the digests of its files. Raises OSError."""
    scan = scan_tree(top)
    found: list[Row] = [
        (path, kind, size, hash_file(f"{top}/{path}"))
        for path, kind, size, _ in scan.iterate_files()
    ]
    found += scan.iterate_others()
    return sort_rows(found)


def sort_rows(rows: list[_Row]) -> list[_Row]:
    """Sort rows or manifest entries by the bytes of their paths, in place."""
    try:
        for row in rows:
            row[0].encode()  # valid text sorts like its UTF-8 encoding
        rows.sort(key=itemgetter(0))
    except UnicodeEncodeError:
        rows.sort(key=lambda row: row[0].encode("utf-8", "surrogateescape"))
    return rows


def hash_file(path: str) -> str:
    """Return the SHA-256 of a regular file. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        return hash_open(file.fileno(), os.fstat(file.fileno()).st_size)


def hash_open(fd: int, size: int, count: Callable[[int], None] = lambda _: None) -> str:
    """Return the SHA-256 of the first `size` bytes of an open file, or of all bytes of a shorter
    file.

    Holes of a sparse file are hashed as zeros without reading. `count` receives the number of bytes
    of each block.
    """
    hasher, view, at = hashlib.sha256(), memoryview(bytearray(_BLOCK)), 0
    for begin, end in sparse.runs_of_data(fd, size):
        _hash_zeros(hasher.update, begin - at, count)
        at = os.lseek(fd, begin, os.SEEK_SET)
        while at < end:
            got = os.readv(fd, [view[: end - at]])
            if not got:
                return hasher.hexdigest()
            hasher.update(view[:got])
            count(got)
            at += got
    _hash_zeros(hasher.update, size - at, count)
    return hasher.hexdigest()


def hash_blocks(fd: int, size: int, block: int) -> list[str]:
    """Return the SHA-256 of each block in the first `size` bytes of an open file.

    The list is incomplete if the file is shorter.
    """
    view = memoryview(bytearray(min(_BLOCK, block)))
    found: list[str] = []
    for begin in range(0, size, block):
        hasher, left = hashlib.sha256(), min(block, size - begin)
        while left and (got := os.readv(fd, [view[:left]])):
            hasher.update(view[:got])
            left -= got
        if left:
            break
        found.append(hasher.hexdigest())
    return found


def _hash_zeros(update: Callable[[bytes], None], size: int, count: Callable[[int], None]) -> None:
    for left in range(size, 0, -_BLOCK):
        zeros = _ZEROS[: min(left, _BLOCK)]
        update(zeros)
        count(len(zeros))
