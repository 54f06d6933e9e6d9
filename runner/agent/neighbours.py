"""A disk that a host and its client both see: how each finds that out, and what need not travel then."""

from __future__ import annotations

import os
import stat

from . import trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import Request


def meet(request: Request, note: str, word: str) -> tuple[bool, str]:
    """Whether the client's file `note` is read here as `word`; and the path of a new file here that holds the same word."""
    try:
        with open(note, encoding="ascii") as file:
            read = file.read(len(word) + 1) == word
    except (OSError, ValueError):
        read = False
    request.arriving(request.partial)
    path = f"{request.root}/{request.partial}/word-{word}"
    with open(path, "w", encoding="ascii") as file:
        file.write(word)
    return read, path


def same(request: Request, paths: Sequence[tuple[str, Sequence[int]]]) -> list[bool]:
    """Whether each of the client's paths is the same file here: `marks` of it is equal."""
    return [marks(path) == list(mark) for path, mark in paths]


def marks(path: str) -> list[int]:
    """What two machines that see one file agree on: inode, bytes, nanoseconds of the last writing and of the last change.  Empty: no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def draw(request: Request, contents: Sequence[tuple[str, str]]) -> list[str]:
    """Copy the client's files and trees: name of the object, and path.  Those that came; they count as sent, and are compared as what was sent is."""
    import shutil

    request.arriving(request.partial)
    drawn = []
    for name, path in contents:
        target = f"{request.partial}/{name}"
        try:
            if os.path.isdir(path):
                shutil.copytree(path, target, symlinks=True, copy_function=copy)
            else:
                copy(path, target)
        except OSError:  # shutil's own is one
            if not os.path.lexists(target):
                continue  # nothing of it came
        trees.open_up(target)
        drawn.append(name)
    return drawn


def copy(source: str, target: str) -> None:
    """Make a file, which must not be there, of another, as one of ours.  Raises OSError."""
    os.chmod(target, 0o755 if trees.copy(source, target) & stat.S_IXUSR else 0o644)
