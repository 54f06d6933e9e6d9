"""Contents of a few bytes: rows of a table, stored together with the trace that names them.  Making a file of one costs more than the rest.

Until then each is a record in a log below `partial/`, so that after a kill the next process knows it for ours, and takes it over.
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
"""Bytes; up to it a row costs less than a file."""
RECENT = 8 << 20
"""Bytes of small contents kept in memory."""
_LOG = ".tiny"  # how logs of tiny contents end


class Table(Protocol):
    """Where the rows are: contents by their names, and when each was stored last, in seconds since the epoch."""

    def tiny(self, contents: Sequence[Content]) -> dict[Content, bytes]:
        """Those of them that are there."""

    def tinies(self) -> dict[Content, float]:
        """All that are there."""

    def forget_tiny(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete those of them that were stored last before then, and say which."""


class TinyContents:
    """The tiny contents of a store below `root`.  Without a table there are none; small ones that were read lately are remembered all the same."""

    def __init__(self, root: str, disk: Disk, table: Table | None) -> None:
        self._root, self._disk, self._table = root, disk, table
        self._tiny: dict[Content, bytes] = {}  # not stored yet
        self._lock = (
            threading.Lock()
        )  # large outputs are taken in a thread, tiny ones beside them, too
        self._logs: list[str] = []  # where those are written meanwhile
        self._log = -1  # descriptor of the last of them, if it is ours and open
        self._rows: set[Content] = set()  # known to be in the table
        self._recent: dict[
            str, bytes
        ] = {}  # small contents that were taken lately: the next step will ask for them
        self._recent_size = 0

    def is_known(self, content: Content) -> bool:
        """Whether it was seen here, without looking for it."""
        return content in self._rows

    def recent(self, content: Content) -> bytes | None:
        """The bytes of a small content that was taken lately."""
        return self._recent.get(content[2:])

    def all(self) -> dict[Content, float]:
        """Those in the table, and when each was put there last: seconds since the epoch."""
        return self._table.tinies() if self._table is not None else {}

    def forget(self, contents: Sequence[Content], before: float) -> set[Content]:
        """Delete those that were put there last before then: which."""
        gone = self._table.forget_tiny(contents, before) if self._table is not None else set()
        for content in gone:
            self._rows.discard(content)
            self._recent.pop(content[2:], None)
        return gone

    def remember(self, path: str, found: os.stat_result) -> Content | None:
        """What the plain file at `path` is, if it is so small that its bytes are remembered, and it stays where it is:.

        `found` is what the file system says of it.
        """
        if (
            self._table is None
            or found.st_size > TINY
            or found.st_nlink != 1
            or not found.st_mode & stat.S_IWUSR
        ):
            return None
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read(TINY + 1)
        except OSError as error:
            fail(path, error)
        if len(data) != found.st_size:
            raise_changed(path)
        content = Content(
            f"{'x' if found.st_mode & stat.S_IXUSR else 'f'}:{hashlib.sha256(data).hexdigest()}"
        )
        with self._lock:
            self._write_log(content, data)
            self._tiny[content] = data
        self._rows.add(content)
        self.keep_recent(content, data)
        crashpoint("object-put")
        return content

    def take_unstored(self) -> tuple[dict[Content, bytes], list[str]]:
        """The tiny contents that came since the last call, to be stored with the first mention of them, and the logs to be deleted after that."""
        with self._lock:
            tiny, self._tiny = self._tiny, {}
            logs, self._logs = self._logs, []
            if self._log >= 0:
                os.close(self._log)
                self._log = -1
        return tiny, logs

    def inherit(self) -> None:
        """Take over the tiny contents that a process had when it was killed."""
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
        """What a process, alive or dead, has written down of a content and not stored yet."""
        return next(
            (
                data
                for path in self._tiny_logs()
                for name, data in _records(path)
                if name == content
            ),
            None,
        )

    def _tiny_logs(self) -> list[str]:
        folder = f"{self._root}/partial"
        return (
            [f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(_LOG)]
            if os.path.isdir(folder)
            else []
        )

    def expect(self, contents: Sequence[Content]) -> None:
        """These will be asked for: read in one go what is tiny of them."""
        if self._table is not None:
            for content, data in self._table.tiny(contents).items():
                if hashlib.sha256(data).hexdigest() == content[2:]:
                    self._rows.add(content)
                    self.keep_recent(content, data)

    def keep_recent(self, content: Content, data: bytes) -> None:
        """These bytes will be asked for soon."""
        if self._recent_size > RECENT:
            self._recent.clear()
            self._recent_size = 0
        self._recent[content[2:]] = data
        self._recent_size += len(data) + 200

    def row(self, content: Content) -> bytes | None:
        """The bytes of a tiny content that are in the table, or will be, if they are sound."""
        data = self._tiny.get(content) or (
            self._recent.get(content[2:]) if content in self._rows else None
        )
        if data is None and self._table is not None and content[0] != "t":
            # another process stores what its log has, and deletes the log: between our two looks, unless there is a third
            for look in (self._read_stored, self._read_logged, self._read_stored):
                if (data := look(content)) is not None:
                    break
        return data

    def _read_stored(self, content: Content) -> bytes | None:
        """What the table has of a content, if it is sound."""
        data = self._table.tiny([content]).get(content) if self._table is not None else None
        return (
            data if data is not None and hashlib.sha256(data).hexdigest() == content[2:] else None
        )


def _records(log: str) -> Iterator[tuple[Content, bytes]]:
    """The sound records of a log of tiny contents; it ends where the first is damaged."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        while (
            len(words := file.readline().split()) == 2
            and words[1].isdigit()
            and int(words[1]) <= TINY
        ):
            data = file.read(int(words[1]))
            content = Content(words[0].decode("ascii", "replace"))
            if hashlib.sha256(data).hexdigest() != content[2:] or file.read(1) != b"\n":
                return
            yield content, data
