"""Type aliases for YAML data: leaf, tree of leaves, and path in a tree."""

from __future__ import annotations

import math
from typing import TypeAlias, TypeGuard

Leaf: TypeAlias = "str | int | float | bool | None"
Tree: TypeAlias = "Leaf | list[Tree] | dict[str, Tree]"
Where: TypeAlias = "tuple[str | int, ...]"


def is_finite(value: float) -> bool:
    """Return True if a number fits a finite float.  Integers above about 1.8e308 do not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value is a number, not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
