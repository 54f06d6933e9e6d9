"""Render leaves with `{{ expression }}`, and find the names that they read.

Independent of steps, inputs and files. A rendered value is never rendered again. A scope may
contain `Unknown` values: then an expression has the types that its result may have, and fails only
if it fails for every possible value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .template_chains import ABSENT, Reads, Reference, Scope, join_path
from .template_syntax import FILTERS, TESTS, Expression, find_expressions, parse_expression
from .template_values import (
    LONGEST_TEXT,
    UNKNOWN_TEXT,
    NoTextError,
    StatePath,
    TemplateError,
    text_of,
    too_long,
)
from .unknowns import A_TEXT, LIST, NULL, Unknown

if TYPE_CHECKING:
    from .values import Tree

__all__ = [
    "ABSENT",
    "FILTERS",
    "LONGEST_TEXT",
    "TESTS",
    "UNKNOWN_TEXT",
    "Expression",
    "Reads",
    "Reference",
    "Scope",
    "StatePath",
    "TemplateError",
    "args",
    "argv",
    "evaluate",
    "expressions",
    "has",
    "join_path",
    "program",
    "references",
    "render",
    "text_of",
]


def has(text: str) -> bool:
    """Return whether `text` contains a template."""
    return "{{" in text


@lru_cache(maxsize=1 << 16)
def expressions(text: str) -> tuple[Expression, ...]:
    """Return the expressions of a leaf, in order.  Raises TemplateError for the first error."""
    return tuple(parse_expression(text, start, end) for start, end in find_expressions(text))


@lru_cache(maxsize=1 << 16)
def references(text: str) -> tuple[Reference, ...]:
    """Return each name that a leaf may read.  Raises TemplateError.

    A computed subscript gives the path before it.
    """
    found: list[Reference] = []
    for expression in expressions(text):
        found += expression.references
    return tuple(found)


def evaluate(text: str, scope: Scope, reads: Reads | None = None) -> object:
    """Return the value of a leaf: typed if the leaf is one expression, otherwise text.

    `reads` collects every name that was read, with its value. Raises TemplateError.
    """
    if not has(text):
        return text
    found = expressions(text)
    if len(found) == 1 and found[0].length == len(text):
        return found[0].value(scope, reads)
    parts: list[str] = []
    size = end = 0
    has_unknown = False
    for expression in found:
        value = expression.value(scope, reads)
        has_unknown = has_unknown or isinstance(value, Unknown)
        before, word = text[end : expression.offset], expression.text(value)
        parts += (before, word)
        size += len(before) + len(word)
        if size > LONGEST_TEXT:
            raise too_long(expression.offset, expression.length)
        end = expression.offset + expression.length
    parts.append(text[end:])
    return A_TEXT if has_unknown else "".join(parts)


def render(tree: Tree, scope: Scope, reads: Reads | None = None) -> Tree:
    """Return `tree` with its leaves evaluated and their types kept.  Raises TemplateError."""
    if isinstance(tree, str):
        return evaluate(tree, scope, reads)  # type: ignore[return-value]  # the scope holds trees
    if isinstance(tree, Mapping):
        return {key: render(item, scope, reads) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [render(item, scope, reads) for item in tree]
    return tree


# -- arguments of commands --


def argv(items: Sequence[Tree], scope: Scope, reads: Reads | None = None) -> list[str]:
    """Return the arguments of a command.  Raises TemplateError.

    A value becomes one argument, null none, a list several. A list within the command is left out
    entirely if one of its leaves is null.
    """
    words: list[str] = []
    for item in items:
        words += _words(item, scope, reads) or ()
    return words


def program(item: Tree, scope: Scope) -> str:
    """Return the program that a command names.  Raises TemplateError for null."""
    value = evaluate(item, scope) if isinstance(item, str) else item
    if value is None:
        length = len(item) if isinstance(item, str) else 1
        raise TemplateError("the program is null", 0, length, "name it, or add `| default(…)`")
    return _argument(value, item)


def _words(item: Tree, scope: Scope, reads: Reads | None) -> list[str] | None:
    """Return the arguments for one item of a command; None for null."""
    if isinstance(item, (list, tuple)):
        return _words_of_list(item, scope, reads)
    value = evaluate(item, scope, reads) if isinstance(item, str) else item
    if isinstance(value, Unknown):
        value = _example_of(value)
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_argument(each, item) for each in value]
    return [_argument(value, item)]


def _words_of_list(items: Sequence[Tree], scope: Scope, reads: Reads | None) -> list[str] | None:
    """Return the arguments for a list; None if a leaf is null.

    A nested list is left out on its own.
    """
    words: list[str] = []
    has_null = False
    for item in items:
        found = _words(item, scope, reads)
        if found is not None:
            words += found
        elif not isinstance(item, (list, tuple)):
            has_null = True
    return None if has_null else words


def args(mapping: Mapping[str, Tree], scope: Scope, reads: Reads | None = None) -> list[str]:
    """Return `{k: v}` as `--k v`.  Raises TemplateError.

    True becomes `--k`, a list `--k a b`; false, null and an empty list are left out.
    """
    words: list[str] = []
    for key, item in mapping.items():
        value: object = render(item, scope, reads)
        if isinstance(value, Unknown):
            value = _example_of(value)
        words += _option(f"--{key}", value, item)
    return words


def _option(flag: str, value: object, leaf: Tree) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        if not value or None in value:
            return []
        return [flag, *(_argument(each, leaf) for each in value)]
    return [flag, _argument(value, leaf)]


def _example_of(value: Unknown) -> object:
    """Return an example of these types that a command accepts, or else one that it rejects."""
    if not value.textless:
        return UNKNOWN_TEXT
    if LIST in value.kinds:
        return [UNKNOWN_TEXT]
    return None if NULL in value.kinds else {}


def _argument(value: object, leaf: Tree) -> str:
    length = len(leaf) if isinstance(leaf, str) else 1
    try:
        text = text_of(value)
    except NoTextError as error:
        raise TemplateError(str(error), 0, length, error.fix) from None
    if "\0" in text:
        raise TemplateError("a NUL character cannot be in an argument", 0, length)
    return text
