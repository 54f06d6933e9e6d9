"""Data that workers on several machines exchange in addition to run rows.

These are bundles, locked keys, output chunks, and results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .database import parse_stored


class SharedOutput(NamedTuple):
    """Output of a run: its published `path`, and its `address` in the shared store.

    The address of a tree is the address of its manifest.
    """

    name: str
    path: str
    content: str
    size: int  # bytes
    address: str


class Chunk(NamedTuple):
    """Part of an attempt's log (`log`), metrics (`metrics`) or host statistics (`host`).

    If `content` is set, the complete stream is that object in the shared store.
    """

    attempt: str
    stream: str
    offset: int  # bytes
    data: bytes
    content: str = ""


def outputs_of(value: str) -> Sequence[SharedOutput]:
    """Parse the stored outputs of a run."""
    rows = parse_stored(value)
    if not isinstance(rows, list):
        return ()
    return tuple(SharedOutput._make(row) for row in rows if isinstance(row, list))


class Exchange:
    """Data exchange between workers through one database.

    This base class serves workers with a common disk: files are read in place, and the disk's locks
    protect keys.
    """

    def bundle(self, digest: str) -> bytes | None:
        """Return the archive of a submitted run; None if this database does not have it."""
        return None

    def store_outputs(self, run: str, fence: int, outputs: Sequence[SharedOutput]) -> None:
        """Store the outputs of a claimed run.

        Raises Stale.
        """

    def confirm(self, run: str, fence: int) -> None:
        """Check that the claim on a run is still valid, before an irreversible action.

        Raises Stale.

        On one disk the claim is always valid, because a stopped worker keeps its locks.
        """

    def hold_key(self, key: str, run: str) -> bool:
        """Lock a step's cache key against runs on other machines while the claim on `run` lasts.

        Returns False if another live run holds the key.
        """
        return True

    def release_keys(self, keys: Collection[str], run: str) -> None:
        """Release the locks of a run on cache keys."""

    def add_chunks(self, run: str, fence: int, chunks: Sequence[Chunk]) -> None:
        """Store parts of the logs and metrics of a claimed run.

        Raises Stale.
        """

    def fold(self, run: str, fence: int, whole: Chunk) -> None:
        """Replace all parts of an attempt's log or metrics by one complete part."""

    def chunks(self, run: str, attempt: str, stream: str, offset: int = 0) -> list[Chunk]:
        """Return parts of a log or metrics stream from an offset, in order, at most a mebibyte.

        Parts may overlap if another worker took over.
        """
        return []
