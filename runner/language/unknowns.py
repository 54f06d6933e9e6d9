"""Unknown values, each with its possible types.

Templates are evaluated with them before a run. An operation on an unknown value is unknown, and
fails only if it fails for every possible value. A list or mapping is known if the number of its
items is, even with unknown items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

NULL = "null"
BOOLEAN = "boolean"
INTEGER = "integer"
FRACTION = "fraction"
TEXT = "text"
LIST = "list"
MAPPING = "mapping"
NUMBERS: Final = frozenset({INTEGER, FRACTION})
_TEXTLESS: Final = frozenset({NULL, LIST, MAPPING})
_WORDS: Final = {
    LIST: "a list",
    MAPPING: "a mapping",
    TEXT: "text",
    INTEGER: "a number",
    FRACTION: "a number",
    BOOLEAN: "a boolean",
    NULL: "null",
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that has one of these types.

    `items` stands for every part of a list or mapping; None if nothing is known about the parts.
    """

    kinds: frozenset[str]
    items: Unknown | None = None
    part: bool = False  # a part of another unknown value; may be absent

    @property
    def without_null(self) -> Unknown:
        """The same value, without the possibility of null."""
        return replace(self, kinds=self.kinds - {NULL}, part=False)

    @property
    def may_be_null(self) -> bool:
        """Whether the value may be null or absent."""
        return NULL in self.kinds or self.part

    @property
    def textless(self) -> bool:
        """Whether no possible value has a text."""
        return self.kinds <= _TEXTLESS

    @property
    def word(self) -> str:
        """Names of the types that the value may have, as text for messages."""
        words = [word for kind, word in _WORDS.items() if kind in self.kinds]
        # Both kinds of numbers have the same word.
        return " or ".join(dict.fromkeys(words))


def unknown(*kinds: str, items: Unknown | None = None) -> Unknown:
    """Return an unknown value of one of these types."""
    return Unknown(frozenset(kinds), items)


ANYTHING: Final = unknown(NULL, BOOLEAN, INTEGER, FRACTION, TEXT, LIST, MAPPING)
GIVEN: Final = ANYTHING.without_null
A_TEXT: Final = unknown(TEXT)
A_BOOLEAN: Final = unknown(BOOLEAN)
AN_INTEGER: Final = unknown(INTEGER)
TEXTS: Final = unknown(LIST, items=A_TEXT)
"""A list of texts, such as the outputs of a step's instances."""


def of_input(type: str, items: str | None = None, *, required: bool = True) -> Unknown:
    """Return the unknown value of an input of this type; optional inputs may be null."""
    item = of_input(items) if items else None
    found = {
        "integer": AN_INTEGER,
        "number": Unknown(NUMBERS),
        "boolean": A_BOOLEAN,
        "choice": unknown(TEXT, INTEGER, FRACTION, BOOLEAN),
        "list": unknown(LIST, items=item),
        "object": unknown(MAPPING),
    }.get(type, A_TEXT)
    return found if required else replace(found, kinds=found.kinds | {NULL})


def kinds_of(value: object) -> frozenset[str]:
    """Return the possible types of a value."""
    if isinstance(value, Unknown):
        return value.kinds
    if value is None:
        return frozenset({NULL})
    if isinstance(value, bool):
        return frozenset({BOOLEAN})
    if isinstance(value, int):
        return frozenset({INTEGER})
    if isinstance(value, float):
        return frozenset({FRACTION})
    if isinstance(value, str):
        return frozenset({TEXT})
    if isinstance(value, Mapping):
        return frozenset({MAPPING})
    return frozenset({LIST})


def holds_unknown(value: object) -> bool:
    """Return whether a value, or any part of it, is unknown."""
    if isinstance(value, Unknown):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_unknown, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_unknown, value))


def one_of(values: Iterable[object]) -> object:
    """Return the common value of several candidates.

    Equal candidates give their value; different ones give an unknown value with all their types.
    """
    candidates = list(values)
    if not candidates:
        return ANYTHING
    first = candidates[0]
    if all(_is_same(each, first) for each in candidates):
        return first
    kinds = frozenset[str]().union(*map(kinds_of, candidates))
    holders = [each for each in candidates if kinds_of(each) & {LIST, MAPPING}]
    part = any(isinstance(each, Unknown) and each.part for each in candidates)
    return Unknown(kinds, _items_of(holders), part)


def _is_same(value: object, other: object) -> bool:
    """Return True if two values are equal and have the same type, unlike 1 and true."""
    return type(value) is type(other) and value == other


def item_of(holder: object) -> Unknown:
    """Return an unknown part of a list or mapping, which may be absent."""
    return replace(_items_of([holder]) or ANYTHING, part=True)


def truth_of(value: object) -> bool | None:
    """Return whether a value counts as true; None if this is unknown."""
    if isinstance(value, Unknown):
        return False if value.kinds == {NULL} else None
    return bool(value)


def _items_of(holders: Iterable[object]) -> Unknown | None:
    """Return the common value of all items of these lists and mappings; None if unknown."""
    found: list[object] = []
    for holder in holders:
        if isinstance(holder, Unknown):
            if holder.items is None:
                return None
            found.append(holder.items)
        elif isinstance(holder, Mapping):
            found += holder.values()
        elif isinstance(holder, (list, tuple)):
            found += holder
    if not found:
        return None
    common = one_of(found)
    return common if isinstance(common, Unknown) else Unknown(kinds_of(common))
