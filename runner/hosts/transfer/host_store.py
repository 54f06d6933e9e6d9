"""Transfer contents between this machine and one host, and manage the host's store.

A `HostStore` is the counterpart of the local object store, with the same names below its root on
the host.  Objects are uploaded (`upload`), hashed there before use, and downloaded (`download`).
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import Corrupt, Infrastructure
from ...planning.step import BROKEN_LINK, MISSING, OUTSIDE, SPECIAL, unfit_output
from ...storage.content import files, tar
from ...storage.content.files import Content, Entry
from ..link.wire import CorruptReply, UploadGone, Wire, ignore_answer, parse_strings
from . import shared_disk
from .download import HashedOutput, OutputDownload
from .manifests import files_size, find_fault, object_name, object_path, tree_stamp
from .pulling import Puller
from .upload import Sender

if TYPE_CHECKING:
    from ...secrets import Secret
    from ...storage.signed import SignedObjects

UNUSED, SWEEP = timedelta(days=14), timedelta(days=1)
"""Age at which unused objects on a host are deleted, and the time between two searches for them."""
PULLS = 2
"""Concurrent downloads from buckets on a host: each occupies a stream until it ends."""


@dataclass(slots=True)
class AttemptContents:
    """The initial contents of an attempt directory."""

    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Name -> data and mode."""
    links: dict[str, str] = field(default_factory=dict)
    """Name -> content of an object on the host."""
    folders: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """Name -> a directory below the root that outlives the attempt, created if missing."""
    beside: dict[str, bytes] = field(default_factory=dict)
    """Suffix such as `.sh` -> data of a file beside the attempt directory."""
    paths: dict[str, str] = field(default_factory=dict)
    """Name -> target of a symbolic link in a repository."""
    seen: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """Name -> a local path that the host sees too, and whether it is an object."""


