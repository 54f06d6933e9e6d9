"""Facts for preflight rules, with one module per subject.

Knows no rule; unknown facts are left out. `program` covers the step's command, `packages` its
installed packages, `missing_inputs`, `model` and `data` its inputs, `machine` its hardware.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

GB: Final = 1e9
LARGE: Final = 1 << 20  # size limit of programs and configurations, in bytes


def contents(path: Path, most: int = 64 * LARGE) -> bytes | None:
    """Return a file's bytes, or None if it is missing, unreadable or at least `most` bytes large."""
    try:
        if not path.is_file() or path.stat().st_size >= most:
            return None
        return path.read_bytes()
    except OSError:
        return None
