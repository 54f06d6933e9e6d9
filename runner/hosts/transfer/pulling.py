"""Let a host download an input from a bucket directly.

The host receives a signed URL per object, and returns the digest of each.

The result becomes an object on the host under the name of its content, which is computed here as
for any directory.  The data does not pass through this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

from drivers.base import DriverError

from ...agent.tree_hash import sort_rows
from ...errors import CannotRun, Corrupt, Infrastructure, RecipeError
from ...secrets import Secret
from ...storage.content import files
from ...storage.content.files import Content, Entry
from ...storage.signed import Item, SignedObjects, opens
from ..link.wire import CorruptReply, Meter, UploadGone, ignore_answer
from .manifests import is_digest, object_name, tree_stamp
from .upload import Sender

BATCH, BATCH_BYTES = 500, 100_000_000_000
"""Maximum objects and bytes per batch of signed URLs: a URL is signed shortly before its use."""
WORDS = 200
"""Maximum characters of a host's error message."""
LINE = 1 << 16
"""Maximum bytes of one line of a host's answer."""


class CannotPull(Exception):
    """The host cannot download the input; the message follows "goes through this machine"."""


class Puller:
    """Downloads from buckets to one host.

    `sender` uses the same wire, and finds interrupted downloads.
    """

    def __init__(self, sender: Sender) -> None:
        self._wire, self._sender = sender.wire, sender

    async def pull(
        self, source: SignedObjects, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        """Download an input to the host as an object.

        Returns its content, which equals `known` if that is set; `learn` receives new secrets.

        Raises CannotPull, Unreachable, Infrastructure if the host's disk is full, and CannotRun if
        the bucket's object has changed.
        """
        with self._sender.protect_uploads():
            await self._sender.resume_transfer(source.name)
            try:
                content = await self._pull(source, known, learn)
            except (CannotPull, CannotRun, Corrupt, UploadGone) as error:
                with contextlib.suppress(DriverError, RecipeError):  # delete the useless data
                    await self._wire.ask(
                        "remove",
                        [f"{self._wire.root}/partial/{self._wire.sender}/{source.name}"],
                        read=ignore_answer,
                    )
                if isinstance(error, (CannotPull, CannotRun)):
                    raise
                raise CannotPull(
                    str(error) or "the downloaded file disappeared on the host"
                ) from error
        return content

    async def _pull(
        self, source: SignedObjects, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        digests = await self._download_all(source, learn)
        entries = sort_rows(
            [Entry(item.path, "f", item.size, digests[item.path]) for item in source.items]
        )
        content = files.tree_id(entries) if source.folder else Content(f"f:{entries[0].value}")
        if known not in ("", content):
            raise CannotPull("the object changed in the bucket under the same version")
        if not await asyncio.to_thread(source.confirm):
            raise CannotPull("cannot check whether the object in the bucket is unchanged")
        stamp = tree_stamp(entries) if source.folder else ""
        try:
            is_named = await self._wire.ask(
                "settle", source.name, object_name(content), stamp, read=bool
            )
        except UploadGone:
            is_named = False
        # The answer to an earlier request may have been lost: then the object exists already.
        if not is_named and content not in await self._sender.find_existing((content,)):
            raise CannotPull("the host received other bytes than requested")
        return content

    async def _download_all(
        self, source: SignedObjects, learn: Callable[[Sequence[Secret]], None]
    ) -> dict[str, str]:
        """Let the host download all objects of an input; return their digests by path."""
        digests: dict[str, str] = {}
        what = f"from {source.address} to {self._wire.name}"
        with self._wire.measure(what, source.size) as meter:
            finished = 0  # bytes of the finished batches
            for batch in _batches(source.items):
                meter.done = finished
                await self._wire.retry(
                    partial(self._download_batch, source, batch, finished, digests, meter, learn)
                )
                finished += sum(item.size for item in batch)
        return digests

    async def _download_batch(
        self,
        source: SignedObjects,
        batch: Sequence[Item],
        finished: int,
        digests: dict[str, str],
        meter: Meter,
        learn: Callable[[Sequence[Secret]], None],
    ) -> None:
        """Download the objects of a batch without a known digest, and add their digests to
        `digests`.
        """
        remaining = {item.path: item for item in batch if item.path not in digests}
        if not remaining:
            return
        try:
            addresses = await asyncio.to_thread(source.addresses, list(remaining.values()))
        except Exception as error:  # any error of the bucket's client
            raise CannotPull(
                f"cannot create signed URLs for its objects ({type(error).__name__})"
            ) from error
        learn(opens(addresses))
        rows = []
        for item, address in zip(remaining.values(), addresses, strict=True):
            rows.append((*item, address))
        finished += sum(item.size for item in batch if item.path in digests)
        report = _PullReport(remaining, digests, meter, finished)
        try:
            async with contextlib.aclosing(
                self._wire.stream("pull", source.name, rows, source.size)
            ) as stream:  # type: ignore[type-var]
                async for data in stream:
                    report.read(data)
        except (IndexError, TypeError, ValueError, RecursionError) as error:
            raise CorruptReply from error
        except Infrastructure as error:
            raise CannotPull(str(error)) from error
        if report.free >= 0:
            raise self._wire.disk_full_error(report.free, source.size)
        if report.problem:
            raise CannotPull(report.problem)
        if remaining.keys() - digests.keys():
            raise CorruptReply


class _PullReport:
    """The JSON lines that a host prints while it downloads the `wanted` objects of a batch.

    The digests of finished objects go into `digests`.  `finished` are the bytes before this
    download.
    """

    def __init__(
        self, wanted: Container[str], digests: dict[str, str], meter: Meter, finished: int
    ) -> None:
        self._wanted, self._digests, self._meter, self._finished = wanted, digests, meter, finished
        self._rest = b""  # the incomplete last line
        self.problem = ""
        """The host's error message."""
        self.free = -1
        """Free bytes of the host's disk if it is full; otherwise -1."""

    def read(self, data: bytes) -> None:
        """Parse received data.

        Raises CorruptReply, IndexError, TypeError, ValueError and RecursionError for invalid lines.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            kind, *values = json.loads(line)
            self._read_line(kind, values)
        if len(self._rest) > LINE:
            raise CorruptReply

    def _read_line(self, kind: object, values: Sequence[Any]) -> None:
        if kind == "bytes":
            self._meter.done = self._finished
            self._meter.add(max(0, int(values[0])))
        elif kind == "file":
            self._record_digest(values[0], values[1])
        elif kind == "full":
            self.free = max(0, int(values[0]))
        elif kind == "problem":
            text = str(values[0])[:WORDS]
            self.problem = "".join(filter(str.isprintable, text))
        else:
            raise CorruptReply

    def _record_digest(self, path: str, digest: str) -> None:
        if path not in self._wanted or not is_digest(digest):
            raise CorruptReply
        self._digests[path] = digest


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.size
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
