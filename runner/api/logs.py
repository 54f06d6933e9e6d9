"""What the attempts of a run printed: kept logs, and those still being written.

What is kept was masked when it was kept.  A log that is being written was not: it is masked here, by the values that the step's secrets have in this
process's environment, and not shown at all when one of them is not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, overload

from ..agent.regular import descriptor_of
from ..secrets import Masker, Secret, Stream, find_passwords, is_tokenlike
from ..survey.env_files import EnvFiles
from ..survey.rows import StoredStream, is_elsewhere

if TYPE_CHECKING:
    from ..storage.records.runs import Event
    from ..storage.workspace import Workspace

POLL: Final = 0.1
"""Seconds between two looks at a log that is being written."""
_CHUNK: Final = 1 << 18
_NAMED_BY_KEY = re.compile(r"[0-9a-f]{24}-")


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
    pattern: str = ""  # by which its metrics are read from its log

    def known(self, ws: Workspace) -> list[Secret]:
        """What has to be masked while it is being written.  Raises CannotRun when a file cannot be read any more."""
        values = EnvFiles(ws.root).values(self.env_files)
        found = [Secret(name, value) for name, value in values.items() if is_tokenlike(name, value)]
        return [
            *found,
            *find_passwords(values),
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
            raw,
            names,
            paths,
            pattern=str(event.data.get("pattern", "")),
        )
        part = on_node(part, node)
        found.append(part)
        going[event.id] = part
    elif event.before == "RUNNING" and event.id in going:
        going.pop(event.id).ended = True


@overload
def on_node(part: Part, node: int) -> Part: ...
@overload
def on_node(part: Part | None, node: int) -> Part | None: ...
def on_node(part: Part | None, node: int) -> Part | None:
    """Return what an attempt printed on one of its nodes, if it printed on the first."""
    if part is None or not node:
        return part
    return replace(part, raw=f"{part.raw[:-4]}.{node}.log", node=node)


def kept(ws: Workspace, run: str, part: Part) -> Path:
    """Where the log of an attempt is when it is over."""
    return ws.kept_path(run, part.step, part.number, f".{part.node}.log" if part.node else ".log")


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


def tail_of(ws: Workspace, run: str, part: Part) -> Tail | StoredStream | None:
    """None when there is nothing yet, or nothing any more."""
    path = kept(ws, run, part)
    if is_elsewhere(ws, run):
        return StoredStream(ws, run, path.name.removesuffix(".log"), "log")
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
