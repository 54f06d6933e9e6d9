"""Copy checkpoints from a host with a disk of its own while the training runs.

They are uploaded to the next host, and old ones are deleted to keep both disks from filling up.

round: list the host's files, download new complete checkpoints to `.incoming`, examine them, list
again, rename, delete old ones on both sides

A local checkpoint equals the host's checkpoint if all files have the same sizes and times, so the
copy needs no records.  After a kill only files in `.incoming` remain, which the next round deletes.
`CheckpointHost` transfers the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from drivers.base import DriverError, Rejected, Unreachable

from ...errors import Infrastructure, RecipeError
from ...language.units import about
from ...retry import backoff, retry_async
from ...storage import checkpoints
from ...storage.checkpoint_layouts import TEMPORARY
from ...storage.checkpoints import Newest
from ...storage.content.disk import delete, sync_one
from ...storage.content.files import scan
from .host_task import StateFolder, SyncRound

if TYPE_CHECKING:
    from ..transfer.download import HashedOutput
    from ..transfer.host_store import HostStore

EVERY = 300.0
"""Default seconds between two rounds."""
SETTLE = 2.0
"""Seconds without a change after which the newest checkpoint counts as complete."""
TRIES = 4
"""Attempts of the last round if the host is unreachable."""
LOW = 0.1
"""Free fraction of a disk below which a warning appears."""
MARGIN = 1.1
"""Free space for the next checkpoint, as a multiple of the largest checkpoint."""
WHOLE = "whole"
"""Name in `.incoming` of a state that is copied as a whole."""
Listing: TypeAlias = Mapping[str, tuple[int, int]]
"""Paths below a directory -> size in bytes and modification time in nanoseconds.

A single file has the path "", a link has the size LINK.
"""
LINK = -1


def round_period(every: float | None, steps: int | None) -> float:
    """Return the seconds between two checks for a new checkpoint.

    The state is copied every `every` seconds or every `steps` steps.
    """
    if every:
        return every
    return EVERY if steps is None else SETTLE


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """A directory listing and the free and total space of its disk in bytes."""

    files: Listing
    free: int
    total: int


class CheckpointHost(Protocol):
    """Access to the state directories of a host.  Paths are relative to the root on the host."""

    partial: bool
    """Whether a lost or new node may hold a part of the checkpoints."""

    async def list_files(self, path: str) -> DirectoryListing:
        """List a directory in one request; empty if the directory does not exist."""
        ...

    async def list_resumable(self, path: str) -> DirectoryListing:
        """List the checkpoints that can be resumed: with several nodes, the files that all nodes
        have.
        """
        ...

    async def download(self, path: str, target: Path) -> int:
        """Download and verify a file or directory to a new path.  Returns the number of bytes.

        An interrupted download leaves `<target>.coming`, and the next download continues with it.
        """
        ...

    async def upload(self, source: Path, path: str) -> int:
        """Upload and verify a file or directory, and replace the old one atomically.

        Returns the number of bytes.
        """
        ...

    async def remove(self, paths: Sequence[str]) -> None:
        """Delete files and directories; missing ones are no error."""
        ...


@dataclass(slots=True)
class _StateMemory:
    """The facts about one state that a sync keeps between rounds."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    newest: tuple[str, Listing] | None = None  # the host's newest checkpoint at the last check
    bad: dict[str, Listing] = field(default_factory=dict)  # broken checkpoints with their listing
    level: int = 0  # last reported warning level of the host's disk


