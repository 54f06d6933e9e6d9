"""A place with a disk of its own: an attempt directory is made here, made again there, links and all, and run.

What the command prints comes here while it runs; what it made is hashed there, brought home, and kept there for the steps after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from drivers.base import Command, Denied, DriverError, Exit, HostLost, Job, Rejected, Throttled, Unreachable

from ..errors import RecipeError
from ..planning.step import DIRECTORY, NONEMPTY, OPTIONAL, TEMPORARY, OutputSpec
from ..retry import pause, retry_async
from ..storage.crash import crashpoint
from ..storage.disk import delete
from ..storage.files import Content, Entry, scan
from ..storage.workspace import Workspace
from .sites import Brought, Errand, Paths, Site, StateFolder
from .staging import Attempt

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..storage.checkpoints import Newest
    from .checkpoint_sync import CheckpointSync, SyncedState
    from .client import Client
    from .containers import Mount
    from .download import Taken
    from .transfer import Depot, Parcel

_T = TypeVar("_T")
FOREVER = timedelta(days=3650)
OUT_OF_SIGHT = 900.0
"""Seconds without a word from a host after which what runs there is given up for lost."""
FIRST_GLANCE, GLANCE, LONGEST_GLANCE = 0.05, 0.2, 2.0
"""Seconds between looks at what a step prints: while it does, and when it has not for a while."""
LULL, LULLS = 0.03, 10
"""Seconds between looks whether other steps run there, and how many, before what a step left is deleted."""
SAMPLED = 5.0
"""Seconds that a job takes before the agent there looks at the machine, and between its looks."""
ROOM = 8 << 20
"""Of a metrics file: bytes that are fetched at once."""
REMAINS_EACH, REMAINS_ALL, REMAINS_COUNT = 1 << 20, 16 << 20, 200
"""Of what a failed attempt wrote: bytes of a file, bytes of all, and files that are brought home at most."""


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
        self._say = say
        self._here: set[str] = set()  # contents that lie there for certain
        self._silent_since = 0.0
        self._spent: list[str] = []  # paths there that nobody needs any more
        self._clearing = asyncio.Lock()

    def paths(self, attempt: Attempt) -> Paths:
        return Paths.at(f"{self.depot.root}/attempts/{attempt.called or os.path.basename(attempt.path)}")

    def described(self, python: str) -> str:
        return f"{python} ({self._version})" if self._version and python == self.python else python

    @property
    def root(self) -> str:
        return self.depot.root

    async def scratch(self, name: str, files: Mapping[str, bytes], script: bytes | None) -> Paths:
        from .transfer import Parcel

        parcel = Parcel({path: (data, False) for path, data in files.items()}, beside={} if script is None else {".sh": script})
        return Paths.at(await self.insist(lambda: self.depot.stage(name, parcel)))

    async def program(self, path: str) -> str:
        content = scan(path)
        await self.insist(lambda: self.depot.send({content: path}))
        return self.depot.path(content)

    async def clear(self, paths: Paths, others: Sequence[str] = ()) -> None:
        """What steps leave that follow each other closely goes in one go."""
        self._spent += [*paths, *others]
        async with self._clearing:
            for _ in range(LULLS):
                if self._spent:
                    await asyncio.sleep(LULL)
                if not self._running:
                    break
            spent, self._spent = self._spent, []
            if spent:
                with contextlib.suppress(DriverError):  # a host that cannot be reached keeps it until it is swept
                    await self.depot.remove(spent)

    async def noted(self, path: str) -> bool:
        return bool(await self.insist(lambda: self.depot.read(f"{self.root}/{path}", limit=16)))

    async def note(self, path: str) -> None:
        await self.depot.note(path)

    async def room(self) -> tuple[int, int | None]:
        try:
            return await self.depot.free(), None
        except (DriverError, RecipeError):
            return sys.maxsize, None  # a host that cannot be asked is not called full

    def holds(self, content: str) -> bool:
        """Whether this output of a step of this run lies there."""
        return content in self._here

    async def look_for(self, contents: Collection[str]) -> None:
        """Ask the host which of these it has."""
        self._here |= await self.insist(lambda: self.depot.have(contents))

    def give_states(self, attempt: Attempt, states: Sequence[StateFolder]) -> None:
        """They are links there: see `_parcel`."""

    def mounts(self, attempt: Attempt, command: Command, states: Sequence[StateFolder]) -> Sequence[Mount]:
        from .containers import Mount

        paths = self.paths(attempt)
        return [
            Mount(paths.cwd, True),
            *([Mount(paths.script)] if command.argv[-1] == paths.script else ()),
            *([Mount(paths.metrics, True)] if "RECIPE_METRICS" in command.env else ()),
            Mount(f"{self.root}/objects"),
            *(Mount(f"{self.root}/{state.below}", True) for state in states),
        ]

    def may_have_made(self, attempt: Attempt, outputs: Sequence[OutputSpec]) -> bool:
        return True

    async def carry(self, errand: Errand) -> Brought:
        checkpoints = self._checkpoint_sync(errand)
        if errand.job is None:
            found = await self.insist(checkpoints.restore) if checkpoints is not None else {}
            errand.job = await self.begin(errand, await self.prepare(errand, found))
        return await self.attend(errand, errand.job, checkpoints)

    async def prepare(self, errand: Errand, found: Mapping[str, Newest]) -> Command:
        """Put an attempt there, with all that it is given: what is to be started."""
        command, script = errand.compose(found)
        await self.insist(lambda: self._put(errand, script))
        crashpoint("attempt-carried")
        return command

    async def begin(self, errand: Errand, command: Command) -> Job:
        """Start what was prepared."""
        job = await self.insist(lambda: self._begin(command, errand.name))
        crashpoint("job-started")
        return job

    async def attend(self, errand: Errand, job: Job, checkpoints: CheckpointSync | None) -> Brought:
        """Wait for the end of what was started, and take what it made."""
        paths = self.paths(errand.attempt)
        try:
            exit = await self._watch(errand, job, paths, checkpoints)
        finally:
            if checkpoints is not None:
                await checkpoints.finish()
        rest = self.insist(lambda: self._rest(errand, job, paths, sampled=exit.ended - exit.started >= SAMPLED))
        if exit.code != 0 or exit.reason != "exit":
            await rest
            if exit.reason not in ("stopped", "busy"):
                await self._bring_remains(errand, paths)
            return Brought(exit)
        crashpoint("job-over")
        if errand.metrics is not None and errand.metrics[0]:
            await rest  # before outputs are moved there: they may be what metrics are read from
            brought = await self.insist(lambda: self._bring(errand, exit, paths))
        else:
            brought, _ = await asyncio.gather(self.insist(lambda: self._bring(errand, exit, paths)), rest)
        if brought.problem == "output":
            await self._bring_remains(errand, paths)
        return brought

    async def clear_after(self, errand: Errand, states: Sequence[StateFolder]) -> None:
        """Until what it used is gone from there, a note here says where it was."""
        if not self.lost:
            await self.clear(self.paths(errand.attempt), [f"{self.root}/{state.below}" for state in states])
        for note in (".taken", ".site"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(errand.attempt.path + note)

    # -- the parts of an errand

    def _checkpoint_sync(self, errand: Errand) -> CheckpointSync | None:
        if not errand.states:
            return None
        from .checkpoint_sync import CheckpointSync, OverDepot

        return CheckpointSync(OverDepot(self.depot), synced(errand.states, f"{self.root}/"), errand.round, world=errand.processes)

    async def _begin(self, command: Command, name: str) -> Job:
        try:
            return await self.host.start(command, name)
        except (Denied, Rejected) as error:
            self.depot.wire.complain(str(error))
            raise

    async def _put(self, errand: Errand, script: bytes | None) -> None:
        attempt = errand.attempt
        parcel = _parcel(attempt, {state.path: state.below for state in errand.states})
        if script is not None:
            parcel.beside[".sh"] = script
        if errand.metrics is not None and errand.metrics.in_environment:
            parcel.beside[".metrics"] = b""  # a container can only be shown a file that is there
        wanted = {content for content in parcel.links.values() if content not in self._here}
        if wanted:
            sources, manifests = self._sources(attempt, wanted)
            await self.depot.send(sources, manifests)
            self._here |= wanted
        await self.depot.stage(attempt.called or os.path.basename(attempt.path), parcel)

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
                    manifests[content] = self.ws.objects.entries(Content(content))
        return sources, manifests

    async def _watch(self, errand: Errand, job: Job, paths: Paths, checkpoints: CheckpointSync | None) -> Exit:
        """The job's end.  Until then what it prints and measures comes here, and its checkpoints."""
        here = Paths.at(errand.attempt.path)
        beside = [asyncio.ensure_future(self._follow(job, here.log))]
        beside.append(asyncio.ensure_future(self._follow_file(paths.host, here.host, SAMPLED, SAMPLED)))
        if errand.metrics is not None and errand.metrics.in_environment:
            beside.append(asyncio.ensure_future(self._follow_file(paths.metrics, here.metrics)))
        if checkpoints is not None:
            beside.append(asyncio.ensure_future(checkpoints.run()))
        if errand.synced:
            from . import output_sync

            partial = f"{self.ws.home}/partial/{os.getpid()}-{errand.name}-synced"
            beside.append(asyncio.ensure_future(output_sync.follow(self.depot, paths.cwd, here.cwd, partial, errand.synced, errand.say)))
        try:
            exit: Exit | None = None
            while exit is None:
                exit = await self.insist(lambda: self.host.wait(job, FOREVER))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        return exit

    async def _follow(self, job: Job, target: str) -> None:
        """Append what the job prints to a file here, as long as we are not cancelled."""
        pause = FIRST_GLANCE
        while True:
            await asyncio.sleep(pause)  # first: a step that is over by then is not asked twice
            with contextlib.suppress(Unreachable):  # who waits for the end says so
                pause = GLANCE if await self._append(job, target) else min(LONGEST_GLANCE, pause * 1.3)

    async def _append(self, job: Job, target: str) -> bool:
        """All that is there by now; whether there was anything."""
        grown = False
        while data := await self.host.log(job, _size(target)):
            _append(target, data)
            grown = True
        return grown

    async def _follow_file(self, path: str, target: str, least: float = GLANCE, most: float = LONGEST_GLANCE) -> None:
        pause = least
        while True:
            await asyncio.sleep(pause)
            with contextlib.suppress(Unreachable):
                data = await self.depot.read(path, _size(target), limit=ROOM)
                _append(target, data)
                pause = least if data else min(most, pause * 1.3)

    async def _bring_remains(self, errand: Errand, paths: Paths) -> None:
        """What a failed attempt wrote, as far as it is small: somebody will want to look at it, and it does not stay there."""
        with contextlib.suppress(DriverError, RecipeError, OSError):  # the failure is what is to be told
            found, others = await self.depot.remains(paths.cwd, each=REMAINS_EACH, all=REMAINS_ALL, count=REMAINS_COUNT)
            for name, data in found.items():
                _leave(errand.attempt.path, name, data)
            if others:
                errand.say(f"{others} of {others + len(found)} files that it left on {self.name} are too large or too many to bring here")

    async def _rest(self, errand: Errand, job: Job, paths: Paths, *, sampled: bool) -> None:
        """What was printed and measured since the last look."""
        here = Paths.at(errand.attempt.path)
        await self._append(job, here.log)
        while sampled and (data := await self.depot.read(paths.host, _size(here.host), limit=ROOM)):
            _append(here.host, data)
        if errand.metrics is None or errand.metrics[1]:
            return
        if not errand.metrics[0]:
            while data := await self.depot.read(paths.metrics, _size(here.metrics), limit=ROOM):
                _append(here.metrics, data)
            return
        for name in await self.depot.matching(paths.cwd, errand.metrics[0]):
            data = await self.depot.read(f"{paths.cwd}/{name}", limit=ROOM)
            target = Path(errand.attempt.path, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # an earlier worker may have brought it
            _append(str(target), data)

    async def _bring(self, errand: Errand, exit: Exit, paths: Paths) -> Brought:
        """Hash what it made there, fetch what has to come home, and let the host keep all of it."""
        outputs = errand.outputs
        if not outputs and not errand.attempt.staged and not errand.attempt.links and not errand.attempt.objects and not errand.rejoined:
            return Brought(exit)  # it was given nothing, and left nothing that was asked for
        harvest = await self.depot.take(paths.cwd, [(path, bool(flags & DIRECTORY)) for _, path, flags in outputs])
        if harvest.changed:
            self._here.difference_update(harvest.changed)
            return Brought(exit, problem="input", words=f"it changed its input {_called(errand.attempt, harvest.changed[0])}")
        noted = errand.attempt.taken()  # by a worker that was killed while the host put them away
        found: dict[str, str] = {}
        wrong: list[str] = []
        for name, path, flags in outputs:
            taken = harvest.outputs[path]
            if taken.problem:
                wrong.append(taken.problem)
            elif not taken.content and name in noted:
                found[name] = noted[name]
            elif not taken.content:
                if not flags & OPTIONAL:
                    wrong.append(f"declared output {path} was not made")
            elif flags & NONEMPTY and not (taken.entries if taken.content[0] == "t" else taken.size):
                wrong.append(f"declared output {path} is empty, which the recipe forbids")
            else:
                found[name] = taken.content
        if wrong:
            return Brought(exit, problem="output", words="; ".join(wrong))
        for name, path, flags in outputs:
            if name in found and name not in noted and not flags & TEMPORARY:
                await self._fetch(errand, f"{paths.cwd}/{path}", harvest.outputs[path])
        for name, content in found.items():
            if name not in noted:
                errand.attempt.note(name, content)
        states = [state.path for state in errand.states]
        below = {path for _, path, _ in outputs if any(path == state or path.startswith(f"{state}/") for state in states)}
        moved = {path: found[name] for name, path, _ in outputs if name in found and name not in noted}
        if moved:
            self._here |= await self.depot.keep(paths.cwd, moved, copy=below & moved.keys())
        if stayed := {found[name] for name, _, flags in outputs if flags & TEMPORARY and name in found and name in noted}:
            await self.look_for(stayed)
        return Brought(exit, found)

    async def _fetch(self, errand: Errand, path: str, taken: Taken) -> None:
        """Have an output in the store here.  What came before a connection broke lies beside the target, whose name is the same at each try."""
        content = Content(taken.content)
        if self.ws.objects.has(content):
            return
        target = Path(f"{self.ws.home}/partial/{os.getpid()}-{errand.name}-{content[2:18]}")
        await self.depot.fetch(path, taken, str(target))
        try:
            await asyncio.to_thread(self.ws.objects.put, target, content, move=True)
        finally:
            delete(target)

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask again while the host cannot be seen: unreachable is not failed.  Raises HostLost when that takes too long."""

        async def once() -> _T:
            try:
                answer = await ask()
            except Unreachable as error:
                self._unseen(error)
                raise
            if self.silent:
                self._say(f"{self.name} answers again")
                self.silent = False
            return answer

        return await retry_async(once, _until_seen)

    def _unseen(self, error: Unreachable) -> None:
        """The host could not be reached.  Raises HostLost when that takes too long."""
        now = time.monotonic()
        if not self.silent:
            self.silent, self._silent_since = True, now
            self._say(f"{self.name} cannot be reached ({error}); what runs there goes on, and is asked after again")
        if now - self._silent_since > OUT_OF_SIGHT:
            raise HostLost(f"{self.name} could not be reached for {OUT_OF_SIGHT / 60:.0f} minutes: {error}") from error


def synced(states: Sequence[StateFolder], root: str) -> list[SyncedState]:
    """The states of an attempt as their checkpoints are copied; `root` is what their paths there begin with."""
    from .checkpoint_sync import SyncedState

    return [SyncedState(each.name, each.here, f"{root}{each.below}", each.pattern, each.every, each.keep) for each in states]


def throttled(error: Exception, _tried: int) -> float | None:
    """A policy: a provider that was asked too often says how long to wait."""
    return error.after.total_seconds() if isinstance(error, Throttled) else None


def _until_seen(error: Exception, tried: int) -> float | None:
    return pause(tried, 0.5, 30.0) if isinstance(error, Unreachable) else throttled(error, tried)


def _parcel(attempt: Attempt, states: Mapping[str, str]) -> Parcel:
    """An attempt directory as it lies here, in a form that can travel."""
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


def _leave(top: str, name: str, data: bytes) -> None:
    """Write a file below `top`, unless something is in its way: what we were given is there too, as links to it."""
    folder = top
    for part in name.split("/")[:-1]:
        folder = f"{folder}/{part}"
        if os.path.islink(folder) or not (os.path.isdir(folder) or not os.path.lexists(folder)):
            return
        os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileExistsError), open(f"{top}/{name}", "xb") as file:
        file.write(data)


def _called(attempt: Attempt, name: str) -> str:
    """What a step calls an input: some are known to their host by content only."""
    names = {content: path for path, (_, content) in attempt.links.items()} | {content: path for path, content in attempt.objects.items()}
    return names.get(name, name)


def _append(path: str, data: bytes) -> None:
    if data:
        with open(path, "ab") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
