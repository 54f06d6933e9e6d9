"""Brings files and trees home from one host, which is not trusted: names are checked before anything is written, sizes counted, every byte hashed.

Knows what is to come by its digests, not who asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import cast

from drivers.base import Unreachable

from ..errors import Corrupt, Infrastructure
from ..language.units import about
from ..storage.files import Entry, no_space
from .manifests import folders, untrusted
from .read_range import BLOCK, chunks, digest
from .wire import TRIES, Garbled, Gone, Meter, Wire, chunks_told, rest


@dataclass(frozen=True, slots=True)
class Taken:
    """What an output is.  `content` is empty when there is none: then `problem` says why, or it is empty too and nothing lies there."""

    content: str = ""
    entries: tuple[Entry, ...] = ()
    """A tree's manifest; of a file one entry with an empty path."""
    size: int = 0
    problem: str = ""


class Fetch:
    """One file or tree on its way home."""

    def __init__(self, wire: Wire, chunk: int, path: str, taken: Taken, target: str) -> None:
        self._wire, self._chunk, self._path, self._taken, self._target = wire, chunk, path, taken, target
        self._near = f"{target}.coming"
        self._tree = taken.content[:1] == "t"
        wanted = sorted(taken.entries, key=lambda entry: entry.size)  # the small ones first: a cut costs least
        self._missing = [entry for entry in wanted if entry.kind in "fx"]

    async def run(self) -> None:
        if self._tree and (trouble := untrusted(self._taken.entries)):
            raise Corrupt(f"{self._wire.name}: {trouble}", fix="look at who that host is")
        try:
            self._begin()
            with self._wire.measured(f"from {self._wire.name}", sum(entry.size for entry in self._missing)) as meter:
                await self._all(meter)
            self._finish()
        except OSError as error:
            raise no_space(error, os.fspath(error.filename or self._target)) from error

    async def _all(self, meter: Meter) -> None:
        idle = 0
        while self._missing:
            owed = self._owed()
            meter.done = meter.total - owed
            trouble: Exception | None = None
            try:
                await self._round(meter)
            except (Unreachable, Garbled) as error:
                trouble = error
            idle = 0 if self._owed() < owed else idle + 1
            if idle >= TRIES and isinstance(trouble, Unreachable):
                raise trouble
            if idle >= TRIES:
                raise self._changed(self._missing[0]) from trouble
            await asyncio.sleep(rest(idle))

    def _owed(self) -> int:
        """Bytes that are still to come, and a little for each file so that an empty one counts."""
        return sum(entry.size - self._there(entry) + 1 for entry in self._missing)

    def _there(self, entry: Entry) -> int:
        try:
            return os.lstat(self._at(entry)).st_size
        except FileNotFoundError:
            return 0

    def _at(self, entry: Entry) -> str:
        return f"{self._near}/{entry.path}" if self._tree else self._near

    def _begin(self) -> None:
        """Make the folders; what an earlier try brought is kept when it is right, and a large file goes on where that stopped."""
        if self._tree:
            os.makedirs(self._near, exist_ok=True)
            for folder in folders(self._taken.entries):
                os.makedirs(f"{self._near}/{folder}", exist_ok=True)
        elif parent := os.path.dirname(self._near):
            os.makedirs(parent, exist_ok=True)
        self._missing = [entry for entry in self._missing if not self._right(entry)]
        free = os.statvfs(os.path.dirname(self._near) or ".")
        if (needed := self._owed()) > free.f_bavail * free.f_frsize:
            have = about(free.f_bavail * free.f_frsize)
            raise Infrastructure(
                f"there is {have} free here for {self._target}, which needs {about(needed)}", fix="free some space, or run `recipe gc`"
            )

    def _right(self, entry: Entry) -> bool:
        """Whether a file is here whole.  One that is wrong goes, and so does a part of a small one."""
        if not os.path.lexists(self._at(entry)):
            return False
        size = self._there(entry)
        if size == entry.size and digest(self._at(entry)) == entry.value:
            return True
        if size >= entry.size or size < self._chunk:
            os.unlink(self._at(entry))
        return False

    async def _round(self, meter: Meter) -> None:
        """Ask once for all that is missing, first for the file of which a part is here."""
        missing = sorted(self._missing, key=lambda entry: -self._there(entry))
        offset = self._there(missing[0])
        sink = _Sink([(entry, self._at(entry)) for entry in missing], offset)
        if self._tree:
            folder, wanted = self._path, [entry.path for entry in missing]
        else:
            folder, wanted = os.path.split(self._path)[0], [os.path.basename(self._path)]
        stream = cast("AsyncGenerator[bytes, None]", self._wire.stream("send", folder, wanted, offset))
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    meter.add(len(data))
                    if not sink.feed(data):
                        break
        except Infrastructure as error:
            if sink.position == 0:
                raise Garbled from error
        finally:
            sink.close()
            self._missing = [entry for entry in missing if entry.path not in sink.done]
            for entry in self._missing:
                if self._there(entry) < self._chunk or (entry.path in sink.wrong and entry.size <= self._chunk):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._at(entry))
        for entry in [entry for entry in self._missing if entry.path in sink.wrong and entry.size > self._chunk]:
            await self._repair(entry)

    async def _repair(self, entry: Entry) -> None:
        """Fetch the chunks of a large file again that are not as they are there."""
        near = self._at(entry)
        folder, name = (self._path, entry.path) if self._tree else os.path.split(self._path)
        asked = self._wire.ask("chunks", folder, name, self._chunk, "", 0, read=chunks_told)
        try:
            (_, theirs), ours = await asyncio.gather(asked, asyncio.to_thread(chunks, near, entry.size, self._chunk))
        except Gone:
            raise self._changed(entry) from None
        for at, (here, there) in enumerate(zip(ours, theirs, strict=False)):
            if here != there:
                _, data = await self._wire.read("read", f"{folder}/{name}", at * self._chunk, self._chunk)
                _patch(near, at * self._chunk, data)
        if not self._right(entry):
            raise self._changed(entry)
        self._missing.remove(entry)

    def _changed(self, entry: Entry) -> Corrupt:
        path = f"{self._path}/{entry.path}".rstrip("/")
        return Corrupt(f"{path} of {self._wire.name} is not what it was when the step ended", fix="run the step again")

    def _finish(self) -> None:
        for entry in self._taken.entries:
            if entry.kind == "l":
                with contextlib.suppress(FileExistsError):
                    os.symlink(entry.value, f"{self._near}/{entry.path}")
            elif entry.kind == "x":
                os.chmod(self._at(entry), 0o755)  # noqa: S103
        os.rename(self._near, self._target)


