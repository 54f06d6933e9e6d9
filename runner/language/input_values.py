"""Convert values to the types of inputs, and check the inputs' limits.

Text is converted as on a command line; Python values keep their types. Equal whole numbers have one
value, however they are written (`1000`, `1e3`, `1000.0`), so that text and cache key depend only on
the value.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from runner.errors import did_you_mean

from . import addresses
from .addresses import AddressType
from .bad_values import BadValue, join_or, show, text_of
from .recipe import Input, InputType
from .spelling import plain_number, takes_text, written_of
from .units import count_text
from .values import Tree, is_finite, is_number

_INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,60})?|\.[0-9]{1,60})(?:[eE][-+]?[0-9]{1,4})?"
)
_FIRST_INEXACT = 2**53
"""Whole floats from here on are not one number each."""
_PATTERN_SECONDS = 0.25
"""Time for comparing one text with a `pattern`: a recipe's expression must not be able to hang."""

_NOUNS: dict[str, str] = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "list": "a list",
    "object": "a mapping",
    **addresses.NOUNS,
}


def convert(spec: Input, value: object) -> Tree:
    """Return `value` converted to the input's type and within its limits.  Raises BadValue."""
    if _is_null(spec, value):
        _check_null(spec)
        return None
    result = _convert(spec.type, spec, value)
    if not isinstance(result, list):
        _check_limits(spec, result)
        return result
    for item in result:
        _check_limits(spec, item)
    _check_list_limits(spec, result)
    return result


def _is_null(spec: Input, value: object) -> bool:
    """Return True if a value is null. The text `null` counts, except for text inputs."""
    if value == "null":
        return spec.type not in ("string", "choice")
    return value is None


def _check_null(spec: Input) -> None:
    is_null_by_default = spec.has_default and spec.default is None
    if spec.required and not is_null_by_default:
        raise BadValue(
            "missing-input",
            "must have a value, not null",
            "to allow null, set `required: false` in the recipe",
        )


# -- types --


def _convert(kind: InputType, spec: Input, value: object) -> Tree:
    """Convert a value to an input type, or to the item type of a list."""
    if takes_text(spec, kind):
        value = written_of(value) or value
    match kind:
        case "string":
            return _convert_string(value)
        case "integer":
            return _convert_integer(value)
        case "number":
            return _convert_number(value)
        case "boolean":
            return _convert_boolean(value)
        case "choice":
            return _find_choice(spec, value)
        case "list":
            return _convert_list(spec, value)
        case "object":
            return as_mapping(value)
        case "file" | "dataset" | "model":
            return _convert_address(kind, spec, value)
    raise _wrong_type(kind, value)


def _wrong_type(kind: str, value: object, fix: str = "") -> BadValue:
    return BadValue("wrong-type", f"must be {_NOUNS[kind]}, not {show(value)}", fix)


def _convert_string(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, dict)):
        fix = ""
    elif isinstance(value, float):
        # A number that JSON brought may have been written in other digits.
        fix = "write it as text, in quotes"
    else:
        fix = f'quote it: "{text_of(value)}"'
    raise _wrong_type("string", value, fix)


def _convert_integer(value: object) -> int:
    number = number_of(value)
    if isinstance(number, int):
        return number
    fix = "" if number is None else "use a whole number"
    raise _wrong_type("integer", value, fix)


def _convert_number(value: object) -> int | float:
    number = number_of(value)
    if number is None:
        raise _wrong_type("number", value)
    return number


def number_of(value: object) -> int | float | None:
    """Convert a number or its text to int (if whole) or float. None for anything else.

    An int beyond the range of float is no number.
    """
    if isinstance(value, str):
        if _INTEGER.fullmatch(value):
            return int(value)
        if not _NUMBER.fullmatch(value):
            return None
        value = float(value)
    if not is_number(value) or not is_finite(value):
        return None
    is_exact = value == int(value) and abs(value) < _FIRST_INEXACT
    return int(value) if is_exact else plain_number(value)


def _convert_boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise _wrong_type("boolean", value, "write true or false")


def _find_choice(spec: Input, value: object) -> Tree:
    """Return the choice equal to a value, or else the choice with the same text."""
    choices = spec.limits.get("choices")
    known = choices if isinstance(choices, list) else []
    value = plain_number(value)
    for choice in known:
        if type(choice) is type(value) and choice == value:
            return choice
    for choice in known:
        if isinstance(value, str) and _spells(value, choice):
            return choice
    raise _wrong_choice(known, value)


def _wrong_choice(choices: Sequence[Tree], value: object) -> BadValue:
    words = [text_of(choice) for choice in choices]
    fix = did_you_mean(value, words) if isinstance(value, str) else ""
    return BadValue("not-allowed", f"must be {join_or(words)}, not {show(value)}", fix)


def _spells(text: str, choice: Tree) -> bool:
    """Return True if a text spells a choice. Numbers may be spelled in any form."""
    if text_of(choice) == text:
        return True
    return is_number(choice) and number_of(text) == choice


def _convert_list(spec: Input, value: object) -> list[Tree]:
    if isinstance(value, str):
        value = _split_list(value)
    if not isinstance(value, (list, tuple)):
        raise _wrong_type("list", value, "write a,b,c or [a, b, c]")
    items: list[Tree] = []
    for number, item in enumerate(value, 1):
        try:
            if spec.items:
                items.append(_convert(spec.items, spec, item))
            else:
                items.append(plain_tree(item))
        except BadValue as wrong:
            message = f"{wrong.message} (item {number})"
            raise BadValue(wrong.code, message, wrong.fix) from None
    return items


