"""Open files that a step may have replaced with a pipe, a device or a directory, without blocking."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

NOT_REGULAR = "it is not a regular file"
"""`strerror` of the OSError for a pipe, device, directory or socket."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises OSError as `descriptor_of` does.
    """
    return os.fdopen(descriptor_of(path), "rb")


def descriptor_of(path: str | os.PathLike[str]) -> int:
    """Return a read descriptor of a regular file, or of a link to one.

    Raises OSError if the file cannot be opened, and OSError with `NOT_REGULAR` for other kinds.
    Opening a pipe would wait for its writer, and reading a device may never end.
    """
    _require_regular(os.stat(path), path)  # before opening, because opening a device may trigger it
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(handle), path)  # again, because the file may have been replaced
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a regular file or a link to one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def size_of(path: str | bytes) -> int:
    """Return the size in bytes of a regular file or a link to one, or -1 if missing."""
    try:
        found = os.stat(path)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
