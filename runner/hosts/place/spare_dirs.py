"""Reuse finished attempt directories.

File systems create and delete inodes far slower than they rename them.  ext4 searches recently
deleted inodes before it allocates one, so a run that creates and deletes seven files per step gets
slower with every step.  A spare directory keeps its subdirectories and files.  The next attempt
renames the directory, then each file to the new name, and overwrites the files.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from ...storage.content.disk import delete, overwrite


class SpareFolder(NamedTuple):
    """A spare directory, its subdirectories (relative, parents first) and its plain, writable
    files.
    """

    path: str
    folders: tuple[str, ...]
    files: tuple[str, ...]


class SparePool:
    """Spare directories of one run, and spare scripts and empty logs beside attempts.

    There is at most one directory per concurrent step.
    """

    def __init__(self, folder: str, tag: str, room: int) -> None:
        self._folder, self._tag, self._room = folder, tag, room
        self._spares: list[SpareFolder] = []
        self._files: list[str] = []
        self._scripts: list[str] = []
        self._logs: list[str] = []
        self._count = 0

    def add_folder(self, spare: SpareFolder) -> bool:
        """Add a directory; False if there are enough, or if it contains other entries."""
        if len(self._spares) >= self._room:
            return False
        known = {*spare.folders, *spare.files}
        names = os.listdir(spare.path)
        for folder in spare.folders:
            names += [f"{folder}/{name}" for name in os.listdir(f"{spare.path}/{folder}")]
        if len(names) != len(known) or not known.issuperset(names):
            return False
        self._spares.append(spare)
        return True

    def take_folder(self, path: str) -> SpareFolder | None:
        """Rename a spare directory to `path`, with its contents; None if there is none."""
        while self._spares:
            spare = self._spares.pop()
            with contextlib.suppress(FileNotFoundError):
                os.rename(spare.path, path)
                return spare
        return None

    def add_file(self, path: str) -> None:
        """Add a file that the next attempt of a spare directory does not need."""
        if len(self._files) >= self._room:
            os.unlink(path)
        else:
            self._files.append(self.rename_to_spare(path))

    def take_file(self, path: str) -> bool:
        """Rename a spare file to `path`; False if there is none."""
        return _rename_spare(self._files, path)

    def add_script(self, path: str) -> None:
        """Add a script file that is no longer executed.  It keeps its name until it is reused."""
        self._scripts.append(path)

    def add_log(self, path: str) -> None:
        """Add an empty log."""
        self._logs.append(path)

    def take_log(self, path: str) -> None:
        """Rename a spare empty log to `path`, if there is one."""
        _rename_spare(self._logs, path)

    def write_script(self, path: str, data: bytes) -> None:
        """Write a script, in place of a spare script if there is one."""
        if _rename_spare(self._scripts, path):
            overwrite(path, data)
        else:
            with open(path, "wb") as file:
                file.write(data)

    def clear(self) -> None:
        """Delete all spare directories and files."""
        for spare in self._spares:
            delete(Path(spare.path))
        for path in (*self._files, *self._scripts, *self._logs):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._spares, self._files, self._scripts, self._logs = [], [], [], []

    def rename_to_spare(self, path: str) -> str:
        """Rename a directory or file to a new spare name and return that.

        The search for attempts skips names with a dot.
        """
        self._count += 1
        name = f"{self._folder}/spare.{self._tag}.{self._count}"
        os.rename(path, name)
        return name


def _rename_spare(spares: list[str], path: str) -> bool:
    """Rename the first existing spare to `path`; False if there is none.  A killed worker's attempt may have taken a file away."""
    while spares:
        with contextlib.suppress(FileNotFoundError):
            os.rename(spares.pop(), path)
            return True
    return False
