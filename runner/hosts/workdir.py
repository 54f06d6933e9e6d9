"""The directory of an attempt while it is filled: each folder is made once, and what an earlier attempt left is written over."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Container, Sequence
from typing import TypeAlias

from ..errors import CannotRun
from ..paths import escapes
from ..storage.disk import overwrite
from .spare_dirs import Scrap

Mark: TypeAlias = tuple[int, int, int]
"""Inode, size, time of the last change."""


class Workdir:
    """At `path`, where nothing is before `begin`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: dict[str, None] = {}  # folders, each after the one it is in
        self._scrap: Scrap | None = None
        self._spare: list[str] = []  # files of an earlier attempt, to be written over
        self._aside = 0  # spare files that had a name which was wanted
        self._idle: dict[str, None] = {}  # folders of an earlier attempt that were not asked for yet

    @property
    def begun(self) -> bool:
        return bool(self._made)

    @property
    def folders(self) -> tuple[str, ...]:
        """Those in it that were made here, each after the one it is in."""
        return tuple(folder[len(self._path) + 1 :] for folder in self._made if folder != self._path)

    def begin(self, scrap: Scrap | None = None) -> None:
        """Make it, or take one that an earlier attempt left."""
        self._scrap = scrap
        spare = scrap.take(self._path) if scrap is not None else None
        if spare is not None:
            self._made[self._path] = None
            self._idle = {f"{self._path}/{folder}": None for folder in spare.folders}
            self._spare = [f"{self._path}/{name}" for name in spare.files]
            return
        try:
            os.mkdir(self._path, 0o700)
        except FileNotFoundError:
            os.makedirs(self._path, 0o700, exist_ok=True)
        self._made[self._path] = None

    def place(self, name: str, whole: Sequence[Container[str]]) -> str:
        """The absolute path of `name`, whose parent exists afterwards.  Raises CannotRun for one outside, or in what is linked to: `whole`."""
        if ".." in name or name[0] == "/":
            if escapes(name):
                raise CannotRun(f'"{name}" leaves the attempt directory')
            name = posixpath.normpath(name)
        target = f"{self._path}/{name}"
        parent = target[: target.rindex("/")]
        if parent not in self._made:
            self._make(parent, whole)
        if target in self._spare:  # the name is wanted, the file is still spare
            self._set_aside(target)
        elif target in self._idle:
            for name in [name for name in self._spare if name.startswith(f"{target}/")]:
                self._set_aside(name)
            for folder in [folder for folder in reversed(self._idle) if f"{folder}/".startswith(f"{target}/")]:
                os.rmdir(folder)
                del self._idle[folder]
        return target

    def _set_aside(self, spare: str) -> None:
        self._spare.remove(spare)
        self._aside += 1
        self._spare.append(f"{self._path}/.spare-{self._aside}")
        os.rename(spare, self._spare[-1])

    def _make(self, folder: str, whole: Sequence[Container[str]]) -> None:
        name = folder[len(self._path) + 1 :]
        if any(name in each for each in whole):
            raise CannotRun(
                f'something is to be put into "{name}", which the step is given as a whole: it would be written into the original',
                fix="write it elsewhere, or give the step single files instead of the folder",
            )
        above = folder[: folder.rindex("/")]
        if above not in self._made:
            self._make(above, whole)
        if folder in self._idle:
            del self._idle[folder]
        else:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        self._made[folder] = None

    def put(self, target: str, data: bytes, *, executable: bool) -> Mark:
        """A small file of our own making."""
        if self._scrap is not None and not executable:
            if self._spare:
                os.rename(self._spare.pop(), target)
                return mark(overwrite(target, data))
            if self._scrap.take_file(target):
                return mark(overwrite(target, data))
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755 if executable else 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            return mark(os.fstat(handle))
        finally:
            os.close(handle)

    def ready(self) -> None:
        """Everything is staged: nothing of an earlier attempt may be left."""
        for name in self._spare:
            self._scrap.give_file(name) if self._scrap is not None else os.unlink(name)
        for folder in reversed(self._idle):
            os.rmdir(folder)
        self._spare, self._idle = [], {}


def mark(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns
