"""Files as a disk has them: their SHA-256, and folders that appear at once, whole.  Does not know what is in them."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path


def sha256(file: Path) -> str:
    """In hexadecimal digits.  A file of any size is read in parts."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def appear(unfinished: Path, final: Path) -> None:
    """Give a folder its name, once all of it is on the disk, in place of what has that name.  A kill leaves the one or the other, or none."""
    for path in (*unfinished.rglob("*"), unfinished):
        _sync(path)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        # Moved away whole: a kill must not leave half of it under its name.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    unfinished.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
