"""Download files and trees from one host, which is not trusted.

Names are checked before a write, sizes are counted, and every byte is hashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from drivers.base import Unreachable

from ...agent import sparse
from ...agent.neighbours import copy
from ...agent.tree_hash import hash_file
from ...agent.trees import below, remove
from ...errors import Corrupt, DiskFull, Infrastructure
from ...language.units import about
from ...planning.step import MISSING
from ...storage.content.files import Entry, no_space
from ..link.read_range import find_different, hash_chunks
from ..link.wire import (
    MOST,
    TRIES,
    CorruptReply,
    Meter,
    UploadGone,
    Wire,
    parse_digests,
    retry_pause,
)
from .manifests import files_by_path, find_fault, list_folders

LEAST, FILES = 1 << 20, 4096
"""Minimum bytes and maximum files of one request."""


@dataclass(frozen=True, slots=True)
class HashedOutput:
    """The digest and manifest of an output on a host.

    Without `content`, `problem` is the reason, or is empty if the output does not exist.
    """

    content: str = ""
    entries: tuple[Entry, ...] = ()
    """A tree's manifest; for a file, one entry with an empty path."""
    size: int = 0
    problem: str = ""
    kind: str = MISSING
    """The kind of the path, as returned by `agent/outputs.py`."""

    @property
    def is_empty(self) -> bool:
        """Whether the output is an empty file or directory."""
        if not self.content:
            return False
        if self.content[0] == "t":
            return not self.entries
        return not self.size


class _Span(NamedTuple):
    """A missing range of a file."""

    entry: Entry
    start: int
    size: int


