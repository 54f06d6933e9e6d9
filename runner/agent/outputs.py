"""Outputs and inputs of an attempt after its command, for this machine and for hosts.

The place of a step judges the outputs by the kinds that `look_at_output` returns.
"""

from __future__ import annotations

import os
import stat

from .tree_hash import kind_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Mark = tuple[int, int, int]
    """Inode, size and modification time of a file."""


def look_at_output(top: str, path: str, inside: Iterable[str]) -> tuple[str, os.stat_result | None]:
    """Return the kind and the status of the output `path` in the attempt directory `top`.

    Kinds are f file, x executable, d directory, - missing, l broken or cyclic link, o other, and b
    for an output behind a link that leaves the attempt and the directories `inside`. The kind of a
    link is the target's, and the status is the link's.
    """
    at = f"{top}/{path}"
    try:
        found = os.lstat(at)
        if _leads_out(top, path, inside):
            return "b", found
        target = os.stat(at) if stat.S_ISLNK(found.st_mode) else found
        return kind_of(target.st_mode), found
    except OSError as error:
        if os.path.islink(at):
            return "l", None
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return ("-" if is_missing else "o"), None


def _leads_out(top: str, path: str, inside: Iterable[str]) -> bool:
    """Return True if a directory above an output is a link out of `top` and the directories
    `inside`.
    """
    at, has_links = top, False
    for part in path.split("/")[:-1]:
        at = f"{at}/{part}"
        has_links = has_links or os.path.islink(at)
    if not has_links:
        return False
    allowed = tuple(f"{os.path.realpath(each)}/" for each in (top, *inside))
    return not f"{os.path.realpath(at)}/".startswith(allowed)


def mark_of(found: os.stat_result) -> Mark:
    """Return the mark of a file, which changes when a command writes or replaces the file."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def find_changed_copies(marks: Mapping[str, Mark], top: str) -> list[str]:
    """Return the staged copies in the attempt directory `top` that are missing or have another
    mark.
    """
    return [name for name, mark in marks.items() if find_mark(f"{top}/{name}") != mark]


def find_mark(path: str) -> Mark | None:
    """Return the mark of a file or of a link's target, or None if there is no file."""
    try:
        return mark_of(os.stat(path))
    except OSError:
        return None
