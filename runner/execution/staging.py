"""Make an attempt directory and take its results.  Knows paths and contents, not commands, keys or runs.

An attempt sees what its step declared, under the same relative names on every driver: code and small files as copies, large files and trees as links.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import Infrastructure
from ..planning.plan import DIRECTORY, NONEMPTY, OPTIONAL, Node
from ..storage.artifacts import Objects
from ..storage.files import Content, Unhashable

SMALL = 64 << 10
"""Files up to this size are copied into an attempt, larger ones linked: bytes."""


class OutputProblem(Exception):
    """What a command left is not what its step declares."""


@dataclass(slots=True)
class Attempt:
    """One attempt directory and what was put there."""

    path: str
    staged: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # name -> inode, size, mtime of what it leads to
    sources: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # workspace path -> the same, when it was staged
    _made: dict[str, None] = field(default_factory=dict)  # folders, each after the one it lies in

    def begin(self) -> None:
        try:
            os.mkdir(self.path, 0o700)
        except FileNotFoundError:
            os.makedirs(self.path, 0o700, exist_ok=True)
        self._made[self.path] = None

    def place(self, name: str) -> str:
        """The absolute path of `name`, whose parent exists afterwards."""
        target = f"{self.path}/{name}"
        parent = target[: target.rindex("/")]
        if parent not in self._made:
            self._make(parent)
        return target

    def _make(self, folder: str) -> None:
        above = folder[: folder.rindex("/")]
        if above not in self._made:
            self._make(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        self._made[folder] = None

    def add_path(self, source: str, name: str, *, copy: bool = False) -> None:
        """A file or folder of the caller's."""
        target = self.place(name)
        found = os.stat(source)
        self.sources[source] = _mark(found)
        if stat.S_ISREG(found.st_mode) and (copy or found.st_size <= SMALL):
            self.staged[name] = _copy(source, target, found)
        else:
            os.symlink(os.path.realpath(source), target)
            self.staged[name] = _mark(found)

    def add_object(self, objects: Objects, content: str, name: str) -> None:
        """An output of an earlier step."""
        target = self.place(name)
        objects.stage(Content(content), Path(target))
        self.staged[name] = _mark(os.stat(target))

    def add_bytes(self, data: bytes, name: str) -> None:
        with open(self.place(name), "wb") as file:
            file.write(data)

    def prepare_outputs(self, node: Node) -> None:
        for _, path, flags in node.outputs:
            target = self.place(path)
            if flags & DIRECTORY:
                os.makedirs(target, exist_ok=True)

    def tampered(self) -> list[str]:
        """Inputs that the step changed, by name."""
        return [name for name, mark in self.staged.items() if _look(f"{self.path}/{name}") != mark]

    def stale(self) -> list[str]:
        """Sources that somebody changed since they were staged: what the step read is not certain."""
        return [path for path, mark in self.sources.items() if _look(path) != mark]

    def collect(self, node: Node, objects: Objects, below_state: Iterable[str] = ()) -> dict[str, str]:
        """Take every output into the store: output name -> content.  Raises OutputProblem naming all that is wrong."""
        wrong: list[str] = []
        found: dict[str, str] = {}
        kept = tuple(below_state)
        for name, path, flags in node.outputs:
            target = f"{self.path}/{path}"
            try:
                here = os.lstat(target)
            except OSError:
                if not flags & OPTIONAL:
                    wrong.append(f"declared output {path} was not made")
                continue
            if flags & NONEMPTY and _empty(target):
                wrong.append(f"declared output {path} is empty, which the recipe forbids")
                continue
            if flags & DIRECTORY and not os.path.isdir(target):
                wrong.append(f"declared output {path}/ is not a directory")
                continue
            try:
                if stat.S_ISLNK(here.st_mode) or any(path == k or path.startswith(k + "/") for k in kept):
                    from ..storage.files import scan

                    content = scan(target)
                    objects.put(Path(os.path.realpath(target)), content, move=False)
                else:
                    content = objects.take(Path(target))
            except Unhashable as error:
                wrong.append(str(error).replace(self.path + "/", ""))
                continue
            found[name] = content
        if wrong:
            raise OutputProblem("; ".join(wrong))
        return found

    def remove(self) -> None:
        """Delete the directory: what we put there first, which is usually all, then whatever is left."""
        try:
            for name in self.staged:
                os.unlink(f"{self.path}/{name}")
            for folder in reversed(self._made):
                os.rmdir(folder)
        except OSError:
            remove(self.path)


def remove(path: str) -> None:
    """Delete a tree, read-only directories included; never follows a link."""
    try:
        _remove_fast(path)
    except OSError:
        for folder, _, _ in os.walk(path):
            if not os.path.islink(folder):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)


def _remove_fast(path: str) -> None:
    folders = []
    with os.scandir(path) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                folders.append(item.path)
            else:
                os.unlink(item.path)
    for folder in folders:
        _remove_fast(folder)
    os.rmdir(path)


def undeclared(log_tail: str, workspace: Path, declared: Iterable[str]) -> str | None:
    """A workspace file whose name a failed command printed and that its step did not declare."""
    import re

    have = set(declared)
    for word in re.findall(r"[\w./+@-]*[\w+-]\.\w+|[\w+-]+(?:/[\w.+-]+)+", log_tail):
        name = posixpath.normpath(word)
        if not name.startswith(("/", "..", ".recipe")) and name not in have and (workspace / name).exists():
            return name
    return None


def _copy(source: str, target: str, found: os.stat_result) -> tuple[int, int, int]:
    origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755 if found.st_mode & 0o100 else 0o644)
        try:
            while data := os.read(origin, 1 << 20):
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
                if len(data) == found.st_size:
                    break
            return _mark(os.fstat(handle))
        finally:
            os.close(handle)
    finally:
        os.close(origin)


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _look(path: str) -> tuple[int, int, int] | None:
    try:
        return _mark(os.stat(path))
    except OSError:
        return None


def _empty(path: str) -> bool:
    if os.path.isdir(path):
        with os.scandir(path) as items:
            return next(items, None) is None
    return os.path.getsize(path) == 0


def no_space(error: OSError, path: str) -> Infrastructure:
    """Words for a full disk, with what is free."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = os.statvfs(os.path.dirname(path) or "/")
        return Infrastructure(
            f"the disk is full: {path} could not be written ({free.f_bavail * free.f_frsize} bytes and {free.f_favail} inodes free)",
            fix="free some space, or run `recipe gc`",
        )
    return Infrastructure(f"{path}: {error.strerror}")
