"""What workers of several machines hand each other beside the rows of runs: bundles, keys that are held, output as chunks, results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .database import parse_stored


class Output(NamedTuple):
    """A result of a run: `path` is where it is published, `address` the object in the shared store that holds its bytes, or says which do."""

    name: str
    path: str
    content: str
    size: int  # bytes
    address: str


class Chunk(NamedTuple):
    """A part of what an attempt printed (`log`), measured (`metrics`), or of what was seen of its machine (`host`).

    With a `content` all of it is that object of the shared store.
    """

    attempt: str
    stream: str
    offset: int  # bytes
    data: bytes
    content: str = ""


def outputs_of(value: str) -> Sequence[Output]:
    """The outputs of a run, from the text that a backend keeps."""
    rows = parse_stored(value)
    return (
        tuple(Output._make(row) for row in rows if isinstance(row, list))
        if isinstance(rows, list)
        else ()
    )


class Exchange:
    """What one database passes on.  This is that of runs whose workers share a disk: files are read where they are, and its locks hold keys."""

    def bundle(self, digest: str) -> bytes | None:
        """The archive that a run names; None where it is not in this database."""
        return None

    def made(self, run: str, fence: int, outputs: Sequence[Output]) -> None:
        """Note what a claimed run made.  Raises Stale."""

    def confirm(self, run: str, fence: int) -> None:
        """See to it that a claimed run is still ours, before something is done that cannot be taken back.  Raises Stale.

        On one disk it is: a worker that stands still keeps its locks.
        """

    def hold_key(self, key: str, run: str) -> bool:
        """Hold a step's key against the runs of other machines for as long as our claim on `run` lasts.  False: another run that is alive has it."""
        return True

    def release_keys(self, keys: Collection[str], run: str) -> None:
        """Let these keys of a run go."""

    def add_chunks(self, run: str, fence: int, chunks: Sequence[Chunk]) -> None:
        """Store what attempts of a claimed run printed.  Raises Stale."""

    def fold(self, run: str, fence: int, whole: Chunk) -> None:
        """Store this one instead of all chunks of its attempt and stream."""

    def chunks(self, run: str, attempt: str, stream: str, offset: int = 0) -> list[Chunk]:
        """What was printed from an offset on, at most a mebibyte, in order; chunks may overlap where a worker took over."""
        return []
