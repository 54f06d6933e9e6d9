"""Hard links from attempt directories to stored files and trees.

Directories are new. If the file system refuses hard links, a file becomes a copy or a symbolic
link, and the caller gets the reason.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from .disk import MODE, Disk
from .files import Entry

FULL = "some of its files are copies: the file system allows no more hard links to them"
REFUSED = "the file system refuses hard links"
_REFUSALS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def give_file(disk: Disk, source: str, target: str) -> str:
    """Hard-link a stored file to `target`.

    Returns the reason for a copy or symbolic link; otherwise "".
    """
    try:
        os.link(source, target)
        return ""
    except OSError as error:
        return _give_otherwise(disk, source, target, error)


def give_tree(disk: Disk, manifest: Sequence[Entry], source: str, target: str) -> str:
    """Create a tree of hard links to the files of a stored tree.

    Returns a reason like `give_file`.
    """
    why = ""
    for name, entries in _by_folder(manifest, target):
        there = f"{source}/{name}" if name else source
        here = f"{target}/{name}" if name else target
        # Directory handles save two path resolutions per file.
        origin = os.open(there, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        made = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for entry in entries:
                last = entry.path.rpartition("/")[2]
                try:
                    os.link(last, last, src_dir_fd=origin, dst_dir_fd=made, follow_symlinks=False)
                except OSError as error:
                    if entry.kind == "l":
                        os.symlink(entry.value, last, dir_fd=made)
                    else:
                        why = _give_otherwise(disk, f"{there}/{last}", f"{here}/{last}", error)
        finally:
            os.close(origin)
            os.close(made)
    return why


def links_to(manifest: Sequence[Entry], source: str) -> list[Entry]:
    """Return the manifest of a tree of symbolic links to the files of the tree at `source`."""
    found = []
    for entry in manifest:
        if entry.kind in "fx":
            target = f"{source}/{entry.path}"
            entry = Entry(entry.path, "l", len(os.fsencode(target)), target)
        found.append(entry)
    return found


def _by_folder(manifest: Sequence[Entry], target: str) -> Iterator[tuple[str, Iterator[Entry]]]:
    """Create the directories of a tree, and yield the non-directory entries of each."""
    os.mkdir(target)
    made = {""}
    for name, entries in groupby(manifest, _folder_of):
        if name not in made:
            os.makedirs(f"{target}/{name}", exist_ok=True)
            made.add(name)
        yield name, (entry for entry in entries if entry.kind != "d")


def _folder_of(entry: Entry) -> str:
    return entry.path if entry.kind == "d" else entry.path.rpartition("/")[0]


def _give_otherwise(disk: Disk, source: str, target: str, error: OSError) -> str:
    """Copy or symlink a file that cannot be hard-linked, and return the reason."""
    if error.errno not in _REFUSALS:
        raise error
    if error.errno == errno.EMLINK:
        _copy(disk, source, target)
        return FULL
    try:
        os.symlink(source, target)
    except OSError:  # FAT, as on memory cards, has no links at all
        _copy(disk, source, target)
    return REFUSED


def _copy(disk: Disk, source: str, target: str) -> None:
    kind = "x" if os.stat(source).st_mode & 0o100 else "f"
    disk.copy_file(source, target, kind)
    os.chmod(target, MODE[kind])
