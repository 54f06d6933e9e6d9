"""Logs and metrics of attempts on other machines, from the run database, or from the shared store
after the attempt's end.

All text was masked on the other machine. Files of a finished attempt are stored locally on first
use, like the files of local attempts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ..errors import Infrastructure, RecipeError
from ..storage import metrics
from ..storage.content.files import Content
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace

PIECE: Final = 1 << 18
"""Maximum bytes per read."""


class StoredStream:
    """A stored log or metrics stream of an attempt, read incrementally.

    `attempt` is the step id as in file names, with the attempt number.
    """

    def __init__(self, ws: Workspace, run: str, attempt: str, stream: str) -> None:
        self._ws, self._run, self._attempt, self._stream = ws, run, attempt, stream
        self.offset = 0

    def read(self) -> bytes:
        """Return the next part of the stream, possibly incomplete.

        Raises Infrastructure if the shared store lacks it.
        """
        found = []
        for chunk in self._ws.store.runs.exchange.chunks(
            self._run, self._attempt, self._stream, self.offset
        ):
            if chunk.content:
                data = self._object(Content(chunk.content))
            else:
                data = chunk.data[max(0, self.offset - chunk.offset) :]
            found.append(data)
            self.offset += len(data)
        return b"".join(found)

    def rest(self, write: Callable[[bytes], object]) -> None:
        """Write the rest of the stream to `write`."""
        while data := self.read():
            write(data)

    def close(self) -> None:
        """Do nothing, because a stored stream has no open file."""

    def whole(self) -> bytes:
        """Return the rest of the stream."""
        return b"".join(iter(self.read, b""))

    def _object(self, content: Content) -> bytes:
        cache = self._ws.remote_cache or self._ws.share(self._ws.store.runs.get(self._run).store)
        if cache is None or cache.bring([content]):
            raise Infrastructure(
                f"cannot read the {self._stream} of {self._attempt} from the shared store",
                fix="check the store that `recipe config` shows",
            )
        with self._ws.objects.path(content).open("rb") as file:
            return os.pread(file.fileno(), PIECE, self.offset)


def is_elsewhere(ws: Workspace, run: str) -> bool:
    """Return True if a run's logs and metrics are in the run database."""
    return ws.store.runs.shared and bool(ws.store.runs.get(run).bundle)


def keep_file(ws: Workspace, attempt: AttemptRow, ending: str) -> Path:
    """Return the path of a finished attempt's file, downloading the file if possible.

    `ending` is `.log`, `.metrics`, or `.host` for machine samples.
    """
    path = ws.kept_path(attempt.run, attempt.step, attempt.n, ending)
    with contextlib.suppress(RecipeError):  # an unreachable store counts as a missing file
        fetch_file(ws, attempt.run, path)
    return path


def fetch_file(ws: Workspace, run: str, path: Path) -> None:
    """Download a finished attempt's file to `path`, if stored.

    Raises Infrastructure if the shared store lacks it.
    """
    if path.exists() or not is_elsewhere(ws, run):
        return
    data = StoredStream(ws, run, path.stem, path.suffix[1:]).whole()
    if data:
        ws.write(path, data)


def read_log(ws: Workspace, run: str, step: str, number: int) -> bytes:
    """Return the log of an attempt on another machine, with secrets masked."""
    return StoredStream(ws, run, ws.kept_path(run, step, number, "").name, "log").whole()


def read_points(
    ws: Workspace, run: str, step: str, number: int, path: Path
) -> Sequence[dict[str, metrics.Value]]:
    """Return the metric points of a running attempt so far, from its `.metrics` or `.host` file."""
    if not is_elsewhere(ws, run):
        return metrics.points(path)
    data = StoredStream(ws, run, ws.kept_path(run, step, number, "").name, path.suffix[1:]).whole()
    return list(filter(None, map(metrics.parse, data.splitlines())))
