"""Chains in templates, such as `inputs.a['b'][0]`: parse, read and record them.

A chain follows mappings, lists and texts only. A dot is never a Python attribute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from runner.errors import did_you_mean

from .template_values import StatePath, TemplateError, describe_type, sort_names
from .unknowns import (
    A_TEXT,
    INTEGER,
    LIST,
    MAPPING,
    NULL,
    TEXT,
    Unknown,
    holds_unknown,
    item_of,
    kinds_of,
    one_of,
)

Scope: TypeAlias = Mapping[str, object]
Reads: TypeAlias = dict[str, object]

ABSENT = {"absent": True}
"""The entry in `reads` of a name that was asked for, guarded, and not there.

No value looks like it: mappings are recorded name by name.
"""

DOTTED_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*")


class MissingValueError(TemplateError):
    """A missing name.

    `path` is recorded as absent; None if the value before it was recorded instead.
    """

    def __init__(
        self, message: str, offset: int, length: int, fix: str, path: tuple[str, ...] | None
    ) -> None:
        super().__init__(message, offset, length, fix)
        self.path = path


class Reference(NamedTuple):
    """A dotted name that an expression reads.

    `names` has the offset and length of each part, to underline the wrong part.
    """

    path: tuple[str, ...]
    offset: int
    length: int
    names: tuple[tuple[int, int], ...]


class Evaluation(NamedTuple):
    """One evaluation: the values of names, and a record of the names read."""

    scope: Scope
    reads: Reads | None

    def record(self, path: tuple[str, ...], value: object) -> None:
        """Record the value at `path`; a mapping is recorded name by name."""
        if self.reads is None:
            return
        if isinstance(value, Mapping) and value:
            for key in value:
                self.record((*path, key), value[key])
        else:
            self.reads[join_path(path)] = {} if isinstance(value, Mapping) else value

    def record_absence(self, path: tuple[str, ...]) -> None:
        """Record that `path` was read but does not exist."""
        if self.reads is not None:
            self.reads[join_path(path)] = dict(ABSENT)


Deferred: TypeAlias = Callable[[Evaluation], object]
"""A part of an expression that has a value only in an evaluation."""


def join_path(path: Sequence[str]) -> str:
    """Return the unique text of a path; parts that are not names are quoted."""
    first, *rest = path
    return first + "".join(map(_dotted_part, rest))


def _dotted_part(part: str) -> str:
    is_name = DOTTED_NAME.fullmatch(part) and "." not in part
    return f".{part}" if is_name else f"[{json.dumps(part)}]"


class Slice(NamedTuple):
    """The bounds in brackets, such as `1:` or `:n`."""

    start: Deferred | None
    stop: Deferred | None
    step: Deferred | None

    def bounds(self, evaluation: Evaluation) -> Iterator[object]:
        """Yield start, stop and step, evaluated one by one; None for a missing bound."""
        for bound in (self.start, self.stop, self.step):
            if bound is None:
                yield None
            else:
                yield bound(evaluation)


class ChainPart(NamedTuple):
    """One part of a chain: a fixed name or number, an expression, or a slice."""

    key: str | int | Deferred | Slice
    offset: int
    length: int

    def error(self, message: str, fix: str = "") -> TemplateError:
        """Return a TemplateError that points at this part."""
        return TemplateError(message, self.offset, self.length, fix)

    def missing_error(
        self, message: str, path: tuple[str, ...] | None, fix: str = ""
    ) -> TemplateError:
        """Return a MissingValueError that points at this part."""
        return MissingValueError(message, self.offset, self.length, fix, path)


class Chain(NamedTuple):
    """A name with the parts read from it.

    With `root`, the parts are read from the value of another expression and have no path.
    """

    links: tuple[ChainPart, ...]
    root: Deferred | None = None

    def reference(self) -> Reference:
        """Return the fixed part of the path, which is known before an evaluation."""
        known: list[ChainPart] = []
        for link in self.links:
            if not isinstance(link.key, str):
                break
            known.append(link)
        first, last = known[0], known[-1]
        path = tuple(str(link.key) for link in known)
        length = last.offset + last.length - first.offset
        names = tuple((link.offset, link.length) for link in known)
        return Reference(path, first.offset, length, names)

    def read(self, evaluation: Evaluation) -> object:
        """Return the value, and record it under its path.  Raises TemplateError.

        Reading a part of a text or list records the whole text or list.
        """
        if self.root is not None:
            return self._read_from(self.root(evaluation), evaluation)
        value: object = evaluation.scope
        path: tuple[str, ...] = ()
        recorded = False
        for link in self.links:
            key = link.key(evaluation) if callable(link.key) else link.key
            if isinstance(value, Unknown) or isinstance(key, Unknown):
                value = _read_item(value, key, path, link, evaluation)
                continue
            if isinstance(value, (Mapping, StatePath)):
                names = value.parts if isinstance(value, StatePath) else value
                name = _check_name(key, path, link)
                try:
                    value = names[name]
                except KeyError:
                    raise _missing_name(path, name, list(names), link, recorded) from None
                path = (*path, name)
                continue
            if not recorded:
                evaluation.record(path, value)
                recorded = True
            if value is None:
                message = f"{_describe_path(path)} is null"
                raise link.missing_error(message, None, "add `| default(…)`")
            value = _read_item(value, key, path, link, evaluation)
        if recorded:
            return value
        evaluation.record(path, value)
        return sort_names(value)

    def _read_from(self, value: object, evaluation: Evaluation) -> object:
        for link in self.links:
            key = link.key(evaluation) if callable(link.key) else link.key
            if isinstance(value, Mapping) and _has_name(value, key):
                value = value[key]
            else:
                value = _read_item(value, key, (), link, evaluation)
        return value

    def read_if_there(self, evaluation: Evaluation) -> tuple[bool, object]:
        """Return whether the value exists, and the value; an absence is recorded too."""
        try:
            return True, self.read(evaluation)
        except MissingValueError as error:
            if error.path is not None:
                evaluation.record_absence(error.path)
            return False, None


# -- names --


def _has_name(mapping: Mapping[str, object], key: object) -> bool:
    return isinstance(key, str) and key in mapping


def _check_name(key: object, path: tuple[str, ...], link: ChainPart) -> str:
    """Return the key for a mapping.  Raises TemplateError if it is not text."""
    if isinstance(key, str):
        return key
    kind = "a slice" if isinstance(key, Slice) else describe_type(key)
    raise link.error(f"{_describe_path(path)} is a mapping: use a name, not {kind}")


def _missing_name(
    path: tuple[str, ...], name: str, known: Sequence[str], link: ChainPart, recorded: bool
) -> TemplateError:
    if path:
        message = f"{_describe_path(path)} has no `{name}`"
    else:
        message = f"there is no `{name}`"
    fix = did_you_mean(name, known)
    if not fix and known:
        fix = f"available: {', '.join(sorted(known)[:12])}"
    # A recorded value is in the key whole: the absence of a part of it need not be.
    absent = None if recorded else (*path, name)
    return link.missing_error(message, absent, fix)


def _describe_path(path: tuple[str, ...]) -> str:
    return f"`{join_path(path)}`" if path else "this value"


# -- items and slices --

_KEY_KINDS = {TEXT: INTEGER, LIST: INTEGER, MAPPING: TEXT}
"""For each type that has items, the type of the keys."""


def _read_item(
    value: object, key: object, path: tuple[str, ...], link: ChainPart, evaluation: Evaluation
) -> object:
    """Return a part of a value that is not a mapping, or of a partly unknown value."""
    if isinstance(value, Unknown) or isinstance(key, Unknown):
        if isinstance(key, Slice):
            return _slice_unknown(value, key.bounds(evaluation), path, link)
        return _item_of_unknown(value, key, path, link)
    if isinstance(value, (str, list, tuple)):
        if isinstance(key, Slice):
            return _slice(value, list(key.bounds(evaluation)), link)
        if isinstance(key, int) and not isinstance(key, bool):
            try:
                return value[key]
            except IndexError:
                message = f"{_describe_path(path)} has {len(value)} items, but no item {key}"
                raise link.error(message) from None
    raise _no_such_part(value, path, link)


def _item_of_unknown(value: object, key: object, path: tuple[str, ...], link: ChainPart) -> object:
    """Return the possible values of an item if the value or the key is unknown."""
    kinds, key_kinds = kinds_of(value), kinds_of(key)
    found: list[object] = []
    for kind, key_kind in _KEY_KINDS.items():
        if kind in kinds and key_kind in key_kinds:
            item = A_TEXT if kind == TEXT else item_of(value)
            found.append(item)
    # An unknown value counts as true. Only a known value can be empty.
    if not found or not value:
        raise _no_such_part(value, path, link)
    part = one_of(found)
    if isinstance(part, Unknown) and NULL in kinds:
        # A null value has no parts; `default` handles the absence.
        return replace(part, part=True)
    return part


def _slice(
    value: str | list[object] | tuple[object, ...], bounds: list[object], link: ChainPart
) -> object:
    whole = [_check_bound(bound, link) for bound in bounds]
    if holds_unknown(bounds):
        return Unknown(kinds_of(value))
    try:
        return value[slice(*whole)]
    except ValueError:
        raise link.error("the step of a slice cannot be 0") from None


def _slice_unknown(
    value: object, bounds: Iterable[object], path: tuple[str, ...], link: ChainPart
) -> Unknown:
    for bound in bounds:
        _check_bound(bound, link)
    kinds = kinds_of(value)
    if not kinds & {LIST, TEXT}:
        raise _no_such_part(value, path, link)
    items = value.items if isinstance(value, Unknown) else None
    return Unknown(kinds & {LIST, TEXT}, items, part=NULL in kinds)


def _check_bound(bound: object, link: ChainPart) -> int | None:
    """Return a bound of a slice; None if it is unknown.  Raises TemplateError."""
    if isinstance(bound, Unknown):
        if bound.kinds & {INTEGER, NULL}:
            return None
    elif bound is None:
        return None
    elif isinstance(bound, int) and not isinstance(bound, bool):
        return bound
    raise link.error(f"the bounds of a slice must be whole numbers, not {describe_type(bound)}")


def _no_such_part(value: object, path: tuple[str, ...], link: ChainPart) -> TemplateError:
    message = f"{_describe_path(path)} is {describe_type(value)} and has no such part"
    may_be_null = value.may_be_null if isinstance(value, Unknown) else value is None
    if may_be_null:
        # `default` stands in for parts of null.
        return link.missing_error(message, None)
    return link.error(message)
