"""Shared directory as a bucket, with one atomically written file per object."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

from ...agent import sparse
from ...agent.regular import NOT_REGULAR
from ..content.disk import SYNCED
from .bucket import COUNT, BucketUnreachable, Spread, Stat, StoreError

_READ: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
"""Open flags that keep a named pipe from blocking the open call."""


class FolderBucket:
    """Local or network directory as a bucket.

    Objects appear by one rename or link. `partial/` has unfinished files.
    """

    width = 8

    def __init__(self, path: str) -> None:
        self.url = path
        self._folders: set[str] = set()

    def load(self) -> None:
        pass

    def check(self, marker: str) -> bytes | None:
        self._demand()
        return self.read(marker)

    def make(self) -> bool:
        try:
            os.makedirs(self.url)
        except FileExistsError:
            return False
        except OSError as error:
            self._fail(error)
        return True

    def head(self, name: str) -> Stat | None:
        try:
            found = os.lstat(f"{self.url}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._fail(error)
        return Stat(name, found.st_size, found.st_mtime)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        try:
            handle = os.open(f"{self.url}/{name}", _READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._fail(error)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise StoreError(
                f"cannot read {self.url}/{name}: {NOT_REGULAR}",
                fix="remove this path from the store: it was not written by recipe, which writes regular files only",
            )
        with os.fdopen(handle, "rb", buffering=0) as file:
            if length is None:
                return file.readall()
            found = []
            while length and (data := os.pread(handle, length, start)):
                found.append(data)
                start, length = start + len(data), length - len(data)
            return b"".join(found)

    def create(self, name: str, data: bytes) -> bool:
        temporary = self._temporary()
        try:
            self._pour(temporary, (data,), sync=True)
            target = self._place(name)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP):
                    raise
                # Without hard links, O_EXCL decides which writer is first. A half-written trace is
                # ignored by readers.
                return self._create_plain(target, data)
            return True
        except OSError as error:
            self._fail(error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _create_plain(self, target: str, data: bytes) -> bool:
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return True

    def write(self, name: str, data: bytes) -> None:
        self._write(name, (data,), sync=len(data) >= SYNCED)

    def write_file(self, name: str, path: str, size: int, crew: Spread) -> None:
        def parts() -> Iterator[bytes]:
            with Path(path).open("rb", buffering=0) as file:
                while data := file.read(4 << 20):
                    yield data

        self._write(name, parts(), sync=True)

    def names(self, prefix: str) -> Iterator[Stat]:
        top = f"{self.url}/{prefix}"
        for at, _, listed in os.walk(top.rstrip("/")):
            for file in listed:
                name = os.path.relpath(f"{at}/{file}", self.url)
                stat = self.head(name)
                if stat is not None:
                    yield stat

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                os.unlink(f"{self.url}/{name}")
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail(error)

    def abandon(self, before: float, *, dry: bool = False) -> int:
        old = [stat.name for stat in self.names("partial/") if stat.at < before]
        if not dry:
            self.delete(old)
        return len(old)

    def _write(self, name: str, parts: Iterable[bytes], *, sync: bool) -> None:
        temporary = self._temporary()
        try:
            self._pour(temporary, parts, sync=sync)
            os.rename(temporary, self._place(name))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._fail(error)

    def _pour(self, path: str, parts: Iterable[bytes], *, sync: bool) -> None:
        # The store is shared, so files are group-readable, subject to the umask.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        try:
            size = 0
            for part in parts:
                sparse.write(handle, part)
                size += len(part)
            sparse.extend(handle, size)
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)

    def _place(self, name: str) -> str:
        target = f"{self.url}/{name}"
        self._make_folder(os.path.dirname(target))
        return target

    def _temporary(self) -> str:
        self._make_folder(f"{self.url}/partial")
        return f"{self.url}/partial/{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}-{next(COUNT)}"

    def _demand(self) -> None:
        if not os.path.isdir(self.url):
            raise StoreError(
                f"{self.url} is not a directory",
                fix="create the directory or mount it; recipe never creates a store",
            )

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            self._demand()  # the directory may have been unmounted
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                self._fail(error)
            self._folders.add(folder)

    def _fail(self, error: OSError) -> NoReturn:
        where = error.filename or self.url
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"{where}: {error.strerror}",
                fix="free space in the store, for example with `recipe gc --store`, then push again",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(
                f"{where}: {error.strerror}",
                fix="get write access to the directory from its owner",
            ) from error
        raise BucketUnreachable(f"{where}: {error.strerror}") from error
