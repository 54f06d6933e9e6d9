"""Send what attempts print and measure, masked, to the database of runs, so that it can be followed on another machine, and to a platform.

While an attempt runs its text is rows of at most 64 KiB, one a second; when it is over it is one object of the shared store, and the rows go.
Rows have at most the first half of what is kept of a log: of a longer one the rest is there when the attempt is over, as `LOG_CAP` keeps it.
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
from ...secrets import Stream
from ...storage.records.exchange import Chunk
from ...storage.records.runs import Stale
from ...storage.workspace import Workspace
from .attempt import Attempt
from .attempt_result import LOG_CAP
from .commit import GroupCommit

if TYPE_CHECKING:
    from ..telemetry import Telemetry

EVERY: Final = 1.0
"""Seconds between two looks at what was printed."""
ROW: Final = 64 << 10
"""Bytes of a row at most."""


@dataclass(slots=True)
class _Text:
    """One file of a running attempt, and how much of it was read and sent."""

    name: str
    stream: str
    path: str
    masked: Stream
    read: int = 0
    sent: int = 0


class Chunks:
    """The texts of one run.  Does nothing for a run whose files are read where they are, and of which no platform gets anything."""

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
        """Send what is new, once a second."""
        if not self._wanted or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY
        rows = [
            row
            for id, attempt in self._running.items()
            for text in self._of(id, attempt)
            for row in self._new(text)
        ]
        self._send(rows)

    def over(self, id: str, attempt: Attempt) -> None:
        """An attempt is over and its log is kept: send the rest, then make it one object beside all else."""
        if not self._wanted:
            return
        texts = self._of(id, attempt)
        self._texts.pop(id)
        rows = []
        for text in texts:
            kept = self._kept(text)
            text.path, text.read = str(kept), text.sent
            text.masked = Stream(type(self._commits.masker)())  # what is kept is masked
            rows += self._new(text)
        self._send(rows)
        if self._telemetry is not None:
            self._telemetry.over(texts[-1].name)
        if self._ws.delivers:
            self._beside(self._fold(texts))

    @property
    def _wanted(self) -> bool:
        return self._ws.delivers or self._telemetry is not None

    def _of(self, id: str, attempt: Attempt) -> list[_Text]:
        if id not in self._texts:
            name, masker = (
                f"{id.replace('/', '%2F')}.{self._commits.tries(id)}",
                self._commits.masker,
            )
            logs = [
                _Text(f"{name}.{rank}" if rank else name, "log", path, masker.stream())
                for rank, path in enumerate(attempt.logs)
            ]
            rest = [
                _Text(name, stream, f"{attempt.directory.path}.{stream}", masker.stream())
                for stream in ("metrics", "host")
            ]
            self._texts[id] = [*logs, *rest]
        return self._texts[id]

    def _kept(self, text: _Text) -> Path:
        return self._ws.home / "runs" / self._commits.run / f"{text.name}.{text.stream}"

    def _new(self, text: _Text) -> list[Chunk]:
        """What a file has that was not sent."""
        rows = []
        with contextlib.suppress(OSError), open_regular(text.path) as file:
            file.seek(text.read)  # a second half is sent with the whole
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
        with contextlib.suppress(Stale):  # the next group finds it out
            if rows and self._ws.delivers:
                self._ws.store.runs.exchange.add_chunks(commits.run, commits.fence, rows)

    async def _fold(self, texts: list[_Text]) -> None:
        from ...storage.content import files
        from ...storage.remote import states as remote_states

        commits, cache = self._commits, self._ws.remote_cache
        assert cache is not None
        for text in texts:
            kept = str(self._kept(text))
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
            except RecipeError as error:  # its rows stay
                commits.say(
                    f"cannot upload the log of {text.name} to the shared store {cache.name}: {error}"
                )