@dataclass(frozen=True, slots=True)
class HashedOutputs:
    """The outputs of an attempt by name, and the attempt's changed inputs, by name or by content."""

    outputs: dict[str, HashedOutput]
    changed: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Data of a file on the host.

    `is_replaced` means that the path is a pipe, a device, a directory or a broken link, without
    data.
    """

    data: bytes
    is_replaced: bool


class MissingDirectory(Corrupt):
    """The directory does not exist on the host."""


class HostStore(Sender):
    """The host's store below the root of `wire`.

    `recall` returns the manifest of a tree that the host may have, if it is known here.  `folder`
    is a local directory to test whether the host sees the local disk; empty if it does not.

    Every method may raise the errors of `Host.call` (after retries if these help), Infrastructure
    if the host or a disk cannot fulfill the request, and Corrupt if data does not match its digest.
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
        """Root directory of recipe on the host."""
        return self.wire.root

    async def open(self) -> None:
        """Create the directories on the host, and determine their absolute path."""
        await self.wire.open()
        if self._folder:
            self.shared_disk = await shared_disk.detect_shared_disk(self.wire, self._folder)

    async def aclose(self) -> None:
        """Close the connection to the host."""
        await self.wire.aclose()

    # -- contents

    def path(self, content: str) -> str:
        """Return the path of an object on the host, whether it exists or not."""
        return f"{self.root}/{object_path(content)}"

    async def pull(
        self, source: SignedObjects, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> Content:
        """Let the host download an input from its bucket, as an object.

        Returns its content, which equals `known` if that is set.

        `learn` receives new secrets.  Raises CannotPull if the host cannot download the input, and
        CannotRun if the input has changed.
        """
        async with self._pulling:
            return await Puller(self).pull(source, known, learn)

    async def fetch(self, path: str, output: HashedOutput, target: str) -> None:
        """Download an output found by `hash_outputs` from `path` to the new path `target`.

        An interrupted download continues.
        """
        await OutputDownload(
            self.wire, path, output, target, near=self.shared_disk.sees_host_root
        ).run()

    # -- attempts

    async def stage(
        self, name: str, contents: AttemptContents, uploading: Collection[str] = ()
    ) -> list[str]:
        """Create the attempt directory `name` on the host.  An existing one stays unchanged.

        The host waits until the contents that are `uploading` have arrived.  Raises UploadGone if
        that takes long. Returns the names of inputs that are symbolic links to files.
        """
        data, stamp = self._pack_attempt(name, contents)
        states = list(contents.states.values())
        awaited = [object_name(content) for content in uploading]
        inputs = [(path, True) for path in contents.links]
        inputs += [(path, is_object) for path, (_, is_object) in contents.seen.items()]

        async def stage_once() -> list[str]:
            linked = await self.wire.ask_once(
                "stage", name, stamp, states, awaited, inputs, read=_parse_links, data=data
            )
            if linked is None:
                raise CorruptReply
            return linked

        return await self.wire.retry(stage_once)

    def _pack_attempt(self, name: str, contents: AttemptContents) -> tuple[bytes, str]:
        """Return an attempt directory as a tar, and the digest of its names and links; empty for an
        empty directory.

        A complete and unpacked tar is correct, except for names that some disks treat as equal.
        The digest detects these.
        """
        at = f"at/{name}"
        entries = [Entry(f"{at}/{folder}", "d", 0, "") for folder in contents.folders]
        for path, target in self._link_targets(contents).items():
            entries.append(Entry(f"{at}/{path}", "l", len(os.fsencode(target)), target))
        is_empty = not entries and not contents.files
        entries.insert(0, Entry(at, "d", 0, ""))
        pieces = [tar.member(entry, b"") for entry in entries]

        def add_file(path: str, data: bytes, kind: str = "f", *, read_only: bool = False) -> None:
            entry = Entry(path, kind, len(data), "")
            entries.append(entry)
            pieces.append(tar.member(entry, data, read_only=read_only))

        for path, (data, mode) in contents.files.items():
            read_only = not mode & stat.S_IWUSR
            add_file(f"{at}/{path}", data, _kind_of(mode), read_only=read_only)
        for suffix, data in contents.beside.items():
            add_file(f"{at}{suffix}", data)
        # The record of the inputs is last, so that no staged file looks newer.
        add_file(f"{at}.in", self._record_inputs(name, contents))
        stamp = ""
        if not is_empty:
            stamp = tree_stamp([Entry(entry.path[len("at/") :], *entry[1:]) for entry in entries])
        return b"".join((*pieces, tar.END)), stamp

    def _link_targets(self, contents: AttemptContents) -> dict[str, str]:
        """Return the symbolic links of an attempt directory: name -> target."""
        targets = {path: self.path(content) for path, content in contents.links.items()}
        targets |= contents.paths
        targets |= {path: target for path, (target, _) in contents.seen.items()}
        targets |= {path: f"{self.root}/{folder}" for path, folder in contents.states.items()}
        return targets

    def _record_inputs(self, name: str, contents: AttemptContents) -> bytes:
        """Return the paths of the staged inputs on the host, which a step must not change."""
        inputs = [f"{self.root}/attempts/{name}/{path}" for path in contents.files]
        inputs += [self.path(content) for content in contents.links.values()]
        return "".join(f"{path}\0" for path in inputs).encode("utf-8", "surrogateescape")

    async def hash_outputs(self, path: str, outputs: Sequence[str]) -> HashedOutputs:
        """Hash these outputs of an attempt on the host, and find its changed inputs."""
        try:
            hashed, changed = await self.wire.ask(
                "take",
                path,
                outputs,
                read=lambda answer: _parse_outputs(answer, outputs),
            )
        except UploadGone:
            raise MissingDirectory(
                f"{path} no longer exists on {self.wire.name}", fix="run the step again"
            ) from None
        objects = f"{self.root}/objects/"

        def name_input(changed_path: str) -> str:
            if changed_path.startswith(objects):
                return _content_at(changed_path)
            return changed_path.removeprefix(f"{path}/")

        return HashedOutputs(hashed, tuple(map(name_input, changed)))

    async def read_leftovers(
        self, path: str, *, each: int, all: int, count: int
    ) -> tuple[dict[str, bytes], int]:
        """Read small files of an attempt; return them and the number of others.

        Limits are `count` files, `each` bytes per file and `all` bytes in total.
        """
        answer, data = await self.wire.read("remains", path, each, all, count)
        leftovers: dict[str, bytes] = {}
        at = 0
        try:
            sent, others = answer
            for name, size in sent:
                leftovers[str(name)] = data[at : at + int(size)]
                at += int(size)
            fault = _find_name_fault(leftovers)
        except (TypeError, ValueError):
            fault = "invalid data"
        if fault:
            raise self._invalid_reply_error(path, fault)
        return leftovers, int(others)

    async def store_outputs(
        self, path: str, outputs: Mapping[str, str], *, copy: Collection[str] = ()
    ) -> set[str]:
        """Move outputs of an attempt into the host's store: name -> content, as `hash_outputs`
        found them.  Those in `copy` are copied.
        """
        known = {object_name(content): content for content in outputs.values()}
        kept = await self.wire.ask(
            "keep",
            path,
            [(name, object_name(content), name in copy) for name, content in outputs.items()],
            read=parse_strings,
        )
        return {known[name] for name in kept if name in known}

    async def read(self, path: str, offset: int = 0, *, limit: int = 16 << 20) -> bytes:
        """Read a small file on the host from `offset`, up to `limit` bytes; empty if it does not exist."""
        return (await self.read_piece(path, offset, limit=limit)).data

    async def read_piece(self, path: str, offset: int, *, limit: int) -> Piece:
        """Read a file as `read` does, and report a path that is no regular file.

        Older agents do not report this.
        """
        answer, data = await self.wire.read("read", path, offset, limit)
        return Piece(data, answer is True)

    async def find_files(self, path: str, pattern: str) -> list[str]:
        """Return the files of an attempt whose names match a pattern."""
        matching = await self.wire.ask("matching", path, pattern, read=parse_strings)
        fault = _find_name_fault(matching)
        if fault:
            raise self._invalid_reply_error(path, fault)
        return matching

    def _invalid_reply_error(self, path: str, fault: str) -> Corrupt:
        return Corrupt(
            f"{self.wire.name} sent an invalid reply about {path}: {fault}",
            fix="check that this is the right host",
        )

    async def write_marker(self, path: str) -> None:
        """Write a marker file below the root on the host."""
        await self.wire.ask("note", path, read=ignore_answer)

    async def remove(self, paths: Collection[str]) -> None:
        """Delete files and directories below the root on the host, even read-only ones."""
        self._check_below_root(paths)
        if paths:
            await self.wire.ask("remove", list(paths), read=ignore_answer)

    def _check_below_root(self, paths: Collection[str]) -> None:
        if any(not path.startswith(f"{self.root}/") for path in paths):
            raise Infrastructure(
                f"BUG: {sorted(paths)} is to be deleted, which is not below {self.root}"
            )

    async def clear(
        self, paths: Collection[str], *, unused: timedelta = UNUSED, every: timedelta = SWEEP
    ) -> int:
        """Delete leftovers of attempts, unused objects that no attempt links to, and unused states.

        Returns the number of deleted objects and states, which are searched at most once per
        `every`.
        """
        self._check_below_root(paths)
        return await self.wire.ask(
            "clear", list(paths), int(unused.total_seconds()), int(every.total_seconds()), read=int
        )

    async def list_folder(self, path: str) -> tuple[list[tuple[str, int, int, bool]], int, int]:
        """List files and links below a directory.

        An entry is the name, the bytes, the modification time in nanoseconds, and whether it is a
        link.

        Also returns the free and total bytes of the disk.
        """
        return await self.wire.ask("look", path, read=_parse_listing)

    async def move_to_state(self, content: str, path: str) -> None:
        """Turn an object into a writable part of a state at `path`, shared with no other file."""
        try:
            await self.wire.ask("release", object_name(content), path, read=ignore_answer)
        except UploadGone:
            raise Infrastructure(
                f"{self.wire.name}: the uploaded files of {path} disappeared",
                fix="find out which program deletes files on the host",
            ) from None

    async def find_free_space(self) -> int:
        """Return the free bytes below the root on the host."""
        return await self.wire.ask("free", read=int)


def _find_name_fault(names: Iterable[str]) -> str:
    """Return the first fault of file names received from a host; empty if they are safe to use."""
    return find_fault([Entry(name, "f", 0, "0" * 64) for name in names])


def _kind_of(mode: int) -> str:
    """Return the manifest kind of a plain file with this mode."""
    return "x" if mode & stat.S_IXUSR else "f"


def _parse_links(answer: Any) -> list[str] | None:
    return None if answer is None else parse_strings(answer)


def _content_at(path: str) -> str:
    """Return the content of the object at `path`."""
    name = path.rpartition("/")[2]
    return f"{name[65:] or 'f'}:{name[:64]}"


def _parse_outputs(
    answer: Any, outputs: Sequence[str]
) -> tuple[dict[str, HashedOutput], list[str]]:
    hashed, changed = answer
    if len(hashed) != len(outputs):
        raise ValueError
    parsed: dict[str, HashedOutput] = {}
    for name, (kind, rows) in zip(outputs, hashed, strict=True):
        parsed[name] = _parse_output(name, kind, rows)
    return parsed, parse_strings(changed)


def _parse_listing(answer: Any) -> tuple[list[tuple[str, int, int, bool]], int, int]:
    rows, free, total = answer
    entries: list[tuple[str, int, int, bool]] = []
    for name, size, written, is_link in rows:
        entries.append((str(name), max(0, int(size)), int(written), bool(is_link)))
    return entries, int(free), int(total)


def _parse_output(name: str, kind: str, rows: Sequence[Sequence[Any]]) -> HashedOutput:
    """Parse the host's answer about one output: its kind and its entries."""
    entries = tuple(
        Entry(str(path), str(each), int(size), str(value)) for path, each, size, value in rows
    )
    unfit = (BROKEN_LINK, SPECIAL, OUTSIDE)
    if kind not in (MISSING, *unfit, "f", "x", "d"):
        raise ValueError
    if any(entry.kind not in ("f", "x", "l", "d", "o") for entry in entries):
        raise ValueError
    if kind == MISSING:
        return HashedOutput()
    if kind in unfit:
        why = unfit_output(kind, 0, is_empty=False)
        return HashedOutput(problem=f"{name} {why}", kind=kind)
    if kind != "d":
        (only,) = entries
        if only.kind != kind:
            raise ValueError
        fault = find_fault([only._replace(path="it")])
        if fault:
            return HashedOutput(problem=f"{name}: {fault}", kind=kind)
        content = f"{only.kind}:{only.value}"
        return HashedOutput(content, (only._replace(path=""),), only.size, kind=kind)
    fault = find_fault(entries)
    if fault:
        return HashedOutput(problem=f"{name}: {fault}", kind=kind)
    return HashedOutput(files.tree_id(entries), entries, files_size(entries), kind=kind)
