"""Print the logs of a run's steps, once or following, on a terminal or in a pipe."""

from __future__ import annotations

import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Protocol, TextIO

from ..api.logs import POLL
from ..errors import CannotRun, RecipeError
from ..planning.ids import readable
from ..planning.waiting import WaitKind
from .handle import core
from .handle.core import LogPosition
from .handle.shells import drive
from .handle.transport import LogPart
from .tail import canvas, fit, safe_line

if TYPE_CHECKING:
    from ..api.values import Status
    from .handle.transport import Transport

LOOK: Final = 0.5
"""Seconds between two polls of the run's status."""
READERS: Final = 12
"""Maximum logs read at the same time.  A server limits each token to 20 streams."""
PATIENCE: Final = 5.0  # seconds to wait until a worker claims the stored run
STEP_FINAL: Final = frozenset({"FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"})
_CHUNK: Final = 1 << 18


class Writer(Protocol):
    """An output for the bytes of several logs, one after another."""

    def head(self, text: str) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...


class Raw:
    """A writer for a pipe or a file: writes the bytes unchanged."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._open_line = False

    def head(self, text: str) -> None:
        if self._open_line:
            text = f"\n{text}"
        self._out.write(text.encode("utf-8", "surrogateescape") + b"\n")
        self._open_line = False

    def write(self, data: bytes) -> None:
        if data:
            self._out.write(data)
            self._out.flush()
            self._open_line = not data.endswith(b"\n")

    def end(self) -> None:
        self._out.flush()


class Safe:
    """A writer for a terminal: removes control sequences.

    Lines that end with a carriage return, such as progress bars, are overwritten.
    """

    def __init__(self, out: TextIO, columns: int) -> None:
        self._out, self._columns = out, columns
        self._rest = b""

    def head(self, text: str) -> None:
        self.end()
        self._out.write(f"{safe_line(text)}\n")

    def write(self, data: bytes) -> None:
        pieces = re.split(rb"(\r?\n|\r)", self._rest + data)
        self._rest = pieces.pop()
        if len(self._rest) > 1 << 16:  # too long to wait for the end of the line
            pieces += [self._rest, b"\n"]
            self._rest = b""
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            line = safe_line(text.decode(errors="replace"))
            if end == b"\r":
                # A wrapped line cannot be overwritten.
                self._out.write(f"{fit(line, self._columns - 1)}\x1b[K\r")
            else:
                self._out.write(f"{line}\x1b[K\n")
        self._out.flush()

    def end(self) -> None:
        if self._rest:
            self._out.write(safe_line(self._rest.decode(errors="replace")) + "\x1b[K\n")
            self._rest = b""
        self._out.flush()


def for_stdout() -> Writer:
    """Return the writer for standard output: Safe for a terminal, else Raw."""
    if sys.stdout.isatty():
        return Safe(canvas(sys.stdout), shutil.get_terminal_size().columns)
    return Raw(sys.stdout.buffer)


def show(
    transport: Transport,
    run: str,
    chosen: Iterable[LogPart],
    writer: Writer,
    say: Callable[[str], None],
    *,
    heads: bool,
) -> bool:
    """Write the current logs of some attempts.  Returns False if all are empty."""
    any_shown = False
    for part in chosen:
        is_new = True
        try:
            for data in drive(transport, core.log(run, part)):
                if heads and is_new:
                    writer.head(head(part.step, part.attempt))
                is_new = False
                writer.write(data)
        except CannotRun as error:
            say(_explain_hidden(part.step, error))
        any_shown |= not is_new
        writer.end()
    return any_shown


class LogOutput(NamedTuple):
    """Output of a followed attempt, or a notice `said` about the attempt.

    `is_last` marks the end of its log.
    """

    attempt: LogPosition
    data: bytes = b""
    said: str = ""
    is_last: bool = False


def _is_idle(now: Status, patience_is_over: bool) -> bool:
    """Return True if a run has finished, is paused, or has no worker.

    A queued run counts as idle only after `PATIENCE` seconds.
    """
    is_unclaimed = now.waits is not None and now.waits.kind == WaitKind.SUBMITTER
    is_left = is_unclaimed and (now.state != "QUEUED" or patience_is_over)
    return now.over or is_left or now.state == "PAUSED"


class LogFollower:
    """Follow the logs of a run, or of one step.  A thread reads each attempt; with several logs, only complete lines are written."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        wanted: Callable[[str], bool],
        writer: Writer,
        say: Callable[[str], None],
        *,
        heads: bool,
        node: int = 0,
    ) -> None:
        self._transport, self._run, self._node = transport, run, node
        self._writer, self._say, self._heads = writer, say, heads
        self._attempts = core.Attempts(lambda id, _number: wanted(id))
        self._states: dict[str, str] = {}
        self._is_over = False
        self._waiting: list[LogPosition] = []  # attempts waiting for a free reader
        self._reading: list[LogPosition] = []
        self._printed: queue.SimpleQueue[LogOutput] = queue.SimpleQueue()
        self._rests: dict[tuple[str, int], bytes] = {}  # the unfinished last line of each log
        self._current: LogPosition | None = None

    def follow(self, step: str) -> Status:
        """Write new output until the run or `step` has finished, or the run is paused or has no
        worker.  Returns the last status of the run.
        """
        give_up_at = time.monotonic() + PATIENCE
        while True:
            # Read the status before the events: a finished or abandoned run has stored all its
            # events.
            now: Status = next(drive(self._transport, core.ask(lambda there: there.run(self._run))))
            self._hear()
            step_is_over = step != "" and self._states.get(step) in STEP_FINAL
            if step_is_over or _is_idle(now, time.monotonic() > give_up_at):
                self._finish()
                return now
            end = time.monotonic() + LOOK
            while (left := end - time.monotonic()) > 0:
                self._write_next(left)

    def _finish(self) -> None:
        """Write the remaining output of all attempts."""
        self._is_over = True
        while self._begin_reading():
            self._write_next(POLL)
        self._writer.end()

    def _hear(self) -> None:
        """Read new events and start reading new attempts.

        Logs of finished attempts are written before logs of later attempts.
        """
        attempts = self._attempts
        before = len(attempts.found)
        for event in drive(self._transport, core.events(self._run, attempts.after, False)):
            attempts.take([event])
            if event.subject == "step":
                self._states[event.id] = event.after
        self._write_ended()
        for each in attempts.found[before:]:
            self._waiting.append(each)
            self._begin_reading()
            self._write_ended()

    def _begin_reading(self) -> bool:
        """Start a reader thread for each waiting attempt, up to `READERS`.

        Return True if any attempt is being read.
        """
        while self._waiting and len(self._reading) < READERS:
            self._reading.append(self._waiting.pop(0))
            args = (self._reading[-1],)
            threading.Thread(target=self._read, args=args, daemon=True).start()
        return bool(self._reading)

    def _write_ended(self) -> None:
        """Write output until no finished attempt is still being read."""
        while any(each.ended for each in self._reading):
            self._write_next(POLL)

    def _read(self, attempt: LogPosition) -> None:
        """Read the log of an attempt until the attempt has finished.

        If the stream ends early, because the server stopped, open it again.
        """
        part = LogPart(attempt.step, attempt.number, 0, False, self._node)
        try:
            self._tell_hidden(part, attempt)
            while True:
                was_over = attempt.ended or self._is_over
                part = part._replace(follow=not was_over)
                for data in drive(self._transport, core.log(self._run, part)):
                    self._printed.put(LogOutput(attempt, data))
                    part = part._replace(offset=part.offset + len(data))
                if was_over:
                    break
                time.sleep(POLL)
        except RecipeError as error:
            self._printed.put(LogOutput(attempt, said=f"{readable(attempt.step)}: {error}"))
        finally:
            self._printed.put(LogOutput(attempt, is_last=True))

    def _tell_hidden(self, part: LogPart, attempt: LogPosition) -> None:
        """Report a log that stays hidden until the attempt has finished."""
        try:
            next(drive(self._transport, core.log(self._run, part)), None)
        except CannotRun as error:
            self._printed.put(LogOutput(attempt, said=_explain_hidden(part.step, error)))

    def _write_next(self, patience: float) -> None:
        """Wait up to `patience` seconds for output and write it.

        With several logs, write only complete lines.
        """
        try:
            attempt, data, said, is_last = self._printed.get(timeout=patience)
        except queue.Empty:
            return
        if said:
            self._say(said)
        if is_last:
            self._reading.remove(attempt)
        key = attempt.step, attempt.number
        data = self._rests.pop(key, b"") + data
        # A very long line is not held back until its end.
        may_wait = len(data) < _CHUNK and not is_last
        if self._has_heads and may_wait:
            whole, end, rest = data.rpartition(b"\n")
            self._rests[key] = rest
            data = whole + end
        self._put(attempt, data)

    @property
    def _has_heads(self) -> bool:
        """Return True if each attempt gets a heading."""
        return self._heads or len(self._attempts.found) > 1

    def _put(self, attempt: LogPosition, data: bytes) -> None:
        if not data:
            return
        if attempt is not self._current:
            if self._current is not None:
                self._writer.end()
            if self._has_heads:
                self._writer.head(head(attempt.step, attempt.number))
            self._current = attempt
        self._writer.write(data)


def head(step: str, attempt: int) -> str:
    """Return the heading of the log of an attempt."""
    number = f", attempt {attempt}" if attempt > 1 else ""
    return f"==> {readable(step)}{number} <=="


def _explain_hidden(step: str, error: CannotRun) -> str:
    return f"{readable(step)}: {error}"
