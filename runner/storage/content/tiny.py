"""Tiny files, stored as table rows in the transaction of their trace.

A separate file would cost more.

Until that transaction, each is a record in a log below `partial/`. After a kill, the next process
takes over the log.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from ..crash import crashpoint
from .disk import Disk, fail, raise_changed
from .files import Content

TINY = 4 << 10
"""Maximum size of a tiny file in bytes. Up to this size, a row is cheaper than a file."""
RECENT = 8 << 20
"""Maximum bytes of small files cached in memory."""
_LOG = ".tiny"  # suffix of the logs of tiny contents


class Table(Protocol):
    """Protocol of the table of tiny files and their last storage times.

    Times are in seconds since the epoch.
    """

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        """Return the bytes of the given tiny files that are in the table."""

    def tinies(self) -> dict[Content, float]:
        """Return all content ids in the table and their storage times."""

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete and return the given contents that were last stored before the time `before`."""


class TinyContents:
    """Store of tiny files below `root`.

    Without a table, only recently used small files are cached.
    """

    def __init__(self, root: str, disk: Disk, table: Table | None) -> None:
        self._root, self._disk, self._table = root, disk, table
        self._tiny: dict[Content, bytes] = {}  # not stored in the table yet
        self._lock = (
            threading.Lock()
        )  # large outputs are stored in another thread, which may add tiny contents too
        self._logs: list[str] = []  # logs of these contents
        self._log = -1  # descriptor of this process's open log, or -1
        self._rows: set[Content] = set()  # known to be in the table
        self._recent: dict[
            str, bytes
        ] = {}  # recently stored small contents, which the next step will read
        self._recent_size = 0

    def is_known(self, content: Content) -> bool:
        """Return True if the content is known to be in the table, without a query."""
        return content in self._rows

    def recent(self, content: Content) -> bytes | None:
        """Return the bytes of a recently stored small file, or None."""
        return self._recent.get(content[2:])

    def all(self) -> dict[Content, float]:
        """Return all contents in the table and their storage times in seconds since the epoch."""
        return self._table.tinies() if self._table is not None else {}

    def forget(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete contents that were last stored before the time `before`, and return them."""
        gone = self._table.forget_tiny(contents, before) if self._table is not None else set()
        for content in gone:
            self._rows.discard(content)
            self._recent.pop(content[2:], None)
        return gone

    def remember(self, path: str, found: os.stat_result) -> Content | None:
        """Store the plain file at `path` as a tiny file, leaving the original in place.

        Returns None if the file is not suitable.

        `found` is the file's status.
        """
        if self._table is None or found.st_size > TINY:
            return None
        # A hard link or a read-only file may be the file of another object.
        if found.st_nlink != 1 or not found.st_mode & stat.S_IWUSR:
            return None
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(TINY + 1)
        except OSError as error:
            fail(path, error)
        if len(data) != found.st_size:
            raise_changed(path)
        kind = "x" if found.st_mode & stat.S_IXUSR else "f"
        content = Content(f"{kind}:{hashlib.sha256(data).hexdigest()}")
        with self._lock:
            self._write_log(content, data)
            self._tiny[content] = data
        self._rows.add(content)
        self.keep_recent(content, data)
        crashpoint("object-put")
        return content

    def take_unstored(self) -> tuple[dict[Content, bytes], list[str]]:
        """Return the new tiny files since the last call, and their logs.

        The caller stores the contents with their trace, and deletes the logs afterwards.
        """
        with self._lock:
            tiny, self._tiny = self._tiny, {}
            logs, self._logs = self._logs, []
            if self._log >= 0:
                os.close(self._log)
                self._log = -1
        return tiny, logs

    def inherit(self) -> None:
        """Take over the logged tiny files of killed processes."""
        for path in self._tiny_logs():
            maker = os.path.basename(path).split("-")[0]
            if not os.path.exists(f"/proc/{maker}"):
                for content, data in _records(path):
                    self._tiny[content] = data
                self._logs.append(path)

    def _write_log(self, content: Content, data: bytes) -> None:
        record = b"%s %d\n%s\n" % (content.encode(), len(data), data)
        try:
            if self._log < 0:
                self._logs.append(f"{self._disk.temporary()}{_LOG}")
                self._log = os.open(
                    self._logs[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                )
            if os.write(self._log, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._logs[-1])
        except OSError as error:
            fail(f"{self._root}/partial", error)

    def _read_logged(self, content: Content) -> bytes | None:
        """Return the bytes of a content from the logs of all processes, dead or alive."""
        for path in self._tiny_logs():
            for name, data in _records(path):
                if name == content:
                    return data
        return None

    def _tiny_logs(self) -> list[str]:
        folder = f"{self._root}/partial"
        if not os.path.isdir(folder):
            return []
        return [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(_LOG)]

    def expect(self, contents: Sequence[Content]) -> None:
        """Prefetch the tiny files among these contents in one query."""
        if self._table is not None:
            for content, data in self._table.tiny(contents).items():
                if hashlib.sha256(data).hexdigest() == content[2:]:
                    self._rows.add(content)
                    self.keep_recent(content, data)

    def keep_recent(self, content: Content, data: bytes) -> None:
        """Cache the bytes of a small file in memory."""
        if self._recent_size > RECENT:
            self._recent.clear()
            self._recent_size = 0
        self._recent[content[2:]] = data
        self._recent_size += len(data) + 200

    def row(self, content: Content) -> bytes | None:
        """Return the verified bytes of a tiny file, from memory, a log or the table.

        Return None if the content is unknown.
        """
        data = self._tiny.get(content)
        if data is None and content in self._rows:
            data = self._recent.get(content[2:])
        if data is not None or self._table is None or content[0] == "t":
            return data
        # Another process may move a content from its log to the table between two lookups, so
        # the table is read twice.
        for look in (self._read_stored, self._read_logged, self._read_stored):
            data = look(content)
            if data is not None:
                return data
        return None

    def _read_stored(self, content: Content) -> bytes | None:
        """Return the verified bytes of a content in the table, or None."""
        if self._table is None:
            return None
        data = self._table.tiny([content]).get(content)
        if data is None or hashlib.sha256(data).hexdigest() != content[2:]:
            return None
        return data


def _records(log: str) -> Iterator[tuple[Content, bytes]]:
    """Yield the intact records of a log, up to the first damaged record."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        while head := _parse_head(file.readline()):
            content, size = head
            data = file.read(size)
            if hashlib.sha256(data).hexdigest() != content[2:] or file.read(1) != b"\n":
                return
            yield content, data


def _parse_head(line: bytes) -> tuple[Content, int] | None:
    """Return the content id and the size that begin a record; None if they are damaged."""
    words = line.split()
    if len(words) != 2 or not words[1].isdigit():
        return None
    size = int(words[1])
    if size > TINY:
        return None
    return Content(words[0].decode("ascii", "replace")), size
