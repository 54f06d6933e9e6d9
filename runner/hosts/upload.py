"""Sends contents to one host: what is not there yet, and again what did not arrive.  Knows manifests and chunks, not who needs them.

What travels is compared with what lies there: a tree builds on the likest one, a large file on its own chunks or on those of the likest.  A
connection that breaks costs what was under way: the host is asked what it has, and that is kept.  Everything is hashed there before it gets the name
of its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drivers.base import DriverError, Unreachable

from ..errors import Corrupt, Infrastructure
from ..retry import backoff, retry_async
from ..storage import files, tar
from ..storage.files import Changed, Entry
from .cargo import Cargo, Older
from .likeness import Likeness
from .manifests import folders, name_of, place_of
from .read_range import chunks, digest, part
from .wire import LANE, MOST, TRIES, Garbled, Gone, Meter, Wire, chunks_told, nothing, process, rest, started, words_of

CHUNK = 8 << 20
"""Bytes: smaller files travel together, larger ones are compared and sent again in pieces of this size."""
BATCH_BYTES, BATCH_FILES = 96 << 20, 4096
"""What one tar holds at most."""
_GRAINS = 4  # of a chunk: pieces in which a large file is compared, and sent again
_PIECE = 2  # grains that travel in one question on a long way
_HOLES = 500  # of a large file in one call
_SIGN = 120.0  # seconds between two signs of life: after ten minutes without any, what came is somebody else's
_count = itertools.count(1)
_sending: set[str] = set()  # those of this process that are sending now


class Sender:
    """Sends to one host.  `recall` answers the manifest of a tree that the host may have, when somebody here remembers it."""

    def __init__(self, wire: Wire, recall: Callable[[str], Sequence[Entry] | None]) -> None:
        self.chunk = CHUNK
        self._wire, self._likeness = wire, Likeness(wire, recall)
        self._turns: dict[str, asyncio.Lock] = {}

    @property
    def _grain(self) -> int:
        return max(1, self.chunk // _GRAINS)

    async def have(self, contents: Collection[str]) -> set[str]:
        """Those that are there and may be used unread: they were hashed in this boot, and nothing has written to them since."""
        if not contents:
            return set()
        known = {name_of(content): content for content in contents}
        return {known[name] for name in await self._wire.ask("have", list(known), read=words_of) if name in known}

    async def send(self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]] | None = None) -> None:
        """See to it that these contents lie there: content -> a path here that holds it.  Trees whose manifest is not given are read for it."""
        async with contextlib.AsyncExitStack() as turns:
            for content in sorted(sources):  # in one order, so that nobody waits for somebody who waits for him
                await turns.enter_async_context(self._turns.setdefault(content, asyncio.Lock()))
            _sending.add(self._wire.sender)
            turns.callback(_sending.discard, self._wire.sender)
            turns.callback(asyncio.create_task(self._live()).cancel)
            try:
                await retry_async(lambda: self._send(sources, manifests or {}), backoff(Gone, TRIES, 0.0, 0.0))
            except Gone:
                fix = f"see who deletes files below {self._wire.root}"
                raise Infrastructure(f"{self._wire.name}: what is being sent disappears there", fix=fix) from None

    async def _live(self) -> None:
        """Be heard of there while a large file is under way."""
        while True:
            await asyncio.sleep(_SIGN)
            with contextlib.suppress(DriverError, Infrastructure, Corrupt):  # those who send will hear of it
                await self._wire.ask("free", read=nothing)

    async def _send(self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]]) -> None:
        known = {name_of(content): content for content in sources}
        standing = await self._begin(known)
        todo = {known[name]: how for name, how in standing.how.items() if how != "here"}
        if not todo:
            return
        doubtful = {content for content, how in todo.items() if how == "doubtful"}
        cargoes = [await self._tree(content, sources[content], manifests, here=content in doubtful) for content in todo if content[0] == "t"]
        loose = [content for content in todo if content[0] != "t"]
        for content in doubtful & set(loose):
            cargoes.append(self._files({content: sources[content]}, here=True))
        if rest := [content for content in loose if content not in doubtful]:
            cargoes.append(self._files({content: sources[content] for content in rest}, here=False))
        began = {content for content, how in todo.items() if how == "partial"}
        for cargo in cargoes:
            await self._prepare(cargo, standing, began, doubtful)
        if (needed := sum(cargo.needs() for cargo in cargoes)) > standing.free:
            raise self._wire.full(standing.free, needed)
        with self._wire.measured(f"to {self._wire.name}", sum(map(self._owed, cargoes))) as meter:
            for cargo in cargoes:
                await self._deliver(cargo, meter)
                await self._place(cargo, meter)

    def _owed(self, cargo: Cargo) -> int:
        return cargo.owed(self._grain)

    async def _begin(self, wanted: Collection[str]) -> _Standing:
        standing = await self._wire.ask("begin", list(wanted), read=_standing)
        if standing.how.keys() != set(wanted):
            raise Corrupt(f"{self._wire.name} answers something else than it was asked", fix="look at who that host is")
        for sender, theirs in standing.theirs.items():
            if sender in standing.silent or _dead(sender):
                standing.how.update({name: "partial" for name in await self._wire.ask("adopt", sender, theirs, read=words_of)})
        return standing

    async def _tree(self, content: str, source: str, manifests: Mapping[str, Sequence[Entry]], *, here: bool) -> Cargo:
        manifest = manifests.get(content)
        if manifest is None:
            manifest = self._likeness.recall(content)
        if manifest is None:
            manifest = await asyncio.to_thread(files.entries, source)
        if files.tree_id(manifest) != content:
            raise Changed(source)
        name = name_of(content)
        folder = place_of(content) if here else f"partial/{self._wire.sender}/{name}"
        size = sum(entry.size for entry in manifest if entry.kind in "fx")
        cargo = Cargo(name, folder, size, lambda entry: f"{source}/{entry.path}", source, content, manifest)
        cargo.missing = {entry.path: entry for entry in manifest if entry.kind in "fx"}
        cargo.links = [entry for entry in manifest if entry.kind in "ld"]
        cargo.bare = True
        return cargo

    def _files(self, sources: Mapping[str, str], *, here: bool) -> Cargo:
        origins = {name_of(content): source for content, source in sources.items()}
        some = next(iter(sources))
        folder = os.path.dirname(place_of(some)) if here else f"partial/{self._wire.sender}"
        cargo = Cargo(name_of(some), folder, 0, lambda entry: origins[entry.path], content=some if here else "")
        for content, source in sources.items():
            try:
                size = os.stat(source).st_size
            except OSError as error:
                raise Changed(source, f"cannot be read any more: {error.strerror}") from error
            cargo.loose[name_of(content)] = Entry(name_of(content), content[0], size, content[2:])
            cargo.size += size
        cargo.missing = dict(cargo.loose)
        return cargo

    async def _prepare(self, cargo: Cargo, standing: _Standing, began: Collection[str], doubtful: Collection[str]) -> None:
        """Find out what of it is there already."""
        if cargo.content in doubtful:
            await self._survey(cargo)
            if not cargo.missing and (not cargo.manifest or await self._same(cargo)):
                await self._wire.ask("seals", [name_of(cargo.content)], read=nothing)
                cargo.folder = ""
                return
            self._wire.say(f"{self._wire.name}: {cargo.content[:14]}… is damaged there, and is put right")
            await self._wire.ask("retract", name_of(cargo.content), read=nothing)
            cargo.folder = f"partial/{self._wire.sender}" + (f"/{cargo.name}" if cargo.manifest or cargo.content[0] == "t" else "")
        if not cargo.root:
            if cargo.content in doubtful or any(f"{entry.kind}:{entry.value}" in began for entry in cargo.missing.values()):
                await self._survey(cargo)
            if cargo.content not in doubtful:
                await self._likeness.build_files_on(cargo, self.chunk, standing.free, began)
                await self._compare_all(cargo, list(cargo.older))
            return
        if cargo.content in began or cargo.content in doubtful:
            await self._tidy(cargo)
            await self._survey(cargo)
            return
        await self._likeness.build_on(cargo, self.chunk, standing.trees)
        await self._compare_all(cargo, list(cargo.older))

    async def _deliver(self, cargo: Cargo, meter: Meter) -> None:
        """Send what is missing, and again what did not arrive, until all of it is there and right."""
        idle = 0
        while cargo.missing or cargo.bare:
            owed = self._owed(cargo), len(cargo.missing), cargo.bare
            trouble = await self._round(cargo, meter)
            if not cargo.missing and not cargo.bare:
                return
            await self._survey(cargo)
            left = self._owed(cargo)
            meter.done = meter.total - left
            idle = 0 if (left, len(cargo.missing), cargo.bare) < owed else idle + 1
            if idle >= TRIES:
                self._give_up(cargo, trouble)
            await asyncio.sleep(rest(idle))

    def _give_up(self, cargo: Cargo, trouble: BaseException | None) -> None:
        if isinstance(trouble, Unreachable):
            raise trouble
        path = next(iter(cargo.missing), cargo.name)
        raise Corrupt(
            f"{path} does not arrive at {self._wire.name} as it was sent", fix="look at the disk and the memory of both machines"
        ) from trouble

    async def _round(self, cargo: Cargo, meter: Meter) -> BaseException | None:
        """Send all that is missing once, on a few streams.  Answers what broke the connection, if anything did."""
        todo = list(self._jobs(cargo, meter))
        jobs = iter(todo)
        trouble: list[BaseException] = []

        async def stream() -> None:
            for job in jobs:
                try:
                    await job()
                except (Unreachable, Garbled) as error:
                    trouble.append(error)
                if trouble:
                    return

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._wire.lanes(self._owed(cargo), len(todo))):
                    group.create_task(stream())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return trouble[0] if trouble else None

    def _jobs(self, cargo: Cargo, meter: Meter) -> Iterator[Callable[[], Awaitable[None]]]:
        """Large files first: what is left at the end should be small.  A manifest that comes with no file keeps nothing waiting."""
        large = [entry for entry in cargo.missing.values() if entry.size > self.chunk]
        small = [entry for entry in cargo.missing.values() if entry.size <= self.chunk]
        bare = cargo.bare
        if large and not small and bare:
            bare = False
            yield lambda: self._batch(cargo, [], True, False, meter)
        for entry in large:
            pieces = _pieces(self._holes(cargo, entry), _PIECE, _HOLES)
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
        data = cargo.told()[0] if last else b""
        told = Entry(title, "f", len(data), hashlib.sha256(data).hexdigest())
        expected = _together([told, *batch] if last else batch)

        def pieces() -> Iterator[bytes]:
            if last:
                yield tar.member(told, data)
            if cargo.root:
                yield from tar.tar_stream(cargo.root, [*batch, *(cargo.links if last else ())])
                return
            for entry in batch:
                yield tar.member(entry, _whole(cargo.origin(entry), entry.size))
            yield tar.END

        stamp = cargo.told()[1] if alone and cargo.root and not cargo.rough else ""
        folder = cargo.name if cargo.root else ""
        loose = list(cargo.loose) if alone and not cargo.rough else []
        arguments = (folder, cargo.name, title if last else "", expected, stamp, loose)
        arrived, placed = await self._wire.once("batch", *arguments, read=_arrived, data=meter.counted(pieces()))
        if arrived != expected:
            raise Garbled
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
        """The same on as many streams as there are; whoever brings the last piece has all of it hashed."""
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
        return cargo.holes.get(entry.path) or [(0, -(-entry.size // self._grain))]

    async def _put(self, cargo: Cargo, entry: Entry, holes: Sequence[tuple[int, int]], meter: Meter, *, last: bool) -> None:
        """Fill some holes of a large file.  The last of it has its mode and its digest.  Raises Garbled when that is another."""
        grain, size = self._grain, entry.size
        blocks = (part(cargo.origin(entry), size, first * grain, min(count * grain, size - first * grain)) for first, count in holes)
        mode = 0 if not last else 0o555 if entry.kind == "x" else 0o444
        known = cargo.grains.setdefault(entry.path, {})
        grains = [known[at] for at in sorted(known)] if last and len(known) == -(-size // grain) else []
        arguments = (cargo.folder, entry.path, grain, size, mode, holes, grains)
        arrived, came = await self._wire.once("write", *arguments, read=_written, data=meter.counted(itertools.chain.from_iterable(blocks)))
        known.update(zip((at for first, count in holes for at in range(first, first + count)), came, strict=False))
        if last and arrived != entry.value:
            raise Garbled
        if last:
            cargo.missing.pop(entry.path, None)
            cargo.holes.pop(entry.path, None)

    async def _survey(self, cargo: Cargo) -> None:
        """Ask what of the missing has arrived, and leave out of `missing` what is right."""
        cargo.rough = True
        small = [entry for entry in cargo.missing.values() if entry.size <= self.chunk]
        if small:
            there = await self._wire.ask(
                "survey", cargo.folder, [entry.path for entry in small], read=lambda told: [(kind, value) for kind, value in told]
            )
            for entry, (kind, value) in zip(small, there, strict=False):
                if kind == entry.kind and value == entry.value:
                    del cargo.missing[entry.path]
        await self._compare_all(cargo, [path for path, entry in cargo.missing.items() if entry.size > self.chunk])

    async def _compare_all(self, cargo: Cargo, paths: Sequence[str]) -> None:
        todo = iter([cargo.missing[path] for path in paths])

        async def some() -> None:
            for entry in todo:
                await self._compare(cargo, entry)

        await asyncio.gather(*(some() for _ in range(self._wire.lanes(0, len(paths)))))

    async def _compare(self, cargo: Cargo, entry: Entry) -> None:
        """Which grains of a large file are not there as they are here.  One that has an older one begins with that."""
        older = cargo.older.get(entry.path, Older("", ""))
        asked = self._wire.ask("chunks", cargo.folder, entry.path, self._grain, *older, entry.size, read=chunks_told)
        hashed = asyncio.to_thread(chunks, cargo.origin(entry), entry.size, self._grain)
        (size, theirs), ours = await asyncio.gather(asked, hashed)
        cargo.grains[entry.path] = dict(enumerate(ours))
        if size > entry.size:
            await self._wire.ask("delete", cargo.folder, [entry.path], read=nothing)
            theirs = []
        if not theirs:
            cargo.holes[entry.path] = []
            return
        wrong = [at for at, digest in enumerate(ours) if at >= len(theirs) or theirs[at] != digest]
        if not wrong and await asyncio.to_thread(digest, cargo.origin(entry)) != entry.value:
            raise Changed(cargo.origin(entry))
        if not wrong and entry.path in cargo.older:
            wrong = [len(ours) - 1]  # the same bytes, maybe with another mode: that comes with the last of them
        if not wrong:
            del cargo.missing[entry.path]
            cargo.holes.pop(entry.path, None)
            return
        holes: list[tuple[int, int]] = []
        for at in wrong:
            if holes and sum(holes[-1]) == at:
                holes[-1] = (holes[-1][0], holes[-1][1] + 1)
            else:
                holes.append((at, 1))
        cargo.holes[entry.path] = holes

    async def _tidy(self, cargo: Cargo) -> None:
        """Delete what does not belong into a tree, and see which links and empty folders are missing."""
        below, pointing = await self._listing(cargo)
        above = set(folders(cargo.manifest))
        wanted = {entry.path: entry for entry in cargo.manifest}
        wrong = []
        for path, kind in below.items():
            entry = wanted.get(path)
            right = path in above if kind == "d" else entry is not None and entry.kind == kind and (kind != "l" or pointing[path] == entry.value)
            if not right:
                wrong.append(path)
        if wrong:
            await self._wire.ask("delete", cargo.folder, wrong, read=nothing)
        gone = set(wrong)
        cargo.links = [entry for entry in cargo.manifest if entry.kind in "ld" and (entry.path not in below or entry.path in gone)]
        cargo.bare = True

    async def _listing(self, cargo: Cargo) -> tuple[dict[str, str], dict[str, str]]:
        """The kind of everything that lies there of a tree, and where links point."""
        return await self._wire.ask("listing", cargo.folder, read=_listing)

    async def _same(self, cargo: Cargo) -> bool:
        """Whether a tree has exactly the names, kinds and links that it should."""
        below, pointing = await self._listing(cargo)
        wanted = {entry.path: entry.kind for entry in cargo.manifest if entry.kind != "d"} | {folder: "d" for folder in folders(cargo.manifest)}
        return below == wanted and pointing == {entry.path: entry.value for entry in cargo.manifest if entry.kind == "l"}

    async def _place(self, cargo: Cargo, meter: Meter) -> None:
        """What has arrived gets its name."""
        if not cargo.folder:
            return
        if not cargo.root:
            if not cargo.placed:
                await self._place_files(cargo)
            return
        for _ in range(TRIES):
            try:
                placed = cargo.placed or await self._wire.ask("place_tree", cargo.name, cargo.told()[1], cargo.rough, read=bool)
            except Gone:
                placed = bool(await self.have((cargo.content,)))  # the answer to an earlier try was lost, not the work
                if not placed:
                    raise
            if placed:
                self._likeness.remember(cargo.content, cargo.manifest)
                return
            cargo.missing = {entry.path: entry for entry in cargo.manifest if entry.kind in "fx"}
            await self._tidy(cargo)
            await self._survey(cargo)
            await self._deliver(cargo, meter)
        self._give_up(cargo, None)

    async def _place_files(self, cargo: Cargo) -> None:
        placed = set(await self._wire.ask("place_files", list(cargo.loose), read=words_of))
        if placed.issuperset(cargo.loose):
            return
        # An answer that was lost: the first to ask has placed them.
        contents = {f"{entry.kind}:{entry.value}" for name, entry in cargo.loose.items() if name not in placed}
        if await self.have(contents) != contents:
            raise Gone


class _Standing(NamedTuple):
    """What a host says of the objects that are to be sent to it."""

    how: dict[str, str]
    """Name -> here, partial, doubtful or absent."""
    theirs: dict[str, list[str]]
    """Others who send -> which of these they began."""
    silent: set[str]
    """Others of whom nothing was heard for long."""
    free: int
    """Bytes."""
    trees: list[str]
    """Names of those that were used last."""


def _standing(answer: Any) -> _Standing:
    how = {str(name): str(word) for name, word in answer["how"].items()}
    theirs = {str(sender): words_of(names) for sender, names in answer["theirs"].items()}
    return _Standing(how, theirs, set(words_of(answer["silent"])), int(answer["free"]), words_of(answer["trees"]))


def _pairs(answer: Any) -> list[tuple[str, str]]:
    return [(str(kind), str(value)) for kind, value in answer]


def _arrived(answer: Any) -> tuple[str, bool]:
    return str(answer["digest"]), bool(answer["placed"])


def _written(answer: Any) -> tuple[str, list[str]]:
    digest, came = answer
    return str(digest), words_of(came)


def _listing(answer: Any) -> tuple[dict[str, str], dict[str, str]]:
    return {str(path): str(kind) for path, kind, _ in answer}, {str(path): str(target) for path, kind, target in answer if kind == "l"}


def _pieces(holes: Iterable[tuple[int, int]], grains: int, most: int) -> list[list[tuple[int, int]]]:
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


def _dead(sender: str) -> bool:
    """Whether whoever sent under this name is certainly not sending any more."""
    theirs, _, _ = sender.rpartition("-")
    mine = process()
    if theirs == mine:
        return sender not in _sending
    if theirs.split(".")[:2] != mine.split(".")[:2]:
        return False
    try:
        return started(int(theirs.split(".")[2])) != theirs.split(".")[3]
    except (OSError, ValueError, IndexError):
        return True
