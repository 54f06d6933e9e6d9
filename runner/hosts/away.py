"""A place with a disk of its own: an attempt directory is made here, made again there, links and all, and run.

What the command prints comes here while it runs; what it made is hashed there, brought home, and kept there for the steps after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from drivers.base import Command, Denied, Job, Rejected

from ..planning.step import OutputSpec
from ..storage.crash import crashpoint
from ..storage.files import Content, Entry
from ..storage.workspace import Workspace
from .collecting import Collector
from .contact import RemoteContact
from .errand import Brought, Errand, Paths, StateFolder
from .folder import RemoteFolder
from .following import Follower
from .sites import Site
from .staging import Attempt

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..storage.checkpoints import Newest
    from .checkpoint_sync import CheckpointSync, SyncedState
    from .client import Client
    from .containers import Mount
    from .transfer import Depot, Parcel

_T = TypeVar("_T")


class Away(Site):
    """A host with a disk of its own."""

    def __init__(
        self,
        ws: Workspace,
        name: str,
        host: Client,
        machine: Mapping[str, float],
        devices: Sequence[Device],
        depot: Depot,
        *,
        slots: int | None,
        python: str,
        version: str,
        path: str,
        login: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(ws, name, host, machine, lambda: devices, slots=slots, python=python, path=path, login=login)
        self.depot = depot
        self.installer = python
        self._version = version
        self.contact = RemoteContact(name, say)
        self.folder: RemoteFolder = RemoteFolder(ws, depot, self.contact, lambda: self.capacity.busy)

    def paths(self, attempt: Attempt) -> Paths:
        return Paths.at(f"{self.depot.root}/attempts/{attempt.called or os.path.basename(attempt.path)}")

    def described(self, python: str) -> str:
        return f"{python} ({self._version})" if self._version and python == self.python else python

    def give_states(self, attempt: Attempt, states: Sequence[StateFolder]) -> None:
        """They are links there: see `_parcel`."""

    def mounts(self, attempt: Attempt, command: Command, states: Sequence[StateFolder]) -> Sequence[Mount]:
        from .containers import Mount, leads

        paths = self.paths(attempt)
        return [
            Mount(paths.cwd, True),
            *([Mount(paths.script)] if command.argv[-1] == paths.script else ()),
            *([Mount(paths.metrics, True)] if "RECIPE_METRICS" in command.env else ()),
            Mount(f"{self.folder.root}/objects"),
            *(map(Mount, leads(attempt.path, f"{self.ws.home}/objects")) if self.depot.neighbour.reads else ()),
            *(Mount(f"{self.folder.root}/{state.below}", True) for state in states),
        ]

    def may_have_made(self, attempt: Attempt, outputs: Sequence[OutputSpec]) -> bool:
        return True

    async def carry(self, errand: Errand) -> Brought:
        checkpoints = self._checkpoint_sync(errand)
        if errand.job is None:
            found = await self.contact.insist(checkpoints.restore) if checkpoints is not None else {}
            errand.job = await self.begin(errand, await self.prepare(errand, found))
        return await self.attend(errand, errand.job, checkpoints)

    async def prepare(self, errand: Errand, found: Mapping[str, Newest]) -> Command:
        """Put an attempt there, with all that it is given: what is to be started."""
        command, script = errand.compose(found)
        await self.contact.insist(lambda: self._put(errand, script))
        crashpoint("attempt-carried")
        return command

    async def begin(self, errand: Errand, command: Command) -> Job:
        """Start what was prepared."""
        job = await self.contact.insist(lambda: self._begin(command, errand.name))
        crashpoint("job-started")
        return job

    async def attend(self, errand: Errand, job: Job, checkpoints: CheckpointSync | None) -> Brought:
        """Wait for the end of what was started, and take what it made."""
        paths = self.paths(errand.attempt)
        follower = Follower(self.host, self.depot, self.contact, errand, job, paths)
        collector = Collector(self.ws, self.depot, self.folder, errand, paths)
        try:
            exit = await follower.end([*self._copied(errand, paths), *([checkpoints.run()] if checkpoints is not None else ())])
        finally:
            if checkpoints is not None:
                await checkpoints.finish()
        rest = self.contact.insist(lambda: follower.rest(exit))
        if exit.code != 0 or exit.reason != "exit":
            await rest
            if exit.reason not in ("stopped", "busy"):
                await collector.remains()
            return Brought(exit)
        crashpoint("job-over")
        if errand.metrics is not None and errand.metrics[0]:
            await rest  # before outputs are moved there: they may be what metrics are read from
            brought = await self.contact.insist(lambda: collector.outputs(exit))
        else:
            brought, _ = await asyncio.gather(self.contact.insist(lambda: collector.outputs(exit)), rest)
        if brought.problem == "output":
            await collector.remains()
        return brought

    def _copied(self, errand: Errand, paths: Paths) -> Iterator[Coroutine[object, object, object]]:
        """What brings outputs here while they are made."""
        if errand.synced:
            from . import output_sync

            partial = f"{self.ws.home}/partial/{os.getpid()}-{errand.name}-synced"
            yield output_sync.follow(self.depot, paths.cwd, Paths.at(errand.attempt.path).cwd, partial, errand.synced, errand.say)

    async def clear_after(self, errand: Errand, states: Sequence[StateFolder]) -> None:
        """Until what it used is gone from there, a note here says where it was."""
        if not self.lost:
            await self.folder.clear(self.paths(errand.attempt), [f"{self.folder.root}/{state.below}" for state in states])
        for note in (".taken", ".site"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(errand.attempt.path + note)

    # -- the parts of an errand

    def _checkpoint_sync(self, errand: Errand) -> CheckpointSync | None:
        if not errand.states:
            return None
        from .checkpoint_sync import CheckpointSync, OverDepot

        return CheckpointSync(OverDepot(self.depot), synced(errand.states, f"{self.folder.root}/"), errand.round, world=errand.processes)

    async def _begin(self, command: Command, name: str) -> Job:
        try:
            return await self.host.start(command, name)
        except (Denied, Rejected) as error:
            self.depot.wire.complain(str(error))
            raise

    async def _put(self, errand: Errand, script: bytes | None) -> None:
        attempt = errand.attempt
        parcel = _parcel(attempt, {state.path: state.below for state in errand.states})
        for name, path in (await self._direct(attempt)).items():
            del parcel.links[name]
            parcel.paths[name] = path
        if script is not None:
            parcel.beside[".sh"] = script
        if errand.metrics is not None and errand.metrics.in_environment:
            parcel.beside[".metrics"] = b""  # a container can only be shown a file that is there
        name = attempt.called or os.path.basename(attempt.path)
        wanted = {content for content in parcel.links.values() if content not in self.folder.contents}
        if not wanted:
            await self.depot.stage(name, parcel)
            return
        from .meeting import together
        from .wire import Gone

        sent = asyncio.Event()

        async def send() -> None:
            await self.depot.send(*self._sources(attempt, wanted))
            sent.set()

        async def stage() -> None:
            try:
                await self.depot.stage(name, parcel, wanted)  # travels while they do
            except Gone:  # they take longer than it waits for them
                await sent.wait()
                await self.depot.stage(name, parcel)

        await together((send(), stage()))
        self.folder.contents |= wanted

    async def _direct(self, attempt: Attempt) -> dict[str, str]:
        """What it is given that the host sees on our disk: name -> path."""
        if not self.depot.neighbour.reads:
            return {}
        given = {name: os.path.realpath(f"{attempt.path}/{name}") for name in (*attempt.links, *attempt.objects)}
        seen = await self.depot.neighbour.same(list(given.values()))
        return {name: path for name, path in given.items() if path in seen}

    def _sources(self, attempt: Attempt, wanted: set[str]) -> tuple[dict[str, str], dict[str, list[Entry]]]:
        """Where these contents lie here, and the manifests of those that are trees."""
        sources: dict[str, str] = {}
        manifests: dict[str, list[Entry]] = {}
        for name, (at, content) in attempt.links.items():
            if content in wanted:
                sources[content] = os.path.realpath(f"{attempt.path}/{name}")
                if content[0] == "t":
                    manifests[content] = self.ws.cache.entries(at)
        for content in attempt.objects.values():
            if content in wanted and content not in sources:
                sources[content] = str(self.ws.objects.path(Content(content)))
                if content[0] == "t":
                    manifests[content] = self.ws.objects.manifests.entries(Content(content))
        return sources, manifests


def synced(states: Sequence[StateFolder], root: str) -> list[SyncedState]:
    """The states of an attempt as their checkpoints are copied; `root` is what their paths there begin with."""
    from .checkpoint_sync import SyncedState

    return [SyncedState(each.name, each.here, f"{root}{each.below}", each.pattern, each.every, each.keep) for each in states]


def _parcel(attempt: Attempt, states: Mapping[str, str]) -> Parcel:
    """An attempt directory as it is here, in a form that can travel."""
    from .transfer import Parcel

    parcel = Parcel(states=dict(states))
    parcel.links = {name: content for name, (_, content) in attempt.links.items()} | attempt.objects
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        empty = True
        with os.scandir(f"{attempt.path}/{folder}") as items:
            for item in items:
                empty = False
                name = f"{folder}/{item.name}" if folder else item.name
                if name in parcel.links or name in parcel.states:
                    continue
                if item.is_dir():
                    waiting.append(name)
                else:  # a link within code that came from a repository is what it leads to
                    with open(item.path, "rb") as file:
                        parcel.files[name] = file.read(), bool(item.stat().st_mode & stat.S_IXUSR)
        if empty and folder:
            parcel.folders.append(folder)
    return parcel
