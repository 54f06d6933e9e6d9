"""Whether the disk of a workspace takes names that differ in case or in Unicode form for one file."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path


def as_disk(root: Path) -> Callable[[str], str]:
    """Return what gives the same text for two paths that are one file below `root`."""
    return _folded if _ignores_case(root) else str


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def _ignores_case(root: Path) -> bool:
    """Look for an entry of the folder, or for the folder itself, by its name in other letters."""
    try:
        names = [*sorted(os.listdir(root))[:50], ""]
    except OSError:
        names = [""]
    for name in names:
        path = root / name if name else root
        other = path.with_name(path.name.swapcase())
        if other.name != path.name and os.path.exists(path):
            return os.path.exists(other) and os.path.samefile(path, other)
    return False
