"""Shows what the steps of a run printed, at once or followed, in a terminal or a pipe."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, TextIO

from ..api.logs import POLL, Part, Tail, hear, missing, tail_of
from ..planning.ids import readable
from ..storage.records.runs import FINAL
from ..survey.rows import StoredStream, is_elsewhere
from .tail import canvas, fit, shown

if TYPE_CHECKING:
    from ..storage.workspace import Workspace

POLL_ELSEWHERE: Final = 0.5
"""Seconds between two looks into a database."""
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
        self._out.write(f"{shown(text)}\n")

    def write(self, data: bytes) -> None:
        pieces = re.split(rb"(\r?\n|\r)", self._rest + data)
        self._rest = pieces.pop()
        if len(self._rest) > 1 << 16:  # no end of the line in sight
            pieces += [self._rest, b"\n"]
            self._rest = b""
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            line = shown(text.decode(errors="replace"))
            self._out.write(
                f"{fit(line, self._columns - 1)}\x1b[K\r" if end == b"\r" else f"{line}\x1b[K\n"
            )
        self._out.flush()

    def end(self) -> None:
        if self._rest:
            self._out.write(shown(self._rest.decode(errors="replace")) + "\x1b[K\n")
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
    ws: Workspace,
    run: str,
    chosen: Collection[Part],
    writer: Writer,
    say: Callable[[str], None],
    *,
    heads: bool,
) -> bool:
    """Write what these attempts have printed so far; False when that is nothing."""
    any_shown = False
    for part in chosen:
        if unset := missing(ws, run, part):
            say(_hidden(part, unset))
            continue
        tail = tail_of(ws, run, part)
        if tail is None:
            continue
        any_shown = True
        if heads:
            writer.head(head(part.step, part.number))
        tail.rest(writer.write)
        writer.end()
    return any_shown


class Follower:
    """Follows the attempts of a run until it is over, or one step of it."""

    def __init__(
        self,
        ws: Workspace,
        run: str,
        wanted: Callable[[str], bool],
        writer: Writer,
        say: Callable[[str], None],
        *,
        heads: bool,
        node: int = 0,
    ) -> None:
        self._node = node
        self._ws, self._run, self._wanted, self._writer, self._say, self._heads = (
            ws,
            run,
            wanted,
            writer,
            say,
            heads,
        )
        self._found: list[Part] = []
        self._running: dict[str, Part] = {}
        self._states: dict[str, str] = {}
        self._waiting: list[Part] = []  # begun, and their logs not opened yet
        self._tails: list[tuple[Part, Tail | StoredStream]] = []
        self._elsewhere = is_elsewhere(ws, run)
        self._seen = 0
        self._hidden: set[str] = set()
        self._rests: dict[str, bytes] = {}  # of each log: a line that has not ended
        self._current: Part | None = None

    def follow(self, step: str | None) -> bool:
        """Write what comes until the run is final, or `step` is (True); False when its worker died before that."""
        give_up_at = time.monotonic() + PATIENCE
        while True:
            # In this order: who is final or dead has stored all events before.
            live, row = self._ws.store.runs.live(self._run), self._ws.store.runs.get(self._run)
            state, queued = (
                row.state,
                row.due is not None and row.state in ("QUEUED", "ACTIVE"),
            )  # a worker will take it
            self._hear()
            moved = self._turn()
            dead = (
                not live
                and not queued
                and state not in FINAL
                and (state != "QUEUED" or time.monotonic() > give_up_at)
            )
            if (
                state in FINAL
                or dead
                or (step is not None and not self._tails and self._states.get(step) in STEP_FINAL)
            ):
                for part, tail in self._tails:
                    self._finish(part, tail)
                self._writer.end()
                return not dead
            if not moved:
                time.sleep(POLL_ELSEWHERE if self._elsewhere else POLL)

    def _hear(self) -> None:
        before = len(self._found)
        for event in self._ws.store.runs.events(self._run, self._seen):
            self._seen = event.seq
            hear(event, self._found, self._running, self._node)
            if event.subject == "step":
                self._states[event.id] = event.after
        self._waiting += [part for part in self._found[before:] if self._wanted(part.step)]

    def _turn(self) -> bool:
        """One look at every log; True when something was new."""
        self._waiting = [part for part in self._waiting if not self._opened(part)]
        moved = False
        open_still = []
        for part, tail in self._tails:
            if part.ended:
                self._finish(part, tail)
                moved = True
                continue
            open_still.append((part, tail))
            if data := tail.read():
                self._write(part, data)
                moved = True
        self._tails = open_still
        return moved

    def _opened(self, part: Part) -> bool:
        """Whether there is no need to try again."""
        if unset := missing(self._ws, self._run, part):
            if part.raw not in self._hidden:
                self._hidden.add(part.raw)
                self._say(_hidden(part, unset))
            return False
        tail = tail_of(self._ws, self._run, part)
        if tail is not None:
            self._tails.append((part, tail))
        return tail is not None or part.ended

    def _finish(self, part: Part, tail: Tail | StoredStream) -> None:
        tail.rest(lambda data: self._write(part, data))
        self._put(part, self._rests.pop(part.raw, b""))

    def _write(self, part: Part, data: bytes) -> None:
        """Of several logs whole lines, so that no other cuts in."""
        data = self._rests.pop(part.raw, b"") + data
        if self._heads and len(data) < _CHUNK:
            whole, end, rest = data.rpartition(b"\n")
            self._rests[part.raw] = rest
            data = whole + end
        self._put(part, data)

    def _put(self, part: Part, data: bytes) -> None:
        if not data:
            return
        if part is not self._current:
            if self._current is not None:
                self._writer.end()
            if self._heads:
                self._writer.head(head(part.step, part.number))
            self._current = part
        self._writer.write(data)


def head(step: str, attempt: int) -> str:
    """The line above what an attempt printed."""
    return f"==> {readable(step)}" + (f", attempt {attempt}" if attempt > 1 else "") + " <=="


def _hidden(part: Part, unset: Sequence[str]) -> str:
    return f"{readable(part.step)}: the log is hidden until the step finishes: {', '.join(unset)} is not set here, so the secret cannot be masked"
