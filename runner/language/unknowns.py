"""Values that are not known yet, each by the types that it may have.

Templates are evaluated with them before a run: an operation on an unknown value is unknown, and fails only where it would fail for every value of its
types.  A list or mapping is known where its items are counted, even if some of the items are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

NULL, BOOLEAN, INTEGER, FRACTION, TEXT, LIST, MAPPING = (
    "null",
    "boolean",
    "integer",
    "fraction",
    "text",
    "list",
    "mapping",
)
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
    """A value that has one of these types.  `items` is each part of a list or mapping; None where nothing is known of them."""

    kinds: frozenset[str]
    items: Unknown | None = None
    part: bool = False  # of another unknown value: it may not be there at all

    @property
    def given(self) -> Unknown:
        """The same, where it is not null."""
        return replace(self, kinds=self.kinds - {NULL}, part=False)

    @property
    def may_be_null(self) -> bool:
        return NULL in self.kinds or self.part

    @property
    def textless(self) -> bool:
        """Whether no value of its types has a text."""
        return self.kinds <= _TEXTLESS

    @property
    def word(self) -> str:
        """What it is, in a sentence."""
        return " or ".join(dict.fromkeys(_WORDS[kind] for kind in _WORDS if kind in self.kinds))


def unknown(*kinds: str, items: Unknown | None = None) -> Unknown:
    return Unknown(frozenset(kinds), items)


ANYTHING: Final = unknown(NULL, BOOLEAN, INTEGER, FRACTION, TEXT, LIST, MAPPING)
GIVEN: Final = ANYTHING.given
A_TEXT: Final = unknown(TEXT)
A_BOOLEAN: Final = unknown(BOOLEAN)
AN_INTEGER: Final = unknown(INTEGER)
TEXTS: Final = unknown(LIST, items=A_TEXT)
"""A list of texts, such as the outputs of a step's instances."""


def of_input(type: str, items: str | None = None, *, required: bool = True) -> Unknown:
    """A value of an input of this type."""
    found = {
        "integer": AN_INTEGER,
        "number": Unknown(NUMBERS),
        "boolean": A_BOOLEAN,
        "choice": unknown(TEXT, INTEGER, FRACTION, BOOLEAN),
        "list": unknown(LIST, items=of_input(items) if items else None),
        "object": unknown(MAPPING),
    }.get(type, A_TEXT)
    return found if required else replace(found, kinds=found.kinds | {NULL})


def kinds_of(value: object) -> frozenset[str]:
    """The types that a value may have."""
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
    return frozenset({MAPPING if isinstance(value, Mapping) else LIST})


def holds_unknown(value: object) -> bool:
    """Whether a value, or any part of it, is unknown."""
    if isinstance(value, Unknown):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_unknown, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_unknown, value))


def one_of(values: Iterable[object]) -> object:
    """The value that is one of these: itself where they are the same, else what is common to them."""
    every = list(values)
    if not every:
        return ANYTHING
    first = every[0]
    if all(type(each) is type(first) and each == first for each in every):
        return first
    kinds = frozenset[str]().union(*map(kinds_of, every))
    holders = [each for each in every if kinds_of(each) & {LIST, MAPPING}]
    items = _items_of(holders) if holders else None
    return Unknown(kinds, items, any(isinstance(each, Unknown) and each.part for each in every))


def item_of(holder: object) -> Unknown:
    """Any part of a list or mapping; it may not be there."""
    return replace(_items_of([holder]) or ANYTHING, part=True)


def truth_of(value: object) -> bool | None:
    """Whether a value counts as true; None where that is not known."""
    if isinstance(value, Unknown):
        return False if value.kinds == {NULL} else None
    return bool(value)


def _items_of(holders: Iterable[object]) -> Unknown | None:
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