class OutputDownload:
    """The download of one file or tree.

    An interrupted download leaves `<target>.coming`.  The next download verifies this data and
    requests only the missing ranges.
    """

    def __init__(
        self, wire: Wire, path: str, output: HashedOutput, target: str, *, near: bool = False
    ) -> None:
        """Prepare the download of `path` on the host.

        With `near`, this machine sees the same path on a shared disk.
        """
        self._wire, self._path, self._output, self._target = wire, path, output, target
        self._is_visible = near
        self._partial = f"{target}.coming"
        self._is_tree = output.content[:1] == "t"
        self._missing = files_by_path(output.entries)
        self._holes: dict[str, list[_Span]] = {}
        self._hashed: dict[str, str] = {}
        """Digests of files that arrived in one piece."""

    async def run(self) -> None:
        """Download and verify all data, and give the file or tree its final name.

        Raises Corrupt if the data changed, DiskFull, Infrastructure.
        """
        fault = find_fault(self._output.entries) if self._is_tree else ""
        if fault:
            raise Corrupt(f"{self._wire.name}: {fault}", fix="check that this is the right host")
        try:
            await self._prepare()
            with self._wire.measure(f"from {self._wire.name}", self._missing_bytes()) as meter:
                await self._download_missing(meter)
            self._finish()
        except OSError as error:
            raise no_space(error, os.fspath(error.filename or self._target)) from error

    async def _download_missing(self, meter: Meter) -> None:
        """Request missing data until all files are correct.

        Gives up after several rounds without progress.
        """
        idle = 0
        while self._missing:
            before = self._measure_missing()
            meter.done = meter.total - self._missing_bytes()
            trouble = await self._run_round(meter)
            await self._check_complete_files()
            idle = 0 if self._measure_missing() < before else idle + 1
            if idle >= TRIES and isinstance(trouble, Unreachable):
                raise trouble
            if idle >= TRIES:
                raise self._changed_error(next(iter(self._missing.values()))) from trouble
            await asyncio.sleep(retry_pause(idle))

    def _missing_bytes(self) -> int:
        """Return the number of missing bytes."""
        return sum(span.size for span in self._list_holes())

    def _list_holes(self) -> Iterator[_Span]:
        """Return the missing ranges of all files."""
        return itertools.chain.from_iterable(self._holes.values())

    def _measure_missing(self) -> int:
        """Return a number that decreases with each received byte and each correct file."""
        return self._missing_bytes() + len(self._missing)

    def _local_path(self, entry: Entry) -> str:
        return f"{self._partial}/{entry.path}" if self._is_tree else self._partial

    def _is_local(self, entry: Entry) -> bool:
        return os.path.lexists(self._local_path(entry))

    async def _prepare(self) -> None:
        """Create the directories, and keep correct data of an earlier download."""
        await asyncio.to_thread(self._clear)
        if self._is_tree:
            os.makedirs(self._partial, exist_ok=True)
            for folder in list_folders(self._output.entries):
                os.makedirs(f"{self._partial}/{folder}", exist_ok=True)
        else:
            os.makedirs(os.path.dirname(self._partial) or ".", exist_ok=True)
        for entry in self._missing.values():
            self._holes[entry.path] = [_Span(entry, 0, entry.size)]
        if self._is_visible:
            await asyncio.to_thread(self._copy_shared)
        existing = [entry for entry in self._missing.values() if self._is_local(entry)]
        await asyncio.gather(*(self._check_file(entry) for entry in existing))
        self._check_disk()

    def _check_disk(self) -> None:
        disk = os.statvfs(os.path.dirname(self._partial) or ".")
        free, needed = disk.f_bavail * disk.f_frsize, self._missing_bytes()
        if needed > free:
            raise DiskFull(
                f"only {about(free)} disk space is free for {self._target}, which requires {about(needed)}",
                fix="free disk space, for example with `recipe gc`",
            )

    def _clear(self) -> None:
        """Delete data of an earlier download that does not belong to this content.

        A training may have deleted or replaced the files.
        """
        if os.path.lexists(self._partial) and os.path.isdir(self._partial) != self._is_tree:
            remove(self._partial)
        if not os.path.isdir(self._partial):
            return
        kinds = dict.fromkeys(list_folders(self._output.entries), "d")
        kinds |= dict.fromkeys(self._missing, "f")
        for path, kind in list(below(self._partial)):
            if kinds.get(path, "") != kind.replace("x", "f"):
                with contextlib.suppress(NotADirectoryError):  # its directory is deleted already
                    remove(f"{self._partial}/{path}")

    def _copy_shared(self) -> None:
        """Copy files from the shared disk.

        They may be shorter or older than the host's files, so they are verified like all others.
        """
        for entry in self._missing.values():
            if not self._is_local(entry):
                with contextlib.suppress(OSError):
                    copy(f"{self._path}/{entry.path}".rstrip("/"), self._local_path(entry))

    async def _check_file(self, entry: Entry) -> None:
        """Verify an existing file and record its missing ranges: none, all, or, for a large file,
        some chunks.
        """
        path = self._local_path(entry)
        size = os.lstat(path).st_size
        if size == entry.size and await asyncio.to_thread(hash_file, path) == entry.value:
            self._mark_correct(entry)
            return
        if entry.size <= self._wire.chunk or size < self._wire.chunk or not os.path.isfile(path):
            os.unlink(path)
            self._holes[entry.path] = [_Span(entry, 0, entry.size)]
            return
        self._holes[entry.path] = await self._find_wrong_chunks(entry, size)

    def _mark_correct(self, entry: Entry) -> None:
        del self._missing[entry.path]
        del self._holes[entry.path]

    async def _find_wrong_chunks(self, entry: Entry, size: int) -> list[_Span]:
        """Return the chunks of a large file that differ on the host.

        `size` is the size of the local file.
        """
        chunk = self._wire.chunk
        folder, name = (self._path, entry.path) if self._is_tree else os.path.split(self._path)
        asking = self._wire.ask("chunks", folder, name, chunk, "", "", 0, read=parse_digests)
        hashing = asyncio.to_thread(hash_chunks, self._local_path(entry), size, chunk)
        try:
            (_, on_host), local = await asyncio.gather(asking, hashing)
        except UploadGone:
            raise self._changed_error(entry) from None
        wrong = find_different(on_host, local)
        if not wrong:  # all chunks are equal, but the whole file has another digest than before
            raise self._changed_error(entry)
        spans: list[_Span] = []
        for number in wrong:
            start = number * chunk
            if start < entry.size:  # the host's file may be longer by now
                spans.append(_Span(entry, start, min(chunk, entry.size - start)))
        return spans

    async def _check_complete_files(self) -> None:
        """Verify the files that are complete now.  For a wrong file, find its wrong ranges."""
        whole = [entry for entry in self._missing.values() if not self._holes[entry.path]]
        hashed = {entry.path: self._hashed.pop(entry.path, "") for entry in whole}

        async def verify(entry: Entry) -> None:
            digest = hashed[entry.path]
            if not digest:  # the file arrived in several pieces
                digest = await asyncio.to_thread(hash_file, self._local_path(entry))
            if digest == entry.value:
                self._mark_correct(entry)
            else:
                await self._check_file(entry)

        await asyncio.gather(*(verify(entry) for entry in whole))

    async def _run_round(self, meter: Meter) -> BaseException | None:
        """Request all missing data once, over several streams.

        Returns the connection error, if any.
        """
        jobs = [partial(self._download_ranges, spans, meter) for spans in self._group_ranges()]
        return await self._wire.run_parallel(jobs, self._missing_bytes())

    def _group_ranges(self) -> list[list[_Span]]:
        """Group the missing ranges into requests, the smallest first.

        A broken connection then costs least.

        Small files are requested together, a large file alone, or on a far host in chunks.
        """
        spans = sorted(self._list_holes(), key=lambda span: span.size)
        missing = self._missing_bytes()
        most = max(LEAST, missing // MOST) if self._wire.is_far else missing
        requests: list[list[_Span]] = []
        room = 0
        for span in spans:
            if self._wire.is_far and span.size > self._wire.chunk:
                requests += [[piece] for piece in self._split(span)]
                continue
            if not requests or span.size > room or len(requests[-1]) == FILES:
                requests.append([])
                room = most
            requests[-1].append(span)
            room -= span.size
        return requests

    def _split(self, span: _Span) -> list[_Span]:
        """Replace a missing range by its chunks, and return these."""
        chunk, end = self._wire.chunk, span.start + span.size
        pieces = [
            span._replace(start=start, size=min(chunk, end - start))
            for start in range(span.start, end, chunk)
        ]
        self._holes[span.entry.path].remove(span)
        self._holes[span.entry.path] += pieces
        return pieces

    async def _download_ranges(self, spans: Sequence[_Span], meter: Meter) -> None:
        """Download the ranges of one request."""
        writer = _RangeWriter([(span, self._local_path(span.entry)) for span in spans])
        if self._is_tree:
            folder = self._path
            wanted = [(span.entry.path, span.start, span.size) for span in spans]
        else:
            folder, name = os.path.split(self._path)
            wanted = [(name, span.start, span.size) for span in spans]
        stream = cast(
            "AsyncGenerator[bytes, None]",
            self._wire.stream("send", folder, wanted, self._wire.is_far),
        )
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    meter.add(len(data))
                    if not writer.write(data):
                        break
        except Infrastructure as error:
            if writer.position == 0:
                raise CorruptReply from error
        finally:
            writer.close()
            for span, received in writer.received:
                self._record_range(span, received)
            self._hashed.update(writer.hashed)

    def _record_range(self, span: _Span, received: int) -> None:
        """Replace a missing range by the part that was not received."""
        holes = self._holes[span.entry.path]
        holes.remove(span)
        if received < span.size:
            holes.append(_Span(span.entry, span.start + received, span.size - received))

    def _changed_error(self, entry: Entry) -> Corrupt:
        path = f"{self._path}/{entry.path}".rstrip("/")
        return Corrupt(
            f"{path} on {self._wire.name} changed after the step finished",
            fix="run the step again",
        )

    def _finish(self) -> None:
        """Create the links, set the modes, and rename the download to its target."""
        for entry in self._output.entries:
            if entry.kind == "l":
                os.symlink(entry.value, f"{self._partial}/{entry.path}")
            elif entry.kind == "x":
                os.chmod(self._local_path(entry), 0o755)  # noqa: S103
        os.rename(self._partial, self._target)


class _RangeWriter:
    """Writes received ranges into files, and hashes files that arrive completely."""

    def __init__(self, wanted: Sequence[tuple[_Span, str]]) -> None:
        self.position = 0
        self.received: list[tuple[_Span, int]] = []
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
        self.received.append((span, span.size - self._left))
        if self._whole and not self._left:
            self.hashed[span.entry.path] = self._hasher.hexdigest()

    def _open(self) -> None:
        if self.position == len(self._wanted):
            return
        span, path = self._wanted[self.position]
        self._hasher, self._whole = hashlib.sha256(), span.size == span.entry.size
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._whole:
            flags |= os.O_TRUNC
        self._handle = os.open(path, flags, 0o644)
        os.lseek(self._handle, span.start, os.SEEK_SET)
        self._left = span.size
