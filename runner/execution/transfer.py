"""Move contents between here and one host, and know what that host keeps of ours.  Knows content ids, manifests and `Host.call`, not steps or keys.

A `Depot` is the other end of the object store: the same names below its root on the host, made there from what is sent, hashed there before anybody
uses it.  What travels is what is not there yet.  A connection that breaks costs what was under way: the host is asked what it has, and that is kept.

What comes back is not trusted: names are checked before anything is written, sizes are counted, and every byte is hashed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, cast

from drivers.base import NOTHING, Host, Rejected, Unreachable

from ..errors import Corrupt, Infrastructure
from ..storage import files, tar
from ..storage.files import Changed, Entry
from . import hostwork as work
from .hostwork import Garbled, name_of, names, place_of
from .staging import no_space

CHUNK = 8 << 20
"""Bytes: smaller files travel together, larger ones are compared and sent again in pieces of this size."""
BATCH_BYTES, BATCH_FILES = 96 << 20, 4096
"""What one tar holds at most."""
STREAMS = 2
"""Tars and files under way at once."""
TRIES = 8
"""Times that nothing at all may get through before we give up."""
_READ = 1 << 20
_TURN = 128  # chunks of a large file in one call: a sender is heard of now and then
_MANIFESTS = 8
_WORTH = 256 << 10  # bytes of a tree for which an older one there is looked for
_ASKED = 4  # older ones of which we do not know what they hold, at most
_T = TypeVar("_T")
_FULL = ("No space left", "Disk quota exceeded", "disk full")
_count = itertools.count(1)
_sending: set[str] = set()  # depots of this process that are sending now


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is.  Bytes, bytes a second, seconds; `eta` None while nobody can tell."""

    what: str
    done: int
    total: int
    rate: float
    eta: float | None


@dataclass(slots=True)
class Parcel:
    """What an attempt directory begins with."""

    files: dict[str, tuple[bytes, bool]] = field(default_factory=dict)
    """Name -> its bytes, and whether it can be executed."""
    links: dict[str, str] = field(default_factory=dict)
    """Name -> the content that it leads to, which must be there."""
    folders: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """Name -> a folder below the root, made if need be, that it leads to and that outlives the attempt."""
    beside: dict[str, bytes] = field(default_factory=dict)
    """Ending (`.sh`) -> a file next to the attempt directory, called as that is and so on."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What an output is.  `content` is empty when there is none: then `problem` says why, or it is empty too and nothing lies there."""

    content: str = ""
    entries: tuple[Entry, ...] = ()
    """A tree's manifest; of a file one entry with an empty path."""
    size: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Harvest:
    """What an attempt left: its outputs by name, and which of its inputs it changed: names in it, and contents that it was given as links."""

    outputs: dict[str, Taken]
    changed: tuple[str, ...] = ()


@dataclass(slots=True)
class _Cargo:
    """Files on their way into one folder there."""

    name: str
    folder: str
    size: int
    origin: Callable[[Entry], str]
    root: str = ""  # of a tree, here
    content: str = ""
    manifest: Sequence[Entry] = ()
    missing: dict[str, Entry] = field(default_factory=dict)
    loose: dict[str, Entry] = field(default_factory=dict)  # all of them, when it is no tree
    holes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # large file -> (first chunk, chunks) that are not there
    links: list[Entry] = field(default_factory=list)  # and empty folders
    bare: bool = False  # neither links nor the manifest are there yet
    rough: bool = False  # something of it was found there, or did not come as it should
    placed: bool = False

    def owed(self) -> int:
        return sum(entry.size for entry in self.missing.values())


class _Gone(Exception):
    """What we were sending into is not there any more."""


