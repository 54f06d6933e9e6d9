"""What a YAML document holds, as types: a leaf, a tree of leaves, and the path to one of them."""

from __future__ import annotations

from typing import TypeAlias

Leaf: TypeAlias = "str | int | float | bool | None"
Tree: TypeAlias = "Leaf | list[Tree] | dict[str, Tree]"
Where: TypeAlias = "tuple[str | int, ...]"