class _Sink:
    """Bytes that come one file after the other, into files, hashed on the way."""

    def __init__(self, wanted: Sequence[tuple[Entry, str]], offset: int) -> None:
        self.done: set[str] = set()
        self.wrong: set[str] = set()
        self.position = 0
        self._wanted = wanted
        self._handle = -1
        self._left = 0
        self._open(offset)

    def feed(self, data: bytes) -> bool:
        """Take what came.  False when more comes than there should: whoever says that is not to be listened to."""
        view = memoryview(data)
        while self.position < len(self._wanted):
            piece = view[: self._left]
            self._hasher.update(piece)
            view = view[len(piece) :]
            self._left -= len(piece)
            while piece:
                piece = piece[os.write(self._handle, piece) :]
            if self._left:
                return True
            entry = self._wanted[self.position][0]
            (self.done if self._hasher.hexdigest() == entry.value else self.wrong).add(entry.path)
            self.position += 1
            self._open(0)
        return not view

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _open(self, offset: int) -> None:
        self.close()
        if self.position == len(self._wanted):
            return
        entry, path = self._wanted[self.position]
        self._hasher = hashlib.sha256()
        if offset:
            with open(path, "rb") as file:
                while data := file.read(BLOCK):
                    self._hasher.update(data)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if offset else os.O_TRUNC), 0o644)
        self._left = entry.size - offset


def _patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
