"""Locks between processes of one machine.

A lock is an flock on a small file. The kernel releases the lock when its process exits, so no stale
locks and no unlock command exist.

The file's text (process id) is only for messages.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from ..errors import Infrastructure
from .content.files import is_full, no_space


class Lock:
    """Held lock, usable as a context manager, and released explicitly or at process exit."""

    __slots__ = ("_handle", "name")

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self._handle = handle

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Locks:
    """Named file locks in one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, name: str) -> Lock:
        """Wait for the lock `name` and acquire it."""
        lock = self._take(name, fcntl.LOCK_EX)
        assert lock is not None
        return lock

    def try_hold(self, name: str) -> Lock | None:
        """Acquire the lock `name`; return None if another process holds it."""
        return self._take(name, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_held(self, name: str) -> bool:
        """Return True if any process, including the current one, holds the lock."""
        try:
            handle = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._trouble(name, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise self._trouble(name, error) from error
        finally:
            os.close(handle)
        return False

    def holder(self, name: str) -> str:
        """Describe the last holder of the lock for a message, for example `process 4711`."""
        try:
            return self._path(name).read_text("utf-8", "replace").strip() or "another process"
        except OSError:
            return "another process"

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe="@,=+")

    def _take(self, name: str, how: int) -> Lock | None:
        path = self._path(name)
        try:
            while True:
                try:
                    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                except FileNotFoundError:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    continue
                try:
                    fcntl.flock(handle, how)
                    # Another process may have deleted the file during the wait. A lock on a deleted
                    # file protects nothing.
                    if _same(handle, path):
                        os.ftruncate(handle, 0)
                        os.pwrite(handle, b"process %d\n" % os.getpid(), 0)
                        return Lock(name, handle)
                except BlockingIOError:
                    os.close(handle)
                    return None
                except BaseException:
                    os.close(handle)
                    raise
                os.close(handle)
        except OSError as error:
            raise self._trouble(name, error) from error

    def _trouble(self, name: str, error: OSError) -> Infrastructure:
        if is_full(error):
            return no_space(error, str(self._path(name)))
        return Infrastructure(
            f"{self._path(name)}: cannot lock: {error.strerror}",
            fix=f"make {self._folder} writable",
        )


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
