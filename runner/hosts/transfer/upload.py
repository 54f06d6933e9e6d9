"""Upload missing contents to one host, and repeat parts that did not arrive.

New data builds on similar data on the host: a tree on the most similar tree, a large file on its
own chunks or on those of the most similar file. After a broken connection, the host lists its data,
and the upload continues from there.  Everything is hashed on the host before it gets the name of
its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    Meter,
    UploadGone,
    Wire,
    ignore_answer,
    parse_strings,
    process_name,
    process_start_time,
    retry_pause,
)
from .manifests import (
    content_of,
    files_by_path,
    files_size,
    links_and_folders,
    object_name,
    object_path,
)
from .shared_disk import SharedDisk
from .upload_base import BaseFinder
from .upload_files import Upload, UploadChecker, grain_size

BATCH_BYTES, BATCH_FILES = 96 << 20, 4096
"""Maximum bytes and files of one tar."""
_PIECE = 2  # grains per request to a far host
_HOLES = 500  # holes of a large file per request
_count = itertools.count(1)
# Seconds between two signs of life: after ten minutes without one, another sender adopts the data.
_SIGN = 120.0
_active_senders: set[str] = set()  # of this process


class Sender:
    """Uploads to one host.

    `recall` returns the manifest of a tree that the host may have, if it is known here.
    """

    def __init__(self, wire: Wire, recall: Callable[[str], Sequence[Entry] | None]) -> None:
        self._checker, self._uploader = UploadChecker(wire), Uploader(wire)
        self.wire, self._bases = wire, BaseFinder(wire, recall)
        self.shared_disk = SharedDisk(wire)
        self._turns: dict[str, asyncio.Lock] = {}  # content -> lock of its upload
        self._prefetched: _HostState | None = None  # state of expected contents

    async def find_existing(self, contents: Collection[str]) -> set[str]:
        """Return the contents that exist on the host and need no verification.

        These were hashed since its boot and have not changed.
        """
        if not contents:
            return set()
        known = {object_name(content): content for content in contents}
        existing = await self.wire.ask("have", list(known), read=parse_strings)
        return {known[name] for name in existing if name in known}

    async def prefetch_state(self, contents: Collection[str]) -> None:
        """Request the state of these contents on the host before the first upload, which then makes
        no such request.
        """
        if contents:
            self._prefetched = await self.wire.ask(
                "begin", [object_name(content) for content in contents], read=_parse_host_state
            )

    async def send(
        self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]] | None = None
    ) -> None:
        """Upload contents that the host lacks: content -> a local path with it.

        Manifests that are not given are read from the trees.
        """
        async with contextlib.AsyncExitStack() as turns:
            for content in sorted(sources):  # in a fixed order, to avoid a deadlock
                await turns.enter_async_context(self._turns.setdefault(content, asyncio.Lock()))
            turns.enter_context(self.protect_uploads())
            turns.callback(asyncio.create_task(self._send_signs_of_life()).cancel)
            try:
                await retry_async(
                    lambda: self._send(sources, manifests or {}),
                    backoff(UploadGone, TRIES, 0.0, 0.0),
                )
            except UploadGone:
                fix = f"find out which program deletes files below {self.wire.root}"
                raise Infrastructure(
                    f"{self.wire.name}: files disappear during the upload", fix=fix
                ) from None

    @contextlib.contextmanager
    def protect_uploads(self) -> Iterator[None]:
        """Protect this sender's partial uploads from other senders of this process during the
        block.
        """
        _active_senders.add(self.wire.sender)
        try:
            yield
        finally:
            _active_senders.discard(self.wire.sender)

    async def resume_transfer(self, name: str) -> None:
        """Take over the partial data of an interrupted transfer with this object name."""
        await self._request_state([name])

    async def _send_signs_of_life(self) -> None:
        """Send signs of life during the upload of a large file."""
        while True:
            await asyncio.sleep(_SIGN)
            # The upload itself reports an error.
            with contextlib.suppress(DriverError, Infrastructure, Corrupt):
                await self.wire.ask("free", read=ignore_answer)

    async def _send(
        self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]]
    ) -> None:
        contents = {object_name(content): content for content in sources}
        state = await self._request_state(contents)
        statuses: dict[str, str] = {}
        for name, status in state.statuses.items():
            if status != "here":
                statuses[contents[name]] = status
        if not statuses:
            return
        await self._copy_absent(sources, statuses)
        uploads = await self._group_uploads(sources, manifests, statuses)
        for upload in uploads:
            await self._find_existing_data(upload, state, statuses)
        needed = sum(upload.required_space() for upload in uploads)
        if needed > state.free:
            raise self.wire.disk_full_error(state.free, needed)
        missing = sum(upload.missing_bytes(grain_size(self.wire)) for upload in uploads)
        with self.wire.measure(f"to {self.wire.name}", missing) as meter:
            for upload in uploads:
                await self._upload_missing(upload, meter)
                await self._name_objects(upload, meter)

    async def _copy_absent(self, sources: Mapping[str, str], statuses: dict[str, str]) -> None:
        """Let the host copy absent contents from a shared disk, and mark them as partial."""
        absent: dict[str, str] = {}
        for content, status in statuses.items():
            if status == "absent":
                absent[object_name(content)] = content
        copied = await self.shared_disk.copy_to_host(
            {name: sources[content] for name, content in absent.items()}
        )
        for name in copied:
            # The host has not verified the copy: the survey of partial data does.
            statuses[absent[name]] = "partial"

    async def _group_uploads(
        self,
        sources: Mapping[str, str],
        manifests: Mapping[str, Sequence[Entry]],
        statuses: Mapping[str, str],
    ) -> list[Upload]:
        """Return one upload per tree, one per file that may be damaged, and one for all other
        files.
        """
        uploads = []
        doubtful: list[Upload] = []
        others: dict[str, str] = {}
        for content, status in statuses.items():
            source, here = sources[content], status == "doubtful"
            if content[0] == "t":
                uploads.append(await self._tree_upload(content, source, manifests, here=here))
            elif here:
                doubtful.append(self._file_upload({content: source}, here=True))
            else:
                others[content] = source
        uploads += doubtful
        if others:
            uploads.append(self._file_upload(others, here=False))
        return uploads

    async def _request_state(self, names: Collection[str]) -> _HostState:
        """Return the state of these objects on the host, and adopt the partial uploads of senders
        that have stopped.
        """
        state = self._use_prefetched(names)
        if state is None:
            state = await self.wire.ask("begin", list(names), read=_parse_host_state)
        if state.statuses.keys() != set(names):
            raise Corrupt(
                f"{self.wire.name} sent an unexpected reply",
                fix="check that this is the right host",
            )
        for sender, started in state.started_by.items():
            if sender in state.silent or _is_dead(sender):
                for name in await self.wire.ask("adopt", sender, started, read=parse_strings):
                    state.statuses[name] = "partial"
        return state

    def _use_prefetched(self, names: Collection[str]) -> _HostState | None:
        """Return the prefetched state of these objects, or None.

        It is used once, because the state changes.
        """
        prefetched = self._prefetched
        if prefetched is None or not prefetched.statuses.keys() >= set(names):
            return None
        started_by = {}
        for sender, started in prefetched.started_by.items():
            ours = [name for name in started if name in names]
            if ours:
                started_by[sender] = ours
        statuses = {name: prefetched.statuses.pop(name) for name in names}
        return prefetched._replace(statuses=statuses, started_by=started_by)

    async def _tree_upload(
        self, content: str, source: str, manifests: Mapping[str, Sequence[Entry]], *, here: bool
    ) -> Upload:
        """Return the upload of a tree.

        With `here`, the host has it under its name, but it may be damaged.
        """
        manifest = manifests.get(content)
        if manifest is None:
            manifest = self._bases.recall(content)
        if manifest is None:
            manifest = await asyncio.to_thread(files.entries, source)
        if files.tree_id(manifest) != content:
            raise Changed(source)
        name = object_name(content)
        folder = object_path(content) if here else f"partial/{self.wire.sender}/{name}"
        size = files_size(manifest)
        upload = Upload(
            name, folder, size, lambda entry: f"{source}/{entry.path}", source, content, manifest
        )
        upload.missing = files_by_path(manifest)
        upload.links = links_and_folders(manifest)
        upload.lacks_manifest = True
        return upload

    def _file_upload(self, sources: Mapping[str, str], *, here: bool) -> Upload:
        """Return the upload of files.

        With `here`, the host has the only file under its name, but it may be damaged.
        """
        origins = {object_name(content): source for content, source in sources.items()}
        first = next(iter(sources))
        folder, content_on_host = f"partial/{self.wire.sender}", ""
        if here:
            folder, content_on_host = os.path.dirname(object_path(first)), first
        upload = Upload(
            object_name(first),
            folder,
            0,
            lambda entry: origins[entry.path],
            content=content_on_host,
        )
        for content, source in sources.items():
            try:
                size = os.stat(source).st_size
            except OSError as error:
                raise Changed(source, f"can no longer be read: {error.strerror}") from error
            upload.files[object_name(content)] = Entry(
                object_name(content), content[0], size, content[2:]
            )
            upload.size += size
        upload.missing = dict(upload.files)
        return upload

    async def _find_existing_data(
        self, upload: Upload, state: _HostState, statuses: Mapping[str, str]
    ) -> None:
        """Find the data of an upload that exists on the host.

        An object that turns out to be correct leaves nothing to do.
        """
        is_doubtful = statuses.get(upload.content) == "doubtful"
        if is_doubtful:
            if await self._confirm_object(upload):
                upload.folder = ""
                return
            await self._retract_object(upload)
        if upload.root:
            await self._find_tree_data(upload, state, statuses[upload.content])
        elif is_doubtful:
            await self._checker.survey(upload)
        else:
            await self._find_file_data(upload, state, statuses)

    async def _confirm_object(self, upload: Upload) -> bool:
        """Verify an object that may be damaged; return whether the host has marked the object as correct."""
        await self._checker.survey(upload)
        if upload.missing:
            return False
        stamp = upload.describe_tree()[1] if upload.root else ""
        return await self.wire.ask("seals", object_name(upload.content), stamp, read=bool)

    async def _retract_object(self, upload: Upload) -> None:
        """Turn a damaged object into a partial upload."""
        self.wire.say(f"{self.wire.name}: {upload.content[:14]}… is damaged on the host; repairing")
        await self.wire.ask("retract", object_name(upload.content), read=ignore_answer)
        upload.folder = f"partial/{self.wire.sender}"
        if upload.root:
            upload.folder += f"/{upload.name}"

    async def _find_tree_data(self, upload: Upload, state: _HostState, status: str) -> None:
        if status in ("partial", "doubtful"):
            await self._checker.delete_extra(upload)
            await self._checker.survey(upload)
        else:
            await self._bases.choose_tree_base(upload, state.trees)
            await self._checker.compare_files(upload, list(upload.bases))

    async def _find_file_data(
        self, upload: Upload, state: _HostState, statuses: Mapping[str, str]
    ) -> None:
        started = {content for content, status in statuses.items() if status == "partial"}
        if any(content_of(entry) in started for entry in upload.missing.values()):
            await self._checker.survey(upload)
        await self._bases.choose_file_bases(upload, state.free, started)
        await self._checker.compare_files(upload, list(upload.bases))

    async def _upload_missing(self, upload: Upload, meter: Meter) -> None:
        """Upload missing data, and repeat damaged parts, until everything is correct."""
        idle = 0  # rounds without progress
        while upload.missing or upload.lacks_manifest:
            before = self._measure_missing(upload)
            trouble = await self._uploader.run_round(upload, meter)
            if not upload.missing and not upload.lacks_manifest:
                return
            await self._checker.survey(upload)
            after = self._measure_missing(upload)
            meter.done = meter.total - after[0]
            idle = 0 if after < before else idle + 1
            if idle >= TRIES:
                self._give_up(upload, trouble)
            await asyncio.sleep(retry_pause(idle))

    def _measure_missing(self, upload: Upload) -> tuple[int, int, bool]:
        """Return the missing bytes, the number of missing files, and whether the manifest is
        missing.
        """
        missing = upload.missing_bytes(grain_size(self.wire))
        return missing, len(upload.missing), upload.lacks_manifest

    def _give_up(self, upload: Upload, trouble: BaseException | None) -> None:
        if isinstance(trouble, Unreachable):
            raise trouble
        path = next(iter(upload.missing), upload.name)
        raise Corrupt(
            f"{path} was damaged in transfer to {self.wire.name}",
            fix="check the disk and the memory of both machines",
        ) from trouble

    async def _name_objects(self, upload: Upload, meter: Meter) -> None:
        """Give the uploaded objects their names.

        A tree that the host finds incomplete is repaired first.
        """
        if not upload.folder:
            return
        if not upload.root:
            if not upload.is_named:
                await self._name_files(upload)
            return
        for _ in range(TRIES):
            if await self._name_tree(upload):
                self._bases.remember(upload.content, upload.manifest)
                return
            upload.missing = files_by_path(upload.manifest)
            await self._checker.delete_extra(upload)
            await self._checker.survey(upload)
            await self._upload_missing(upload, meter)
        self._give_up(upload, None)

    async def _name_tree(self, upload: Upload) -> bool:
        """Give a tree its name; return False if the host finds the tree incomplete."""
        if upload.is_named:
            return True
        stamp = upload.describe_tree()[1]
        try:
            return await self.wire.ask("place_tree", upload.name, stamp, upload.had_data, read=bool)
        except UploadGone:
            if await self.find_existing((upload.content,)):
                return True  # an earlier request named the tree, but its answer was lost
            raise

    async def _name_files(self, upload: Upload) -> None:
        named = set(await self.wire.ask("place_files", list(upload.files), read=parse_strings))
        if named.issuperset(upload.files):
            return
        # An earlier request may have named the others, but its answer was lost.
        others = {content_of(entry) for name, entry in upload.files.items() if name not in named}
        if await self.find_existing(others) != others:
            raise UploadGone


class _HostState(NamedTuple):
    """A host's answer about objects to be uploaded."""

    statuses: dict[str, str]
    """Object name -> here, partial, doubtful or absent."""
    started_by: dict[str, list[str]]
    """Other senders -> the objects that they started."""
    silent: set[str]
    """Other senders without a recent sign of life."""
    free: int
    """Free bytes of the disk."""
    trees: list[str]
    """Names of the most recently used trees."""


