"""The types of values in a YAML document: a leaf, a tree of leaves, the path to one of them."""

from __future__ import annotations

import math
from typing import TypeAlias, TypeGuard

Leaf: TypeAlias = "str | int | float | bool | None"
Tree: TypeAlias = "Leaf | list[Tree] | dict[str, Tree]"
Where: TypeAlias = "tuple[str | int, ...]"


def is_finite(value: float) -> bool:
    """Whether a number is finite, also as a float: an integer of 309 digits and more is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number; a truth value is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
