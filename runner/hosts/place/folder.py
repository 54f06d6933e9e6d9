"""The directory of recipe on a host: scratch directories, marker files, and the outputs stored
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivers.base import DriverError

from ...errors import RecipeError
from ...storage.content.disk import delete
from ...storage.content.files import Content, scan
from ...storage.workspace import Workspace
from ..link.contact import HostContact
from .host_task import Paths

if TYPE_CHECKING:
    from ...secrets import Secret
    from ...storage.signed import SignedObjects
    from ..transfer.download import HashedOutput
    from ..transfer.host_store import HostStore

LULL, LULLS = 0.03, 10
"""Interval and number of checks for running steps before leftovers are deleted.

The interval is in seconds.
"""


class Folder:
    """recipe's store on the local disk, for steps that run on this machine."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    @property
    def root(self) -> str:
        """The root directory of recipe on the host."""
        return str(self._ws.home)

    async def create_scratch(
        self, name: str, files: Mapping[str, bytes], script: bytes | None
    ) -> Paths:
        """Create a directory with these files for a command that belongs to no step.

        The command's script is beside the directory.
        """
        paths = Paths.at(f"{self.root}/attempts/{name}")
        Path(paths.cwd).mkdir(parents=True)
        for path, data in files.items():
            self._ws.write(Path(paths.cwd, path), data)
        if script is not None:
            self._ws.write(Path(paths.script), script)
        return paths

    async def provide_program(self, path: str) -> str:
        """Return the path of a local program on the host, uploaded if necessary."""
        return path

    async def clear(self, paths: Paths, others: Sequence[str] = ()) -> None:
        """Delete the files of an attempt or a scratch directory, and the paths `others`."""
        for path in (*paths, *others):
            delete(Path(path))

    async def has_marker(self, path: str) -> bool:
        """Return whether a file, usually a marker, exists at a path below the root."""
        return os.path.exists(f"{self.root}/{path}")

    async def write_marker(self, path: str) -> None:
        """Write a marker file at a path below the root."""
        self._ws.write(Path(self.root, path), b"done\n")

    async def find_free_space(self) -> tuple[int, int | None]:
        """Return the free bytes of the attempts' disk, and its free inodes or None."""
        disk = os.statvfs(f"{self.root}/attempts")
        # Some file systems, such as Btrfs, do not count inodes.
        free_inodes = disk.f_favail if disk.f_files else None
        return disk.f_bavail * disk.f_frsize, free_inodes

    def holds(self, content: str) -> bool:
        """Return whether the host holds this output of an earlier step that the local store does
        not have.
        """
        return False

    async def look_up(self, contents: Collection[str]) -> None:
        """Ask the host which of these contents it stores."""

    async def download_content(self, content: str) -> None:
        """Download a content from the host to the local store."""

    @property
    def can_pull(self) -> bool:
        """Whether the host downloads inputs from buckets directly.

        False if it sees the local disk.
        """
        return False

    async def pull(
        self, source: SignedObjects, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> str:
        """Let the host download an input from its bucket: see `HostStore.pull`.  Returns its content; empty if the host does not."""
        return ""


class RemoteFolder(Folder):
    """The directory of recipe on a host with a disk of its own.

    `busy` returns whether steps run there.
    """

    def __init__(
        self, ws: Workspace, host_store: HostStore, contact: HostContact, busy: Callable[[], bool]
    ) -> None:
        super().__init__(ws)
        self._host_store, self._contact, self._busy = host_store, contact, busy
        self.contents: set[str] = set()
        """Contents known to be stored on the host."""
        self._spent: list[str] = []  # paths on the host to delete
        self._clearing = asyncio.Lock()

    @property
    def root(self) -> str:
        return self._host_store.root

    async def create_scratch(
        self, name: str, files: Mapping[str, bytes], script: bytes | None
    ) -> Paths:
        from ..transfer.host_store import AttemptContents

        contents = AttemptContents({path: (data, 0o644) for path, data in files.items()})
        if script is not None:
            contents.beside[".sh"] = script
        await self._contact.insist(lambda: self._host_store.stage(name, contents))
        return Paths.at(f"{self.root}/attempts/{name}")

    async def provide_program(self, path: str) -> str:
        content = scan(path)
        await self._contact.insist(lambda: self._host_store.send({content: path}))
        return self._host_store.path(content)

    async def clear(self, paths: Paths, others: Sequence[str] = ()) -> None:
        """Delete paths later, together with those of steps that finish soon after."""
        self._spent += [*paths, *others]
        async with self._clearing:
            for _ in range(LULLS):
                if self._spent:
                    await asyncio.sleep(LULL)
                if not self._busy():
                    break
            spent, self._spent = self._spent, []
            if spent:
                # An unreachable host keeps the files until a sweep.
                with contextlib.suppress(DriverError):
                    await self._host_store.clear(spent)

    async def has_marker(self, path: str) -> bool:
        return bool(
            await self._contact.insist(
                lambda: self._host_store.read(f"{self.root}/{path}", limit=16)
            )
        )

    async def write_marker(self, path: str) -> None:
        await self._host_store.write_marker(path)

    async def find_free_space(self) -> tuple[int, int | None]:
        try:
            return await self._host_store.find_free_space(), None
        except (DriverError, RecipeError):
            return sys.maxsize, None  # an unreachable host does not count as full

    def holds(self, content: str) -> bool:
        """Return whether the host holds this output."""
        return content in self.contents

    async def look_up(self, contents: Collection[str]) -> None:
        """Ask the host which of these contents it stores."""
        self.contents |= await self._contact.insist(
            lambda: self._host_store.find_existing(contents)
        )

    async def download_content(self, content: str) -> None:
        """Download a content to the local store.

        A missing or changed object no longer counts as stored on the host.
        """
        path = self._host_store.path(content)
        name = path.removeprefix(f"{self.root}/")
        taken = (
            await self._contact.insist(lambda: self._host_store.hash_outputs(self.root, [name]))
        ).outputs[name]
        if taken.content == content:
            await self._contact.insist(lambda: self.download_output(path, taken, content[2:18]))
        else:
            self.contents.discard(content)

    async def download_output(self, path: str, taken: HashedOutput, partial: str) -> None:
        """Download an output to the local store.

        An interrupted download continues with the file at `partial`.
        """
        content = Content(taken.content)
        if self._ws.objects.has(content):
            return
        target = Path(f"{self._ws.home}/partial/{os.getpid()}-{partial}")
        await self._host_store.fetch(path, taken, str(target))
        try:
            await asyncio.to_thread(self._ws.objects.put, target, content, move=True)
        finally:
            delete(target)

    @property
    def can_pull(self) -> bool:
        return not self._host_store.shared_disk.host_sees_workspace

    async def pull(
        self, source: SignedObjects, known: str, learn: Callable[[Sequence[Secret]], None]
    ) -> str:
        content = await self._contact.insist(lambda: self._host_store.pull(source, known, learn))
        self.contents.add(content)
        return content
