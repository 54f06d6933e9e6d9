"""Attempt directories that are done with, to be used again.

File systems make and forget inodes far slower than they rename them: ext4 looks through everything that was deleted in the last minutes before it
gives out an inode, so a run that makes and deletes seven of them a step gets slower with every step.  A spare keeps its folders and its files; the
next attempt renames the whole, then each file to the name that it needs, and writes over it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from ...storage.content.disk import delete, overwrite


class Spare(NamedTuple):
    """A directory, its folders (relative, each after the one it is in) and its files: plain, writable, ours alone."""

    path: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


class Scrap:
    """The spares of one run, at most one for each step that runs at once; also the scripts and empty logs beside attempts."""

    def __init__(self, folder: str, tag: str, room: int) -> None:
        self._folder, self._tag, self._room = folder, tag, room
        self._spares: list[Spare] = []
        self._files: list[str] = []
        self._scripts: list[str] = []
        self._logs: list[str] = []
        self._count = 0

    def give(self, spare: Spare) -> bool:
        """Take a directory; False when there are enough, or it does not hold exactly what is said of it."""
        if len(self._spares) >= self._room:
            return False
        ours = {*spare.folders, *spare.files}
        found = os.listdir(spare.path)
        for folder in spare.folders:
            found += [f"{folder}/{name}" for name in os.listdir(f"{spare.path}/{folder}")]
        if len(found) != len(ours) or not ours.issuperset(found):
            return False
        self._spares.append(spare)
        return True

    def take(self, path: str) -> Spare | None:
        """Rename a spare to `path`; what it held is still in it.  None when there is none."""
        while self._spares:
            spare = self._spares.pop()
            with contextlib.suppress(FileNotFoundError):
                os.rename(spare.path, path)
                return spare
        return None

    def give_file(self, path: str) -> None:
        """A file of a spare directory that its next attempt has no use for."""
        if len(self._files) >= self._room:
            os.unlink(path)
        else:
            self._files.append(self.named(path))

    def take_file(self, path: str) -> bool:
        """Put a file to be written over at `path`; False when there is none."""
        return _rename_spare(self._files, path)

    def give_script(self, path: str) -> None:
        """A script that is not run any more.  It keeps its name until it gets another one."""
        self._scripts.append(path)

    def give_log(self, path: str) -> None:
        """An empty log."""
        self._logs.append(path)

    def log(self, path: str) -> None:
        """Put an empty file at `path`, if there is a spare one."""
        _rename_spare(self._logs, path)

    def write_script(self, path: str, data: bytes) -> None:
        if _rename_spare(self._scripts, path):
            overwrite(path, data)
        else:
            with open(path, "wb") as file:
                file.write(data)

    def clear(self) -> None:
        """Delete everything."""
        for spare in self._spares:
            delete(Path(spare.path))
        for path in (*self._files, *self._scripts, *self._logs):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._spares, self._files, self._scripts, self._logs = [], [], [], []

    def named(self, path: str) -> str:
        """Rename to a name that no attempt has: a look for attempts passes over names with a dot."""
        self._count += 1
        name = f"{self._folder}/spare.{self._tag}.{self._count}"
        os.rename(path, name)
        return name


def _rename_spare(spares: list[str], path: str) -> bool:
    """Rename the first spare that is still there; an attempt of a worker that was killed may have lost what was given."""
    while spares:
        with contextlib.suppress(FileNotFoundError):
            os.rename(spares.pop(), path)
            return True
    return False
