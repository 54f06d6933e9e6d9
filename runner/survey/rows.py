"""What attempts printed and measured on other machines: rows of the database of runs, or, when they are over, objects of the shared store.

It was masked there.  What is wanted of an attempt that is over is kept here from then on, where the files of our own attempts are kept.
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
"""Bytes of one answer at most."""


class StoredStream:
    """One text of one attempt, read on from where it was read to.  `attempt` is its step's id, as files are called, and its number."""

    def __init__(self, ws: Workspace, run: str, attempt: str, stream: str) -> None:
        self._ws, self._run, self._attempt, self._stream = ws, run, attempt, stream
        self.offset = 0

    def read(self) -> bytes:
        """What is new, at most a part of it.  Raises Infrastructure where the store does not give it."""
        found = []
        for chunk in self._ws.store.runs.exchange.chunks(
            self._run, self._attempt, self._stream, self.offset
        ):
            data = (
                self._object(Content(chunk.content))
                if chunk.content
                else chunk.data[max(0, self.offset - chunk.offset) :]
            )
            found.append(data)
            self.offset += len(data)
        return b"".join(found)

    def rest(self, write: Callable[[bytes], object]) -> None:
        """Everything to the end."""
        while data := self.read():
            write(data)

    def close(self) -> None:
        """There is nothing to let go of."""

    def whole(self) -> bytes:
        """The same together."""
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
    """Whether what a run's attempts print are rows of its database."""
    return ws.store.runs.shared and bool(ws.store.runs.get(run).bundle)


def keep_file(ws: Workspace, attempt: AttemptRow, ending: str) -> Path:
    """Where what an attempt that is over printed (`.log`), measured (`.metrics`) or had around it (`.host`) is kept; brought if it can be."""
    path = ws.kept_path(attempt.run, attempt.step, attempt.n, ending)
    with contextlib.suppress(RecipeError):  # the store cannot be reached: as if it were not kept
        fetch_file(ws, attempt.run, path)
    return path


def fetch_file(ws: Workspace, run: str, path: Path) -> None:
    """Have what an attempt that is over printed or measured at `path`, if it did.  Raises Infrastructure where the store does not give it."""
    if (
        not path.exists()
        and is_elsewhere(ws, run)
        and (data := StoredStream(ws, run, path.stem, path.suffix[1:]).whole())
    ):
        ws.write(path, data)


def read_log(ws: Workspace, run: str, step: str, number: int) -> bytes:
    """What an attempt on another machine has printed, masked."""
    return StoredStream(ws, run, ws.kept_path(run, step, number, "").name, "log").whole()


def read_points(
    ws: Workspace, run: str, step: str, number: int, path: Path
) -> Sequence[dict[str, metrics.Value]]:
    """What an attempt that runs has reported in the file `path` of its machine, `.metrics` or `.host`."""
    if not is_elsewhere(ws, run):
        return metrics.points(path)
    data = StoredStream(ws, run, ws.kept_path(run, step, number, "").name, path.suffix[1:]).whole()
    return [point for line in data.splitlines() if (point := metrics.parse(line))]
