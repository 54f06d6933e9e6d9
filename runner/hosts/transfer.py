"""Move contents between here and one host, and know what that host keeps of ours.  Knows content ids, manifests and `Host.call`, not steps or keys.

A `Depot` is the other end of the object store: the same names below its root on the host, made there from what is sent (`sending`), hashed there
before anybody uses it, and brought home from there (`fetching`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from drivers.base import Host

from ..errors import Infrastructure
from ..storage import files, tar
from ..storage.files import Entry
from . import hostwork as work
from .download import Fetch, Taken
from .hostwork import Garbled, free_of, lines, name_of, names, place_of
from .upload import Sender
from .wire import Progress, Wire


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
class Harvest:
    """What an attempt left: its outputs by name, and which of its inputs it changed: names in it, and contents that it was given as links."""

    outputs: dict[str, Taken]
    changed: tuple[str, ...] = ()


class Depot:
    """What one host keeps of ours below `root`, a path there; a relative one begins at the login's home.

    `recall` answers the manifest of a tree that the host may have, when somebody here remembers it.  Every method may raise what `Host.call` raises
    (after it has tried again where that helps), Infrastructure when the host or a disk cannot do what is asked, and Corrupt when bytes cannot be had
    as their name says.
    """

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
        self.wire = Wire(host, root, name=name, say=say, progress=progress)
        self._sender = Sender(self.wire, recall)

    @property
    def root(self) -> str:
        """Where ours begins there."""
        return self.wire.root

    @property
    def chunk(self) -> int:
        """Bytes: smaller files travel together, larger ones are compared and sent again in pieces of this size."""
        return self._sender.chunk

    @chunk.setter
    def chunk(self, size: int) -> None:
        self._sender.chunk = size

    async def open(self) -> None:
        """Make the folders there, and find out how that host does things."""
        await self.wire.open()

    # -- contents

    def path(self, content: str) -> str:
        """Where an object lies there, if it does."""
        return f"{self.root}/{place_of(content)}"

    async def have(self, contents: Collection[str]) -> set[str]:
        """Those that are there and may be used unread: they were hashed in this boot, and nothing has written to them since."""
        return await self._sender.have(contents)

    async def send(self, sources: Mapping[str, str], manifests: Mapping[str, Sequence[Entry]] | None = None) -> None:
        """See to it that these contents lie there: content -> a path here that holds it.  Trees whose manifest is not given are read for it."""
        await self._sender.send(sources, manifests or {})

    async def fetch(self, path: str, taken: Taken, target: str) -> None:
        """Bring what `take` found at `path` there to `target` here, which must not exist.  A part that came earlier is not fetched again."""
        await Fetch(self.wire, self.chunk, path, taken, target).run()

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
            if said := (await self.wire.once(work.STAGE, *arguments, stdin=data)).decode("utf-8", "replace"):
                self.wire.complain(said)
                raise Garbled

        await self.wire.patiently(once)
        return f"{self.root}/attempts/{name}"

    async def take(self, path: str, outputs: Sequence[tuple[str, bool]]) -> Harvest:
        """What an attempt at `path` made: for each of `outputs` (its name there, and whether it has to be a folder) what it is, hashed there."""

        async def once() -> tuple[list[work.Seen], list[str]]:
            return work.seen(await self.wire.once(work.TAKE, path, stdin=names(name for name, _ in outputs)), len(outputs))

        found, changed = await self.wire.patiently(once)
        outcome = {name: _judged(name, folder, seen) for (name, folder), seen in zip(outputs, found, strict=True)}
        objects = f"{self.root}/objects/"
        return Harvest(outcome, tuple(_content(name) if name.startswith(objects) else name.removeprefix(f"{path}/") for name in changed))

    async def remains(self, path: str, *, each: int, all: int, count: int) -> tuple[dict[str, bytes], int]:
        """Small files of the attempt at `path` by name, at most `count`, of `each` bytes and together `all`; and how many others it has."""
        return await self.wire.patiently(lambda: self._remains(path, str(each), str(all), str(count)))

    async def _remains(self, *arguments: str) -> tuple[dict[str, bytes], int]:
        return work.remains(await self.wire.once(work.REMAINS, *arguments))

    async def keep(self, path: str, outputs: Mapping[str, str], *, copy: Collection[str] = ()) -> set[str]:
        """Make outputs of the attempt at `path` objects there: name -> content, as `take` found them.  They are moved, but those of `copy`."""
        known = {name_of(content): content for content in outputs.values()}
        triples = itertools.chain.from_iterable((name, name_of(content), "cp" if name in copy else "mv") for name, content in outputs.items())
        said = await self.wire.ask(work.KEEP, path, stdin=names(triples))
        return {known[name] for name in said.decode().split("\n") if name in known}

    async def read(self, path: str, offset: int = 0, *, limit: int = 16 << 20) -> bytes:
        """Bytes of a small file there, from `offset` on, at most `limit`; empty when there is none."""
        return await self.wire.ask(work.READ, path, str(offset), str(limit))

    async def remove(self, paths: Collection[str]) -> None:
        """Delete files and folders below the root there, whatever their modes."""
        if any(not path.startswith(f"{self.root}/") for path in paths):
            raise Infrastructure(f"BUG: {sorted(paths)} is to be deleted, which is not below {self.root}")
        if paths:
            await self.wire.ask(work.REMOVE, stdin=names(paths))

    async def sweep(self, keep: Collection[str] = (), *, unused: timedelta = timedelta(days=14), every: timedelta = timedelta(0)) -> int:
        """Delete objects that nobody asked for since then, unless an attempt there leads to them or `keep` has them, and states nobody wrote to.

        Answers how many.  Nothing is looked at when the last sweep was less than `every` ago.
        """
        minutes = [int(time.total_seconds() // 60) for time in (unused, every)]
        said = await self.wire.ask(work.SWEEP, str(max(1, minutes[0])), str(minutes[1]), stdin=lines(map(name_of, keep)))
        return said.count(b"\n")

    async def free(self) -> int:
        """Bytes that may still be written below the root there."""
        return free_of(await self.wire.ask(work.FREE))


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
