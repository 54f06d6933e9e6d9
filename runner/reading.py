"""Bounded reads of regular files. A user's path may be a pipe, a device, or a terabyte."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from .agent.regular import NOT_REGULAR, open_regular

LARGEST: Final = 24_000_000
"""Maximum bytes of a file to read at once."""


def why_unreadable(found: os.stat_result, most: int = LARGEST) -> str:
    """Return the reason why a file must not be read at once, as a sentence about "it"; empty if it
    may.
    """
    if not stat.S_ISREG(found.st_mode):
        return NOT_REGULAR
    return f"it is larger than {most / 1_000_000:g} MB" if found.st_size > most else ""


def whole(path: Path, most: int = LARGEST) -> bytes:
    """Read a whole regular file of bounded size.

    Raises OSError, also for other file types and for more than `most` bytes.
    """
    with open_regular(path) as file:
        wrong = why_unreadable(os.fstat(file.fileno()), most)
        if wrong:
            raise OSError(errno.EINVAL, wrong, str(path))
        return file.read(most)


def parse_json(data: str | bytes) -> Any:
    """Parse a JSON text. Raises ValueError, also for excessive nesting."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