def _parse_host_state(answer: Any) -> _HostState:
    statuses = {str(name): str(word) for name, word in answer["how"].items()}
    started_by = {str(sender): parse_strings(names) for sender, names in answer["theirs"].items()}
    return _HostState(
        statuses,
        started_by,
        set(parse_strings(answer["silent"])),
        int(answer["free"]),
        parse_strings(answer["trees"]),
    )


def _is_dead(sender: str) -> bool:
    """Return whether an earlier sender has certainly stopped.

    Senders on other machines are unknown.
    """
    process, _, _ = sender.rpartition("-")
    own_process = process_name()
    if process == own_process:
        return sender not in _active_senders
    if process.split(".")[:2] != own_process.split(".")[:2]:
        return False
    try:
        return process_start_time(int(process.split(".")[2])) != process.split(".")[3]
    except (OSError, ValueError, IndexError):
        return True


class Uploader:
    """Uploads missing data over several streams: small files in tars, large files by holes.

    Makes no other requests.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def run_round(self, upload: Upload, meter: Meter) -> BaseException | None:
        """Upload all missing data once, over several streams.

        Returns the connection error, if any.
        """
        jobs = self._list_jobs(upload, meter)
        return await self._wire.run_parallel(jobs, upload.missing_bytes(grain_size(self._wire)))

    def _list_jobs(self, upload: Upload, meter: Meter) -> list[Callable[[], Awaitable[None]]]:
        """Return the jobs of a round: large files, then batches of small files.

        The last batch includes the manifest.  Without small files, the manifest comes first, so
        that large files do not delay it.
        """
        large = upload.large_files(self._wire.chunk)
        small = upload.small_files(self._wire.chunk)
        large_jobs: list[Callable[[], Awaitable[None]]] = []
        for entry in large:
            large_jobs += self._large_file_jobs(upload, entry, meter)
        if small:
            return large_jobs + self._batch_jobs(upload, small, meter, has_large=bool(large))
        if not upload.lacks_manifest:
            return large_jobs
        batch = _Batch([], with_manifest=True, is_only=not large)
        return [partial(self._send_batch, upload, batch, meter), *large_jobs]

    def _batch_jobs(
        self, upload: Upload, small: Sequence[Entry], meter: Meter, *, has_large: bool
    ) -> list[Callable[[], Awaitable[None]]]:
        """Return the jobs that upload small files, one per batch."""
        *parts, last = _split_batches(small, self._batch_bytes(small))
        batches = [_Batch(part) for part in parts]
        is_only = not parts and not has_large
        batches.append(_Batch(last, with_manifest=upload.lacks_manifest, is_only=is_only))
        return [partial(self._send_batch, upload, batch, meter) for batch in batches]

    def _batch_bytes(self, small: Sequence[Entry]) -> int:
        """Return the maximum bytes of a batch.  On a far host, several streams share the files."""
        if not self._wire.is_far:
            return BATCH_BYTES
        total = sum(entry.size for entry in small)
        return min(BATCH_BYTES, max(LANE, total // MOST))

    async def _send_batch(self, upload: Upload, batch: _Batch, meter: Meter) -> None:
        """Upload small files in one tar.

        If the tar is the only job of the round, the host names the objects at once.
        """
        manifest = _manifest_file(upload) if batch.with_manifest else None
        sent_files = batch.files
        if manifest is not None:
            sent_files = [manifest.entry, *sent_files]
        expected = _joint_digest(sent_files)
        may_name = batch.is_only and not upload.had_data
        stamp = upload.describe_tree()[1] if may_name and upload.root else ""
        folder = upload.name if upload.root else ""
        files_to_name = list(upload.files) if may_name else []
        manifest_name = manifest.entry.path if manifest is not None else ""
        arguments = (folder, upload.name, manifest_name, expected, stamp, files_to_name)
        arrived, is_named = await self._wire.ask_once(
            "batch",
            *arguments,
            read=lambda answer: (str(answer["digest"]), bool(answer["placed"])),
            data=meter.count(_tar_pieces(upload, batch.files, manifest)),
        )
        if arrived != expected:
            raise CorruptReply
        for entry in batch.files:
            upload.missing.pop(entry.path, None)
        if batch.with_manifest:
            upload.lacks_manifest = False
        upload.is_named = is_named

    def _large_file_jobs(
        self, upload: Upload, entry: Entry, meter: Meter
    ) -> list[Callable[[], Awaitable[None]]]:
        """Return the jobs of a large file: one, or on a far host one per piece."""
        pieces = _split_holes(self._holes_of(upload, entry), _PIECE, _HOLES)
        if not self._wire.is_far or len(pieces) <= 1:
            return [partial(self._send_large_file, upload, entry, meter)]
        left = len(pieces)

        async def send(piece: Sequence[tuple[int, int]]) -> None:
            nonlocal left
            await self._fill_holes(upload, entry, piece, meter, last=False)
            left -= 1
            if not left:  # the stream with the last piece makes the host hash the file
                await self._fill_holes(upload, entry, (), meter, last=True)

        return [partial(send, piece) for piece in pieces]

    async def _send_large_file(self, upload: Upload, entry: Entry, meter: Meter) -> None:
        """Upload a large file, or its missing parts, on one stream; the host hashes the data as it arrives."""
        holes = self._holes_of(upload, entry)
        for at in range(0, len(holes), _HOLES):
            last = at + _HOLES >= len(holes)
            await self._fill_holes(upload, entry, holes[at : at + _HOLES], meter, last=last)

    def _holes_of(self, upload: Upload, entry: Entry) -> Sequence[tuple[int, int]]:
        """Return the holes of a large file: (first grain, number of grains).

        A file without data is one hole.
        """
        return upload.holes.get(entry.path) or [(0, -(-entry.size // grain_size(self._wire)))]

    async def _fill_holes(
        self,
        upload: Upload,
        entry: Entry,
        holes: Sequence[tuple[int, int]],
        meter: Meter,
        *,
        last: bool,
    ) -> None:
        """Fill holes of a large file.

        The last call sets its mode and verifies its digest.  Raises CorruptReply if it differs.
        """
        grain, size = grain_size(self._wire), entry.size

        def read_holes() -> Iterator[bytes]:
            for first, count in holes:
                start = first * grain
                yield from read_part(
                    upload.origin(entry), size, start, min(count * grain, size - start)
                )

        mode, digests = 0, list[str]()
        known = upload.grains.setdefault(entry.path, {})
        if last:
            mode = 0o555 if entry.kind == "x" else 0o444
            if len(known) == -(-size // grain):
                digests = [known[number] for number in sorted(known)]
        base = upload.bases[entry.path].path if entry.path in upload.bases else ""
        arguments = (upload.folder, entry.path, grain, size, mode, holes, digests, base)
        digest, written = await self._wire.ask_once(
            "write",
            *arguments,
            read=lambda answer: (str(answer[0]), parse_strings(answer[1])),
            data=meter.count(read_holes()),
        )
        numbers = itertools.chain.from_iterable(range(at, at + count) for at, count in holes)
        known.update(zip(numbers, written, strict=False))
        if not last:
            return
        if digest != entry.value:
            raise CorruptReply
        upload.missing.pop(entry.path, None)
        upload.holes.pop(entry.path, None)


class _Batch(NamedTuple):
    """Small files of an upload that are sent in one tar."""

    files: Sequence[Entry]
    with_manifest: bool = False
    """Whether the tar includes the manifest and the links of a tree."""
    is_only: bool = False
    """Whether the tar is the only job of its round."""


class _ManifestFile(NamedTuple):
    """The manifest of a tree, as a file of the upload."""

    entry: Entry
    data: bytes


def _manifest_file(upload: Upload) -> _ManifestFile:
    data = upload.describe_tree()[0]
    digest = hashlib.sha256(data).hexdigest()
    return _ManifestFile(Entry(f".manifest-{next(_count)}", "f", len(data), digest), data)


def _tar_pieces(
    upload: Upload, small: Sequence[Entry], manifest: _ManifestFile | None
) -> Iterator[bytes]:
    """Yield a tar of small files, and with the manifest also of the links."""
    links: Sequence[Entry] = ()
    if manifest is not None:
        yield tar.member(manifest.entry, manifest.data)
        links = upload.links
    if upload.root:
        yield from tar.tar_stream(upload.root, [*small, *links])
        return
    for entry in small:
        yield tar.member(entry, _read_whole(upload.origin(entry), entry.size))
    yield tar.END


def _split_batches(entries: Iterable[Entry], most: int) -> list[list[Entry]]:
    """Split one or more files into batches of about `most` bytes."""
    batches: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if size >= most or len(batches[-1]) >= BATCH_FILES:
            batches.append([])
            size = 0
        batches[-1].append(entry)
        size += entry.size
    return batches


def _split_holes(
    holes: Iterable[tuple[int, int]], grains: int, most: int
) -> list[list[tuple[int, int]]]:
    """Split holes into pieces of `grains` grains with at most `most` holes."""
    pieces: list[list[tuple[int, int]]] = []
    room = 0
    for first, count in holes:
        while count:
            if not room or len(pieces[-1]) == most:
                pieces.append([])
                room = grains
            taken = min(room, count)
            pieces[-1].append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
    return pieces


def _joint_digest(entries: Iterable[Entry]) -> str:
    """Return a digest of the digests of these files, in this order."""
    return hashlib.sha256(b"".join(entry.value.encode() + b"\n" for entry in entries)).hexdigest()


def _read_whole(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise Changed(path)
    return data
