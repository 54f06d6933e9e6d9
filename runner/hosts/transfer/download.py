"""Download files and trees from one host, which is not trusted.

Names are checked before a write, sizes are counted, and every byte is hashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from drivers.base import Unreachable

from ...agent import sparse
from ...agent.neighbours import copy
from ...agent.trees import below, digest_of, remove
from ...errors import Corrupt, DiskFull, Infrastructure
from ...language.units import about
from ...storage.content.files import Entry, no_space
from ..link.read_range import hash_chunks
from ..link.wire import MOST, TRIES, CorruptReply, Gone, Meter, Wire, parse_digests, retry_pause
from .manifests import find_fault, list_folders

LEAST, FILES = 1 << 20, 4096
"""Minimum bytes and maximum files of one request."""


@dataclass(frozen=True, slots=True)
class HashedOutput:
    """The digest and manifest of an output.  Without `content`, `problem` is the reason, or is empty if the output does not exist."""

    content: str = ""
    entries: tuple[Entry, ...] = ()
    """A tree's manifest; for a file, one entry with an empty path."""
    size: int = 0
    problem: str = ""


class _Span(NamedTuple):
    """A missing range of a file."""

    entry: Entry
    start: int
    size: int


class OutputDownload:
    """The download of one file or tree.

    `holes` are the missing ranges of files.  An interrupted download leaves files with holes.
    """

    def __init__(
        self, wire: Wire, path: str, taken: HashedOutput, target: str, *, near: bool = False
    ) -> None:
        """Create a download.  With `near`, the path on the host is also visible on this machine."""
        self._wire, self._path, self._taken, self._target = wire, path, taken, target
        self._seen = near
        self._near = f"{target}.coming"
        self._tree = taken.content[:1] == "t"
        self._missing = {entry.path: entry for entry in taken.entries if entry.kind in "fx"}
        self._holes: dict[str, list[_Span]] = {}
        self._hashed: dict[str, str] = {}
        """Digests of files that arrived in one piece."""

    async def run(self) -> None:
        if self._tree and (trouble := find_fault(self._taken.entries)):
            raise Corrupt(f"{self._wire.name}: {trouble}", fix="check that this is the right host")
        try:
            await self._prepare()
            with self._wire.measure(f"from {self._wire.name}", self._missing_bytes()) as meter:
                await self._download_missing(meter)
            self._finish()
        except OSError as error:
            raise no_space(error, os.fspath(error.filename or self._target)) from error

    async def _download_missing(self, meter: Meter) -> None:
        idle = 0
        while self._missing:
            owed = self._missing_bytes() + len(self._missing)
            meter.done = meter.total - self._missing_bytes()
            trouble: BaseException | None = await self._run_round(meter)
            await self._check_complete_files()
            idle = 0 if self._missing_bytes() + len(self._missing) < owed else idle + 1
            if idle >= TRIES and isinstance(trouble, Unreachable):
                raise trouble
            if idle >= TRIES:
                raise self._changed_error(next(iter(self._missing.values()))) from trouble
            await asyncio.sleep(retry_pause(idle))

    def _missing_bytes(self) -> int:
        """Return the number of missing bytes."""
        return sum(span.size for spans in self._holes.values() for span in spans)

    def _local_path(self, entry: Entry) -> str:
        return f"{self._near}/{entry.path}" if self._tree else self._near

    async def _prepare(self) -> None:
        """Create the directories, and keep correct data of an earlier download."""
        await asyncio.to_thread(self._clear)
        if self._tree:
            os.makedirs(self._near, exist_ok=True)
            for folder in list_folders(self._taken.entries):
                os.makedirs(f"{self._near}/{folder}", exist_ok=True)
        elif parent := os.path.dirname(self._near):
            os.makedirs(parent, exist_ok=True)
        for entry in self._missing.values():
            self._holes[entry.path] = [_Span(entry, 0, entry.size)]
        if self._seen:
            await asyncio.to_thread(self._copy_shared)
        here = [
            entry for entry in self._missing.values() if os.path.lexists(self._local_path(entry))
        ]
        await asyncio.gather(*(self._check_file(entry) for entry in here))
        free = os.statvfs(os.path.dirname(self._near) or ".")
        if (needed := self._missing_bytes()) > free.f_bavail * free.f_frsize:
            have = about(free.f_bavail * free.f_frsize)
            raise DiskFull(
                f"only {have} disk space is free for {self._target}, which requires {about(needed)}",
                fix="free disk space, for example with `recipe gc`",
            )

    def _clear(self) -> None:
        """Delete data of an earlier download that does not belong to this content.

        A training may have deleted or replaced the files.
        """
        if os.path.lexists(self._near) and os.path.isdir(self._near) != self._tree:
            remove(self._near)
        if not os.path.isdir(self._near):
            return
        kinds = dict.fromkeys(list_folders(self._taken.entries), "d") | {
            path: "f" for path in self._missing
        }
        for path, kind in list(below(self._near)):
            if kinds.get(path, "") != kind.replace("x", "f"):
                with contextlib.suppress(NotADirectoryError):  # its directory is deleted already
                    remove(f"{self._near}/{path}")

    def _copy_shared(self) -> None:
        """Copy files from the shared disk.  They may be shorter or older than the host's files, so they are verified like all others."""
        for entry in self._missing.values():
            if not os.path.lexists(self._local_path(entry)):
                with contextlib.suppress(OSError):
                    copy(f"{self._path}/{entry.path}".rstrip("/"), self._local_path(entry))

    async def _check_file(self, entry: Entry) -> None:
        """Verify an existing file and record its missing ranges: none, all, or, for a large file, some chunks."""
        near = self._local_path(entry)
        size = os.lstat(near).st_size
        if size == entry.size and await asyncio.to_thread(digest_of, near) == entry.value:
            del self._missing[entry.path]
            del self._holes[entry.path]
            return
        if entry.size <= self._wire.chunk or size < self._wire.chunk or not os.path.isfile(near):
            os.unlink(near)
            self._holes[entry.path] = [_Span(entry, 0, entry.size)]
            return
        folder, name = (self._path, entry.path) if self._tree else os.path.split(self._path)
        asked = self._wire.ask(
            "chunks", folder, name, self._wire.chunk, "", "", 0, read=parse_digests
        )
        try:
            (_, theirs), ours = await asyncio.gather(
                asked, asyncio.to_thread(hash_chunks, near, size, self._wire.chunk)
            )
        except Gone:
            raise self._changed_error(entry) from None
        wrong = [at for at, there in enumerate(theirs) if at >= len(ours) or ours[at] != there]
        if not wrong:
            raise self._changed_error(entry)
        starts = [at * self._wire.chunk for at in wrong if at * self._wire.chunk < entry.size]
        self._holes[entry.path] = [
            _Span(entry, start, min(self._wire.chunk, entry.size - start)) for start in starts
        ]

    async def _check_complete_files(self) -> None:
        """Verify the files that are complete now.  For a wrong file, find its wrong ranges."""
        whole = [entry for entry in self._missing.values() if not self._holes[entry.path]]
        hashed = {entry.path: self._hashed.pop(entry.path, "") for entry in whole}

        async def judge(entry: Entry) -> None:
            if (
                hashed[entry.path] or await asyncio.to_thread(digest_of, self._local_path(entry))
            ) == entry.value:
                del self._missing[entry.path]
                del self._holes[entry.path]
            else:
                await self._check_file(entry)

        await asyncio.gather(*(judge(entry) for entry in whole))

    async def _run_round(self, meter: Meter) -> BaseException | None:
        """Request all missing data once, over several streams.  Returns the connection error, if any."""
        jobs = [partial(self._download_ranges, spans, meter) for spans in self._group_ranges()]
        return await self._wire.run_parallel(jobs, self._missing_bytes())

    def _group_ranges(self) -> list[list[_Span]]:
        """Group the missing ranges into requests, the smallest first.

        A broken connection then costs least.

        Small files are requested together, a large file alone, or on a far host in chunks.
        """
        spans = sorted(
            (span for spans in self._holes.values() for span in spans), key=lambda span: span.size
        )
        most = (
            max(LEAST, self._missing_bytes() // MOST)
            if self._wire.is_far
            else self._missing_bytes()
        )
        found: list[list[_Span]] = []
        room = 0
        for span in spans:
            if self._wire.is_far and span.size > self._wire.chunk:
                self._holes[span.entry.path].remove(span)
                cut = [
                    span._replace(start=at, size=min(self._wire.chunk, span.start + span.size - at))
                    for at in _chunk_starts(span, self._wire.chunk)
                ]
                self._holes[span.entry.path] += cut
                found += [[each] for each in cut]
                continue
            if not found or span.size > room or len(found[-1]) == FILES:
                found.append([])
                room = most
            found[-1].append(span)
            room -= span.size
        return found

    async def _download_ranges(self, spans: Sequence[_Span], meter: Meter) -> None:
        """Download the ranges of one request."""
        sink = _RangeWriter([(span, self._local_path(span.entry)) for span in spans])
        folder = self._path if self._tree else os.path.split(self._path)[0]
        wanted = [
            (span.entry.path if self._tree else os.path.basename(self._path), span.start, span.size)
            for span in spans
        ]
        stream = cast(
            "AsyncGenerator[bytes, None]",
            self._wire.stream("send", folder, wanted, self._wire.is_far),
        )
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    meter.add(len(data))
                    if not sink.write(data):
                        break
        except Infrastructure as error:
            if sink.position == 0:
                raise CorruptReply from error
        finally:
            sink.close()
            for span, came in sink.came:
                self._record_range(span, came)
            self._hashed.update(sink.hashed)

    def _record_range(self, span: _Span, came: int) -> None:
        """Record the received bytes of a range."""
        holes = self._holes[span.entry.path]
        holes.remove(span)
        if came < span.size:
            holes.append(_Span(span.entry, span.start + came, span.size - came))

    def _changed_error(self, entry: Entry) -> Corrupt:
        path = f"{self._path}/{entry.path}".rstrip("/")
        return Corrupt(
            f"{path} on {self._wire.name} changed after the step finished",
            fix="run the step again",
        )

    def _finish(self) -> None:
        for entry in self._taken.entries:
            if entry.kind == "l":
                os.symlink(entry.value, f"{self._near}/{entry.path}")
            elif entry.kind == "x":
                os.chmod(self._local_path(entry), 0o755)  # noqa: S103
        os.rename(self._near, self._target)


class _RangeWriter:
    """Writes received ranges into files, and hashes files that arrive completely."""

    def __init__(self, wanted: Sequence[tuple[_Span, str]]) -> None:
        self.position = 0
        self.came: list[tuple[_Span, int]] = []
        self.hashed: dict[str, str] = {}
        self._wanted = wanted
        self._handle = -1
        self._left = 0
        self._open()

    def write(self, data: bytes) -> bool:
        """Write received data.  False if the host sends more bytes than announced."""
        view = memoryview(data)
        while self.position < len(self._wanted):
            piece = view[: self._left]
            if self._whole:
                self._hasher.update(piece)
            view = view[len(piece) :]
            self._left -= len(piece)
            sparse.write(self._handle, piece)
            if self._left:
                return True
            span, _ = self._wanted[self.position]
            sparse.extend(self._handle, span.start + span.size)
            self.close()
            self.position += 1
            self._open()
        return not view

    def close(self) -> None:
        """Close the current range."""
        if self._handle < 0:
            return
        os.close(self._handle)
        self._handle = -1
        span, _ = self._wanted[self.position]
        self.came.append((span, span.size - self._left))
        if self._whole and not self._left:
            self.hashed[span.entry.path] = self._hasher.hexdigest()

    def _open(self) -> None:
        if self.position == len(self._wanted):
            return
        span, path = self._wanted[self.position]
        self._hasher, self._whole = hashlib.sha256(), span.size == span.entry.size
        self._handle = os.open(
            path,
            os.O_WRONLY
            | os.O_CREAT
            | os.O_NOFOLLOW
            | os.O_CLOEXEC
            | (os.O_TRUNC if self._whole else 0),
            0o644,
        )
        os.lseek(self._handle, span.start, os.SEEK_SET)
        self._left = span.size


def _chunk_starts(span: _Span, chunk: int) -> range:
    return range(span.start, span.start + span.size, chunk)
