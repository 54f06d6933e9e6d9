"""File name folding: detect file systems that ignore case or Unicode form."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path


def as_disk(root: Path) -> Callable[[str], str]:
    """Return a function that normalizes paths below `root`, so that equal files have equal paths."""
    return _fold_path if _ignores_case(root) else str


def _fold_path(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def _ignores_case(root: Path) -> bool:
    """Test case sensitivity with the swapped-case name of a directory entry or of the directory."""
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
