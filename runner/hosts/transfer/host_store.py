"""Move contents between here and one host, and know what that host keeps of ours.

A `HostStore` is the other end of the object store: the same names below its root on the host, made there from what is sent (`upload`), hashed there
before anybody uses it, and brought home from there (`download`).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import Corrupt, Infrastructure
from ...storage.content import files, tar
from ...storage.content.files import Content, Entry
from ..link.wire import CorruptReply, Gone, Wire, nothing, words_of
from . import neighbours
from .download import Fetch, Taken
from .manifests import find_fault, name_of, path_of, stamp_of
from .upload import Sender

if TYPE_CHECKING:
    from ...secrets import Secret
    from ...storage.signed import Signed

UNUSED, SWEEP = timedelta(days=14), timedelta(days=1)
"""How long objects on a host may be unused, and between two looks for such."""
PULLS = 2
"""Inputs that a host has from buckets at once: each keeps a stream from other questions for as long as it takes."""


@dataclass(slots=True)
class Parcel:
    """What an attempt directory begins with."""

    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Name -> its bytes and its mode."""
    links: dict[str, str] = field(default_factory=dict)
    """Name -> the content that it leads to, which must be there."""
    folders: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """Name -> a folder below the root, made if need be, that it leads to and that outlives the attempt."""
    beside: dict[str, bytes] = field(default_factory=dict)
    """Ending (`.sh`) -> a file next to the attempt directory, called as that is and so on."""
    paths: dict[str, str] = field(default_factory=dict)
    """Name -> wherever a link of a repository leads."""
    seen: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Name -> a path of ours that the host sees as we do, and whether it is an object."""


@dataclass(frozen=True, slots=True)
class Harvest:
    """What an attempt left: its outputs by name, and which of its inputs it changed: names in it, and contents that it was given as links."""

    outputs: dict[str, Taken]
    changed: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Bytes of a file there; in `is_replaced`, whether it is a pipe, a device, a folder or a link that leads nowhere, which has none."""

    data: bytes
    is_replaced: bool


class Vanished(Corrupt):
    """A folder there is not there any more, or never was."""


