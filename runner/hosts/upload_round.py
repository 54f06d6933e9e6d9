"""One round of sending what is missing of a cargo, on a few streams: small files in tars, large ones in holes that are filled.  Asks for nothing."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from ..storage import tar
from ..storage.files import Changed, Entry
from .read_range import part
from .upload_files import Cargo, grain_of
from .wire import LANE, MOST, CorruptReply, Meter, Wire, words_of

BATCH_BYTES, BATCH_FILES = 96 << 20, 4096
"""What one tar holds at most."""
_PIECE = 2  # grains that travel in one question on a long way
_HOLES = 500  # of a large file in one call
_count = itertools.count(1)


class Courier:
    """To one host."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def round(self, cargo: Cargo, meter: Meter) -> BaseException | None:
        """Send all that is missing once, on a few streams.  Answers what broke the connection, if anything did."""
        return await self._wire.side_by_side(list(self._jobs(cargo, meter)), cargo.owed(grain_of(self._wire)))

    def _jobs(self, cargo: Cargo, meter: Meter) -> Iterator[Callable[[], Awaitable[None]]]:
        """Large files first: what is left at the end should be small.  A manifest that comes with no file keeps nothing waiting."""
        large = [entry for entry in cargo.missing.values() if entry.size > self._wire.chunk]
        small = [entry for entry in cargo.missing.values() if entry.size <= self._wire.chunk]
        bare = cargo.bare
        if large and not small and bare:
            bare = False
            yield lambda: self._batch(cargo, [], True, False, meter)
        for entry in large:
            pieces = _cut(self._holes(cargo, entry), _PIECE, _HOLES)
            if self._wire.far and len(pieces) > 1:
                yield from self._piecemeal(cargo, entry, pieces, meter)
            else:
                yield lambda entry=entry: self._write(cargo, entry, meter)  # type: ignore[misc]
        batches: list[list[Entry]] = [[]]
        size = 0
        together = sum(entry.size for entry in small)
        most = min(BATCH_BYTES, max(LANE, together // MOST)) if self._wire.far else BATCH_BYTES
        for entry in small:
            if size >= most or len(batches[-1]) >= BATCH_FILES:
                batches.append([])
                size = 0
            batches[-1].append(entry)
            size += entry.size
        alone = not large and len(batches) == 1
        for batch in batches:
            if batch or bare:
                last = batch is batches[-1] and bare
                yield lambda batch=batch, last=last: self._batch(cargo, batch, last, alone, meter)  # type: ignore[misc]

    async def _batch(self, cargo: Cargo, batch: Sequence[Entry], last: bool, alone: bool, meter: Meter) -> None:
        """Small files in one tar; with the last ones comes what is no file, and when there are no others, the tree gets its name at once."""
        title = f".manifest-{next(_count)}"
        data = cargo.described()[0] if last else b""
        listing = Entry(title, "f", len(data), hashlib.sha256(data).hexdigest())
        expected = _together([listing, *batch] if last else batch)

        def pieces() -> Iterator[bytes]:
            if last:
                yield tar.member(listing, data)
            if cargo.root:
                yield from tar.tar_stream(cargo.root, [*batch, *(cargo.links if last else ())])
                return
            for entry in batch:
                yield tar.member(entry, _whole(cargo.origin(entry), entry.size))
            yield tar.END

        stamp = cargo.described()[1] if alone and cargo.root and not cargo.rough else ""
        folder = cargo.name if cargo.root else ""
        loose = list(cargo.loose) if alone and not cargo.rough else []
        arguments = (folder, cargo.name, title if last else "", expected, stamp, loose)
        arrived, placed = await self._wire.once(
            "batch", *arguments, read=lambda answer: (str(answer["digest"]), bool(answer["placed"])), data=meter.counted(pieces())
        )
        if arrived != expected:
            raise CorruptReply
        for entry in batch:
            cargo.missing.pop(entry.path, None)
        cargo.bare = cargo.bare and not last
        cargo.placed = placed

    async def _write(self, cargo: Cargo, entry: Entry, meter: Meter) -> None:
        """A large file, or what of it is not there yet, on one stream: it is hashed there while it comes."""
        holes = self._holes(cargo, entry)
        for at in range(0, len(holes), _HOLES):
            await self._put(cargo, entry, holes[at : at + _HOLES], meter, last=at + _HOLES >= len(holes))

    def _piecemeal(
        self, cargo: Cargo, entry: Entry, pieces: Sequence[Sequence[tuple[int, int]]], meter: Meter
    ) -> Iterator[Callable[[], Awaitable[None]]]:
        """The same on as many streams as there are; the stream that brings the last piece has all of it hashed."""
        left = len(pieces)

        async def bring(piece: Sequence[tuple[int, int]]) -> None:
            nonlocal left
            await self._put(cargo, entry, piece, meter, last=False)
            left -= 1
            if not left:
                await self._put(cargo, entry, (), meter, last=True)

        for piece in pieces:
            yield lambda piece=piece: bring(piece)  # type: ignore[misc]

    def _holes(self, cargo: Cargo, entry: Entry) -> Sequence[tuple[int, int]]:
        return cargo.holes.get(entry.path) or [(0, -(-entry.size // grain_of(self._wire)))]

    async def _put(self, cargo: Cargo, entry: Entry, holes: Sequence[tuple[int, int]], meter: Meter, *, last: bool) -> None:
        """Fill some holes of a large file.  The last of it has its mode and its digest.  Raises CorruptReply when that is another."""
        grain, size = grain_of(self._wire), entry.size
        blocks = (part(cargo.origin(entry), size, first * grain, min(count * grain, size - first * grain)) for first, count in holes)
        mode = 0 if not last else 0o555 if entry.kind == "x" else 0o444
        known = cargo.grains.setdefault(entry.path, {})
        grains = [known[at] for at in sorted(known)] if last and len(known) == -(-size // grain) else []
        arguments = (cargo.folder, entry.path, grain, size, mode, holes, grains)
        arrived, came = await self._wire.once(
            "write", *arguments, read=lambda answer: (str(answer[0]), words_of(answer[1])), data=meter.counted(itertools.chain.from_iterable(blocks))
        )
        known.update(zip((at for first, count in holes for at in range(first, first + count)), came, strict=False))
        if last and arrived != entry.value:
            raise CorruptReply
        if last:
            cargo.missing.pop(entry.path, None)
            cargo.holes.pop(entry.path, None)


def _cut(holes: Iterable[tuple[int, int]], grains: int, most: int) -> list[list[tuple[int, int]]]:
    """Holes in pieces of so many grains, and no more than `most` holes."""
    found: list[list[tuple[int, int]]] = []
    room = 0
    for first, count in holes:
        while count:
            if not room or len(found[-1]) == most:
                found.append([])
                room = grains
            some = min(room, count)
            found[-1].append((first, some))
            first, count, room = first + some, count - some, room - some
    return found


def _together(entries: Iterable[Entry]) -> str:
    """The digest of the digests of these files, in this order."""
    return hashlib.sha256(b"".join(entry.value.encode() + b"\n" for entry in entries)).hexdigest()


def _whole(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise Changed(path)
    return data
