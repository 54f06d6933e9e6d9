"""Read new events, progress, log lines and metrics of runs for followers. Use in one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from ..agent.regular import descriptor_of
from ..api.logs import (
    AttemptLog,
    LogTail,
    Tail,
    apply_event,
    find_unmaskable,
    open_tail,
    stored_log_path,
)
from ..api.values import whole
from ..errors import CannotRun, Invalid
from ..secrets import Masker
from ..storage import metrics
from ..storage.records.runs import FINAL, Event, RunRow
from ..storage.workspace import Workspace
from ..survey.rows import StoredStream, is_elsewhere
from .messages import Message
from .runs import event_view

T = TypeVar("T")
PAGE: Final = 500
"""Maximum number of events in one read."""
PIECE: Final = 1 << 18
"""Approximate number of message bytes of one run in one read."""
EVERY: Final = 2.0
"""Seconds between two reads of the progress of a run without new events."""
ELSEWHERE: Final = 1.0
"""Seconds between two reads of an attempt whose log is in a database."""
LINES: Final = 64 << 10
"""Maximum size in bytes of the log lines in one message. Earlier lines are skipped."""
AT_ONCE: Final = 8 << 20
"""Maximum number of bytes of a text in one read."""
LONGEST_LINE: Final = 16 << 10
"""Maximum size in bytes of an incomplete line that is held back."""
HIDDEN: Final = "its log and metrics are hidden until the step finishes: it has secrets that are not set for the server"
REPORTED: Final = frozenset({"metrics", "warning"})
"""Kinds of messages from $RECIPE_METRICS."""
POINTS: Final = 64
"""Maximum number of metric points in one message."""
MORE_WARNINGS: Final = "more warnings are in the step's log"


class NewLines:
    """Reader of new lines in a growing text. With `from_start`, existing lines are included."""

    def __init__(self, tail: LogTail, *, from_start: bool) -> None:
        self._tail = tail
        self._passing = not from_start
        self._rest = b""
        self.offset = 0
        """Offset in bytes of the next returned line in the masked text."""
        self.done = False
        """True if the text has ended and was read completely."""

    def read(self, *, ended: bool) -> list[bytes]:
        """Return new lines with line ends. With `ended`, include an incomplete last line."""
        data = self._rest
        while len(data) < AT_ONCE:
            piece = self._tail.read()
            if piece:
                data += piece
                continue
            if self._passing:
                data = self._skip_existing(data)
                self._passing = False
            if ended:
                rest: list[bytes] = []
                self._tail.rest(rest.append)
                data += b"".join(rest)
                self.done = True
            break
        if self._passing:
            self._rest = self._skip_existing(data)
            return []
        lines = _split_lines(data)
        self._rest = b""
        is_begun = bool(lines) and not lines[-1].endswith(b"\n")
        if is_begun and not ended and len(lines[-1]) < LONGEST_LINE:
            self._rest = lines.pop()
        return lines

    def _skip_existing(self, data: bytes) -> bytes:
        """Skip existing lines, except an incomplete last line."""
        before = data.rfind(b"\n") + 1
        self.offset += before
        return data[before:]

    def close(self) -> None:
        self._tail.close()


def _split_lines(data: bytes) -> list[bytes]:
    *whole_lines, rest = data.split(b"\n")
    lines = [line + b"\n" for line in whole_lines]
    if rest:
        lines.append(rest)
    return lines


class BarLines:
    """A log in which carriage returns, as used by progress bars, count as line ends."""

    def __init__(self, tail: LogTail) -> None:
        self._tail = tail

    def read(self) -> bytes:
        return self._tail.read().replace(b"\r", b"\n")

    def rest(self, write: Callable[[bytes], None]) -> None:
        self._tail.rest(lambda data: write(data.replace(b"\r", b"\n")))

    def close(self) -> None:
        self._tail.close()


class AttemptReader:
    """Reader of an attempt that is running or has just ended."""

    def __init__(self, part: AttemptLog, *, from_start: bool) -> None:
        self.part = part
        self._from_start = from_start
        self._log: NewLines | None = None
        self._metrics: NewLines | None = None
        self._points = 0
        self._values: dict[str, metrics.Value] = {}
        self._warned: dict[str, None] = {}
        self._due = 0.0
        self._is_hidden = False
        self._is_slow = False  # matching the metrics pattern exceeded its time limit

    @property
    def over(self) -> bool:
        """True if the attempt has ended and all its data was read."""
        if not self.part.ended:
            return False
        return all(lines is None or lines.done for lines in (self._log, self._metrics))

    def close(self) -> None:
        for lines in (self._log, self._metrics):
            if lines is not None:
                lines.close()

    def read(self, ws: Workspace, run: str, kinds: Set[str]) -> list[Message]:
        """Return new messages of the followed kinds about this attempt."""
        if "log" not in kinds:
            self._log = self._close(self._log)
            self._from_start = False  # later followers receive only new lines
        if not kinds & REPORTED:
            self._metrics = self._close(self._metrics)
        if not kinds & (REPORTED | {"log"}):
            return []
        now = time.monotonic()
        if now < self._due and not self.part.ended:
            return []
        elsewhere = is_elsewhere(ws, run)
        self._due = now + (ELSEWHERE if elsewhere else 0.0)
        if not self.part.ended and not elsewhere and self._cannot_be_masked(ws):
            return self._report_hidden(run)
        found: list[Message] = []
        if "log" in kinds:
            with suppress(OSError, CannotRun):  # a step may have replaced its log with a pipe
                found += self._print(ws, run)
        if kinds & REPORTED:
            with suppress(OSError, CannotRun):  # no metrics yet
                found += self._report(ws, run, elsewhere)
        return found

    def _message(self, kind: str, run: str, **data: Any) -> Message:
        name = {"run": run, "step": self.part.step, "attempt": self.part.number}
        return Message(kind, run, {**name, **data})

    @staticmethod
    def _close(lines: NewLines | None) -> None:
        if lines is not None:
            lines.close()

    def _cannot_be_masked(self, ws: Workspace) -> bool:
        try:
            return bool(find_unmaskable(ws, self.part))
        except CannotRun:
            return True

    def _report_hidden(self, run: str) -> list[Message]:
        if self._is_hidden:
            return []
        self._is_hidden = self._from_start = True
        return [self._message("warning", run, text=HIDDEN)]

    def _print(self, ws: Workspace, run: str) -> list[Message]:
        if self._log is None:
            tail = open_tail(ws, run, self.part)
            if tail is None:
                return []
            self._log = NewLines(tail, from_start=self._from_start)
        lines = self._log.read(ended=self.part.ended)
        if not lines:
            return []
        first, size = len(lines) - 1, len(lines[-1])
        while first and size + len(lines[first - 1]) <= LINES:
            first -= 1
            size += len(lines[first])
        skipped = sum(map(len, lines[:first]))
        offset = self._log.offset + skipped
        self._log.offset = offset + size
        texts = [_line_text(line) for line in lines[first:]]
        return [self._message("log", run, offset=offset, skipped=skipped, lines=texts)]

    def _report(self, ws: Workspace, run: str, elsewhere: bool) -> list[Message]:
        if self._metrics is None:
            self._metrics = NewLines(self._metrics_tail(ws, run, elsewhere), from_start=True)
        found: list[Message] = []
        lines = self._metrics.read(ended=self.part.ended)
        # With a pattern, the lines are those of the log. Warnings are only in the metrics file.
        if not self.part.pattern:
            for line in lines:
                text = self._warning(metrics.warning_of(line))
                if text:
                    found.append(self._message("warning", run, text=text))
        points = self._points_in(lines)
        for point in points:
            self._values.update(point)
        self._points += len(points)
        if points:
            said = {"values": dict(self._values), "new": _pick_evenly(points, POINTS)}
            found.append(self._message("metrics", run, points=self._points, **said))
        return found

    def _points_in(self, lines: Sequence[bytes]) -> Sequence[Mapping[str, metrics.Value]]:
        """Return the metric points in log lines, or none if regex matching timed out."""
        if not self.part.pattern:
            return [point for point in map(metrics.parse, lines) if point]
        if not self._is_slow:
            try:
                return list(metrics.match_lines(lines, self.part.pattern))
            except Invalid:
                self._is_slow = True
        return ()

    def _warning(self, text: str) -> str:
        """Return the warning text to send, or "" for repeated or too many warnings."""
        line = " ".join(text.split())[: metrics.LONGEST_WARNING]
        if not line or line in self._warned or len(self._warned) > metrics.MOST_WARNINGS:
            return ""
        self._warned[line] = None
        return line if len(self._warned) <= metrics.MOST_WARNINGS else MORE_WARNINGS

    def _metrics_tail(self, ws: Workspace, run: str, elsewhere: bool) -> LogTail:
        """Open the metrics of an attempt. Raises FileNotFoundError if none exist yet."""
        if self.part.pattern:
            tail = open_tail(ws, run, self.part)
            if tail is None:
                raise FileNotFoundError
            return BarLines(tail)
        path = stored_log_path(ws, run, self.part).with_suffix(".metrics")
        if elsewhere:
            return StoredStream(ws, run, path.name.removesuffix(".metrics"), "metrics")
        with suppress(FileNotFoundError):
            return Tail(descriptor_of(path), Masker().stream())
        raw = Path(f"{self.part.raw[:-4]}.metrics")
        return Tail(descriptor_of(raw), Masker(self.part.secrets_to_mask(ws)).stream())


def _pick_evenly(points: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` evenly spaced points, including the last."""
    if len(points) <= most:
        return points
    return [points[(n + 1) * len(points) // most - 1] for n in range(most)]


def _line_text(line: bytes) -> str:
    """Return a log line without its line end, at most `LINES` bytes."""
    return whole(line[:LINES].decode(errors="replace").removesuffix("\n").removesuffix("\r"))


class RunReader:
    """Reader of one run's events. Events up to number `seen` were sent before."""

    def __init__(self, row: RunRow, seen: int) -> None:
        self.row, self.seen = row, seen
        self.parts: list[AttemptLog] = []
        self.over = False
        self._last: dict[tuple[str, ...], Message] = {}
        self._going: dict[str, AttemptLog] = {}
        self._attempts: dict[tuple[str, int], AttemptReader] = {}
        self._progress: Mapping[str, Any] = {}
        self._progress_due = 0.0

    def close(self) -> None:
        for attempt in self._attempts.values():
            attempt.close()

    def begin(self, ws: Workspace, recent: int) -> list[Message]:
        """Read the earlier events of a run, and return the last `recent` of them."""
        last: deque[Event] = deque(maxlen=recent)
        for event in self._earlier_events(ws):
            apply_event(event, self.parts, self._going)
            last.append(event)
        for part in self._going.values():
            self._attempts[part.step, part.number] = AttemptReader(part, from_start=False)
        return [event_message(ws, event) for event in last]

    def _earlier_events(self, ws: Workspace) -> Iterator[Event]:
        """Yield the events up to number `seen`, which are read page by page."""
        number = 0
        while number < self.seen:
            page = ws.store.runs.events(self.row.id, number, PAGE)
            if not page:
                return
            for event in page:
                if event.seq > self.seen:
                    return
                yield event
            number = page[-1].seq

    def read_events(self, ws: Workspace) -> list[Message]:
        """Return new events of a run, at most about `PIECE` bytes.

        Raises NotFound if the run was deleted.
        """
        self.row = ws.store.runs.get(self.row.id)
        found: list[Message] = []
        size = 0
        for event in ws.store.runs.events(self.row.id, self.seen, PAGE):
            if size > PIECE:
                break
            found.append(event_message(ws, event))
            size += len(found[-1].json)
            before = len(self.parts)
            apply_event(event, self.parts, self._going)
            for part in self.parts[before:]:
                known = self._attempts.get((part.step, part.number))
                if known is None:
                    self._attempts[part.step, part.number] = AttemptReader(part, from_start=True)
                else:  # another worker continues the attempt
                    known.part = part
            self.seen = event.seq
        if found:
            self._progress_due = 0.0
        if self._all_moves_read():
            for part in self._going.values():  # attempts of a dead worker
                part.ended = True
        return found

    def read_live(self, ws: Workspace, kinds: Set[str]) -> list[Message]:
        """Return new log lines, metrics, warnings and progress of a run."""
        run = self.row.id
        found: list[Message] = []
        size = 0
        for name in list(self._attempts):
            if size > PIECE:
                break
            attempt = self._attempts.pop(name)
            some = attempt.read(ws, run, kinds)
            found += some
            size += sum(len(each.json) for each in some)
            if not attempt.over:
                # Move to the end, so that the next read starts with other attempts.
                self._attempts[name] = attempt
            else:
                attempt.close()
                self._last = {key: each for key, each in self._last.items() if key[1] != name[0]}
        self.over = self._all_moves_read() and not self._attempts
        now = time.monotonic()
        if "progress" in kinds and now >= self._progress_due:
            self._progress_due = now + EVERY
            (view,) = ws.run_views.summaries([self.row])
            said = {"run": run, "state": view.state, "word": view.word}
            said |= view.progress._asdict()
            if said != self._progress:
                self._progress = said
                found.append(Message("progress", run, said))
        self._remember(found)
        return found

    @property
    def last(self) -> Sequence[Message]:
        """Latest progress, latest metrics of each step, and warnings of running steps."""
        return list(self._last.values())

    def _remember(self, messages: Sequence[Message]) -> None:
        running = {step for step, _ in self._attempts}
        for message in messages:
            step = str(message.data.get("step", ""))
            match message.kind:
                case "progress":
                    self._last["progress", ""] = message
                case "metrics" if step in running:
                    self._last["metrics", step] = message
                case "warning" if step in running:
                    self._last["warning", step, message.data["text"]] = message

    @property
    def behind(self) -> bool:
        """True if the run has unsent events."""
        return self.seen < self.row.next_event - 1

    @property
    def works(self) -> bool:
        """True if the run is active, or has attempts with unread data."""
        return self.row.state == "ACTIVE" or bool(self._attempts)

    def _all_moves_read(self) -> bool:
        return self.row.state in FINAL and not self.behind


def event_message(ws: Workspace, event: Event) -> Message:
    """Convert an event to a stream message."""
    view = event_view(ws, event)
    return Message("move", event.run, view.model_dump(), seq=event.seq)
