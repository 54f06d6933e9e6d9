"""Upload missing contents to one host, and repeat parts that did not arrive.

New data builds on similar data on the host: a tree on the most similar tree, a large file on its own chunks or on those of the most similar file.
After a broken connection, the host lists its data, and the upload continues from there.  Everything is hashed on the host before it gets the name of
its content.
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

from ...errors import Corrupt, Infrastructure
from ...retry import backoff, retry_async
from ...storage.content import files, tar
from ...storage.content.files import Changed, Entry
from ..link.read_range import read_part
from ..link.wire import (
    LANE,
    MOST,
    TRIES,
    CorruptReply,
    Gone,
    Meter,
    Wire,
    ignore_answer,
    parse_strings,
    process_name,
    process_start_time,
    retry_pause,
)
from .manifests import object_name, object_path
from .shared_disk import SharedDisk
from .upload_base import BaseFinder
from .upload_files import Upload, UploadChecker, grain_size

BATCH_BYTES, BATCH_FILES = 96 << 20, 4096
"""Maximum bytes and files of one tar."""
_PIECE = 2  # grains per request to a far host
_HOLES = 500  # holes of a large file per request
_count = itertools.count(1)
_SIGN = 120.0  # seconds between two signs of life: after ten minutes without one, another sender adopts the data
_sending: set[str] = set()  # active senders of this process


class Sender:
    """Uploads to one host.  `recall` returns the manifest of a tree that the host may have, if it is known here."""

    def __init__(self, wire: Wire, recall: Callable[[str], Sequence[Entry] | None]) -> None:
        self._arrivals, self._courier = UploadChecker(wire), Uploader(wire)
        self.wire, self._likeness = wire, BaseFinder(wire, recall)
        self.shared_disk = SharedDisk(wire)
        self._turns: dict[str, asyncio.Lock] = {}
        self._ahead: _HostState | None = None  # prefetched state of expected contents

    async def find_existing(self, contents: Collection[str]) -> set[str]:
        """Return the contents that exist on the host and need no verification.

        These were hashed since its boot and have not changed.
        """
        if not contents:
            return set()
        known = {object_name(content): content for content in contents}
        return {
            known[name]
            for name in await self.wire.ask("have", list(known), read=parse_strings)
            if name in known
        }

    async def prefetch_state(self, contents: Collection[str]) -> None:
        """Ask for the state of these contents on the host before the first upload, which then need not ask."""
        if contents:
            self._ahead = await self.wire.ask(
                "begin", [object_name(content) for content in contents], read=_parse_host_state
            )

    async def send(
        self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]] | None = None
    ) -> None:
        """Upload contents that the host lacks: content -> a local path with it.  Manifests that are not given are read from the trees."""
        async with contextlib.AsyncExitStack() as turns:
            for content in sorted(sources):  # in a fixed order, to avoid a deadlock
                await turns.enter_async_context(self._turns.setdefault(content, asyncio.Lock()))
            turns.enter_context(self.protect_uploads())
            turns.callback(asyncio.create_task(self._send_signs_of_life()).cancel)
            try:
                await retry_async(
                    lambda: self._send(sources, manifests or {}), backoff(Gone, TRIES, 0.0, 0.0)
                )
            except Gone:
                fix = f"find out which program deletes files below {self.wire.root}"
                raise Infrastructure(
                    f"{self.wire.name}: files disappear during the upload", fix=fix
                ) from None

    @contextlib.contextmanager
    def protect_uploads(self) -> Iterator[None]:
        """Protect this sender's partial uploads from other senders of this process during the block."""
        _sending.add(self.wire.sender)
        try:
            yield
        finally:
            _sending.discard(self.wire.sender)

    async def resume_transfer(self, name: str) -> None:
        """Continue an interrupted transfer with this name."""
        await self._request_state([name])

    async def _send_signs_of_life(self) -> None:
        """Send signs of life during the upload of a large file."""
        while True:
            await asyncio.sleep(_SIGN)
            with contextlib.suppress(
                DriverError, Infrastructure, Corrupt
            ):  # the upload itself reports the error
                await self.wire.ask("free", read=ignore_answer)

    async def _send(
        self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]]
    ) -> None:
        known = {object_name(content): content for content in sources}
        standing = await self._request_state(known)
        todo = {known[name]: how for name, how in standing.how.items() if how != "here"}
        if not todo:
            return
        absent = {
            object_name(content): sources[content]
            for content, how in todo.items()
            if how == "absent"
        }
        todo.update(
            {known[name]: "partial" for name in await self.shared_disk.copy_to_host(absent)}
        )
        doubtful = {content for content, how in todo.items() if how == "doubtful"}
        cargoes = [
            await self._tree_upload(content, sources[content], manifests, here=content in doubtful)
            for content in todo
            if content[0] == "t"
        ]
        loose = [content for content in todo if content[0] != "t"]
        for content in doubtful & set(loose):
            cargoes.append(self._file_upload({content: sources[content]}, here=True))
        if rest := [content for content in loose if content not in doubtful]:
            cargoes.append(
                self._file_upload({content: sources[content] for content in rest}, here=False)
            )
        began = {content for content, how in todo.items() if how == "partial"}
        for cargo in cargoes:
            await self._find_existing_data(cargo, standing, began, doubtful)
        if (needed := sum(cargo.required_space() for cargo in cargoes)) > standing.free:
            raise self.wire.disk_full_error(standing.free, needed)
        with self.wire.measure(
            f"to {self.wire.name}",
            sum(cargo.missing_bytes(grain_size(self.wire)) for cargo in cargoes),
        ) as meter:
            for cargo in cargoes:
                await self._upload_missing(cargo, meter)
                await self._name_objects(cargo, meter)

    async def _request_state(self, wanted: Collection[str]) -> _HostState:
        standing = self._use_prefetched(wanted)
        if standing is None:
            standing = await self.wire.ask("begin", list(wanted), read=_parse_host_state)
        if standing.how.keys() != set(wanted):
            raise Corrupt(
                f"{self.wire.name} sent an unexpected reply",
                fix="check that this is the right host",
            )
        for sender, theirs in standing.theirs.items():
            if sender in standing.silent or _is_dead(sender):
                standing.how.update(
                    {
                        name: "partial"
                        for name in await self.wire.ask("adopt", sender, theirs, read=parse_strings)
                    }
                )
        return standing

    def _use_prefetched(self, wanted: Collection[str]) -> _HostState | None:
        """Return the prefetched state of these contents, or None.  It is used once, because the state changes."""
        ahead = self._ahead
        if ahead is None or not ahead.how.keys() >= set(wanted):
            return None
        theirs = {
            sender: [name for name in names if name in wanted]
            for sender, names in ahead.theirs.items()
        }
        theirs = {sender: names for sender, names in theirs.items() if names}
        return ahead._replace(how={name: ahead.how.pop(name) for name in wanted}, theirs=theirs)

    async def _tree_upload(
        self, content: str, source: str, manifests: Mapping[str, Sequence[Entry]], *, here: bool
    ) -> Upload:
        manifest = manifests.get(content)
        if manifest is None:
            manifest = self._likeness.recall(content)
        if manifest is None:
            manifest = await asyncio.to_thread(files.entries, source)
        if files.tree_id(manifest) != content:
            raise Changed(source)
        name = object_name(content)
        folder = object_path(content) if here else f"partial/{self.wire.sender}/{name}"
        size = sum(entry.size for entry in manifest if entry.kind in "fx")
        cargo = Upload(
            name, folder, size, lambda entry: f"{source}/{entry.path}", source, content, manifest
        )
        cargo.missing = {entry.path: entry for entry in manifest if entry.kind in "fx"}
        cargo.links = [entry for entry in manifest if entry.kind in "ld"]
        cargo.lacks_manifest = True
        return cargo

    def _file_upload(self, sources: Mapping[str, str], *, here: bool) -> Upload:
        origins = {object_name(content): source for content, source in sources.items()}
        some = next(iter(sources))
        folder = os.path.dirname(object_path(some)) if here else f"partial/{self.wire.sender}"
        cargo = Upload(
            object_name(some),
            folder,
            0,
            lambda entry: origins[entry.path],
            content=some if here else "",
        )
        for content, source in sources.items():
            try:
                size = os.stat(source).st_size
            except OSError as error:
                raise Changed(source, f"can no longer be read: {error.strerror}") from error
            cargo.files[object_name(content)] = Entry(
                object_name(content), content[0], size, content[2:]
            )
            cargo.size += size
        cargo.missing = dict(cargo.files)
        return cargo

    async def _find_existing_data(
        self, cargo: Upload, standing: _HostState, began: Collection[str], doubtful: Collection[str]
    ) -> None:
        """Find the data of a cargo that exists on the host."""
        if cargo.content in doubtful:
            await self._arrivals.survey(cargo)
            stamp = cargo.describe_tree()[1] if cargo.root else ""
            if not cargo.missing and await self.wire.ask(
                "seals", object_name(cargo.content), stamp, read=bool
            ):
                cargo.folder = ""
                return
            self.wire.say(
                f"{self.wire.name}: {cargo.content[:14]}… is damaged on the host; repairing"
            )
            await self.wire.ask("retract", object_name(cargo.content), read=ignore_answer)
            cargo.folder = f"partial/{self.wire.sender}" + (
                f"/{cargo.name}" if cargo.manifest or cargo.content[0] == "t" else ""
            )
        if not cargo.root:
            if cargo.content in doubtful or any(
                f"{entry.kind}:{entry.value}" in began for entry in cargo.missing.values()
            ):
                await self._arrivals.survey(cargo)
            if cargo.content not in doubtful:
                await self._likeness.choose_file_bases(cargo, standing.free, began)
                await self._arrivals.compare_files(cargo, list(cargo.bases))
            return
        if cargo.content in began or cargo.content in doubtful:
            await self._arrivals.delete_extra(cargo)
            await self._arrivals.survey(cargo)
            return
        await self._likeness.choose_tree_base(cargo, standing.trees)
        await self._arrivals.compare_files(cargo, list(cargo.bases))

    async def _upload_missing(self, cargo: Upload, meter: Meter) -> None:
        """Upload missing data, and repeat damaged parts, until everything is correct."""
        idle = 0
        while cargo.missing or cargo.lacks_manifest:
            owed = (
                cargo.missing_bytes(grain_size(self.wire)),
                len(cargo.missing),
                cargo.lacks_manifest,
            )
            trouble = await self._courier.run_round(cargo, meter)
            if not cargo.missing and not cargo.lacks_manifest:
                return
            await self._arrivals.survey(cargo)
            left = cargo.missing_bytes(grain_size(self.wire))
            meter.done = meter.total - left
            idle = 0 if (left, len(cargo.missing), cargo.lacks_manifest) < owed else idle + 1
            if idle >= TRIES:
                self._give_up(cargo, trouble)
            await asyncio.sleep(retry_pause(idle))

    def _give_up(self, cargo: Upload, trouble: BaseException | None) -> None:
        if isinstance(trouble, Unreachable):
            raise trouble
        path = next(iter(cargo.missing), cargo.name)
        raise Corrupt(
            f"{path} was damaged in transfer to {self.wire.name}",
            fix="check the disk and the memory of both machines",
        ) from trouble

    async def _name_objects(self, cargo: Upload, meter: Meter) -> None:
        """Give the uploaded objects their names."""
        if not cargo.folder:
            return
        if not cargo.root:
            if not cargo.is_named:
                await self._name_files(cargo)
            return
        for _ in range(TRIES):
            try:
                placed = cargo.is_named or await self.wire.ask(
                    "place_tree", cargo.name, cargo.describe_tree()[1], cargo.had_data, read=bool
                )
            except Gone:
                placed = bool(
                    await self.find_existing((cargo.content,))
                )  # the answer to an earlier attempt was lost, but the tree has its name
                if not placed:
                    raise
            if placed:
                self._likeness.remember(cargo.content, cargo.manifest)
                return
            cargo.missing = {entry.path: entry for entry in cargo.manifest if entry.kind in "fx"}
            await self._arrivals.delete_extra(cargo)
            await self._arrivals.survey(cargo)
            await self._upload_missing(cargo, meter)
        self._give_up(cargo, None)

    async def _name_files(self, cargo: Upload) -> None:
        placed = set(await self.wire.ask("place_files", list(cargo.files), read=parse_strings))
        if placed.issuperset(cargo.files):
            return
        # The answer was lost: an earlier request has named the files.
        contents = {
            f"{entry.kind}:{entry.value}"
            for name, entry in cargo.files.items()
            if name not in placed
        }
        if await self.find_existing(contents) != contents:
            raise Gone


