"""Plain scalars of the YAML 1.2 core schema, and forbidden characters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .values import is_finite

if TYPE_CHECKING:
    from .values import Leaf

MAX_DIGITS = 400

# NEL, LS and PS break lines for YAML 1.1 parsers and not for YAML 1.2 or an editor: no two readers
# would agree on a line number.
REFUSED_CHARACTERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]"
)

_WORDS: dict[str, Leaf] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# Most strings are told from words and numbers by one look at their first character.
FIRST_OF_NO_STRING = frozenset(["", *"~nNtTfF+-.0123456789"])
_FIRST_OF_NUMBER = frozenset("+-.0123456789")
_LAST_OF_NUMBER = frozenset(".0123456789abcdefABCDEFnN")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def plain_value(text: str) -> Leaf:
    """Return the value of a plain scalar.

    Raises ValueError for a number that is not finite or has more than MAX_DIGITS digits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _FIRST_OF_NUMBER or text[-1] not in _LAST_OF_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(text)
    return text


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(text)
    if text.startswith("0o"):
        number = int(text[2:], 8)
    elif text.startswith("0x"):
        number = int(text[2:], 16)
    else:
        number = int(text)
    if not is_finite(number):
        raise ValueError(text)
    return number


def _float(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise ValueError(text)
    number = float(text)
    if not is_finite(number):
        raise ValueError(text)
    return number
