"""What the training platform hears of a run while it works: metric points and lines of logs, in batches, masked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Final

from ..storage.records.exchange import Chunk
from ..storage.records.letters import Letters, Numbers, moment, point_of
from ..storage.workspace import Workspace
from ..survey.survey import Survey
from .tasks import steps_of

EVERY: Final = 5.0
"""Seconds between two batches."""
BATCH: Final = 500
"""Points, or lines, of one message at most."""
LONGEST: Final = 4000
"""Characters of a line at most."""


class Telemetry:
    """Of one run.  Make one with `reporting.telemetry`."""

    def __init__(
        self, ws: Workspace, letters: Letters, run: str, found: Survey, say: Callable[[str], None]
    ) -> None:
        self._runs, self._letters, self._found, self._say = ws.store.runs, letters, found, say
        self._row = ws.store.runs.get(run)
        self._rest: dict[tuple[str, str], bytes] = {}  # what came of a line that has not ended
        self._points: list[dict[str, object]] = []
        self._lines: list[dict[str, object]] = []
        self._sent, self._dropped, self._due = 0, 0, 0.0

    def feed(self, rows: Sequence[Chunk]) -> None:
        """What attempts wrote since the last call, in order."""
        for row in rows:
            whole, newline, rest = (
                self._rest.pop((row.attempt, row.stream), b"") + row.data
            ).rpartition(b"\n")
            self._rest[row.attempt, row.stream] = rest[-LONGEST:] if row.stream == "log" else rest
            for line in whole.split(b"\n") if newline else ():
                (self._point if row.stream == "metrics" else self._line)(row.attempt, line)
        if time.monotonic() >= self._due or len(self._points) + len(self._lines) >= BATCH:
            self.flush()

    def over(self, attempt: str) -> None:
        """An attempt has ended, perhaps within a line."""
        for stream in ("metrics", "log"):
            if rest := self._rest.pop((attempt, stream), b""):
                (self._point if stream == "metrics" else self._line)(attempt, rest)
        self.flush()

    def flush(self) -> None:
        """Put what there is into the outbox."""
        self._due = time.monotonic() + EVERY
        while self._points or self._lines:
            points, self._points = self._points[:BATCH], self._points[BATCH:]
            lines, self._lines = self._lines[:BATCH], self._lines[BATCH:]
            self._sent += 1
            id = f"{self._row.id}-{self._sent}"
            metrics = self._letters.metrics(self._row, points, f"{id}-metrics")
            self._runs.outbox.post(
                self._row.id, [*metrics, *self._letters.logs(self._row, lines, f"{id}-logs")]
            )
            if metrics and (dropped := self._runs.outbox.thin(self._row.id, metrics[0].receiver)):
                if not self._dropped:
                    self._say(
                        "the platform does not take the metrics: of those that wait every second one is dropped, the newest stay"
                    )
                self._dropped += dropped

    def _point(self, attempt: str, line: bytes) -> None:
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            return
        point = point_of(parsed, time.time()) if isinstance(parsed, dict) else None
        if point is None:
            return
        self._points.append(point)
        step, loss = point["step"], point.get("train_loss")
        total = steps_of(self._found, attempt.rpartition(".")[0].replace("%2F", "/"))
        if isinstance(step, (int, float)):
            known = Numbers(
                int(step),
                int(total) if total else None,
                float(loss) if isinstance(loss, (int, float)) else None,
            )
            self._letters.newest[self._row.id] = known

    def _line(self, attempt: str, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rpartition("\r")[2][:LONGEST]
        self._lines.append(
            {
                "timestamp": moment(time.time()),
                "step": attempt.rpartition(".")[0].replace("%2F", "/"),
                "message": text,
            }
        )
