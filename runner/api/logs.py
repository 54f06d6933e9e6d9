"""Logs of a run's attempts, both finished and growing.

Finished logs were masked when they were stored. A growing log is masked here with the secret values
in this process's environment. If one of these secrets is unset, the log is not shown.
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
from ..secrets import Masker, Secret, StreamMasker, find_passwords, is_tokenlike
from ..survey.env_files import EnvFiles
from ..survey.rows import StoredStream, is_elsewhere

if TYPE_CHECKING:
    from ..storage.records.runs import Event
    from ..storage.workspace import Workspace

POLL: Final = 0.1
"""Seconds between two reads of a growing log."""
_CHUNK: Final = 1 << 18
_NAMED_BY_KEY = re.compile(r"[0-9a-f]{24}-")


@dataclass(slots=True)
class AttemptLog:
    """The log of one attempt of a step, as described by the events of the run."""

    step: str
    number: int
    raw: str
    secrets: tuple[str, ...]
    env_files: tuple[str, ...] = ()
    ended: bool = False
    node: int = 0
    pattern: str = ""  # regular expression that finds metrics in the log

    def secrets_to_mask(self, ws: Workspace) -> list[Secret]:
        """Return the secrets to mask in a growing log.

        Raises CannotRun if an environment file cannot be read.
        """
        values = EnvFiles(ws.root).values(self.env_files)
        found = [Secret(name, value) for name, value in values.items() if is_tokenlike(name, value)]
        found += find_passwords(values)
        found += [Secret(name, ws.environ[name]) for name in self.secrets]
        return found


def list_attempt_logs(events: Iterable[Event], node: int = 0) -> list[AttemptLog]:
    """List the attempts of a run in start order, with the logs of one node each."""
    found: list[AttemptLog] = []
    going: dict[str, AttemptLog] = {}
    for event in events:
        apply_event(event, found, going, node)
    return found


def apply_event(
    event: Event, found: list[AttemptLog], going: dict[str, AttemptLog], node: int = 0
) -> None:
    """Apply a step event: add the attempt that starts to `found`, or mark an attempt as ended.

    `going` holds the running attempts by step.
    """
    if event.subject != "step":
        return
    if event.after == "RUNNING" and "log" in event.data:
        number = event.data.get("attempt")
        if not isinstance(number, int):
            number = 1
        part = AttemptLog(
            event.id,
            number,
            str(event.data["log"]),
            _texts(event.data.get("secrets")),
            _texts(event.data.get("env_files")),
            pattern=str(event.data.get("pattern", "")),
        )
        part = on_node(part, node)
        found.append(part)
        going[event.id] = part
    elif event.before == "RUNNING" and event.id in going:
        going.pop(event.id).ended = True


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


@overload
def on_node(part: AttemptLog, node: int) -> AttemptLog: ...
@overload
def on_node(part: AttemptLog | None, node: int) -> AttemptLog | None: ...
def on_node(part: AttemptLog | None, node: int) -> AttemptLog | None:
    """Return the log of an attempt on `node`, given its log on the first node."""
    if part is None or not node:
        return part
    return replace(part, raw=f"{part.raw[:-4]}.{node}.log", node=node)


def stored_log_path(ws: Workspace, run: str, part: AttemptLog) -> Path:
    """Return the path of a finished attempt's log."""
    ending = f".{part.node}.log" if part.node else ".log"
    return ws.kept_path(run, part.step, part.number, ending)


class LogTail(Protocol):
    """Interface of a log that is read incrementally."""

    def read(self) -> bytes: ...
    def rest(self, write: Callable[[bytes], None]) -> None: ...
    def close(self) -> None: ...


class Tail:
    """A log file that is read incrementally.

    The file stays open, so moving or deleting it loses no data.
    """

    def __init__(self, handle: int, masked: StreamMasker) -> None:
        self._handle, self._masked = handle, masked
        self._offset = 0

    def read(self) -> bytes:
        """Read new log data, at most one chunk, with secrets masked."""
        data = os.pread(self._handle, _CHUNK, self._offset)
        self._offset += len(data)
        return self._masked.feed(data) if data else b""

    def rest(self, write: Callable[[bytes], None]) -> None:
        """Write the remaining data to `write`, then close the log file."""
        while data := os.pread(self._handle, _CHUNK, self._offset):
            self._offset += len(data)
            write(self._masked.feed(data))
        write(self._masked.end())
        self.close()

    def close(self) -> None:
        """Close the log file. Further calls have no effect."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def open_tail(ws: Workspace, run: str, part: AttemptLog) -> Tail | StoredStream | None:
    """Open the log of an attempt. None if the log does not exist yet, or no longer."""
    path = stored_log_path(ws, run, part)
    if is_elsewhere(ws, run):
        return StoredStream(ws, run, path.name.removesuffix(".log"), "log")
    with suppress(FileNotFoundError):
        return Tail(descriptor_of(path), Masker().stream())
    with suppress(OSError):  # a step may have replaced its log with a pipe
        if not part.ended:
            masker = Masker(part.secrets_to_mask(ws))
            return Tail(descriptor_of(_find_running_log(part.raw)), masker.stream())
    return None


def read_available(tail: LogTail, ended: bool) -> Iterator[bytes]:
    """Yield the currently available data of a log.

    For a finished attempt, yield the data up to the end.
    """
    while data := tail.read():
        yield data
    if ended:
        rest: list[bytes] = []
        tail.rest(rest.append)
        yield from rest


def find_missing_secrets(ws: Workspace, run: str, part: AttemptLog) -> list[str]:
    """Return the unset secrets and unreadable environment files that prevent showing a growing log.

    Empty for stored logs, which are masked already.
    """
    if part.ended or is_elsewhere(ws, run):
        return []
    if stored_log_path(ws, run, part).exists():
        return []
    return find_unmaskable(ws, part)


def find_unmaskable(ws: Workspace, part: AttemptLog) -> list[str]:
    """Return an attempt's unset secrets and unreadable environment files."""
    unset = [name for name in part.secrets if not ws.environ.get(name)]
    unreadable = [path for path in part.env_files if any(EnvFiles(ws.root).faults([path]))]
    return [*unset, *unreadable]


def _find_running_log(path: str) -> str:
    """Return the path of a running attempt's log file.

    If another worker took over the attempt, its log has the same cache key and another name.
    """
    folder, name = os.path.split(path)
    if not os.path.lexists(path) and _NAMED_BY_KEY.match(name):
        ending = "".join(Path(name).suffixes)  # `.log`, or `.1.log` of another node
        others = []
        for other in os.listdir(folder):
            if other.startswith(name[:25]) and "".join(Path(other).suffixes) == ending:
                others.append(f"{folder}/{other}")
        if others:
            return max(others, key=os.path.getmtime)
    return path
