"""Digests: a content address as a type, and one canonical hash of values.

The canonical form (version 1) of a value is its JSON text with sorted keys, no white space and everything beyond ASCII escaped, so that no two
different values share a form: `1`, `1.0`, `"1"` and `true` differ, and so do `["ab"]` and `["a","b"]`.  NaN and infinities have no form. A hash of a
value is SHA-256 over a record tag, a NUL and this form: a step's key and a tree's manifest never share a pre-image.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NewType

Digest = NewType("Digest", str)
"""64 lowercase hex digits of a SHA-256."""

_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, check_circular=False
).encode


def of_bytes(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def of_file(path: Path) -> str:
    """The digest of a file; empty for what is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def canonical(value: object) -> bytes:
    """The one byte form of a JSON-like value.  Raises TypeError or ValueError for anything that has none: such a thing cannot be in a key."""
    return _encode(value).encode()


def of_value(tag: str, value: object) -> Digest:
    """The digest of a record of kind `tag`."""
    return Digest(hashlib.sha256(f"{tag}\0{_encode(value)}".encode()).hexdigest())
