"""Write downloaded files, only below the chosen directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self

from ...api.values import File
from ...digest import of_file
from ...errors import CannotRun, Corrupt
from ...storage.content.files import link_leads_out


class Download:
    """A download into a directory.

    Each file is written to a `.part` file and renamed when complete.  Methods raise CannotRun and
    Corrupt.
    """

    def __init__(self, folder: str | Path, overwrite: bool) -> None:
        self._folder, self._overwrite = Path(os.path.abspath(folder)), overwrite
        self.paths: list[Path] = []
        self._file: File | None = None
        self._out: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._size = 0

    def take(self, item: File | bytes) -> None:
        """Begin the next file, or append bytes to the current file."""
        if isinstance(item, File):
            self._finish()
            self._begin(item, self._target(item))
        else:
            assert self._out is not None
            self._out.write(item)
            self._hash.update(item)
            self._size += len(item)

    def _target(self, file: File) -> Path:
        """Return the target path of a file, and create its parent directory.

        Raises Corrupt for a path outside the download directory.
        """
        if not _is_inside(file.path):
            raise Corrupt(f"an output has a path outside its directory: {file.path!r}")
        target = self._folder.joinpath(*PurePosixPath(file.path).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.resolve().is_relative_to(self._folder.resolve()):
            raise Corrupt(
                f"{target.parent} is a link that points outside {self._folder}",
                fix="download into another directory",
            )
        return target

    def _begin(self, file: File, target: Path) -> None:
        kind, _, where = file.content.partition(":")
        if kind == "d":
            target.mkdir(exist_ok=True)
            return
        self.paths.append(target)
        if kind == "l":
            self._link(file, target, where)
            return
        self._file, self._hash, self._size = file, hashlib.sha256(), 0
        self._out = open(self._part(target), "wb")  # noqa: SIM115  (closed with the download)

    def _link(self, file: File, target: Path, where: str) -> None:
        if link_leads_out("", file.path.partition("/")[2], where, ()):
            raise Corrupt(f"{file.path} is a link to {where}, outside its output")
        if not self._overwrite and _is_taken_for_link(target, where):
            raise self._taken_error(target)
        self._part(target).unlink(missing_ok=True)
        self._part(target).symlink_to(where)
        self._part(target).replace(target)

    @staticmethod
    def _part(target: Path) -> Path:
        return target.with_name(f"{target.name[:200]}.{os.getpid()}.part")

    def _finish(self) -> None:
        file, out = self._file, self._out
        if file is None or out is None:
            return
        out.close()
        target = self.paths[-1]
        if not self._is_as_announced(file):
            raise Corrupt(
                f"{file.path} was damaged in transfer: its {self._size} bytes do not match the digest",
                fix="try again",
            )
        is_taken = not self._overwrite and os.path.lexists(target)
        if is_taken and of_file(target) != self._hash.hexdigest():
            raise self._taken_error(target)
        if file.content.startswith("x:"):
            self._part(target).chmod(0o755)
        self._part(target).replace(target)
        self._file = self._out = None

    def _is_as_announced(self, file: File) -> bool:
        """Return True if the received bytes have the digest and the size of the file, if known."""
        digest = file.content.partition(":")[2]
        if digest and self._hash.hexdigest() != digest:
            return False
        return file.size in (None, self._size)

    @staticmethod
    def _taken_error(target: Path) -> CannotRun:
        return CannotRun(
            f"{target} already exists with other content",
            fix="move the file away, or pass overwrite=True (--overwrite)",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._out is not None:
                self._out.close()
                with contextlib.suppress(FileNotFoundError):
                    self._part(self.paths[-1]).unlink()


def _is_taken_for_link(target: Path, where: str) -> bool:
    """Return True if anything but a link to `where` is at the path."""
    if not os.path.lexists(target):
        return False
    return not target.is_symlink() or os.readlink(target) != where


def _is_inside(path: str) -> bool:
    """Return True for a relative path that does not leave its directory."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/"):
        return False
    return ".." not in parts and "\0" not in path
