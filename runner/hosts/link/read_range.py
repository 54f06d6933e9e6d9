"""Read and hash parts of a local file.  Raises Changed if the size of the file changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

from ...storage.content.files import Changed

BLOCK = 1 << 18
"""Bytes per read: a block fits the processor's cache while it is copied, hashed and encrypted."""


def read_part(path: str, size: int, start: int, count: int) -> Iterator[bytes]:
    """Yield `count` bytes of a file with `size` bytes, from `start`."""
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


def hash_chunks(path: str, size: int, chunk: int) -> list[str]:
    """Return the digest of each chunk of a file."""
    found = []
    for start in range(0, size, chunk):
        hasher = hashlib.sha256()
        for data in read_part(path, size, start, min(chunk, size - start)):
            hasher.update(data)
        found.append(hasher.hexdigest())
    return found
