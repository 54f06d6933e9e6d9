"""Reads a file of ours in pieces, and says what each of them is.  Raises Changed for one that is not as long as it was."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from ...storage.content.files import Changed

BLOCK = 1 << 18
"""Bytes read at once: what fits into a processor's cache is copied, hashed and encrypted there."""


def part(path: str, size: int, start: int, count: int) -> Iterator[bytes]:
    """Some bytes of a file that has `size`."""
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Changed(path)
        file.seek(start)
        while count:
            data = file.read(min(count, BLOCK))
            if not data:
                raise Changed(path)
            count -= len(data)
            yield data


def chunks(path: str, size: int, chunk: int) -> list[str]:
    """A digest for every chunk of a file."""
    found = []
    for start in range(0, size, chunk):
        hasher = hashlib.sha256()
        for data in part(path, size, start, min(chunk, size - start)):
            hasher.update(data)
        found.append(hasher.hexdigest())
    return found
