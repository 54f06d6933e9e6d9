"""Read a file whole, if it is one and not without bound: what a person names may be a pipe, a device, or a terabyte."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

LARGEST: Final = 24_000_000
"""Bytes of the largest file that is read whole."""


def unfit(found: os.stat_result, most: int = LARGEST) -> str:
    """What keeps a file from being read whole, as a sentence about "it"; empty if nothing does."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    return f"it is larger than {most / 1_000_000:g} MB" if found.st_size > most else ""


def whole(path: Path, most: int = LARGEST) -> bytes:
    """The bytes of a regular file.  Raises OSError, whose `strerror` says also that it is none, or has more than `most` bytes."""
    # A pipe without a writer would hold up who opens it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if wrong := unfit(os.fstat(handle), most):
            raise OSError(errno.EINVAL, wrong, str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)
