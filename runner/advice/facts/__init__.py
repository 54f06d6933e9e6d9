"""What preflight rules ask about, a module for each thing that is looked at.  No rule is known here; what is unknown is left out.

`program` is what a step starts, `packages` what it will find installed, `needs`, `model` and `data` what it is given, `machine` what it runs on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

GB: Final = 1e9
LARGE: Final = 1 << 20  # bytes of a program or a configuration that is read


def contents(path: Path, most: int = 64 * LARGE) -> bytes | None:
    """What is in a file; None where it is not there, cannot be read, or is larger than `most` bytes."""
    try:
        return path.read_bytes() if path.is_file() and path.stat().st_size < most else None
    except OSError:
        return None
