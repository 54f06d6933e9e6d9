"""Open a file that a step may have replaced by a pipe, a device or a folder, without waiting for it."""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

NOT_REGULAR = "it is not a regular file"
"""`strerror` of the OSError for a pipe, a device, a folder or a socket."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.  Raises OSError as `descriptor_of` does."""
    return os.fdopen(descriptor_of(path), "rb")


def descriptor_of(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a regular file, or of one that a link leads to, for reading.

    Raises OSError if it cannot be opened, and OSError with `NOT_REGULAR` for anything else. Opening
    a pipe waits for its writer, reading a device may never end, so neither is done.
    """
    _require_regular(os.stat(path), path)  # to open some devices is to use them
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(handle), path)  # it may have been replaced since
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file, or a link to one, is there."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def size_of(path: str | bytes) -> int:
    """Bytes of a regular file, or of one that a link leads to; -1 where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def _require_regular(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