def _split_list(text: str) -> object:
    """Split `a,b,c`, or parse a JSON list, to a list of items."""
    if text.lstrip().startswith("["):
        return _parse_json(text, "a list")
    if not text.strip():
        return []
    return [part.strip() for part in text.split(",")]


def as_mapping(value: object) -> Tree:
    """Convert a mapping or its JSON text to a mapping. Raises BadValue."""
    if isinstance(value, str):
        value = _parse_json(value, "a mapping")
    if not isinstance(value, Mapping):
        raise _wrong_type("object", value, 'write JSON, such as {"a": 1}')
    return plain_tree(value)


def _convert_address(kind: AddressType, spec: Input, value: object) -> str:
    if spec.member and isinstance(value, str):
        _, member = spec.split_member(value)
        if not member:
            message = "must be FILE.py:NAME, a Python file and a class or function in it"
            raise BadValue("wrong-type", f"{message}, not {show(value)}")
    return addresses.normalize(kind, value)


# -- parts of objects --


def set_parts(name: str, tree: Tree, parts: Iterable[tuple[Sequence[str], object]]) -> Tree:
    """Set values inside the mapping `tree` by their key paths, and return the mapping.

    Text is parsed as JSON if possible. `name` is the input's. Raises BadValue.
    """
    for keys, value in parts:
        *above, last = keys
        holder = tree
        for depth, key in enumerate(above):
            holder = _check_mapping(holder, name, keys[:depth]).setdefault(key, {})
        _check_mapping(holder, name, above)[last] = plain_tree(_parse_if_json(value))
    return tree


def _check_mapping(holder: Tree, name: str, keys: Sequence[str]) -> dict[str, Tree]:
    if isinstance(holder, dict):
        return holder
    message = f"has no parts below {'.'.join(keys)}, whose value is {show(holder)}"
    raise BadValue("wrong-type", message, f"set the whole value of {name}")


def _parse_if_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return _parse_json(value, "a value")
    except BadValue:
        return value


def _parse_json(text: str, noun: str) -> object:
    def refuse(word: str) -> object:
        raise ValueError(f"JSON has no number {word}")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadValue("wrong-type", f"must be {noun} in JSON: {error}") from None


def plain_tree(value: object) -> Tree:
    """Convert nested containers to plain lists and dicts.

    Raises BadValue for types that JSON lacks.
    """
    match value:
        case None | bool() | str():
            return value
        case int() | float() if is_finite(value):
            return plain_number(value)
        case list() | tuple():
            return [plain_tree(item) for item in value]
        case Mapping() if all(isinstance(key, str) for key in value):
            return {str(key): plain_tree(item) for key, item in value.items()}
    raise BadValue("wrong-type", f"has a part that JSON cannot store: {show(value)}")


# -- limits --


def _is_multiple(value: float, step: float) -> bool:
    """Return True if a number is a decimal multiple of `step`: 0.3 is 3 times 0.1."""
    return Fraction(repr(value)) % Fraction(repr(step)) == 0


_BOUNDS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("minimum", "at least", operator.ge),
    ("maximum", "at most", operator.le),
    ("exclusiveMinimum", "more than", operator.gt),
    ("exclusiveMaximum", "less than", operator.lt),
    ("multipleOf", "a multiple of", _is_multiple),
)
"""Keyword, the words for it, and the test that a value and the bound pass."""


def _check_limits(spec: Input, value: Tree) -> None:
    """Check one value, or one item of a list, against the limits of its input."""
    limits: Mapping[str, Any] = spec.limits
    if is_number(value):
        _check_bounds(limits, value)
    elif isinstance(value, str):
        _check_text(limits, value)


def _check_bounds(limits: Mapping[str, Any], value: float) -> None:
    for word, phrase, holds in _BOUNDS:
        if word in limits and not holds(value, limits[word]):
            message = f"must be {phrase} {text_of(limits[word])}, not {text_of(value)}"
            raise BadValue("out-of-range", message)


def _check_text(limits: Mapping[str, Any], value: str) -> None:
    _check_length(limits, "minLength", "maxLength", len(value), "character")
    if "pattern" in limits:
        _check_pattern(limits["pattern"], value)


def _check_length(limits: Mapping[str, Any], least: str, most: str, length: int, noun: str) -> None:
    if least in limits and length < limits[least]:
        message = f"must have at least {count_text(limits[least], noun)}, not {length}"
        raise BadValue("too-short", message)
    if most in limits and length > limits[most]:
        message = f"must have at most {count_text(limits[most], noun)}, not {length}"
        raise BadValue("too-long", message)


def _check_pattern(pattern: str, value: str) -> None:
    import regex

    try:
        found = regex.search(pattern, value, timeout=_PATTERN_SECONDS)
    except TimeoutError:
        message = f'took too long to compare with the pattern "{pattern}"'
        fix = "simplify the pattern in the recipe: it backtracks too much"
        raise BadValue("pattern-too-slow", message, fix) from None
    if not found:
        raise BadValue("not-allowed", f'must match the pattern "{pattern}", unlike {show(value)}')


def _check_list_limits(spec: Input, value: list[Tree]) -> None:
    limits = cast("Mapping[str, Any]", spec.limits)
    _check_length(limits, "minItems", "maxItems", len(value), "item")
    if limits.get("uniqueItems"):
        _check_unique(value)


def _check_unique(items: Sequence[Tree]) -> None:
    seen: set[str] = set()
    for item in items:
        text = json.dumps(item, sort_keys=True)
        if text in seen:
            raise BadValue("twice", f"lists {show(item)} twice", "remove the duplicate")
        seen.add(text)