class _HostState(NamedTuple):
    """A host's answer about objects to be uploaded."""

    how: dict[str, str]
    """Name -> here, partial, doubtful or absent."""
    theirs: dict[str, list[str]]
    """Other senders -> the objects that they started."""
    silent: set[str]
    """Other senders without a recent sign of life."""
    free: int
    """Free bytes of the disk."""
    trees: list[str]
    """Names of the most recently used trees."""


def _parse_host_state(answer: Any) -> _HostState:
    how = {str(name): str(word) for name, word in answer["how"].items()}
    theirs = {str(sender): parse_strings(names) for sender, names in answer["theirs"].items()}
    return _HostState(
        how,
        theirs,
        set(parse_strings(answer["silent"])),
        int(answer["free"]),
        parse_strings(answer["trees"]),
    )


def _is_dead(sender: str) -> bool:
    """Return whether an earlier sender has certainly stopped."""
    theirs, _, _ = sender.rpartition("-")
    mine = process_name()
    if theirs == mine:
        return sender not in _sending
    if theirs.split(".")[:2] != mine.split(".")[:2]:
        return False
    try:
        return process_start_time(int(theirs.split(".")[2])) != theirs.split(".")[3]
    except (OSError, ValueError, IndexError):
        return True


class Uploader:
    """Uploads the missing data of a cargo over several streams: small files in tars, large files by holes.  Makes no other requests."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def run_round(self, cargo: Upload, meter: Meter) -> BaseException | None:
        """Upload all missing data once, over several streams.  Returns the connection error, if any."""
        return await self._wire.run_parallel(
            list(self._list_jobs(cargo, meter)), cargo.missing_bytes(grain_size(self._wire))
        )

    def _list_jobs(self, cargo: Upload, meter: Meter) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield the uploads, large files first, so that the rest is small.  A manifest without files blocks nothing."""
        large = [entry for entry in cargo.missing.values() if entry.size > self._wire.chunk]
        small = [entry for entry in cargo.missing.values() if entry.size <= self._wire.chunk]
        bare = cargo.lacks_manifest
        if large and not small and bare:
            bare = False
            yield lambda: self._send_batch(cargo, [], True, False, meter)
        for entry in large:
            pieces = _split_holes(self._holes_of(cargo, entry), _PIECE, _HOLES)
            if self._wire.is_far and len(pieces) > 1:
                yield from self._piece_jobs(cargo, entry, pieces, meter)
            else:
                yield lambda entry=entry: self._send_large_file(cargo, entry, meter)  # type: ignore[misc]
        batches: list[list[Entry]] = [[]]
        size = 0
        together = sum(entry.size for entry in small)
        most = min(BATCH_BYTES, max(LANE, together // MOST)) if self._wire.is_far else BATCH_BYTES
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
                yield lambda batch=batch, last=last: self._send_batch(
                    cargo, batch, last, alone, meter
                )  # type: ignore[misc]

    async def _send_batch(
        self, cargo: Upload, batch: Sequence[Entry], last: bool, alone: bool, meter: Meter
    ) -> None:
        """Upload small files in one tar.  The last tar includes links and the manifest; if it is the only upload, the tree gets its name at once."""
        title = f".manifest-{next(_count)}"
        data = cargo.describe_tree()[0] if last else b""
        listing = Entry(title, "f", len(data), hashlib.sha256(data).hexdigest())
        expected = _joint_digest([listing, *batch] if last else batch)

        def pieces() -> Iterator[bytes]:
            if last:
                yield tar.member(listing, data)
            if cargo.root:
                yield from tar.tar_stream(cargo.root, [*batch, *(cargo.links if last else ())])
                return
            for entry in batch:
                yield tar.member(entry, _read_whole(cargo.origin(entry), entry.size))
            yield tar.END

        stamp = cargo.describe_tree()[1] if alone and cargo.root and not cargo.had_data else ""
        folder = cargo.name if cargo.root else ""
        loose = list(cargo.files) if alone and not cargo.had_data else []
        arguments = (folder, cargo.name, title if last else "", expected, stamp, loose)
        arrived, placed = await self._wire.ask_once(
            "batch",
            *arguments,
            read=lambda answer: (str(answer["digest"]), bool(answer["placed"])),
            data=meter.count(pieces()),
        )
        if arrived != expected:
            raise CorruptReply
        for entry in batch:
            cargo.missing.pop(entry.path, None)
        cargo.lacks_manifest = cargo.lacks_manifest and not last
        cargo.is_named = placed

    async def _send_large_file(self, cargo: Upload, entry: Entry, meter: Meter) -> None:
        """Upload a large file, or its missing parts, on one stream; the host hashes the data as it arrives."""
        holes = self._holes_of(cargo, entry)
        for at in range(0, len(holes), _HOLES):
            await self._fill_holes(
                cargo, entry, holes[at : at + _HOLES], meter, last=at + _HOLES >= len(holes)
            )

    def _piece_jobs(
        self, cargo: Upload, entry: Entry, pieces: Sequence[Sequence[tuple[int, int]]], meter: Meter
    ) -> Iterator[Callable[[], Awaitable[None]]]:
        """Upload a large file on all streams.  The stream with the last piece makes the host hash the file."""
        left = len(pieces)

        async def bring(piece: Sequence[tuple[int, int]]) -> None:
            nonlocal left
            await self._fill_holes(cargo, entry, piece, meter, last=False)
            left -= 1
            if not left:
                await self._fill_holes(cargo, entry, (), meter, last=True)

        for piece in pieces:
            yield lambda piece=piece: bring(piece)  # type: ignore[misc]

    def _holes_of(self, cargo: Upload, entry: Entry) -> Sequence[tuple[int, int]]:
        return cargo.holes.get(entry.path) or [(0, -(-entry.size // grain_size(self._wire)))]

    async def _fill_holes(
        self,
        cargo: Upload,
        entry: Entry,
        holes: Sequence[tuple[int, int]],
        meter: Meter,
        *,
        last: bool,
    ) -> None:
        """Fill holes of a large file.  The last call sets its mode and verifies its digest.  Raises CorruptReply if it differs."""
        grain, size = grain_size(self._wire), entry.size
        blocks = (
            read_part(
                cargo.origin(entry), size, first * grain, min(count * grain, size - first * grain)
            )
            for first, count in holes
        )
        mode = 0 if not last else 0o555 if entry.kind == "x" else 0o444
        known = cargo.grains.setdefault(entry.path, {})
        grains = (
            [known[at] for at in sorted(known)] if last and len(known) == -(-size // grain) else []
        )
        older = cargo.bases[entry.path].path if entry.path in cargo.bases else ""
        arguments = (cargo.folder, entry.path, grain, size, mode, holes, grains, older)
        arrived, came = await self._wire.ask_once(
            "write",
            *arguments,
            read=lambda answer: (str(answer[0]), parse_strings(answer[1])),
            data=meter.count(itertools.chain.from_iterable(blocks)),
        )
        known.update(
            zip(
                (at for first, count in holes for at in range(first, first + count)),
                came,
                strict=False,
            )
        )
        if last and arrived != entry.value:
            raise CorruptReply
        if last:
            cargo.missing.pop(entry.path, None)
            cargo.holes.pop(entry.path, None)


def _split_holes(
    holes: Iterable[tuple[int, int]], grains: int, most: int
) -> list[list[tuple[int, int]]]:
    """Split holes into pieces of `grains` grains with at most `most` holes."""
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


def _joint_digest(entries: Iterable[Entry]) -> str:
    """Return a digest of the digests of these files, in this order."""
    return hashlib.sha256(b"".join(entry.value.encode() + b"\n" for entry in entries)).hexdigest()


def _read_whole(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise Changed(path)
    return data
