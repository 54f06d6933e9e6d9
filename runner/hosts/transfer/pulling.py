"""Let a host download an input from a bucket directly.

The host receives a signed URL per object, and returns the digest of each.

The result becomes an object on the host under the name of its content, which is computed here as for any directory.  The data does not pass through
this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from drivers.base import DriverError

from ...errors import CannotRun, Corrupt, Infrastructure, RecipeError
from ...secrets import Secret
from ...storage.content import files
from ...storage.content.files import Content, Entry
from ...storage.signed import Item, Signed, opens
from ..link.wire import CorruptReply, Gone, Meter, ignore_answer
from .manifests import HEX, object_name, tree_stamp
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
    """Downloads from buckets to one host.  `sender` uses the same wire, and finds interrupted downloads."""

    def __init__(self, sender: Sender) -> None:
        self._wire, self._sender = sender.wire, sender

    async def pull(
        self, source: Signed, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        """Download an input to the host as an object.  Returns its content, which equals `known` if that is set; `learn` receives new secrets.

        Raises Passed, Unreachable, Infrastructure if the host's disk is full, and CannotRun if the bucket's object has changed.
        """
        with self._sender.protect_uploads():
            await self._sender.resume_transfer(source.name)
            try:
                content = await self._pull(source, known, learn)
            except (CannotPull, CannotRun, Corrupt, Gone) as error:
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
        self, source: Signed, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        digests: dict[str, str] = {}
        with self._wire.measure(
            f"from {source.address} to {self._wire.name}", source.size
        ) as meter:
            done = 0
            for batch in _batches(source.items):
                meter.done = done
                await self._wire.retry(
                    partial(self._download_batch, source, batch, done, digests, meter, learn)
                )
                done += sum(item.size for item in batch)
        entries = files.sort(
            [Entry(item.path, "f", item.size, digests[item.path]) for item in source.items]
        )
        content = files.tree_id(entries) if source.folder else Content(f"f:{entries[0].value}")
        if known not in ("", content):
            raise CannotPull("the object changed in the bucket under the same version")
        if not await asyncio.to_thread(source.confirm):
            raise CannotPull("cannot check whether the object in the bucket is unchanged")
        try:
            placed = await self._wire.ask(
                "settle",
                source.name,
                object_name(content),
                tree_stamp(entries) if source.folder else "",
                read=bool,
            )
        except Gone:
            placed = False
        if not placed and content not in await self._sender.find_existing(
            (content,)
        ):  # otherwise the answer to an earlier attempt was lost
            raise CannotPull("the host received other bytes than requested")
        return content

    async def _download_batch(
        self,
        source: Signed,
        batch: Sequence[Item],
        done: int,
        digests: dict[str, str],
        meter: Meter,
        learn: Callable[[Sequence[Secret]], None],
    ) -> None:
        """Download the objects of a batch without a known digest."""
        left = {item.path: item for item in batch if item.path not in digests}
        if not left:
            return
        try:
            addresses = await asyncio.to_thread(source.addresses, list(left.values()))
        except Exception as error:  # any error of the bucket's client
            raise CannotPull(
                f"cannot create signed URLs for its objects ({type(error).__name__})"
            ) from error
        learn(opens(addresses))
        rows = [(*item, address) for item, address in zip(left.values(), addresses, strict=True)]
        before = done + sum(item.size for item in batch if item.path in digests)
        problem, held, free = "", b"", -1
        try:
            async with contextlib.aclosing(
                self._wire.stream("pull", source.name, rows, source.size)
            ) as stream:  # type: ignore[type-var]
                async for data in stream:
                    *lines, held = (held + data).split(b"\n")
                    for kind, *words in map(json.loads, lines):
                        if kind == "bytes":
                            meter.done = before
                            meter.add(max(0, int(words[0])))
                        elif (
                            kind == "file"
                            and words[0] in left
                            and len(words[1]) == 64
                            and HEX.issuperset(words[1])
                        ):
                            digests[words[0]] = words[1]
                        elif kind == "full":
                            free = max(0, int(words[0]))
                        elif kind == "problem":
                            problem = "".join(
                                letter for letter in str(words[0])[:WORDS] if letter.isprintable()
                            )
                        else:
                            raise CorruptReply
                    if len(held) > LINE:
                        raise CorruptReply
        except (IndexError, TypeError, ValueError, RecursionError) as error:
            raise CorruptReply from error
        except Infrastructure as error:
            raise CannotPull(str(error)) from error
        if free >= 0:
            raise self._wire.disk_full_error(free, source.size)
        if problem:
            raise CannotPull(problem)
        if left.keys() - digests.keys():
            raise CorruptReply


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
