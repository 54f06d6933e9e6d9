"""Digests: the digest type, and a canonical hash of values.

The canonical form (version 1) of a value is its JSON text with sorted keys, without white space,
and with non-ASCII characters escaped, so that different values have different forms: `1`, `1.0`,
`"1"` and `true` differ, and so do `["ab"]` and `["a","b"]`. NaN and infinities have no form. The
hash of a value is the SHA-256 of a record tag, a NUL and this form, so that a step's key and a
tree's manifest never share a pre-image.
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
    """Return the SHA-256 of a file, or an empty text if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def canonical(value: object) -> bytes:
    """Encode a JSON-like value as canonical bytes for hashing.

    Raises TypeError or ValueError for any other value.
    """
    return _encode(value).encode()


def of_value(tag: str, value: object) -> Digest:
    """Return the digest of a JSON-like value with the record tag `tag`."""
    return Digest(hashlib.sha256(f"{tag}\0{_encode(value)}".encode()).hexdigest())
