"""Make real folders and files of stored ones: the folders are new, the files other names of the stored files.

Where the file system refuses that, a file becomes a copy or a link, and the caller hears why.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from .disk import MODE, Disk
from .files import Entry

FULL = "some of its files are copies because they have as many hard links as the file system allows"
REFUSED = "the file system refuses hard links"
_REFUSALS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


def give_file(disk: Disk, source: str, target: str) -> str:
    """Give a stored file another name; why it is a copy or a link instead, empty when it is none."""
    try:
        os.link(source, target)
        return ""
    except OSError as error:
        return _give_otherwise(disk, source, target, error)


def give_tree(disk: Disk, manifest: Sequence[Entry], source: str, target: str) -> str:
    """Make the tree at `source` at `target` too: see `give_file`."""
    why = ""
    for name, entries in _by_folder(manifest, target):
        there = f"{source}/{name}" if name else source
        here = f"{target}/{name}" if name else target
        # By handles the kernel is spared the way from the root, twice for each file.
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
    """The manifest of a tree whose links lead to the files of the tree at `source`."""
    found = []
    for entry in manifest:
        if entry.kind in "fx":
            target = f"{source}/{entry.path}"
            entry = Entry(entry.path, "l", len(os.fsencode(target)), target)
        found.append(entry)
    return found


def _by_folder(manifest: Sequence[Entry], target: str) -> Iterator[tuple[str, Iterator[Entry]]]:
    """Make the folders of a tree, and go through what is in each but its folders."""
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
    """Make a copy or a link of a file that cannot have another name, and answer why."""
    if error.errno not in _REFUSALS:
        raise error
    if error.errno == errno.EMLINK:
        _copy(disk, source, target)
        return FULL
    try:
        os.symlink(source, target)
    except OSError:  # a file system of cameras has no links of any kind
        _copy(disk, source, target)
    return REFUSED


def _copy(disk: Disk, source: str, target: str) -> None:
    kind = "x" if os.stat(source).st_mode & 0o100 else "f"
    disk.copy_file(source, target, kind)
    os.chmod(target, MODE[kind])
