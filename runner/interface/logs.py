"""Shows what the steps of a run printed, at once or followed, in a terminal or a pipe."""

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
from .handle.core import Attempt
from .handle.shells import carry_out
from .handle.transport import LogPart
from .tail import canvas, fit, safe_line

if TYPE_CHECKING:
    from ..api.values import Status
    from .handle.transport import Transport

LOOK: Final = 0.5
"""Seconds between two looks at how a run stands."""
READERS: Final = 12
"""Attempts that are read at once: a server lets a token follow 20 things."""
PATIENCE: Final = 5.0  # seconds for a run that was stored to be claimed by its worker
STEP_FINAL: Final = frozenset({"FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"})
_CHUNK: Final = 1 << 18


class Writer(Protocol):
    """Takes bytes of one log after another."""

    def head(self, text: str) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...


class Raw:
    """For a pipe or a file: bytes as they are."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._open_line = False

    def head(self, text: str) -> None:
        self._out.write(
            (b"\n" if self._open_line else b"") + text.encode("utf-8", "surrogateescape") + b"\n"
        )
        self._open_line = False

    def write(self, data: bytes) -> None:
        if data:
            self._out.write(data)
            self._out.flush()
            self._open_line = not data.endswith(b"\n")

    def end(self) -> None:
        self._out.flush()


class Safe:
    """For a terminal: nothing that a step printed acts on it, but a line that was written over is written over here too."""

    def __init__(self, out: TextIO, columns: int) -> None:
        self._out, self._columns = out, columns
        self._rest = b""

    def head(self, text: str) -> None:
        self.end()
        self._out.write(f"{safe_line(text)}\n")

    def write(self, data: bytes) -> None:
        pieces = re.split(rb"(\r?\n|\r)", self._rest + data)
        self._rest = pieces.pop()
        if len(self._rest) > 1 << 16:  # no end of the line in sight
            pieces += [self._rest, b"\n"]
            self._rest = b""
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            line = safe_line(text.decode(errors="replace"))
            self._out.write(
                f"{fit(line, self._columns - 1)}\x1b[K\r" if end == b"\r" else f"{line}\x1b[K\n"
            )
        self._out.flush()

    def end(self) -> None:
        if self._rest:
            self._out.write(safe_line(self._rest.decode(errors="replace")) + "\x1b[K\n")
            self._rest = b""
        self._out.flush()


def for_stdout() -> Writer:
    """What suits standard output."""
    return (
        Safe(canvas(sys.stdout), shutil.get_terminal_size().columns)
        if sys.stdout.isatty()
        else Raw(sys.stdout.buffer)
    )


def show(
    place: Transport,
    run: str,
    chosen: Iterable[LogPart],
    writer: Writer,
    say: Callable[[str], None],
    *,
    heads: bool,
) -> bool:
    """Write what these attempts have printed so far; False when that is nothing."""
    any_shown = False
    for part in chosen:
        is_new = True
        try:
            for data in carry_out(place, core.log(run, part)):
                if heads and is_new:
                    writer.head(head(part.step, part.attempt))
                is_new = False
                writer.write(data)
        except CannotRun as error:
            say(_explain_hidden(part.step, error))
        any_shown |= not is_new
        writer.end()
    return any_shown


class Printed(NamedTuple):
    """What a followed attempt printed next, or what is to be said of it; `is_last`: nothing more comes."""

    attempt: Attempt
    data: bytes = b""
    said: str = ""
    is_last: bool = False


class Follower:
    """Follows the attempts of a run until it is over, or one step of it.  Each attempt is read by a thread; lines of several come whole."""

    def __init__(
        self,
        place: Transport,
        run: str,
        wanted: Callable[[str], bool],
        writer: Writer,
        say: Callable[[str], None],
        *,
        heads: bool,
        node: int = 0,
    ) -> None:
        self._place, self._run, self._wanted, self._node = place, run, wanted, node
        self._writer, self._say, self._heads = writer, say, heads
        self._found: list[Attempt] = []
        self._going: dict[str, Attempt] = {}
        self._states: dict[str, str] = {}
        self._seen = 0
        self._is_over = False
        self._waiting: list[Attempt] = []  # to be read
        self._reading: list[Attempt] = []
        self._printed: queue.SimpleQueue[Printed] = queue.SimpleQueue()
        self._rests: dict[tuple[str, int], bytes] = {}  # of each log: a line that has not ended
        self._current: Attempt | None = None

    def follow(self, step: str) -> Status:
        """Write what comes until the run is over, or `step` is; answers how the run stands then: it may have lost its worker, or be paused."""
        give_up_at = time.monotonic() + PATIENCE
        while True:
            # In this order: what is over, or is left, has stored all events before.
            now: Status = next(carry_out(self._place, core.ask(lambda there: there.run(self._run))))
            self._hear()
            is_unclaimed = now.waits is not None and now.waits.kind == WaitKind.SUBMITTER
            is_left = is_unclaimed and (now.state != "QUEUED" or time.monotonic() > give_up_at)
            step_is_over = step != "" and self._states.get(step) in STEP_FINAL
            if now.over or is_left or now.state == "PAUSED" or step_is_over:
                self._is_over = True
                while self._begin_reading():
                    self._write_next(POLL)
                self._writer.end()
                return now
            end = time.monotonic() + LOOK
            while (left := end - time.monotonic()) > 0:
                self._write_next(left)

    def _hear(self) -> None:
        """Take note of what happened.  What has ended is written to its end before what began after it."""
        before = len(self._found)
        for event in carry_out(self._place, core.events(self._run, self._seen, False)):
            self._seen = event.seq
            core.hear(event, self._found, self._going, lambda id, _number: self._wanted(id))
            if event.subject == "step":
                self._states[event.id] = event.after
        self._write_ended()
        for each in self._found[before:]:
            self._waiting.append(each)
            self._begin_reading()
            self._write_ended()

    def _begin_reading(self) -> bool:
        """Read the next attempts, each in a thread; whether any is read."""
        while self._waiting and len(self._reading) < READERS:
            self._reading.append(self._waiting.pop(0))
            args = (self._reading[-1],)
            threading.Thread(target=self._read, args=args, daemon=True).start()
        return bool(self._reading)

    def _write_ended(self) -> None:
        """Write what the attempts printed that are read, and have ended."""
        while any(each.ended for each in self._reading):
            self._write_next(POLL)

    def _read(self, attempt: Attempt) -> None:
        """Hand on what an attempt prints, to its end.  A stream may end before, because its server does."""
        part = LogPart(attempt.step, attempt.number, 0, False, self._node)
        try:
            self._tell_hidden(part, attempt)
            while True:
                was_over = attempt.ended or self._is_over
                part = part._replace(follow=not was_over)
                for data in carry_out(self._place, core.log(self._run, part)):
                    self._printed.put(Printed(attempt, data))
                    part = part._replace(offset=part.offset + len(data))
                if was_over:
                    break
                time.sleep(POLL)
        except RecipeError as error:
            self._printed.put(Printed(attempt, said=f"{readable(attempt.step)}: {error}"))
        finally:
            self._printed.put(Printed(attempt, is_last=True))

    def _tell_hidden(self, part: LogPart, attempt: Attempt) -> None:
        """Say it where the log is not shown before it is over."""
        try:
            next(carry_out(self._place, core.log(self._run, part)), None)
        except CannotRun as error:
            self._printed.put(Printed(attempt, said=_explain_hidden(part.step, error)))

    def _write_next(self, patience: float) -> None:
        """Write the next that an attempt prints, within so many seconds.  Of several logs whole lines, so that no other cuts in."""
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
        if self._has_heads and len(data) < _CHUNK and not is_last:
            whole, end, rest = data.rpartition(b"\n")
            self._rests[key] = rest
            data = whole + end
        self._put(attempt, data)

    @property
    def _has_heads(self) -> bool:
        """Whether each attempt gets a head, as where there are several."""
        return self._heads or len(self._found) > 1

    def _put(self, attempt: Attempt, data: bytes) -> None:
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
    """The line above what an attempt printed."""
    return f"==> {readable(step)}" + (f", attempt {attempt}" if attempt > 1 else "") + " <=="


def _explain_hidden(step: str, error: CannotRun) -> str:
    return f"{readable(step)}: {error}"
