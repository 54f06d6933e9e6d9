"""Give out what the steps of a run printed: kept logs, and those still being written, followed by offset.

What is kept was masked when it was kept.  A log that is being written was not: it is masked here, by the values that the step's secrets have in this
process's environment, and not shown at all when one of them is not set.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, TextIO

from ..agent.regular import descriptor_of
from ..planning.ids import readable
from ..secrets import Masker, Secret, Stream, passwords, tokenlike
from ..storage.records.runs import FINAL
from ..survey.env_files import EnvFiles
from ..survey.rows import Rows, is_elsewhere
from .tail import canvas, fit, shown

if TYPE_CHECKING:
    from ..storage.records.runs import Event
    from ..storage.workspace import Workspace

POLL: Final = 0.1
POLL_ELSEWHERE: Final = 0.5
"""Seconds between two looks into a database."""
PATIENCE: Final = 5.0  # seconds for a run that was stored to be claimed by its worker
STEP_FINAL: Final = frozenset({"FRESH", "DONE", "FAILED", "SKIPPED", "BLOCKED", "CANCELLED"})
_CHUNK: Final = 1 << 18
_NAMED_BY_KEY = re.compile(r"[0-9a-f]{24}-")


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


@dataclass(slots=True)
class Part:
    """One attempt of one step, as the events tell it."""

    step: str
    number: int
    raw: str
    secrets: tuple[str, ...]
    env_files: tuple[str, ...] = ()
    ended: bool = False
    node: int = 0

    def known(self, ws: Workspace) -> list[Secret]:
        """What has to be masked while it is being written.  Raises CannotRun when a file cannot be read any more."""
        values = EnvFiles(ws.root).values(self.env_files)
        found = [Secret(name, value) for name, value in values.items() if tokenlike(name, value)]
        return [
            *found,
            *passwords(values),
            *(Secret(name, ws.environ[name]) for name in self.secrets),
        ]


def parts(events: Iterable[Event], node: int = 0) -> list[Part]:
    """The attempts of a run, in the order in which they began: what they printed on one of their nodes."""
    found: list[Part] = []
    going: dict[str, Part] = {}
    for event in events:
        hear(event, found, going, node)
    return found


def hear(event: Event, found: list[Part], going: dict[str, Part], node: int = 0) -> None:
    """Take note of an attempt that an event begins or ends.  `going` are those that run, by step."""
    if event.subject != "step":
        return
    if event.after == "RUNNING" and "log" in event.data:
        number, secrets = event.data.get("attempt"), event.data.get("secrets")
        names = tuple(str(name) for name in secrets) if isinstance(secrets, list) else ()
        files = event.data.get("env_files", ())
        paths = tuple(map(str, files)) if isinstance(files, list) else ()
        raw = str(event.data["log"])
        part = Part(
            event.id,
            number if isinstance(number, int) else 1,
            f"{raw[:-4]}.{node}.log" if node else raw,
            names,
            paths,
            node=node,
        )
        found.append(part)
        going[event.id] = part
    elif event.before == "RUNNING" and event.id in going:
        going.pop(event.id).ended = True


def kept(ws: Workspace, run: str, part: Part) -> Path:
    """Where the log of an attempt is when it is over."""
    return ws.kept(run, part.step, part.number, f".{part.node}.log" if part.node else ".log")


class LogTail(Protocol):
    """One log, read on from where it was read to."""

    def read(self) -> bytes: ...
    def rest(self, write: Callable[[bytes], None]) -> None: ...
    def close(self) -> None: ...


class Tail:
    """One log, read on from where it was read to.  A raw one is held open: that it is moved or removed when its attempt ends loses nothing."""

    def __init__(self, handle: int, masked: Stream) -> None:
        self._handle, self._masked = handle, masked
        self._offset = 0

    def read(self) -> bytes:
        """What is new, at most a part of it."""
        data = os.pread(self._handle, _CHUNK, self._offset)
        self._offset += len(data)
        return self._masked.feed(data) if data else b""

    def rest(self, write: Callable[[bytes], None]) -> None:
        """Everything to the end, and let go of the file."""
        while data := os.pread(self._handle, _CHUNK, self._offset):
            self._offset += len(data)
            write(self._masked.feed(data))
        write(self._masked.end())
        self.close()

    def close(self) -> None:
        """Let go of the file; more than once is fine."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def tail_of(ws: Workspace, run: str, part: Part) -> Tail | Rows | None:
    """None when there is nothing yet, or nothing any more."""
    path = kept(ws, run, part)
    if is_elsewhere(ws, run):
        return Rows(ws, run, path.name.removesuffix(".log"), "log")
    with suppress(FileNotFoundError):
        return Tail(descriptor_of(path), Masker().stream())
    with suppress(OSError):  # a step may have put a pipe in the place of its log
        if not part.ended:
            masker = Masker(part.known(ws))
            return Tail(descriptor_of(_raw(part.raw)), masker.stream())
    return None


def available(tail: LogTail, ended: bool) -> Iterator[bytes]:
    """What is there by now; of a log that is over all to its end."""
    while data := tail.read():
        yield data
    if ended:
        rest: list[bytes] = []
        tail.rest(rest.append)
        yield from rest


def missing(ws: Workspace, run: str, part: Part) -> list[str]:
    """What is not set here, and keeps a log from being shown while it is written.  One that is kept, or comes from elsewhere, is masked already."""
    if part.ended or is_elsewhere(ws, run) or kept(ws, run, part).exists():
        return []
    return unmaskable(ws, part)


def unmaskable(ws: Workspace, part: Part) -> list[str]:
    """The secrets of a log that is being written which cannot be masked here, and the files of them that cannot be read."""
    files = [path for path in part.env_files if any(EnvFiles(ws.root).faults([path]))]
    return [*(name for name in part.secrets if not ws.environ.get(name)), *files]


def _raw(path: str) -> str:
    """The log that a running attempt writes.  One taken over from a worker that died writes on where it began: same key, another name."""
    folder, name = os.path.split(path)
    if not os.path.lexists(path) and _NAMED_BY_KEY.match(name):
        ending = "".join(Path(name).suffixes)  # `.log`, or `.1.log` of another node
        others = [
            f"{folder}/{other}"
            for other in os.listdir(folder)
            if other.startswith(name[:25]) and "".join(Path(other).suffixes) == ending
        ]
        if others:
            return max(others, key=os.path.getmtime)
    return path


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
        self._tails: list[tuple[Part, Tail | Rows]] = []
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

    def _finish(self, part: Part, tail: Tail | Rows) -> None:
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
    return f"{readable(part.step)}: its log is shown when it is over; {', '.join(unset)} is not set here, so it could not be masked"
