"""A place with a disk of its own.

An attempt directory is created here, copied to the host with its links, and executed there.

The command's output is copied while it runs.  Its results are hashed on the host, downloaded, and
kept there for downstream steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from drivers.base import Command, Denied, Exit, Job, Rejected

from ...errors import DiskFull
from ...planning.step import OutputSpec
from ...storage.content.files import Content, Entry, is_full, no_space
from ...storage.content.inputs import COPIED, InputSource, size_of
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from ..link.contact import RemoteContact
from .collecting import Collector
from .folder import RemoteFolder
from .following import AttemptFollower
from .host_task import HostTask, Paths, StateFolder, TaskResult
from .place import Place, Shell
from .rendezvous import gather_all
from .staging import AttemptDirectory

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...storage.checkpoints import Newest
    from ..engines import Mount
    from ..link.client import Client
    from ..transfer.host_store import AttemptContents, HostStore
    from .checkpoint_sync import CheckpointSync

LINKED = "it is staged as symbolic links on {} because {}. Use `tar -h` and `find -L`"
_T = TypeVar("_T")


class RemotePlace(Place):
    """A host with a disk of its own."""

    own_disk = True

    def __init__(
        self,
        ws: Workspace,
        name: str,
        host: Client,
        machine: Mapping[str, float],
        devices: Sequence[Device],
        host_store: HostStore,
        shell: Shell,
        slots: int | None,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(ws, name, host, machine, lambda: devices, shell, slots)
        self.host_store = host_store
        self.installer = shell.python
        self.contact = RemoteContact(name, say)
        self.folder: RemoteFolder = RemoteFolder(
            ws, host_store, self.contact, lambda: self.capacity.busy
        )
        self._linked: set[str] = set()  # inputs already reported as links

    def paths(self, attempt: AttemptDirectory) -> Paths:
        return Paths.at(
            f"{self.host_store.root}/attempts/{attempt.called or os.path.basename(attempt.path)}"
        )

    def describe_python(self, python: str, *, may_ask: bool) -> str:
        if self.shell.version and python == self.python:
            return f"{python} ({self.shell.version})"
        return python

    def link_states(self, attempt: AttemptDirectory, states: Sequence[StateFolder]) -> None:
        """Do nothing: the contents of the attempt directory include the links to the states."""

    def find_mounts(
        self, attempt: AttemptDirectory, command: Command, states: Sequence[StateFolder]
    ) -> Sequence[Mount]:
        from ..containers import link_targets
        from ..engines import Mount

        paths = self.paths(attempt)
        mounts = [Mount(paths.cwd, True)]
        if command.argv[-1] == paths.script:
            mounts.append(Mount(paths.script))
        if "RECIPE_METRICS" in command.env:
            mounts.append(Mount(paths.metrics, True))
        mounts.append(Mount(f"{self.folder.root}/objects"))
        if self.host_store.shared_disk.host_sees_workspace:
            # Inputs on the shared disk are links to local files.
            mounts += map(Mount, link_targets(attempt.path, f"{self.ws.home}/objects"))
        mounts += [Mount(f"{self.folder.root}/{state.host_path}", True) for state in states]
        return mounts

    def may_have_made(self, attempt: AttemptDirectory, outputs: Sequence[OutputSpec]) -> bool:
        return True

    async def run_attempt(self, task: HostTask) -> TaskResult:
        checkpoints = self._checkpoint_sync(task)
        if task.job is None:
            restored: Mapping[str, Newest] = {}
            if checkpoints is not None:
                restored = await self.contact.insist(checkpoints.restore)
            command = await self.prepare(task, restored)
            task.job = await self.start(task, command)
        return await self.finish(task, task.job, checkpoints)

    async def prepare(self, task: HostTask, restored: Mapping[str, Newest]) -> Command:
        """Upload an attempt and its inputs; return the command to start."""
        task.phase("TRANSFERRING_DATA")
        await task.bring()
        command, script = task.compose(restored)
        await self.contact.insist(lambda: self._upload(task, script))
        crashpoint("attempt-carried")
        return command

    async def start(self, task: HostTask, command: Command) -> Job:
        """Start the command of a prepared attempt."""
        job = await self.contact.insist(lambda: self._start(command, task))
        task.phase("EXECUTING")
        crashpoint("job-started")
        return job

    async def finish(
        self, task: HostTask, job: Job, checkpoints: CheckpointSync | None
    ) -> TaskResult:
        """Wait for the end of a started attempt, and collect its outputs."""
        paths = self.paths(task.attempt)
        follower = AttemptFollower(self.host, self.host_store, self.contact, task, job, paths)
        collector = Collector(self.ws, self.host_store, self.folder, task, paths)
        try:
            syncs = [*self._sync_outputs(task, paths)]
            if checkpoints is not None:
                syncs.append(checkpoints.run())
            exit = await follower.wait_for_end(syncs)
        finally:
            if checkpoints is not None and not self.lost:
                await checkpoints.finish()
        rest = self.contact.insist(lambda: follower.copy_rest(exit))
        if exit.code != 0 or exit.reason != "exit":
            await rest
            if exit.reason not in ("stopped", "busy"):
                await collector.download_leftovers()
            return TaskResult(exit)
        task.phase("FETCHING_RESULTS")
        crashpoint("job-over")
        try:
            result = await self._collect(task, exit, collector, rest)
        except DiskFull as error:
            return TaskResult(exit, problem="full", words=str(error))
        except OSError as error:
            if not is_full(error):
                raise
            words = str(no_space(error, str(error.filename or task.attempt.path)))
            return TaskResult(exit, problem="full", words=words)
        if result.problem == "output":
            await collector.download_leftovers()
        return result

    async def _collect(
        self, task: HostTask, exit: Exit, collector: Collector, rest: Coroutine[Any, Any, None]
    ) -> TaskResult:
        """Collect the outputs of a successful command; `rest` copies the end of its log."""
        if task.metrics is not None and task.metrics[0]:
            await rest  # before outputs are moved: they may contain the metrics
            return await self.contact.insist(lambda: collector.collect_outputs(exit))
        result: TaskResult
        result, _ = await asyncio.gather(
            self.contact.insist(lambda: collector.collect_outputs(exit)), rest
        )
        return result

    def _sync_outputs(
        self, task: HostTask, paths: Paths
    ) -> Iterator[Coroutine[object, object, object]]:
        """Yield the tasks that copy outputs while the step runs."""
        if task.synced:
            from . import output_sync

            partial = f"{self.ws.home}/partial/{os.getpid()}-{task.name}-synced"
            yield output_sync.follow(
                self.host_store,
                paths.cwd,
                Paths.at(task.attempt.path).cwd,
                partial,
                task.synced,
                task.say,
            )

    async def clear_after(self, task: HostTask, states: Sequence[StateFolder]) -> None:
        """Delete the attempt on the host, and then the local records of its host and its moved
        outputs.
        """
        if not self.lost:
            await self.folder.clear(
                self.paths(task.attempt),
                [f"{self.folder.root}/{state.host_path}" for state in states],
            )
        for note in (".taken", ".site"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(task.attempt.path + note)

    # -- the parts of a task

    def _checkpoint_sync(self, task: HostTask) -> CheckpointSync | None:
        if not task.states:
            return None
        from .checkpoint_sync import CheckpointSync, HostCheckpoints

        return CheckpointSync(
            HostCheckpoints(self.host_store), task.states, task.round, processes=task.processes
        )

    async def _start(self, command: Command, task: HostTask) -> Job:
        await task.confirm()
        try:
            return await self.host.start(command, task.name)
        except (Denied, Rejected) as error:
            self.host_store.wire.raise_if_disk_full(str(error))
            raise

    async def _upload(self, task: HostTask, script: bytes | None) -> None:
        attempt = task.attempt
        contents = _attempt_contents(
            attempt, {state.path: state.host_path for state in task.states}
        )
        for name, path in (await self._find_shared_inputs(attempt)).items():
            del contents.links[name]
            contents.seen[name] = path, name in attempt.objects
        if script is not None:
            contents.beside[".sh"] = script
        if task.metrics is not None and task.metrics.in_environment:
            contents.beside[".metrics"] = b""  # a missing file cannot be mounted into a container
        name = attempt.called or os.path.basename(attempt.path)
        wanted = set(contents.links.values()) - self.folder.contents
        if not wanted:
            self._report_links(task, await self.host_store.stage(name, contents))
            return
        from ..link.wire import UploadGone

        sent = asyncio.Event()

        async def send() -> None:
            await self.host_store.send(*self._find_sources(attempt, wanted))
            sent.set()

        async def stage() -> None:
            try:
                # The contents are uploaded in parallel with this request, which waits for them.
                linked = await self.host_store.stage(name, contents, wanted)
            except UploadGone:  # the uploads took longer than the host waits
                await sent.wait()
                linked = await self.host_store.stage(name, contents)
            self._report_links(task, linked)

        await gather_all((send(), stage()))
        self.folder.contents |= wanted

    def _report_links(self, task: HostTask, linked: Sequence[str]) -> None:
        """Report, once per run, the inputs that are symbolic links on this host."""
        for name in set(linked) - self._linked:
            self._linked.add(name)
            why = "the file system there refuses hard links"
            if name in task.attempt.links:
                why = f"it is larger than {COPIED >> 20} MiB and is read in place"
            task.say(f"input {name}: {LINKED.format(self.name, why)}")

    async def _find_shared_inputs(self, attempt: AttemptDirectory) -> dict[str, str]:
        """Return the inputs that the host reads from the shared disk: name -> path.

        Small files are uploaded instead.
        """
        if not self.host_store.shared_disk.host_sees_workspace:
            return {}
        large = [name for name in attempt.links if self._is_large_input(attempt, name)]
        paths: dict[str, str] = {}
        for name in (*large, *attempt.objects):
            paths[name] = os.path.realpath(f"{attempt.path}/{name}")
        shared = await self.host_store.shared_disk.find_same(list(paths.values()))
        return {name: path for name, path in paths.items() if path in shared}

    def _is_large_input(self, attempt: AttemptDirectory, name: str) -> bool:
        at, content = attempt.links[name]
        if not content:
            return False
        path = os.path.realpath(f"{attempt.path}/{name}")
        return size_of(self.ws.cache, InputSource(at, path, Content(content))) > COPIED

    def _find_sources(
        self, attempt: AttemptDirectory, wanted: set[str]
    ) -> tuple[dict[str, str], dict[str, list[Entry]]]:
        """Return the local paths of these contents, and the manifests of the trees among them."""
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


def _attempt_contents(attempt: AttemptDirectory, states: Mapping[str, str]) -> AttemptContents:
    """Return the contents of a local attempt directory for an upload.

    `states` maps names in the attempt to directories on the host.
    """
    from ..transfer.host_store import AttemptContents

    contents = AttemptContents(states=dict(states))
    contents.links = {name: content for name, (_, content) in attempt.links.items()}
    contents.links |= attempt.objects
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        empty = True
        with os.scandir(f"{attempt.path}/{folder}") as items:
            for item in items:
                empty = False
                name = f"{folder}/{item.name}" if folder else item.name
                if name in contents.links or name in contents.states:
                    continue
                if item.is_symlink():
                    # A link of a repository may lead outside, so it stays a link.
                    contents.paths[name] = os.readlink(item.path)
                elif item.is_dir():
                    waiting.append(name)
                else:
                    with open(item.path, "rb") as file:
                        contents.files[name] = file.read(), stat.S_IMODE(item.stat().st_mode)
        if empty and folder:
            contents.folders.append(folder)
    return contents
