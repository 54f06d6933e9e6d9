"""Operations of templates on values: arithmetic, comparison, filters.

The set is closed: no operation calls Python code of a value, and results have a size limit.
`offset` is the position of the operation in its leaf, for errors.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .template_values import (
    LONGEST_TEXT,
    TemplateError,
    check_size,
    describe_type,
    is_plain_number,
    sort_names,
    text_at,
    too_long,
)
from .unknowns import (
    A_TEXT,
    AN_INTEGER,
    BOOLEAN,
    FRACTION,
    INTEGER,
    LIST,
    MAPPING,
    NUMBERS,
    TEXT,
    Unknown,
    holds_unknown,
    kinds_of,
)

_ARITHMETIC: dict[str, Callable[[Any, Any], object]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_DIVISIONS = ("/", "//", "%")
_JOINABLE = frozenset({TEXT, LIST})
"""Types of which `+` joins two values."""


def _is_in(left: Any, right: Any) -> bool:
    return left in right


def _is_not_in(left: Any, right: Any) -> bool:
    return left not in right


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": _is_in,
    "notin": _is_not_in,
}

_MOST_NUMBERS = 100_000
"""Numbers that `range` may return: as many as a plan may have steps."""

_ORDERED_TYPES = (NUMBERS | {BOOLEAN}, frozenset({TEXT}), frozenset({LIST}))
"""Groups of types whose values have an order among each other."""


# -- arithmetic --


def calculate(sign: str, left: object, right: object, offset: int) -> object:
    """Evaluate an arithmetic operation on two numbers.  `+` also joins two texts or two lists.

    Raises TemplateError for other types, a division by zero, or a result that is too large.
    """
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return _calculate_unknown(sign, left, right, offset)
    apply = _ARITHMETIC[sign]
    if sign == "+" and _can_join(left, right):
        if len(left) + len(right) > LONGEST_TEXT:  # type: ignore[arg-type]
            raise too_long(offset, 1)
        return apply(left, right)
    if not is_plain_number(left) or not is_plain_number(right):
        raise _unsupported_types(sign, left, right, offset)
    try:
        return check_size(apply(left, right), offset)
    except ZeroDivisionError:
        raise TemplateError("division by zero", offset) from None
    except OverflowError:
        raise TemplateError("this number is too large", offset) from None


def _can_join(left: object, right: object) -> bool:
    """Return True if both values are text or both are lists, so that `+` joins them."""
    if isinstance(left, str):
        return isinstance(right, str)
    return isinstance(left, list) and isinstance(right, list)


def _calculate_unknown(sign: str, left: object, right: object, offset: int) -> Unknown:
    """Return the possible types of a result if at least one operand is unknown."""
    left_kinds, right_kinds = kinds_of(left), kinds_of(right)
    kinds = frozenset[str]()
    if left_kinds & NUMBERS and right_kinds & NUMBERS:
        if sign in _DIVISIONS and right == 0:
            raise TemplateError("division by zero", offset)
        kinds |= _number_kinds(sign, left_kinds, right_kinds)
    if sign == "+":
        kinds |= _JOINABLE & left_kinds & right_kinds
    if not kinds:
        raise _unsupported_types(sign, left, right, offset)
    return Unknown(kinds)


def _number_kinds(sign: str, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    """Return the possible types of a result whose operands may be numbers."""
    if sign == "/":
        return frozenset({FRACTION})
    integers = {INTEGER} & left & right
    fractions = {FRACTION} & (left | right)
    return frozenset(integers | fractions)


def _unsupported_types(sign: str, left: object, right: object, offset: int) -> TemplateError:
    message = f"`{sign}` does not work on {describe_type(left)} and {describe_type(right)}"
    return TemplateError(message, offset, 1, "join text with `~`")


def apply_sign(sign: str, value: object, offset: int) -> object:
    """Evaluate `-value` or `+value` for a number.  Raises TemplateError for another type."""
    if isinstance(value, Unknown) and value.kinds & NUMBERS:
        return Unknown(value.kinds & NUMBERS)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TemplateError(f"{describe_type(value)} cannot have a sign", offset)
    return -value if sign == "-" else +value


# -- comparison --


def compare(name: str, left: object, right: object, offset: int) -> bool | None:
    """Evaluate a comparison.  None if a value is unknown.  Raises TemplateError.

    `name` is jinja2's name: `eq`, `lteq`, `notin`.
    """
    if holds_unknown(left) or holds_unknown(right):
        if not _are_comparable(name, kinds_of(left), kinds_of(right)):
            raise _incomparable(left, right, offset)
        return None
    try:
        return bool(_COMPARE[name](left, right))
    except TypeError:
        raise _incomparable(left, right, offset) from None


def _are_comparable(name: str, left: frozenset[str], right: frozenset[str]) -> bool:
    """Return True if some values of these types can be compared."""
    if name in ("eq", "ne"):
        return True
    if name in ("in", "notin"):
        if right & {LIST, MAPPING}:
            return True
        return TEXT in right and TEXT in left
    return any(left & kinds and right & kinds for kinds in _ORDERED_TYPES)


def _incomparable(left: object, right: object, offset: int) -> TemplateError:
    message = f"{describe_type(left)} and {describe_type(right)} cannot be compared like this"
    return TemplateError(message, offset)


# -- filters --


def join(value: object, separator: object, offset: int) -> object:
    """Return the items of a list as one text.  Raises TemplateError."""
    if isinstance(value, Unknown) and LIST in value.kinds:
        text_at(separator, offset)
        return A_TEXT
    if not isinstance(value, (list, tuple)):
        raise TemplateError(f"`join` works on a list, not on {describe_type(value)}", offset, 4)
    texts = [text_at(each, offset) for each in value]
    between = text_at(separator, offset)
    if sum(map(len, texts)) + len(between) * len(texts) > LONGEST_TEXT:
        raise too_long(offset, 4)
    if isinstance(separator, Unknown) or holds_unknown(value):
        return A_TEXT
    return between.join(texts)


def to_json(value: object, offset: int) -> object:
    """Return a value as JSON text with sorted keys.  Raises TemplateError."""
    if holds_unknown(value):
        return A_TEXT
    # Check the size first: an expression can repeat a long text a thousand times.
    if _budget_after(value, LONGEST_TEXT) < 0:
        raise too_long(offset, 6)
    try:
        text = json.dumps(sort_names(value), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise TemplateError(
            "the value contains NaN or an infinite number, which JSON cannot represent", offset, 6
        ) from None
    if len(text) > LONGEST_TEXT:
        raise too_long(offset, 6)
    return text


def length(value: object, offset: int) -> object:
    """Return the number of items of a list or mapping, or of characters.  Raises TemplateError."""
    if isinstance(value, (str, list, tuple, Mapping)):
        return len(value)
    if kinds_of(value) & {TEXT, LIST, MAPPING}:
        return AN_INTEGER
    message = f"`length` works on a list, mapping or text, not on {describe_type(value)}"
    raise TemplateError(message, offset, 6)


def numbers_below(value: object, offset: int) -> object:
    """Return the whole numbers from 0 up to, but not including, a count.  Raises TemplateError."""
    if isinstance(value, Unknown) and INTEGER in value.kinds:
        return Unknown(frozenset({LIST}), AN_INTEGER)
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"`range` works on a whole number, not on {describe_type(value)}"
        raise TemplateError(message, offset, 5)
    if not 0 <= value <= _MOST_NUMBERS:
        message = f"`range` works on a number from 0 to {_MOST_NUMBERS:,}, not on {value}"
        raise TemplateError(message, offset, 5)
    return list(range(value))


def _budget_after(value: object, budget: int) -> int:
    """Return the remaining characters of a budget after a value; negative if exceeded."""
    if isinstance(value, str):
        return budget - len(value) - 2
    if isinstance(value, Mapping):
        for key, item in value.items():
            budget = _budget_after(item, budget - len(key) - 4)
            if budget < 0:
                break
    elif isinstance(value, (list, tuple)):
        for item in value:
            budget = _budget_after(item, budget - 2)
            if budget < 0:
                break
    return budget - 2


def apply_path_filter(name: str, value: object, offset: int) -> object:
    """Return the `name`, `stem`, `suffix` or `parent` of a path.  Raises TemplateError."""
    if isinstance(value, Unknown) and TEXT in value.kinds:
        return A_TEXT
    if not isinstance(value, str):
        message = f"`{name}` works on a path, not on {describe_type(value)}"
        raise TemplateError(message, offset, len(name))
    return _PATH_FILTERS[name](value)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _stem(path: str) -> str:
    return _split_suffix(path)[0]


def _suffix(path: str) -> str:
    return _split_suffix(path)[1]


def _split_suffix(path: str) -> tuple[str, str]:
    """Split a file name before its last suffix.  `.bashrc` has no suffix."""
    name = _name(path)
    dot = name.rfind(".")
    return (name[:dot], name[dot:]) if 0 < dot < len(name) - 1 else (name, "")


def _parent(path: str) -> str:
    head, slash, _ = path.rstrip("/").rpartition("/")
    head = head.rstrip("/")
    if head:
        return head
    is_absolute = slash or path.startswith("/")
    return "/" if is_absolute else "."


_PATH_FILTERS: dict[str, Callable[[str], str]] = {
    "name": _name,
    "stem": _stem,
    "suffix": _suffix,
    "parent": _parent,
}
