"""Read and hash parts of a local file.  Raises Changed if the size of the file changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...agent.tree_hash import hash_blocks
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
    with open(path, "rb", buffering=0) as file:
        found = hash_blocks(file.fileno(), size, chunk)
        if os.fstat(file.fileno()).st_size != size or len(found) * chunk < size:
            raise Changed(path)
    return found
