"""The programs of recipes/trainers as modules, importable as they import each other.  What one test has imported no other sees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRAINERS = Path(__file__).resolve().parents[2] / "recipes" / "trainers"


@contextmanager
def siblings() -> Iterator[None]:
    _forget()
    sys.path.insert(0, str(TRAINERS))
    try:
        yield
    finally:
        sys.path.remove(str(TRAINERS))
        _forget()


def _forget() -> None:
    for name in [
        name
        for name, found in sys.modules.items()
        if (getattr(found, "__file__", None) or "").startswith(str(TRAINERS))
    ]:
        del sys.modules[name]
