"""Live upload of attempts' logs and metrics, masked, to the run database and a platform.

Other machines follow a run through the database. While an attempt runs, its text is stored in rows
of at most 64 KiB, once a second. After its end, the text becomes one object of the shared store
and the rows are deleted.

Rows contain at most the first half of the stored size (`LOG_CAP`) of a log. The rest of a longer
log follows when the attempt has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...agent.regular import open_regular
from ...errors import RecipeError
from ...secrets import StreamMasker
from ...storage.content import files
from ...storage.records.exchange import Chunk
from ...storage.records.runs import Stale
from ...storage.workspace import Workspace
from .attempt import Attempt
from .attempt_result import LOG_CAP
from .commit import GroupCommit

if TYPE_CHECKING:
    from ..telemetry import Telemetry

EVERY: Final = 1.0
"""Interval between reads of log and metrics files, in seconds."""
ROW: Final = 64 << 10
"""Maximum size of a database row with log text, in bytes."""


@dataclass(slots=True)
class _Text:
    """Log or metrics file of a running attempt, with its read and sent byte counts."""

    name: str
    stream: str
    path: str
    masked: StreamMasker
    read: int = 0
    sent: int = 0


class Chunks:
    """Uploader of the log and metrics text of one run.

    Does nothing if the run's files are read locally and no platform is configured.
    """

    def __init__(
        self,
        ws: Workspace,
        commits: GroupCommit,
        running: Mapping[str, Attempt],
        beside: Callable[[Coroutine[Any, Any, None]], None],
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._ws, self._commits, self._running, self._beside = ws, commits, running, beside
        self._texts: dict[str, list[_Text]] = {}
        self._due = 0.0

    def tick(self) -> None:
        """Upload new log and metrics text, at most once a second."""
        if not self._is_needed or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY
        rows: list[Chunk] = []
        for id, attempt in self._running.items():
            for text in self._texts_of(id, attempt):
                rows += self._read_new(text)
        self._send(rows)

    def finish(self, id: str, attempt: Attempt) -> None:
        """Upload the remaining text of a finished attempt, then all its text as one object.

        The object is uploaded in the background.
        """
        if not self._is_needed:
            return
        texts = self._texts_of(id, attempt)
        self._texts.pop(id)
        rows = []
        for text in texts:
            kept = self._kept_path(text)
            text.path, text.read = str(kept), text.sent
            text.masked = StreamMasker(
                type(self._commits.masker)()
            )  # the kept file is already masked
            rows += self._read_new(text)
        self._send(rows)
        if self._telemetry is not None:
            self._telemetry.finish(texts[-1].name)
        if self._ws.delivers:
            self._beside(self._fold(texts))

    @property
    def _is_needed(self) -> bool:
        return self._ws.delivers or self._telemetry is not None

    def _texts_of(self, id: str, attempt: Attempt) -> list[_Text]:
        if id not in self._texts:
            masker = self._commits.masker
            name = f"{id.replace('/', '%2F')}.{self._commits.tries(id)}"
            texts = []
            for rank, path in enumerate(attempt.logs):
                of_rank = f"{name}.{rank}" if rank else name
                texts.append(_Text(of_rank, "log", path, masker.stream()))
            for stream in ("metrics", "host"):
                path = f"{attempt.directory.path}.{stream}"
                texts.append(_Text(name, stream, path, masker.stream()))
            self._texts[id] = texts
        return self._texts[id]

    def _kept_path(self, text: _Text) -> Path:
        return self._ws.home / "runs" / self._commits.run / f"{text.name}.{text.stream}"

    def _read_new(self, text: _Text) -> list[Chunk]:
        """Read the part of a file that was not uploaded yet."""
        rows = []
        with contextlib.suppress(OSError), open_regular(text.path) as file:
            file.seek(text.read)  # the second half is uploaded with the whole file
            while data := file.read(min(ROW, LOG_CAP // 2 - text.read)):
                text.read += len(data)
                if shown := text.masked.feed(data):
                    rows.append(Chunk(text.name, text.stream, text.sent, shown))
                    text.sent += len(shown)
        return rows

    def _send(self, rows: list[Chunk]) -> None:
        commits = self._commits
        if self._telemetry is not None:
            self._telemetry.feed(rows)
        with contextlib.suppress(Stale):  # the next group raises the error
            if rows and self._ws.delivers:
                self._ws.store.runs.exchange.add_chunks(commits.run, commits.fence, rows)

    async def _fold(self, texts: list[_Text]) -> None:
        from ...storage.remote import states as remote_states

        commits, cache = self._commits, self._ws.remote_cache
        assert cache is not None
        for text in texts:
            kept = str(self._kept_path(text))
            if not os.path.exists(kept):
                continue
            try:
                content = await asyncio.to_thread(files.scan, kept)
                await asyncio.to_thread(
                    remote_states.keep,
                    cache.remote,
                    [commits.run, text.name, text.stream],
                    {content: kept},
                )
                self._ws.store.runs.exchange.fold(
                    commits.run, commits.fence, Chunk(text.name, text.stream, 0, b"", content)
                )
            except RecipeError as error:  # the log's rows stay in the database
                commits.say(
                    f"cannot upload the log of {text.name} to the shared store {cache.name}: {error}"
                )
