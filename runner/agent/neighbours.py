"""Detection of a file system shared by host and client, and local copies instead of transfers."""

from __future__ import annotations

import os
import stat

from . import trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import AgentRequest


def meet(request: AgentRequest, note: str, word: str) -> tuple[bool, str]:
    """Return whether the client's file `note` contains `word` here, and a new local file with
    `word`.
    """
    try:
        with open(note, encoding="ascii") as file:
            read = file.read(len(word) + 1) == word
    except (OSError, ValueError):
        read = False
    request.make_arriving(request.partial)
    path = f"{request.root}/{request.partial}/word-{word}"
    with open(path, "w", encoding="ascii") as file:
        file.write(word)
    return read, path


def same(request: AgentRequest, paths: Sequence[tuple[str, Sequence[int]]]) -> list[bool]:
    """Return for each path of the client whether it is the same file here, by its `marks`."""
    return [marks(path) == list(mark) for path, mark in paths]


def marks(path: str) -> list[int]:
    """Return a file's inode, size, modification time and change time in nanoseconds.

    Two machines that share a file system agree on these values. Empty if the file does not exist.
    """
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def draw(request: AgentRequest, contents: Sequence[tuple[str, str]]) -> list[str]:
    """Copy files and trees of the client: object name and path.

    `contents` are pairs of object name and client path. Return the names that were copied.

    They are verified like transferred objects.
    """
    import shutil

    request.make_arriving(request.partial)
    drawn = []
    for name, path in contents:
        target = f"{request.partial}/{name}"
        try:
            if os.path.isdir(path):
                shutil.copytree(path, target, symlinks=True, copy_function=copy)
            else:
                copy(path, target)
        except OSError:  # shutil.Error is an OSError
            if not os.path.lexists(target):
                continue  # nothing was copied
        trees.open_up(target)
        drawn.append(name)
    return drawn


def copy(source: str, target: str) -> None:
    """Copy a file to a new path, with standard permissions. Raises OSError."""
    os.chmod(target, 0o755 if trees.copy(source, target) & stat.S_IXUSR else 0o644)