class HostStore(Sender):
    """What one host keeps of ours below the root that `wire` asks about.

    `recall` answers the manifest of a tree that the host may have, when somebody here remembers it.  `folder` is one of ours, by which a host is
    asked whether it sees our disk; empty: it does not.

    Every method may raise what `Host.call` raises (after it has tried again where that helps), Infrastructure when the host or a disk cannot do
    what is asked, and Corrupt when bytes cannot be had as their name says.
    """

    def __init__(
        self,
        wire: Wire,
        recall: Callable[[str], Sequence[Entry] | None] = lambda _content: None,
        folder: str = "",
    ) -> None:
        super().__init__(wire, recall)
        self._folder = folder
        self._pulling = asyncio.Semaphore(PULLS)

    @property
    def root(self) -> str:
        """Where ours begins there."""
        return self.wire.root

    async def open(self) -> None:
        """Make the folders there, and find out where they are."""
        await self.wire.open()
        if self._folder:
            self.neighbour = await neighbours.meet(self.wire, self._folder)

    async def aclose(self) -> None:
        """End what answers us there."""
        await self.wire.aclose()

    # -- contents

    def path(self, content: str) -> str:
        """Where an object is there, if it does."""
        return f"{self.root}/{path_of(content)}"

    async def pull(
        self, source: Signed, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        """Let the host have an input from its bucket, as an object.  Answers its content, which is `known` where that is not empty.

        `learn` hears what is a secret from now on.  Raises Passed when it cannot be had this way, and CannotRun when it is not what it was.
        """
        from .pulling import Puller

        async with self._pulling:
            return await Puller(self).pull(source, known, learn)

    async def fetch(self, path: str, taken: Taken, target: str) -> None:
        """Bring what `take` found at `path` there to `target` here, which must not exist.  A part that came earlier is not fetched again."""
        await Fetch(self.wire, path, taken, target, near=self.neighbour.shows).run()

    # -- attempts

    async def stage(self, name: str, parcel: Parcel, coming: Collection[str] = ()) -> list[str]:
        """Make the attempt directory `name` there.  One that was staged already stays as it is.

        It stands once the contents `coming`, which are being sent, are there.  Raises Gone when that takes long.
        Answers the names of what it is given as links to files.
        """
        at = f"at/{name}"
        plain = [
            (Entry(f"{at}/{path}", _kind_of(mode), len(data), ""), data)
            for path, (data, mode) in parcel.files.items()
        ]
        read_only = {
            f"{at}/{path}" for path, (_, mode) in parcel.files.items() if not mode & stat.S_IWUSR
        }
        plain += [
            (Entry(f"{at}{ending}", "f", len(data), ""), data)
            for ending, data in parcel.beside.items()
        ]
        pointing = {path: self.path(content) for path, content in parcel.links.items()}
        pointing |= parcel.paths | {path: to for path, (to, _) in parcel.seen.items()}
        pointing |= {path: f"{self.root}/{folder}" for path, folder in parcel.states.items()}
        below = [Entry(f"{at}/{folder}", "d", 0, "") for folder in parcel.folders]
        below += [
            Entry(f"{at}/{path}", "l", len(os.fsencode(to)), to) for path, to in pointing.items()
        ]
        given = [f"{self.root}/attempts/{name}/{path}" for path in parcel.files] + [
            self.path(content) for content in parcel.links.values()
        ]
        note = "".join(f"{path}\0" for path in given).encode("utf-8", "surrogateescape")
        plain.append(
            (Entry(f"{at}.in", "f", len(note), ""), note)
        )  # last: nothing that is given may look as if it had changed since
        pieces = [
            tar.member(entry, data, read_only=entry.path in read_only)
            for entry, data in (
                (Entry(at, "d", 0, ""), b""),
                *((entry, b"") for entry in below),
                *plain,
            )
        ]
        data = b"".join((*pieces, tar.END))
        # A tar that came whole and was unpacked without a word is what was sent, but for names that some disks take for the same.
        stamp = ""
        if below or parcel.files:
            made = [Entry(at, "d", 0, ""), *below, *(entry for entry, _ in plain)]
            stamp = stamp_of([Entry(entry.path[3:], *entry[1:]) for entry in made])

        real = [(path, True) for path in parcel.links]
        real += [(path, is_object) for path, (_, is_object) in parcel.seen.items()]

        async def once() -> list[str]:
            awaited = [name_of(content) for content in coming]
            states = list(parcel.states.values())
            linked = await self.wire.once(
                "stage", name, stamp, states, awaited, real, read=_link_answer, data=data
            )
            if linked is None:
                raise CorruptReply
            return linked

        return await self.wire.patiently(once)

    async def take(self, path: str, outputs: Sequence[tuple[str, bool]]) -> Harvest:
        """What an attempt at `path` made: for each of `outputs` (its name there, and whether it has to be a folder) what it is, hashed there."""
        try:
            found, changed = await self.wire.ask(
                "take",
                path,
                [name for name, _ in outputs],
                read=lambda answer: _read_taken(answer, outputs),
            )
        except Gone:
            raise Vanished(
                f"{path} is not on {self.wire.name} any more", fix="run the step again"
            ) from None
        objects = f"{self.root}/objects/"
        return Harvest(
            found,
            tuple(
                _content(name) if name.startswith(objects) else name.removeprefix(f"{path}/")
                for name in changed
            ),
        )

    async def remains(
        self, path: str, *, each: int, all: int, count: int
    ) -> tuple[dict[str, bytes], int]:
        """Small files of the attempt at `path` by name, at most `count`, of `each` bytes and together `all`; and how many others it has."""
        answer, data = await self.wire.read("remains", path, each, all, count)
        found: dict[str, bytes] = {}
        at = 0
        try:
            sent, others = answer
            for name, size in sent:
                found[str(name)] = data[at : at + int(size)]
                at += int(size)
            trouble = find_fault(
                [Entry(name, "f", len(held), "0" * 64) for name, held in found.items()]
            )
        except (TypeError, ValueError):
            trouble = "it makes no sense"
        if trouble:
            raise Corrupt(
                f"what {self.wire.name} says of {path} cannot be: {trouble}",
                fix="look at who that host is",
            )
        return found, int(others)

    async def keep(
        self, path: str, outputs: Mapping[str, str], *, copy: Collection[str] = ()
    ) -> set[str]:
        """Make outputs of the attempt at `path` objects there: name -> content, as `take` found them.  They are moved, but those of `copy`."""
        known = {name_of(content): content for content in outputs.values()}
        kept = await self.wire.ask(
            "keep",
            path,
            [(name, name_of(content), name in copy) for name, content in outputs.items()],
            read=words_of,
        )
        return {known[name] for name in kept if name in known}

    async def read(self, path: str, offset: int = 0, *, limit: int = 16 << 20) -> bytes:
        """Bytes of a small file there, from `offset` on, at most `limit`; empty when there is none."""
        return (await self.piece(path, offset, limit=limit)).data

    async def piece(self, path: str, offset: int, *, limit: int) -> Piece:
        """The same, and whether something else than a regular file is there.  Older agents do not say so."""
        answer, data = await self.wire.read("read", path, offset, limit)
        return Piece(data, answer is True)

    async def matching(self, path: str, pattern: str) -> list[str]:
        """Files of the attempt at `path` whose names a pattern fits."""
        found = await self.wire.ask("matching", path, pattern, read=words_of)
        if trouble := find_fault([Entry(name, "f", 0, "0" * 64) for name in found]):
            raise Corrupt(
                f"what {self.wire.name} says of {path} cannot be: {trouble}",
                fix="look at who that host is",
            )
        return found

    async def note(self, path: str) -> None:
        """Write down, in a file below the root there, that something was done."""
        await self.wire.ask("note", path, read=nothing)

    async def remove(self, paths: Collection[str]) -> None:
        """Delete files and folders below the root there, whatever their modes."""
        self._ours(paths)
        if paths:
            await self.wire.ask("remove", list(paths), read=nothing)

    def _ours(self, paths: Collection[str]) -> None:
        if any(not path.startswith(f"{self.root}/") for path in paths):
            raise Infrastructure(
                f"BUG: {sorted(paths)} is to be deleted, which is not below {self.root}"
            )

    async def clear(
        self, paths: Collection[str], *, unused: timedelta = UNUSED, every: timedelta = SWEEP
    ) -> int:
        """Delete what attempts leave, and objects not used since then, unless an attempt there leads to them, and states that were not written to.

        Answers how many objects and states.  They are not looked for when that was done less than `every` ago.
        """
        self._ours(paths)
        return await self.wire.ask(
            "clear", list(paths), int(unused.total_seconds()), int(every.total_seconds()), read=int
        )

    async def look(self, path: str) -> tuple[list[tuple[str, int, int, bool]], int, int]:
        """Files and links below a folder: name, bytes, nanoseconds of the last writing, whether it is a link.  And bytes of its disk: free, all."""
        return await self.wire.ask("look", path, read=_look)

    async def release(self, content: str, path: str) -> None:
        """Make an object something of a state at `path`: shared with no other, writable."""
        try:
            await self.wire.ask("release", name_of(content), path, read=nothing)
        except Gone:
            raise Infrastructure(
                f"{self.wire.name}: what was sent for {path} disappeared there",
                fix="see who deletes files there",
            ) from None

    async def free(self) -> int:
        """Bytes that may still be written below the root there."""
        return await self.wire.ask("free", read=int)


def _kind_of(mode: int) -> str:
    """Of a plain file of this mode, in a manifest."""
    return "x" if mode & stat.S_IXUSR else "f"


def _link_answer(answer: Any) -> list[str] | None:
    return None if answer is None else words_of(answer)


def _content(path: str) -> str:
    """The content id of an object that is at `path`."""
    name = path.rpartition("/")[2]
    return f"{name[65:] or 'f'}:{name[:64]}"


def _read_taken(
    answer: Any, outputs: Sequence[tuple[str, bool]]
) -> tuple[dict[str, Taken], list[str]]:
    found, changed = answer
    if len(found) != len(outputs):
        raise ValueError
    return {
        name: _judge_output(name, folder, kind, rows)
        for (name, folder), (kind, rows) in zip(outputs, found, strict=True)
    }, words_of(changed)


def _look(answer: Any) -> tuple[list[tuple[str, int, int, bool]], int, int]:
    found, free, total = answer
    return (
        [
            (str(name), max(0, int(size)), int(written), bool(link))
            for name, size, written, link in found
        ],
        int(free),
        int(total),
    )


def _judge_output(name: str, folder: bool, kind: str, rows: Sequence[Sequence[Any]]) -> Taken:
    """One output, as content or in words.  A host says that it is f, x, d (a folder), - (nothing) or o (something else), and what is in it."""
    entries = tuple(
        Entry(str(path), str(each), int(size), str(value)) for path, each, size, value in rows
    )
    if kind not in ("-", "o", "f", "x", "d") or any(
        entry.kind not in ("f", "x", "l", "d", "o") for entry in entries
    ):
        raise ValueError
    if kind == "-":
        return Taken()
    if kind == "o":
        return Taken(problem=f"{name} is neither a file nor a folder")
    if kind != "d":
        (only,) = entries
        if folder:
            return Taken(problem=f"declared output {name}/ is not a directory")
        if trouble := find_fault([only._replace(path="it")]):
            return Taken(problem=f"{name}: {trouble}")
        return Taken(f"{only.kind}:{only.value}", (only._replace(path=""),), only.size)
    if trouble := find_fault(entries):
        return Taken(problem=f"{name}: {trouble}")
    return Taken(
        files.tree_id(entries), entries, sum(entry.size for entry in entries if entry.kind in "fx")
    )