class CheckpointSync:
    """Copies the states of one attempt.  Rounds of one state never overlap."""

    def __init__(
        self,
        host: CheckpointHost,
        states: Sequence[StateFolder],
        tell: Callable[[SyncRound], None],
        *,
        processes: int | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare the sync.

        `tell` receives the result of each round, `processes` is the number of training processes or
        None for any.
        """
        self._host, self._states, self._tell = host, states, tell
        self._processes, self._pause = processes, pause
        self._memory = {state.name: _StateMemory() for state in states}

    async def restore(self) -> dict[str, Newest]:
        """Prepare the states on the host before an attempt.

        Downloads the host's newer checkpoints, then uploads the newest checkpoint and all other
        files of the state.

        Returns the checkpoint from which each state resumes.  Raises DriverError and RecipeError if
        the upload fails.
        """
        return {state.name: await self._restore(state) for state in self._states}

    async def run(self) -> None:
        """Run rounds at the interval of the recipe, until cancelled.

        A failed round is reported and repeated at the next interval.
        """
        async with asyncio.TaskGroup() as group:
            for state in self._states:
                group.create_task(self._run_rounds(state))

    async def sync(self) -> None:
        """Run a round for every state now, for example before a machine is preempted."""
        for state in self._states:
            await self._run_round(state)

    async def finish(self) -> None:
        """Run a last round for every state after the training has exited, with several attempts.

        Raises nothing.
        """
        for state in self._states:
            await self._run_round(state, exited=True, tries=TRIES)

    async def _run_rounds(self, state: StateFolder) -> None:
        wait = every = round_period(state.every, state.every_steps)
        while True:
            await self._pause(wait)
            began = time.monotonic()
            await self._run_round(state)
            wait = max(0.0, began + every - time.monotonic())

    async def _run_round(self, state: StateFolder, *, exited: bool = False, tries: int = 1) -> None:
        """Run a round of a state and report its result; errors are a part of the result."""
        result = SyncRound()
        async with self._memory[state.name].lock:
            try:
                await retry_async(
                    lambda: self._copier(state, result, exited=exited).run(),
                    backoff(Unreachable, tries, 1.0, 30.0),
                    self._pause,
                )
            except (DriverError, RecipeError, OSError) as error:
                result.problem = f"the checkpoint copy is incomplete: {_error_text(error)}"
                if not isinstance(error, DriverError):
                    with contextlib.suppress(OSError, RecipeError):
                        # Partial downloads may fill the local disk.
                        await asyncio.to_thread(_clean_incoming, state)
        self._tell(result)

    def _copier(self, state: StateFolder, result: SyncRound, *, exited: bool) -> _RoundCopier:
        memory = self._memory[state.name]
        return _RoundCopier(
            self._host, state, memory, result, self._pause, processes=self._processes, exited=exited
        )

    async def _restore(self, state: StateFolder) -> Newest:
        """Prepare one state on the host; return the checkpoint from which it resumes."""
        result = SyncRound()
        async with self._memory[state.name].lock:
            listing = await self._host.list_files(state.host_path)
            await asyncio.to_thread(_clean_incoming, state, None)
            if listing.files:
                await self._copier(state, result, exited=True).run(only_newer=True)
                listing = await self._host.list_resumable(state.host_path)
            newest = await asyncio.to_thread(
                checkpoints.newest, state.local_path, state.pattern, processes=self._processes
            )
            await self._upload_changed(state, newest, listing, result)
        self._tell(result)
        return newest

    async def _upload_changed(
        self, state: StateFolder, newest: Newest, listing: DirectoryListing, result: SyncRound
    ) -> None:
        """Upload the newest checkpoint and the files that are no checkpoints, unless the host has
        equal files.
        """
        on_host = _split_listing(listing.files, state.pattern)
        local = await asyncio.to_thread(_listings, state.local_path, state.pattern)
        changed = []
        for name, files in local.items():
            is_older = name != newest.name and _is_checkpoint(name, state.pattern)
            if state.pattern is not None and is_older:
                continue
            if files != on_host.get(name):
                changed.append(name)
        if not changed:
            return
        needed = sum(_total_bytes(local[name]) for name in changed)
        if needed > listing.free:
            raise Infrastructure(
                f"the host's disk has {about(listing.free)} free, but the checkpoints of {state.name} require {about(needed)}",
                fix="free disk space on the host",
            )
        for name in changed:
            source, target = _below(state.local_path, name), _join(state.host_path, name)
            result.size += await self._host.upload(source, target)
        # An upload has new times on the host.  The local files get the same, so that they count as
        # equal.
        uploaded = _split_listing(
            (await self._host.list_resumable(state.host_path)).files, state.pattern
        )
        for name in changed:
            path = _below(state.local_path, name)
            await asyncio.to_thread(_set_times, path, uploaded.get(name, {}))


class _RoundCopier:
    """One round of one state: copies new checkpoints from the host, and deletes old ones on both
    sides.

    `exited` means that the training process has exited, so that its files no longer change.
    """

    def __init__(
        self,
        host: CheckpointHost,
        state: StateFolder,
        memory: _StateMemory,
        result: SyncRound,
        pause: Callable[[float], Awaitable[None]],
        *,
        processes: int | None,
        exited: bool,
    ) -> None:
        self._host, self._state, self._memory, self._result = host, state, memory, result
        self._pause, self._processes, self._exited = pause, processes, exited
        self._incoming = _incoming_dir(state)
        self._units: Mapping[str, Listing] = {}  # name -> listing on the host
        self._failures: list[Exception] = []

    async def run(self, *, only_newer: bool = False) -> None:
        """Run the round.

        With `only_newer`, copy only checkpoints newer than the newest complete local one, and
        delete nothing.

        A failed copy does not prevent others.  The first error is raised at the end.
        """
        listing = await self._host.list_files(self._state.host_path)
        self._units = _split_listing(listing.files, self._state.pattern)
        partial = {f"{name or WHOLE}.coming" for name in self._units}
        await asyncio.to_thread(_clean_incoming, self._state, partial)
        names = [name for name in self._units if _is_checkpoint(name, self._state.pattern)]
        names.sort(key=lambda name: _age_key(name, self._units[name]), reverse=True)
        complete = await asyncio.to_thread(_complete_checkpoints, self._state)
        floor = None
        if only_newer and complete:
            floor = max(_age_key(name, files) for name, files in complete.items())
        backed_up = await self._copy_checkpoints(names, complete, floor)
        if not only_newer:
            if self._exited:
                await self._copy_other_files(names)
            await self._delete_old(names, backed_up, listing)
        await asyncio.to_thread(delete, self._incoming)
        if self._failures:
            raise self._failures[0]

    async def _copy_checkpoints(
        self,
        names: Sequence[str],
        complete: Mapping[str, Listing],
        floor: tuple[int, int, str] | None,
    ) -> list[str]:
        """Copy checkpoints, newest first, until there are enough.

        Returns those with a complete local copy.

        `names` are all checkpoints of the host, newest first.  With `floor`, only newer ones than
        this age are copied.
        """
        keep = self._state.keep
        backed_up: list[str] = []
        copied = set(complete)
        for number, name in enumerate(names):
            if keep is not None and len(backed_up) >= max(1, keep):
                break
            if self._has_copy(name, complete.get(name, {})):
                backed_up.append(name)
                continue
            if floor is not None and _age_key(name, self._units[name]) <= floor:
                continue
            if not await self._should_copy(name, copied, is_newest=number == 0):
                continue
            older = names[number + 1] if number + 1 < len(names) else ""
            if await self._copy_one(name, older):
                backed_up.append(name)
                copied.add(name)
        return backed_up

    def _has_copy(self, name: str, local: Listing) -> bool:
        """Return whether the complete local checkpoint has all files of the host's.

        It may have more, from a node that is lost now.
        """
        on_host = self._units[name]
        if local == on_host:
            return True
        return bool(local) and self._state.pattern is not None and on_host.items() <= local.items()

    async def _should_copy(self, name: str, copied: Collection[str], *, is_newest: bool) -> bool:
        """Return whether a checkpoint is due, not known to be broken, and no longer being written."""
        if self._memory.bad.get(name) == self._units[name]:
            return False
        if self._exited:
            return True
        if not checkpoints.is_due(name, copied, self._state.every_steps):
            return False
        return not is_newest or await self._is_settled(name)

    async def _is_settled(self, name: str) -> bool:
        """Return whether the host's newest checkpoint has not changed for a while."""
        listing = self._units[name]
        if self._memory.newest == (name, listing):
            return True
        await self._pause(SETTLE)
        now = await self._list_now(name) or {}
        self._memory.newest = name, now
        return now == listing

    async def _list_now(self, name: str) -> Listing | None:
        """Return the present listing of a checkpoint or file on the host; None if it does not exist."""
        listing = await self._host.list_files(self._state.host_path)
        return _split_listing(listing.files, self._state.pattern).get(name)

    async def _copy_other_files(self, names: Collection[str]) -> None:
        """Copy the changed files of the state that are no checkpoints."""
        for name in sorted(set(self._units) - set(names)):
            if any(TEMPORARY.match(part) for part in name.split("/")):
                continue
            if _listing(_below(self._state.local_path, name)) != self._units[name]:
                await self._copy_one(name)

    async def _copy_one(self, name: str, older: str = "") -> bool:
        """Download one checkpoint or file; return whether it counts.  `older` is the next older checkpoint on the host."""
        state, listing = self._state, self._units[name]
        target = self._incoming / (name or WHOLE)
        try:
            self._result.size += await self._host.download(_join(state.host_path, name), target)
        except (Rejected, RecipeError, OSError) as error:
            # The training may delete or change the checkpoint meanwhile, which is no error.
            if await self._list_now(name) == listing:
                self._failures.append(error)
            return False
        problem = await self._find_problem(name, target, older)
        if problem:
            await asyncio.to_thread(delete, target)
            if name:
                self._memory.bad[name] = listing
                self._result.rejected.append((name, problem))
            return False
        if not self._exited and await self._list_now(name) != listing:
            await asyncio.to_thread(delete, target)
            return False
        await asyncio.to_thread(_publish, target, _below(state.local_path, name), listing)
        self._result.copied.append(name or state.name)
        return True

    async def _find_problem(self, name: str, target: Path, older: str) -> str:
        """Return why a downloaded checkpoint does not count; empty if it does, or if this is no checkpoint."""
        if not _is_checkpoint(name, self._state.pattern):
            return ""
        if name == "" and self._exited and not self._host.partial:
            return ""  # the whole state of an exited training needs no examination
        verdict = await asyncio.to_thread(
            checkpoints.examine, target, processes=self._processes, thorough=True
        )
        files, older_files = list(self._units[name]), list(self._units.get(older, {}))
        why = verdict.why or checkpoints.unlike(files, older_files, older, verdict)
        if not why and self._host.partial and verdict.kind in ("file", "files"):
            return "a lost node may have held a part of the checkpoint"
        return why

    async def _delete_old(
        self, names: Sequence[str], backed_up: Sequence[str], listing: DirectoryListing
    ) -> None:
        """Delete checkpoints beyond the retention limit on both sides, and report a nearly full
        disk of the host.

        `names` are all checkpoints of the host, `backed_up` those with a complete local copy, both
        newest first.
        """
        state = self._state
        if state.pattern is None:
            return
        sizes = {name: _total_bytes(self._units[name]) for name in names}
        needed = int(max(sizes.values(), default=0) * MARGIN)
        old = self._find_old(names, backed_up, short_of_space=listing.free < needed)
        if old:
            spared = await asyncio.to_thread(checkpoints.best, state.local_path / backed_up[0])
            old = [name for name in old if name != spared]
        if old:
            await self._host.remove([_join(state.host_path, name) for name in old])
        await asyncio.to_thread(checkpoints.prune, state.local_path, state.pattern, state.keep)
        free = listing.free + sum(sizes[name] for name in old)
        level, message = disk_strain(free, listing.total, needed)
        self._result.warning = message if level > self._memory.level else ""
        self._memory.level = level

    def _find_old(
        self, names: Sequence[str], backed_up: Sequence[str], *, short_of_space: bool
    ) -> list[str]:
        """Return the checkpoints on the host that are no longer necessary, because enough complete
        ones are copied.
        """
        keep = self._state.keep
        old: list[str] = []
        if keep is not None and len(backed_up) >= max(1, keep):
            oldest_kept = backed_up[max(1, keep) - 1]
            old = list(names[names.index(oldest_kept) + 1 :])
        if short_of_space:
            old += [name for name in backed_up[1:] if name not in old]
        return old


class HostCheckpoints:
    """`CheckpointHost` on the store of one host.

    An uploaded directory arrives as an object and then moves into the state.
    """

    partial = False

    def __init__(self, host_store: HostStore) -> None:
        self._host_store = host_store

    async def list_files(self, path: str) -> DirectoryListing:
        rows, free, total = await self._host_store.list_folder(self._at(path))
        files: dict[str, tuple[int, int]] = {}
        for name, size, written, is_link in rows:
            # The host is not trusted: a name must not lead out of the directory.
            if {"", ".", ".."}.isdisjoint(name.split("/")):
                files[name] = (LINK if is_link else size), written
        return DirectoryListing(files, free, total)

    async def download(self, path: str, target: Path) -> int:
        output = await self.hash_path(path)
        if not output.content:
            raise Rejected(output.problem or f"{path} no longer exists")
        return await self.download_hashed(path, output, target)

    async def list_resumable(self, path: str) -> DirectoryListing:
        return await self.list_files(path)

    async def hash_path(self, path: str) -> HashedOutput:
        """Return the digest and manifest of a file or directory on the host.

        Raises MissingDirectory if the state directory does not exist.
        """
        folder, _, name = self._at(path).rpartition("/")
        return (await self._host_store.hash_outputs(folder, [name])).outputs[name]

    async def download_hashed(self, path: str, output: HashedOutput, target: Path) -> int:
        """Download a content found by `hash_path`, or a part of it.

        Returns the number of bytes.
        """
        await self._host_store.fetch(self._at(path), output, str(target))
        await asyncio.to_thread(_make_writable, target)
        return output.size

    async def upload(self, source: Path, path: str) -> int:
        content = await asyncio.to_thread(scan, source)
        size = _total_bytes(await asyncio.to_thread(_listing, source))
        await self._host_store.send({content: str(source)})
        await self._host_store.move_to_state(content, self._at(path))
        return size

    async def remove(self, paths: Sequence[str]) -> None:
        await self._host_store.remove([self._at(path) for path in paths])

    def _at(self, path: str) -> str:
        return f"{self._host_store.root}/{path}"


class CheckpointPruner:
    """Deletes old checkpoints of a state on the local disk while the training writes there."""

    def __init__(self, folder: Path, pattern: str | None, keep: int | None) -> None:
        self._folder, self._pattern, self._keep = folder, pattern, keep
        self._newest: tuple[str, Listing] | None = None
        self._level = 0

    def delete_old(self) -> tuple[list[str], str]:
        """Delete old checkpoints; return their names and a disk warning.

        The warning appears once until the disk has space again.

        The newest checkpoint counts only if it has not changed since the last call, so an
        incomplete one never replaces a complete one.
        """
        if self._pattern is None or not self._folder.is_dir():
            return [], ""
        names = checkpoints.newest_first(self._folder, self._pattern)
        listings = {name: _listing(self._folder / name) for name in names}
        complete = self._find_complete(listings, self._pattern)
        sizes = {name: _total_bytes(listing) for name, listing in listings.items()}
        disk = os.statvfs(self._folder)
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        needed = int(max(sizes.values(), default=0) * MARGIN)
        old: list[str] = []
        if self._keep is not None and complete:
            spared = checkpoints.best(self._folder / complete[0])
            old = [name for name in complete[max(1, self._keep) :] if name != spared]
            for name in old:
                delete(self._folder / name)
        free += sum(sizes[name] for name in old)
        level, message = disk_strain(free, total, needed)
        warning = message if level > self._level else ""
        self._level = level
        return old, warning

    def _find_complete(self, listings: Mapping[str, Listing], pattern: str) -> list[str]:
        """Return the names of the complete checkpoints, newest first.

        `listings` are all checkpoints, newest first.
        """
        newest = next(iter(listings.items()), None)
        is_settled = newest == self._newest
        self._newest = newest
        # A checkpoint that appeared after the listing may still be incomplete.
        complete = [name for name in _complete_names(self._folder, pattern) if name in listings]
        if is_settled or newest is None:
            return complete
        return [name for name in complete if name != newest[0]]


def disk_strain(free: int, total: int, need: int) -> tuple[int, str]:
    """Return the warning level of a disk and its message.

    The level is 0 for enough space, 1 if nearly full, 2 if the next checkpoint does not fit.
    """
    if need and free < need:
        return (
            2,
            f"the disk has {about(free)} free, but the next checkpoint requires about {about(need)}: free disk space, or lower `keep`",
        )
    if total and free < LOW * total:
        return 1, f"the disk is nearly full: {about(free)} of {about(total)} are free"
    return 0, ""


def _error_text(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _is_checkpoint(name: str, pattern: str | None) -> bool:
    if pattern is None:
        return name == ""
    return fnmatch.fnmatchcase(name, pattern) and not TEMPORARY.match(name)


def _age_key(name: str, listing: Listing) -> tuple[int, int, str]:
    """Return a sort key: the number in the checkpoint's name, then its last change."""
    latest = max((changed for _, changed in listing.values()), default=0)
    return checkpoints.number(name), latest, name


def _split_listing(files: Listing, pattern: str | None) -> dict[str, Listing]:
    """Split a listing into units of transfer: each entry directly below the state, or the whole
    state.
    """
    if pattern is None:
        return {"": files} if files else {}
    units: dict[str, dict[str, tuple[int, int]]] = {}
    for path, known in files.items():
        name, _, rest = path.partition("/")
        if not rest and known[0] == LINK:
            continue  # usually an alias of a checkpoint, which itself is copied
        units.setdefault(name, {})[rest] = known
    return dict(units)


def _listing(path: Path) -> Listing:
    """Return the listing of a local path; empty if it does not exist."""
    try:
        names: Sequence[str] = [""]
        if path.is_dir() and not path.is_symlink():
            names = checkpoints.files(path)
        return {name: _identity_of(os.lstat(path / name)) for name in names}
    except OSError:
        return {}


def _identity_of(status: os.stat_result) -> tuple[int, int]:
    size = LINK if stat.S_ISLNK(status.st_mode) else status.st_size
    return size, status.st_mtime_ns


def _total_bytes(listing: Listing) -> int:
    return sum(size for size, _ in listing.values() if size != LINK)


def _listings(folder: Path, pattern: str | None) -> dict[str, Listing]:
    if pattern is None:
        whole = _listing(folder)
        return {"": whole} if whole else {}
    if not folder.is_dir():
        return {}
    names = [name for name in sorted(os.listdir(folder)) if not (folder / name).is_symlink()]
    return {name: _listing(folder / name) for name in names}


def _below(folder: Path, name: str) -> Path:
    return folder / name if name else folder


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if name else folder


def _complete_checkpoints(state: StateFolder) -> dict[str, Listing]:
    """Return the complete local checkpoints."""
    if state.pattern is None:
        return _listings(state.local_path, None)
    names = _complete_names(state.local_path, state.pattern)
    return {name: _listing(state.local_path / name) for name in names}


def _complete_names(folder: Path, pattern: str) -> list[str]:
    """Return the names of the complete checkpoints in a directory, newest first."""
    verdicts = checkpoints.judge_checkpoints(folder, pattern)
    return [name for name, verdict in verdicts if verdict.ok]


def _clean_incoming(state: StateFolder, partial: Collection[str] | None = ()) -> None:
    """Clean `.incoming` after a kill.

    Restores checkpoints that were moved aside, and deletes all but the `partial` downloads (None:
    keep all).
    """
    incoming = _incoming_dir(state)
    incoming.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(incoming):
        if name.endswith(".old") and _is_missing(state, name.removesuffix(".old")):
            os.rename(incoming / name, _checkpoint_path(state, name.removesuffix(".old")))
        elif partial is not None and name not in partial:
            delete(incoming / name)
    state.local_path.mkdir(parents=True, exist_ok=True)


def _checkpoint_path(state: StateFolder, name: str) -> Path:
    """Return the path of a checkpoint: without a pattern, the whole state is the only one."""
    return state.local_path if state.pattern is None else _below(state.local_path, name)


def _is_missing(state: StateFolder, name: str) -> bool:
    """Return whether a checkpoint was moved aside without a successor."""
    path = _checkpoint_path(state, name)
    if not os.path.lexists(path):
        return True
    # An empty directory is no successor: each round creates the state directory if it is missing.
    return path == state.local_path and not os.listdir(path)


def _make_writable(path: Path) -> None:
    """Make downloaded files writable for a local training."""
    _add_owner_bits(path)
    for folder, below, names in os.walk(path):
        for name in (*below, *names):
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                _add_owner_bits(inner)


def _add_owner_bits(path: str | Path) -> None:
    mode = os.stat(path).st_mode
    owner_bits = 0o700 if stat.S_ISDIR(mode) else 0o600
    os.chmod(path, mode | owner_bits)


def _publish(source: Path, target: Path, listing: Listing) -> None:
    """Flush a download to disk, with its original times, and rename it to `target`.

    Afterwards the host may delete its copy.
    """
    _set_times(source, listing)
    for path in (source, *source.rglob("*")):
        if not path.is_symlink():
            sync_one(str(path))
    old = source.with_name(f"{source.name}.old")
    if os.path.lexists(target):
        os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        if os.path.lexists(old):
            os.rename(old, target)
        raise
    sync_one(str(target.parent))
    if os.path.lexists(old):
        delete(old)


def _set_times(path: Path, listing: Listing) -> None:
    for name, (_, changed) in listing.items():
        os.utime(_below(path, name), ns=(changed, changed), follow_symlinks=False)
    if listing and "" not in listing:
        latest = max(changed for _, changed in listing.values())
        os.utime(path, ns=(latest, latest))


def _incoming_dir(state: StateFolder) -> Path:
    return state.local_path.parent / ".incoming" / state.name
