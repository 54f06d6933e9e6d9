"""Digests: a content address as a type, and one canonical, type-tagged hash of values.  Knows nothing of files or steps.

The canonical form (version 1) of a value is a byte string in which no two different values collide:

    null `n` · true `t` · false `f` · integer `i<decimal>;` · number `d<shortest round-trip decimal>;`
    string `s<UTF-8 length>:<UTF-8>` · list `l<items>e` · mapping `m<key><value>…e`, keys are strings in code-point order

so `1` and `1.0`, `"1"` and `1`, `["ab"]` and `["a", "b"]` all differ.  NaN and infinities have no form.
A hash of a value is SHA-256 over a record tag, a NUL and this form: a step's key and a tree's manifest never share a pre-image.
"""

from __future__ import annotations

import hashlib
import math
from typing import NewType

Digest = NewType("Digest", str)
"""64 lowercase hex digits of a SHA-256."""


def of_bytes(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def canonical(value: object) -> bytes:
    """The one byte form of a JSON-like value.  Raises TypeError or ValueError for anything that has none: such a thing cannot be in a key."""
    parts: list[bytes] = []
    _write(value, parts)
    return b"".join(parts)


def of_value(tag: str, value: object) -> Digest:
    """The digest of a record of kind `tag`."""
    return of_bytes(tag.encode() + b"\0" + canonical(value))


def _write(value: object, out: list[bytes]) -> None:
    if value is None:
        out.append(b"n")
    elif value is True:
        out.append(b"t")
    elif value is False:
        out.append(b"f")
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogateescape")
        out.append(b"s%d:" % len(data))
        out.append(data)
    elif isinstance(value, int):
        out.append(b"i%d;" % value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no canonical form")
        out.append(b"d" + repr(value).encode() + b";")
    elif isinstance(value, (list, tuple)):
        out.append(b"l")
        for item in value:
            _write(item, out)
        out.append(b"e")
    elif isinstance(value, dict):
        out.append(b"m")
        for key in sorted(value):
            if not isinstance(key, str):
                raise TypeError(f"a mapping key must be a string, not {type(key).__name__}")
            _write(key, out)
            _write(value[key], out)
        out.append(b"e")
    else:
        raise TypeError(f"{type(value).__name__} has no canonical form")
