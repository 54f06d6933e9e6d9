"""Read a file whole, if it is one and not without bound: what a person names may be a pipe, a device, or a terabyte."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from .agent.regular import NOT_REGULAR, open_regular

LARGEST: Final = 24_000_000
"""Bytes of the largest file that is read whole."""


def unfit(found: os.stat_result, most: int = LARGEST) -> str:
    """What keeps a file from being read whole, as a sentence about "it"; empty if nothing does."""
    if not stat.S_ISREG(found.st_mode):
        return NOT_REGULAR
    return f"it is larger than {most / 1_000_000:g} MB" if found.st_size > most else ""


def whole(path: Path, most: int = LARGEST) -> bytes:
    """The bytes of a regular file.  Raises OSError, whose `strerror` says also that it is none, or has more than `most` bytes."""
    with open_regular(path) as file:
        if wrong := unfit(os.fstat(file.fileno()), most):
            raise OSError(errno.EINVAL, wrong, str(path))
        return file.read(most)


def parse_json(data: str | bytes) -> Any:
    """Return what JSON text holds.  Raises ValueError, also for one that is nested without end."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
