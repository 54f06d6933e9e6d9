"""Values of templates: their texts, type names and errors.

Independent of expressions and of the source of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from runner.errors import RecipeError

from .unknowns import LIST, MAPPING, NULL, Unknown

LONGEST_TEXT = 1_000_000  # characters
_WIDEST_INTEGER = 128  # bits
UNKNOWN_TEXT = "…"
"""Placeholder for the text of an unknown value, used where nothing depends on the text."""


class TemplateError(RecipeError):
    """An invalid template, or one without a value.

    `offset` and `length` count characters inside the leaf.
    """

    exit_code = 3

    def __init__(self, message: str, offset: int = 0, length: int = 1, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.offset = offset
        self.length = length


class NoTextError(TemplateError):
    """Error for a value that has no text form, such as null or a list."""


class StatePath(str):
    """A path with named parts: `{{ state.x }}` is its text, `{{ state.x.latest }}` a part."""

    parts: Mapping[str, object]

    def __new__(cls, path: str, parts: Mapping[str, object]) -> StatePath:
        made = super().__new__(cls, path)
        made.parts = parts
        return made


def text_of(value: object) -> str:
    """Return the text of a typed value, which is unique.  Raises TemplateError.

    Numbers are Python's shortest round-trip decimals: `4`, `2.0`, `0.0001`, `1e-05`.
    """
    if isinstance(value, str):
        return value
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NoTextError(f"{value} is not a number that can be written")
        return float.__repr__(value)
    if isinstance(value, Unknown):
        return _text_of_unknown(value)
    if value is None:
        raise NoTextError(
            "null cannot be inserted into text",
            fix="use the template as the whole value, or add `| default(…)`",
        )
    if isinstance(value, Mapping):
        raise NoTextError(
            "a mapping cannot be inserted into text", fix="use one of its values, or add `| tojson`"
        )
    if isinstance(value, (list, tuple)):
        raise NoTextError(
            "a list cannot be inserted into text",
            fix="use the template as the whole value, or add `| join(' ')`",
        )
    raise TypeError(f"BUG: {type(value).__name__} is not a value of the recipe language")


def _text_of_unknown(value: Unknown) -> str:
    """Return a placeholder, or raise the error of the first type without a text."""
    if not value.textless:
        return UNKNOWN_TEXT
    examples: dict[str, object] = {LIST: [], MAPPING: {}, NULL: None}
    first = next(example for kind, example in examples.items() if kind in value.kinds)
    return text_of(first)


def text_at(value: object, offset: int, length: int = 1) -> str:
    """Return the text of a value.  Raises TemplateError at `offset` of the leaf."""
    try:
        return text_of(value)
    except NoTextError as error:
        raise TemplateError(str(error), offset, length, error.fix) from None


def describe_type(value: object) -> str:
    """Return a value's type for messages: `a number`, `text or null`."""
    if isinstance(value, Unknown):
        return value.word
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a mapping" if isinstance(value, Mapping) else "a list"


def is_plain_number(value: object) -> bool:
    """Return whether a value is an int or a float, not a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_size(value: object, offset: int) -> object:
    """Return a value.  Raises TemplateError for a number that is too large."""
    if isinstance(value, int) and value.bit_length() > _WIDEST_INTEGER:
        raise TemplateError("this number is too large", offset)
    if isinstance(value, float) and not math.isfinite(value):
        raise TemplateError("this number is too large", offset)
    return value


def sort_names(value: object) -> object:
    """Return a mapping sorted by name; other values are unchanged.

    The cache key ignores the order of names, so rendered text must not depend on it.
    """
    if isinstance(value, Mapping):
        return {key: sort_names(value[key]) for key in sorted(value)}
    return value


def too_long(offset: int, length: int) -> TemplateError:
    """Return the error for a text longer than LONGEST_TEXT."""
    return TemplateError(
        f"this text is longer than {LONGEST_TEXT:,} characters",
        offset,
        length,
        "pass the text in a file: `files: {list.json: …}`",
    )
