"""Keep the source text of numbers: as text, `3.10` is not `3.1`, and `01234` not `1234`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .template import text_of
from .values import is_number

if TYPE_CHECKING:
    from .document import Document
    from .recipe import Input
    from .values import Tree, Where

_T = TypeVar("_T")

_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(?:\.[0-9]*)?")
_TRAILING_ZERO = re.compile(r"[-+]?[0-9]*\.[0-9]*0")


class WrittenInt(int):
    """A whole number from a values file, with its source text."""

    written: str


class WrittenFloat(float):
    """A number with a point or exponent from a values file, with its source text."""

    written: str


def takes_text(spec: Input, kind: str) -> bool:
    """Return True if an input, or its items, are text."""
    if kind == "choice":
        choices = spec.limits.get("choices")
        return isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    return kind == "string"


def value_as_written(document: Document, spec: Input, value: Any, path: Where) -> Any:
    """Return the value at `path`, with original number spelling if the input is text."""
    kind = (spec.items or "") if isinstance(value, list) else spec.type
    if not takes_text(spec, kind):
        return value
    return as_written(document, value, path, every=True)


def as_written(document: Document, tree: Any, path: Where, *, every: bool = False) -> Any:
    """Return the tree at `path`, with source text for numbers that Python spells differently.

    `every`: for all numbers.
    """
    if isinstance(tree, dict):
        written = {}
        for key, item in tree.items():
            written[key] = as_written(document, item, (*path, key), every=every)
        return written
    if isinstance(tree, list):
        return [as_written(document, item, (*path, n), every=every) for n, item in enumerate(tree)]
    if every and is_number(tree):
        return document.source_text(path)
    return _other_text(document, tree, path) or tree


def keep_spelling(document: Document, tree: Any, path: Where) -> Any:
    """Return the tree at `path`, with numbers that remember their source text, also in lists."""
    if isinstance(tree, list):
        return [keep_spelling(document, item, (*path, n)) for n, item in enumerate(tree)]
    if not is_number(tree):
        return tree
    number = WrittenInt(tree) if isinstance(tree, int) else WrittenFloat(tree)
    number.written = document.source_text(path)
    return number


def written_of(value: object) -> str | None:
    """Return the source text of a number from a values file, or None for other values."""
    return value.written if isinstance(value, (WrittenInt, WrittenFloat)) else None


def plain_number(value: _T) -> _T | int | float:
    """Convert a number with source text to a plain number. Other values stay unchanged."""
    if isinstance(value, WrittenInt):
        return int(value)
    return float(value) if isinstance(value, WrittenFloat) else value


class Misread(NamedTuple):
    """An unquoted YAML number that may be meant as text, such as a version."""

    where: Where
    written: str
    read: str  # the text of its value


def misread_numbers(document: Document, tree: Tree, path: Where) -> Iterator[Misread]:
    """Yield numbers in the tree at `path` whose spelling would change if they were text.

    `1e-3` does not count: it is only another form of 0.001.
    """
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from misread_numbers(document, item, (*path, key))
    elif isinstance(tree, list):
        for n, item in enumerate(tree):
            yield from misread_numbers(document, item, (*path, n))
    else:
        written = _other_text(document, tree, path)
        if _LEADING_ZERO.fullmatch(written) or _TRAILING_ZERO.fullmatch(written):
            yield Misread(path, written, text_of(tree))


def _other_text(document: Document, leaf: object, path: Where) -> str:
    """Return the source text of a number if Python spells the number differently, else ""."""
    if not is_number(leaf):
        return ""
    written = document.source_text(path)
    return "" if written == text_of(leaf) else written