class Depot:
    """What one host keeps of ours below `root`, a path there; a relative one begins at the login's home.

    `recall` answers the manifest of a tree that the host may have, when somebody here remembers it.  Every method may raise what `Host.call` raises
    (after it has tried again where that helps), Infrastructure when the host or a disk cannot do what is asked, and Corrupt when bytes cannot be had
    as their name says.
    """

    chunk = CHUNK

    def __init__(
        self,
        host: Host,
        root: str,
        *,
        name: str = "the host",
        say: Callable[[str], None] = lambda _text: None,
        progress: Callable[[Progress], None] = lambda _progress: None,
        recall: Callable[[str], Sequence[Entry] | None] = lambda _content: None,
    ) -> None:
        self.root = root
        self.name = name
        self.boot = ""
        """What tells one boot of the host from the next; empty before `open`."""
        self._host = host
        self._say = say
        self._progress = progress
        self._recall = recall
        self._word = secrets.token_hex(8)
        self._sender = f"{_process()}-{next(_count)}"
        self._hashes, self._lists = "sha256sum", "exec"
        self._manifests: dict[str, Sequence[Entry]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._meters: list[_Meter] = []

    # -- once

    async def open(self) -> None:
        """Make the folders there, and find out how that host does things."""

        async def once() -> list[str]:
            said = await self._raw(("sh", "-c", work.OPENING, "sh", self.root, self._word), b"")
            parts = said.decode("utf-8", "surrogateescape").split(f"\n{self._word}\n")
            lines = parts[1].split("\n") if len(parts) == 3 else []
            if len(lines) != 6:
                raise Garbled
            return lines

        async def twice() -> list[str]:
            # Which digest the host can do is part of the answer, so it has none: two that are the same have to do.
            first = await once()
            if first != await once():
                raise Garbled
            return first

        root, hashes, lists, boot, lacks, _ = await self._patiently(twice)
        if lacks or hashes not in work.HASHES or lists not in work.LISTS:
            raise Infrastructure(
                f"{self.name} has no{lacks or ' sha256sum'}", fix="install it there; everything of coreutils, findutils and tar is needed"
            )
        self.root, self._hashes, self._lists, self.boot = root, hashes, lists, boot

    # -- contents

    def path(self, content: str) -> str:
        """Where an object lies there, if it does."""
        return f"{self.root}/{place_of(content)}"

    async def have(self, contents: Collection[str]) -> set[str]:
        """Those that are there and may be used unread: they were hashed in this boot, and nothing has written to them since."""
        if not contents:
            return set()
        known = {name_of(content): content for content in contents}
        said = await self._ask(work.HAVE, stdin=_lines(known))
        return {known[name] for name in said.decode().split("\n") if name in known}

    async def send(self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]] | None = None) -> None:
        """See to it that these contents lie there: content -> a path here that holds it.  Trees whose manifest is not given are read for it."""
        async with contextlib.AsyncExitStack() as turns:
            for content in sorted(sources):  # in one order, so that nobody waits for somebody who waits for him
                await turns.enter_async_context(self._turns.setdefault(content, asyncio.Lock()))
            _sending.add(self._sender)
            turns.callback(_sending.discard, self._sender)
            for tries in itertools.count(1):
                try:
                    await self._send(sources, manifests or {})
                    return
                except _Gone:
                    if tries == TRIES:
                        raise Infrastructure(
                            f"{self.name}: what is being sent disappears there", fix=f"see who deletes files below {self.root}"
                        ) from None

    async def fetch(self, path: str, taken: Taken, target: str) -> None:
        """Bring what `take` found at `path` there to `target` here, which must not exist.  A part that came earlier is not fetched again."""
        await _Fetch(self, path, taken, target).run()

    # -- attempts

    async def stage(self, name: str, parcel: Parcel) -> str:
        """Make the attempt directory `name` there, and answer its path.  One that was staged already stays as it is."""
        at = f"at/{name}"
        plain = [(Entry(f"{at}/{path}", "x" if executable else "f", len(data), ""), data) for path, (data, executable) in parcel.files.items()]
        plain += [(Entry(f"{at}{ending}", "f", len(data), ""), data) for ending, data in parcel.beside.items()]
        pointing = {path: self.path(content) for path, content in parcel.links.items()}
        pointing |= {path: f"{self.root}/{folder}" for path, folder in parcel.states.items()}
        below = [Entry(f"{at}/{folder}", "d", 0, "") for folder in parcel.folders]
        below += [Entry(f"{at}/{path}", "l", len(os.fsencode(to)), to) for path, to in pointing.items()]
        given = names([f"{self.root}/attempts/{name}/{path}" for path in parcel.files] + [self.path(content) for content in parcel.links.values()])
        plain.append((Entry(f"{at}.in", "f", len(given), ""), given))  # last: nothing that is given may look as if it had changed since
        pieces = [tar.member(entry, data) for entry, data in ((Entry(at, "d", 0, ""), b""), *((entry, b"") for entry in below), *plain)]
        data = b"".join((*pieces, tar.END))
        # A tar that came whole and was unpacked without a word is what was sent, but for names that some disks take for the same.
        digest = ""
        if below or parcel.files:
            digest = work.tree_digest([Entry(entry.path[3:], *entry[1:]) for entry in (*below, *(entry for entry, _ in plain))])
        arguments = (name, hashlib.sha256(data).hexdigest(), digest, *parcel.states.values())

        async def once() -> None:
            if said := (await self._once(work.STAGE, *arguments, stdin=data)).decode("utf-8", "replace"):
                self._complain(said)
                raise Garbled

        await self._patiently(once)
        return f"{self.root}/attempts/{name}"

    async def take(self, path: str, outputs: Sequence[tuple[str, bool]]) -> Harvest:
        """What an attempt at `path` made: for each of `outputs` (its name there, and whether it has to be a folder) what it is, hashed there."""

        async def once() -> tuple[list[work.Seen], list[str]]:
            return work.seen(await self._once(work.TAKE, path, stdin=names(name for name, _ in outputs)), len(outputs))

        found, changed = await self._patiently(once)
        outcome = {name: _judged(name, folder, seen) for (name, folder), seen in zip(outputs, found, strict=True)}
        objects = f"{self.root}/objects/"
        return Harvest(outcome, tuple(_content(name) if name.startswith(objects) else name.removeprefix(f"{path}/") for name in changed))

    async def keep(self, path: str, outputs: Mapping[str, str], *, copy: Collection[str] = ()) -> set[str]:
        """Make outputs of the attempt at `path` objects there: name -> content, as `take` found them.  They are moved, but those of `copy`."""
        known = {name_of(content): content for content in outputs.values()}
        triples = itertools.chain.from_iterable((name, name_of(content), "cp" if name in copy else "mv") for name, content in outputs.items())
        said = await self._ask(work.KEEP, path, stdin=names(triples))
        return {known[name] for name in said.decode().split("\n") if name in known}

    async def read(self, path: str, offset: int = 0, *, limit: int = 16 << 20) -> bytes:
        """Bytes of a small file there, from `offset` on, at most `limit`; empty when there is none."""
        return await self._ask(work.READ, path, str(offset), str(limit))

    async def remove(self, paths: Collection[str]) -> None:
        """Delete files and folders below the root there, whatever their modes."""
        if any(not path.startswith(f"{self.root}/") for path in paths):
            raise Infrastructure(f"BUG: {sorted(paths)} is to be deleted, which is not below {self.root}")
        if paths:
            await self._ask(work.REMOVE, stdin=names(paths))

    async def sweep(self, keep: Collection[str] = (), *, unused: timedelta = timedelta(days=14), every: timedelta = timedelta(0)) -> int:
        """Delete objects that nobody asked for since then, unless an attempt there leads to them or `keep` has them, and states nobody wrote to.

        Answers how many.  Nothing is looked at when the last sweep was less than `every` ago.
        """
        minutes = [int(time.total_seconds() // 60) for time in (unused, every)]
        said = await self._ask(work.SWEEP, str(max(1, minutes[0])), str(minutes[1]), stdin=_lines(map(name_of, keep)))
        return said.count(b"\n")

    async def free(self) -> int:
        """Bytes that may still be written below the root there."""
        return _free(await self._ask(work.FREE))

    # -- sending

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
        needed = sum(cargo.owed() for cargo in cargoes)
        if needed > standing.free:
            raise self._full(standing.free, needed)
        with self._measured(f"to {self.name}", needed) as meter:
            for cargo in cargoes:
                await self._deliver(cargo, meter)
                await self._place(cargo, meter)

    async def _begin(self, wanted: Collection[str]) -> _Standing:
        said = (await self._ask(work.BEGIN, stdin=_lines(wanted))).decode("utf-8", "replace")
        standing = _Standing(wanted, said)
        for sender, theirs in standing.theirs.items():
            if sender in standing.silent or _dead(sender):
                taken = (await self._ask(work.ADOPT, sender, stdin=_lines(theirs))).decode().split("\n")
                standing.how.update({name: "partial" for name in taken if name in standing.how})
        return standing

    async def _tree(self, content: str, source: str, manifests: Mapping[str, Sequence[Entry]], *, here: bool) -> _Cargo:
        manifest = manifests.get(content)
        if manifest is None:
            manifest = self._recall(content)
        if manifest is None:
            manifest = await asyncio.to_thread(files.entries, source)
        if files.tree_id(manifest) != content:
            raise Changed(source)
        name = name_of(content)
        folder = place_of(content) if here else f"partial/{self._sender}/{name}"
        size = sum(entry.size for entry in manifest if entry.kind in "fx")
        cargo = _Cargo(name, folder, size, lambda entry: f"{source}/{entry.path}", source, content, manifest)
        cargo.missing = {entry.path: entry for entry in manifest if entry.kind in "fx"}
        cargo.links = [entry for entry in manifest if entry.kind in "ld"]
        cargo.bare = True
        return cargo

    def _files(self, sources: Mapping[str, str], *, here: bool) -> _Cargo:
        origins = {name_of(content): source for content, source in sources.items()}
        some = next(iter(sources))
        folder = os.path.dirname(place_of(some)) if here else f"partial/{self._sender}"
        cargo = _Cargo(name_of(some), folder, 0, lambda entry: origins[entry.path], content=some if here else "")
        for content, source in sources.items():
            try:
                size = os.stat(source).st_size
            except OSError as error:
                raise Changed(source, f"cannot be read any more: {error.strerror}") from error
            cargo.loose[name_of(content)] = Entry(name_of(content), content[0], size, content[2:])
            cargo.size += size
        cargo.missing = dict(cargo.loose)
        return cargo

    async def _prepare(self, cargo: _Cargo, standing: _Standing, began: Collection[str], doubtful: Collection[str]) -> None:
        """Find out what of it is there already."""
        if cargo.content in doubtful:
            await self._survey(cargo)
            if not cargo.missing and (not cargo.manifest or await self._same(cargo)):
                await self._ask(work.SEAL, stdin=_lines((name_of(cargo.content),)))
                cargo.folder = ""
                return
            self._say(f"{self.name}: {cargo.content[:14]}… is damaged there, and is put right")
            await self._ask(work.RETRACT, name_of(cargo.content))
            cargo.folder = f"partial/{self._sender}" + (f"/{cargo.name}" if cargo.manifest or cargo.content[0] == "t" else "")
        if not cargo.root:
            if cargo.content in doubtful or any(f"{entry.kind}:{entry.value}" in began for entry in cargo.missing.values()):
                await self._survey(cargo)
            return
        if cargo.content in began or cargo.content in doubtful:
            await self._tidy(cargo)
            await self._survey(cargo)
            return
        await self._build_on(cargo, standing.trees)

    async def _build_on(self, cargo: _Cargo, trees: Sequence[str]) -> None:
        """Begin with what the likest tree there has in common with this one."""
        wanted = {(entry.path, entry.kind, entry.value): entry.size for entry in cargo.manifest}
        large = {entry.path: entry.size for entry in cargo.manifest if entry.kind in "fx" and entry.size > self.chunk}
        best, common = "", 0
        if cargo.size < _WORTH:
            return
        unknown = 0
        for name in trees:
            unknown += f"t:{name[:64]}" not in self._manifests
            if unknown > _ASKED:
                break
            older = await self._manifest(name)
            shared = sum(wanted.get((entry.path, entry.kind, entry.value), 0) for entry in older)
            shared += sum(min(entry.size, large.get(entry.path, 0)) // 2 for entry in older)  # they may have chunks in common
            if shared > common:
                best, common = name, shared
        if not best or common * 10 < cargo.size:
            return
        older = await self._manifest(best)
        same = {entry.path for entry in older if (entry.path, entry.kind, entry.value) in wanted}
        alike = [entry.path for entry in older if entry.path in large and entry.path not in same and entry.size > self.chunk]
        superfluous = [entry.path for entry in older if entry.path not in same and entry.path not in alike]
        superfluous += sorted(set(_folders(older)) - set(_folders(cargo.manifest)))
        listed = names(f"./{path}" for path in superfluous)
        said = await self._ask(work.BASE, cargo.name, best, *(f"./{path}" for path in alike), stdin=listed)
        if said == b"linked\n":
            cargo.missing = {path: entry for path, entry in cargo.missing.items() if path not in same}
            cargo.links = [entry for entry in cargo.links if entry.path not in same]
            await self._compare_all(cargo, alike)

    async def _manifest(self, name: str) -> Sequence[Entry]:
        """What a tree that the host has holds; nothing when that cannot be told."""
        content = f"t:{name[:64]}"
        if (known := self._manifests.get(content)) is None:
            known = self._recall(content)
            if known is None:
                data = await self.read(f"{self.path(content)}.json", limit=work.LONGEST_ANSWER)
                try:
                    known = [Entry(*row) for row in json.loads(data.decode("utf-8", "surrogateescape"))]
                    known = known if files.tree_id(known) == content else ()
                except (ValueError, TypeError):
                    known = ()
            self._remember(content, known)
        return known

    def _remember(self, content: str, manifest: Sequence[Entry]) -> None:
        self._manifests[content] = manifest
        if len(self._manifests) > _MANIFESTS:
            del self._manifests[next(iter(self._manifests))]

    async def _deliver(self, cargo: _Cargo, meter: _Meter) -> None:
        """Send what is missing, and again what did not arrive, until all of it is there and right."""
        idle = 0
        while cargo.missing or cargo.bare:
            owed = cargo.owed(), len(cargo.missing), cargo.bare
            trouble = await self._round(cargo, meter)
            if not cargo.missing and not cargo.bare:
                return
            await self._patiently(lambda: self._survey(cargo))
            meter.done = meter.total - cargo.owed()
            idle = 0 if (cargo.owed(), len(cargo.missing), cargo.bare) < owed else idle + 1
            if idle >= TRIES:
                self._give_up(cargo, trouble)
            if idle > 1:
                await asyncio.sleep(min(5.0, 0.05 * 2**idle))

    def _give_up(self, cargo: _Cargo, trouble: BaseException | None) -> None:
        if isinstance(trouble, Unreachable):
            raise trouble
        path = next(iter(cargo.missing), cargo.name)
        raise Corrupt(f"{path} does not arrive at {self.name} as it was sent", fix="look at the disk and the memory of both machines") from trouble

    async def _round(self, cargo: _Cargo, meter: _Meter) -> BaseException | None:
        """Send all that is missing once, on a few streams.  Answers what broke the connection, if anything did."""
        jobs = iter(self._jobs(cargo, meter))
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
                for _ in range(STREAMS):
                    group.create_task(stream())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return trouble[0] if trouble else None

    def _jobs(self, cargo: _Cargo, meter: _Meter) -> Iterator[Callable[[], Awaitable[None]]]:
        """Large files first: what is left at the end should be small."""
        large = [entry for entry in cargo.missing.values() if entry.size > self.chunk]
        small = [entry for entry in cargo.missing.values() if entry.size <= self.chunk]
        for entry in large:
            yield lambda entry=entry: self._write(cargo, entry, meter)  # type: ignore[misc]
        batches: list[list[Entry]] = [[]]
        size = 0
        for entry in small:
            if size >= BATCH_BYTES or len(batches[-1]) >= BATCH_FILES:
                batches.append([])
                size = 0
            batches[-1].append(entry)
            size += entry.size
        alone = not large and len(batches) == 1
        for batch in batches:
            if batch or cargo.bare:
                last = batch is batches[-1] and cargo.bare
                yield lambda batch=batch, last=last: self._batch(cargo, batch, last, alone, meter)  # type: ignore[misc]

    async def _batch(self, cargo: _Cargo, batch: Sequence[Entry], last: bool, alone: bool, meter: _Meter) -> None:
        """Small files in one tar; with the last ones comes what is no file, and when there are no others, the tree gets its name at once."""
        title = f".{self._word}-{next(_count)}"
        data = _text(cargo.manifest) if last else b""
        digests = [*batch, Entry(f"{title}.json", "f", len(data), hashlib.sha256(data).hexdigest())] if last else batch
        listed = names(f"./{entry.path}" for entry in digests)

        def pieces() -> Iterator[bytes]:
            yield tar.member(Entry(title, "f", len(listed), ""), listed)
            if last:
                yield tar.member(digests[-1], data)
            if cargo.root:
                yield from tar.tar_stream(cargo.root, [*batch, *(cargo.links if last else ())])
                return
            for entry in batch:
                yield tar.member(entry, _whole(cargo.origin(entry), entry.size))
            yield tar.END

        expected = work.bytes_digest(digests)
        place = (cargo.name, expected, *_stamp(cargo)) if alone and cargo.root else (cargo.name, "later")
        folder = cargo.name if cargo.root else "."
        said = (await self._once(work.BATCH, folder, title, *place, stdin=meter.counted(pieces()))).decode("utf-8", "replace")
        digest, _, more = said.partition("\n")
        if digest != expected:
            self._complain(said)
            raise Garbled
        for entry in batch:
            cargo.missing.pop(entry.path, None)
        cargo.bare = cargo.bare and not last
        cargo.placed = more == f"placed {cargo.name}\n"

    async def _write(self, cargo: _Cargo, entry: Entry, meter: _Meter) -> None:
        mode = "0555" if entry.kind == "x" else "0444"
        holes = cargo.holes.get(entry.path) or [(0, -(-entry.size // self.chunk))]
        holes = [(at, min(_TURN, first + count - at)) for first, count in holes for at in range(first, first + count, _TURN)]
        for first, count in holes:
            pieces = _part(cargo.origin(entry), entry.size, first * self.chunk, min(count * self.chunk, entry.size - first * self.chunk))
            arguments = (cargo.folder, f"./{entry.path}", str(self.chunk), str(first), mode, "whole" if (first, count) == holes[-1] else "part")
            said = (await self._once(work.WRITE, *arguments, stdin=meter.counted(pieces))).decode("utf-8", "replace")
            if said == f"{entry.value}\n":
                cargo.missing.pop(entry.path, None)
                cargo.holes.pop(entry.path, None)
                return
            if said == "gone\n":
                raise _Gone
            self._complain(said)
            if said:
                break
        raise Garbled

    async def _survey(self, cargo: _Cargo) -> None:
        """Ask what of the missing has arrived, and leave out of `missing` what is right."""
        cargo.rough = True
        small = [entry for entry in cargo.missing.values() if entry.size <= self.chunk]
        if small:
            said = await self._ask(work.SURVEY, cargo.folder, stdin=names(f"./{entry.path}" for entry in small))
            letters, _, rest = said.partition(b"\n")
            if said == b"gone\n":
                raise _Gone
            digests = iter(rest.split(b"\n"))
            if len(letters) != len(small):
                raise Garbled
            for entry, letter in zip(small, letters.decode(), strict=True):
                if letter != "-" and next(digests, b"").decode() == entry.value and letter == entry.kind:
                    del cargo.missing[entry.path]
        await self._compare_all(cargo, [path for path, entry in cargo.missing.items() if entry.size > self.chunk])

    async def _compare_all(self, cargo: _Cargo, paths: Sequence[str]) -> None:
        todo = iter([cargo.missing[path] for path in paths])

        async def some() -> None:
            for entry in todo:
                await self._compare(cargo, entry)

        await asyncio.gather(*(some() for _ in range(STREAMS)))

    async def _compare(self, cargo: _Cargo, entry: Entry) -> None:
        """Which chunks of a large file are not there as they are here."""
        asked = self._ask(work.CHUNKS, cargo.folder, f"./{entry.path}", str(self.chunk))
        hashed = asyncio.to_thread(_chunks, cargo.origin(entry), entry.size, self.chunk)
        answer, ours = await asyncio.gather(asked, hashed)
        said = answer.decode().split("\n")
        if said[0] == "gone":
            raise _Gone
        size, theirs = int(said[0]), said[1:-1]
        if size > entry.size:
            await self._ask(work.DELETE, cargo.folder, stdin=names((f"./{entry.path}",)))
            theirs = []
        if not theirs:
            cargo.holes[entry.path] = []
            return
        wrong = [at for at, digest in enumerate(ours) if at >= len(theirs) or theirs[at] != digest]
        if not wrong and await asyncio.to_thread(_digest, cargo.origin(entry)) != entry.value:
            raise Changed(cargo.origin(entry))
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

    async def _tidy(self, cargo: _Cargo) -> None:
        """Delete what does not belong into a tree, and see which links and empty folders are missing."""
        below, pointing = work.listing(await self._ask(work.LIST, cargo.folder))
        folders = set(_folders(cargo.manifest))
        wanted = {entry.path: entry for entry in cargo.manifest}
        wrong = []
        for path, kind in below.items():
            entry = wanted.get(path)
            right = path in folders if kind == "d" else entry is not None and entry.kind == kind and (kind != "l" or pointing[path] == entry.value)
            if not right:
                wrong.append(path)
        if wrong:
            await self._ask(work.DELETE, cargo.folder, stdin=names(f"./{path}" for path in wrong))
        gone = set(wrong)
        cargo.links = [entry for entry in cargo.manifest if entry.kind in "ld" and (entry.path not in below or entry.path in gone)]
        cargo.bare = True

    async def _same(self, cargo: _Cargo) -> bool:
        """Whether a tree has exactly the names, kinds and links that it should."""
        below, pointing = work.listing(await self._ask(work.LIST, cargo.folder))
        wanted = {entry.path: entry.kind for entry in cargo.manifest if entry.kind != "d"} | {folder: "d" for folder in _folders(cargo.manifest)}
        return below == wanted and pointing == {entry.path: entry.value for entry in cargo.manifest if entry.kind == "l"}

    async def _place(self, cargo: _Cargo, meter: _Meter) -> None:
        """What has arrived gets its name."""
        if not cargo.folder:
            return
        if not cargo.root:
            await self._place_files(cargo)
            return
        for _ in range(TRIES):
            if not cargo.placed:
                said = (await self._ask(work.PLACE_TREE, cargo.name, *_stamp(cargo))).decode()
            if cargo.placed or said == f"placed {cargo.name}\n":
                self._remember(cargo.content, cargo.manifest)
                return
            if said == "gone\n":
                if name_of(cargo.content) in {name_of(content) for content in await self.have((cargo.content,))}:
                    return  # the answer was lost, not the work
                raise _Gone
            cargo.missing = {entry.path: entry for entry in cargo.manifest if entry.kind in "fx"}
            await self._tidy(cargo)
            await self._patiently(lambda: self._survey(cargo))
            await self._deliver(cargo, meter)
        self._give_up(cargo, None)

    async def _place_files(self, cargo: _Cargo) -> None:
        placed = set((await self._ask(work.PLACE_FILES, stdin=_lines(cargo.loose))).decode().split("\n"))
        if placed.issuperset(cargo.loose):
            return
        # An answer that was lost: the first to ask has placed them.
        contents = {f"{entry.kind}:{entry.value}" for name, entry in cargo.loose.items() if name not in placed}
        if await self.have(contents) != contents:
            raise _Gone

    # -- asking

    async def _ask(self, body: str, *arguments: str, stdin: bytes = b"") -> bytes:
        """What a program there answers; asked again until an answer comes whole.  Every program may run twice."""
        return await self._patiently(lambda: self._once(body, *arguments, stdin=stdin))

    async def _once(self, body: str, *arguments: str, stdin: bytes | Iterator[bytes] = b"") -> bytes:
        argv = ("sh", "-c", work.program(self._hashes, self._lists, body), "sh", self._word, self.root, self._sender, self.boot, *arguments)
        return work.answer(await self._raw(argv, stdin), self._word)

    async def _raw(self, argv: Sequence[str], stdin: bytes | Iterator[bytes]) -> bytes:
        received = bytearray()
        source = _Source(stdin)
        stream = cast("AsyncGenerator[bytes, None]", self._host.call(argv, source.stream()))
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    received += data
                    if len(received) > work.LONGEST_ANSWER:
                        raise Infrastructure(f"{self.name} does not stop answering", fix="look at what runs there, and at who it is")
        except Rejected as error:
            if source.failed is None:
                self._complain(str(error))
                raise Infrastructure(f"{self.name}: {error}") from error
        if source.failed is not None:
            raise source.failed
        return bytes(received)

    async def _patiently(self, what: Callable[[], Awaitable[_T]]) -> _T:
        for tries in itertools.count(1):
            try:
                return await what()
            except Unreachable:
                if tries == TRIES:
                    raise
            except Garbled as error:
                if tries == TRIES:
                    raise Corrupt(f"the answers of {self.name} do not arrive whole", fix="look at the connection to it") from error
            if tries > 1:
                await asyncio.sleep(0.05 * 2**tries)
        raise AssertionError

    def _complain(self, words: str) -> None:
        """A disk that is full there has words of its own."""
        if any(sign in words for sign in _FULL):
            text = " ".join(words.split())
            raise Infrastructure(f"the disk of {self.name} is full ({text})", fix=f"free some space below {self.root} there, or give it another root")

    def _full(self, free: int, needed: int) -> Infrastructure:
        return Infrastructure(f"{self.name} has {_size(free)} free, and needs {_size(needed)}", fix=f"free some space below {self.root} there")

    @contextlib.contextmanager
    def _measured(self, what: str, total: int) -> Iterator[_Meter]:
        meter = _Meter(what, total, self._progress)
        yield meter
        meter.done = meter.total
        meter.tell()


class _Standing:
    """What a host said of the objects that are to be sent to it."""

    def __init__(self, wanted: Collection[str], said: str) -> None:
        self.how: dict[str, str] = {}
        self.theirs: dict[str, list[str]] = {}
        objects, _, rest = said.partition("silent\n")
        silent, _, rest = rest.partition("free\n")
        free, _, trees = rest.partition("trees\n")
        for line in objects.splitlines():
            word, _, name = line.partition(" ")
            if word == "theirs":
                sender, _, name = name.partition(" ")
                self.theirs.setdefault(sender, []).append(name)
            elif name in wanted:
                self.how[name] = word
        self.silent = {line.split("/")[1] for line in silent.splitlines()}
        self.free = _free(free.encode())
        self.trees = [name for name in trees.splitlines() if name.endswith(".t")][:20]
        if len(self.how) != len(wanted):
            raise Garbled


class _Source:
    """What a program reads, and what kept it from coming: that is told when the program is over, whatever that said."""

    def __init__(self, data: bytes | Iterator[bytes]) -> None:
        self._data = data
        self.failed: Exception | None = None

    def stream(self) -> AsyncIterable[bytes]:
        return self._stream() if self._data else NOTHING

    async def _stream(self) -> AsyncIterator[bytes]:
        if isinstance(self._data, bytes):
            yield self._data
            return
        try:
            for block in self._data:
                yield block
        except (Changed, OSError) as error:
            self.failed = error


class _Meter:
    """Counts bytes, and tells about four times a second."""

    def __init__(self, what: str, total: int, told: Callable[[Progress], None]) -> None:
        self.total, self.done = total, 0
        self._what, self._told = what, told
        self._begun = self._last = time.monotonic()

    def counted(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            yield block
            self.add(len(block))

    def add(self, size: int) -> None:
        self.done = min(self.total, self.done + size)
        if time.monotonic() - self._last > 0.25:
            self.tell()

    def tell(self) -> None:
        self._last = time.monotonic()
        rate = self.done / max(1e-6, self._last - self._begun)
        self._told(Progress(self._what, self.done, self.total, rate, (self.total - self.done) / rate if rate else None))


class _Fetch:
    """One file or tree on its way home."""

    def __init__(self, depot: Depot, path: str, taken: Taken, target: str) -> None:
        self._depot, self._path, self._taken, self._target = depot, path, taken, target
        self._near = f"{target}.coming"
        self._tree = taken.content[:1] == "t"
        wanted = sorted(taken.entries, key=lambda entry: entry.size)  # the small ones first: a cut costs least
        self._missing = [entry for entry in wanted if entry.kind in "fx"]

    async def run(self) -> None:
        if self._tree and (trouble := work.untrusted(self._taken.entries)):
            raise Corrupt(f"{self._depot.name}: {trouble}", fix="look at who that host is")
        try:
            self._begin()
            with self._depot._measured(f"from {self._depot.name}", sum(entry.size for entry in self._missing)) as meter:
                await self._all(meter)
            self._finish()
        except OSError as error:
            raise no_space(error, os.fspath(error.filename or self._target)) from error

    async def _all(self, meter: _Meter) -> None:
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
            if idle > 1:
                await asyncio.sleep(0.05 * 2**idle)

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
            for folder in _folders(self._taken.entries):
                os.makedirs(f"{self._near}/{folder}", exist_ok=True)
        elif parent := os.path.dirname(self._near):
            os.makedirs(parent, exist_ok=True)
        self._missing = [entry for entry in self._missing if not self._right(entry)]
        free = os.statvfs(os.path.dirname(self._near) or ".")
        if (needed := self._owed()) > free.f_bavail * free.f_frsize:
            have = _size(free.f_bavail * free.f_frsize)
            raise Infrastructure(
                f"there is {have} free here for {self._target}, which needs {_size(needed)}", fix="free some space, or run `recipe gc`"
            )

    def _right(self, entry: Entry) -> bool:
        """Whether a file is here whole.  One that is wrong goes, and so does a part of a small one."""
        if not os.path.lexists(self._at(entry)):
            return False
        size = self._there(entry)
        if size == entry.size and _digest(self._at(entry)) == entry.value:
            return True
        if size >= entry.size or size < self._depot.chunk:
            os.unlink(self._at(entry))
        return False

    async def _round(self, meter: _Meter) -> None:
        """Ask once for all that is missing, first for the file of which a part is here."""
        depot = self._depot
        missing = sorted(self._missing, key=lambda entry: -self._there(entry))
        offset = self._there(missing[0])
        sink = _Sink([(entry, self._at(entry)) for entry in missing], offset)
        wanted = names(f"./{entry.path}" for entry in missing) if self._tree else names((os.path.basename(self._path),))
        folder = self._path if self._tree else os.path.dirname(self._path)
        argv = ("sh", "-c", work.SEND_HOME, "sh", depot._word, folder, str(offset))
        source = _Source(wanted)
        stream = cast("AsyncGenerator[bytes, None]", depot._host.call(argv, source.stream()))
        mark = f"\n{depot._word}\n".encode()
        noise: bytes | None = b""
        try:
            async with contextlib.aclosing(stream):
                async for data in stream:
                    if noise is not None:
                        noise += data
                        if (at := noise.find(mark)) < 0:
                            if len(noise) > _READ:
                                raise Garbled
                            continue
                        data, noise = noise[at + len(mark) :], None
                    meter.add(len(data))
                    if not sink.feed(data):
                        break
        except Rejected as error:
            if sink.position == 0:
                raise Garbled from error
        finally:
            sink.close()
            self._missing = [entry for entry in missing if entry.path not in sink.done]
            for entry in self._missing:
                if self._there(entry) < depot.chunk or (entry.path in sink.wrong and entry.size <= depot.chunk):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._at(entry))
        for entry in [entry for entry in self._missing if entry.path in sink.wrong and entry.size > depot.chunk]:
            await self._repair(entry)

    async def _repair(self, entry: Entry) -> None:
        """Fetch the chunks of a large file again that are not as they are there."""
        depot, near = self._depot, self._at(entry)
        folder, name = (self._path, entry.path) if self._tree else os.path.split(self._path)
        asked = depot._ask(work.CHUNKS, folder, f"./{name}", str(depot.chunk))
        said, ours = await asyncio.gather(asked, asyncio.to_thread(_chunks, near, entry.size, depot.chunk))
        theirs = said.decode("utf-8", "replace").split("\n")[1:-1]
        for at, (here, there) in enumerate(zip(ours, theirs, strict=False)):
            if here != there:
                data = await depot.read(f"{folder}/{name}", at * depot.chunk, limit=depot.chunk)
                _patch(near, at * depot.chunk, data)
        if not self._right(entry):
            raise self._changed(entry)
        self._missing.remove(entry)

    def _changed(self, entry: Entry) -> Corrupt:
        path = f"{self._path}/{entry.path}".rstrip("/")
        return Corrupt(f"{path} of {self._depot.name} is not what it was when the step ended", fix="run the step again")

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
                while data := file.read(_READ):
                    self._hasher.update(data)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if offset else os.O_TRUNC), 0o644)
        self._left = entry.size - offset


def _content(path: str) -> str:
    """The content id of an object that lies at `path`."""
    name = path.rpartition("/")[2]
    return f"{name[65:] or 'f'}:{name[:64]}"


def _judged(name: str, folder: bool, seen: work.Seen) -> Taken:
    """One output, as content or in words."""
    if seen.kind == "-":
        return Taken()
    if seen.kind == "o":
        return Taken(problem=f"{name} is neither a file nor a folder")
    if seen.kind != "d":
        if folder:
            return Taken(problem=f"declared output {name}/ is not a directory")
        if trouble := work.untrusted([entry._replace(path="it") for entry in seen.entries]):
            return Taken(problem=f"{name}: {trouble}")
        entry = Entry("", *seen.entries[0][1:])
        return Taken(f"{entry.kind}:{entry.value}", (entry,), entry.size)
    if trouble := work.untrusted(seen.entries):
        return Taken(problem=f"{name}: {trouble}")
    return Taken(files.tree_id(seen.entries), seen.entries, sum(entry.size for entry in seen.entries if entry.kind in "fx"))


def _folders(manifest: Iterable[Entry]) -> list[str]:
    """Every folder of a tree, each after the one it lies in."""
    found: dict[str, None] = {}
    for path, kind, _, _ in manifest:
        folder = path if kind == "d" else path.rpartition("/")[0]
        if folder in found or not folder:
            continue
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            found["/".join(parts[:depth])] = None
    return list(found)


def _stamp(cargo: _Cargo) -> tuple[str, str, str]:
    """What a tree is recognized by before it gets its name, whether links are to be looked at, and modes."""
    links = any(entry.kind == "l" for entry in cargo.manifest)
    return work.tree_digest(cargo.manifest), "links" if links else "plain", "rough" if cargo.rough else "smooth"


def _text(manifest: Sequence[Entry]) -> bytes:
    """A manifest as it lies beside a tree."""
    return json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _lines(texts: Iterable[str]) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def _part(path: str, size: int, start: int, count: int) -> Iterator[bytes]:
    """Some bytes of a file that has `size`."""
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise Changed(path)
        file.seek(start)
        while count:
            data = file.read(min(count, _READ))
            if not data:
                raise Changed(path)
            count -= len(data)
            yield data


def _patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def _whole(path: str, size: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise Changed(path)
    return data


def _chunks(path: str, size: int, chunk: int) -> list[str]:
    """A digest for every chunk of a file."""
    found = []
    for start in range(0, size, chunk):
        hasher = hashlib.sha256()
        for data in _part(path, size, start, min(chunk, size - start)):
            hasher.update(data)
        found.append(hasher.hexdigest())
    return found


def _digest(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _free(line: bytes) -> int:
    """Bytes, from a line of `df -Pk`."""
    fields = line.split()
    numbers = [int(field) for field in fields if field.isdigit()]
    if len(numbers) < 3:
        raise Garbled
    return numbers[2] << 10


def _size(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _process() -> str:
    """A name for this process that no other has: the machine's boot, the names its pids belong to, pid, and when that began."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()[:8]
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{os.getpid()}.{_started(os.getpid())}"
    except OSError:
        return f"{secrets.token_hex(4)}.0.{os.getpid()}.0"


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


def _dead(sender: str) -> bool:
    """Whether whoever sent under this name is certainly not sending any more."""
    process, _, _ = sender.rpartition("-")
    mine = _process()
    if process == mine:
        return sender not in _sending
    if process.split(".")[:2] != mine.split(".")[:2]:
        return False
    try:
        return _started(int(process.split(".")[2])) != process.split(".")[3]
    except (OSError, ValueError, IndexError):
        return True
