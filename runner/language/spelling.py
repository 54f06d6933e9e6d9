"""Numbers as their author wrote them: where text is wanted, `3.10` is no 3.1, and `01234` no 1234."""

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
    """A whole number of a file of values, and how it is written there."""

    written: str


class WrittenFloat(float):
    """A number of a file of values with a point or an exponent, and how it is written there."""

    written: str


def takes_text(spec: Input, kind: str) -> bool:
    """Whether a value of this kind, the input's own or that of its items, is text."""
    if kind == "choice":
        choices = spec.limits.get("choices")
        return isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    return kind == "string"


def value_as_written(document: Document, spec: Input, value: Any, path: Where) -> Any:
    """A value of an input, which stands at `path`: where that takes text, as it is written."""
    kind = (spec.items or "") if isinstance(value, list) else spec.type
    return as_written(document, value, path, every=True) if takes_text(spec, kind) else value


def as_written(document: Document, tree: Any, path: Where, *, every: bool = False) -> Any:
    """`tree`, which stands at `path`, with text for each number in it whose own text is not what is written; `every`: for each number."""
    if isinstance(tree, dict):
        return {
            key: as_written(document, item, (*path, key), every=every) for key, item in tree.items()
        }
    if isinstance(tree, list):
        return [as_written(document, item, (*path, n), every=every) for n, item in enumerate(tree)]
    if every and is_number(tree):
        return document.written(path)
    return _other_text(document, tree, path) or tree


def remembering(document: Document, tree: Any, path: Where) -> Any:
    """`tree`, which stands at `path`, with numbers, in lists too, that know how they are written."""
    if isinstance(tree, list):
        return [remembering(document, item, (*path, n)) for n, item in enumerate(tree)]
    if not is_number(tree):
        return tree
    number = WrittenInt(tree) if isinstance(tree, int) else WrittenFloat(tree)
    number.written = document.written(path)
    return number


def written_of(value: object) -> str | None:
    """How a number of a file of values is written; None for everything else."""
    return value.written if isinstance(value, (WrittenInt, WrittenFloat)) else None


def plain_number(value: _T) -> _T | int | float:
    """The value, a number without how it is written."""
    if isinstance(value, WrittenInt):
        return int(value)
    return float(value) if isinstance(value, WrittenFloat) else value


class Misread(NamedTuple):
    """A number that may be meant as text: a version, a code."""

    where: Where
    written: str
    read: str  # its own text


def misread_numbers(document: Document, tree: Tree, path: Where) -> Iterator[Misread]:
    """The numbers in `tree`, which stands at `path`, that mean something else as text; `1e-3` is but another form."""
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
    """How a number is written; empty where its own text says it, and for what is no number."""
    if not is_number(leaf):
        return ""
    written = document.written(path)
    return "" if written == text_of(leaf) else written
