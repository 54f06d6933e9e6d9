"""Read and hash parts of a local file.  Raises Changed if the size of the file changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

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
        digests = hash_blocks(file.fileno(), size, chunk)
        if os.fstat(file.fileno()).st_size != size or len(digests) * chunk < size:
            raise Changed(path)
    return digests


def find_different(digests: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return the numbers of the chunks whose digest differs from that of the other file's chunk.

    A chunk that the other file does not have differs.
    """
    pairs = enumerate(zip(digests, others, strict=False))
    different = [number for number, (digest, other) in pairs if digest != other]
    return different + list(range(len(others), len(digests)))
