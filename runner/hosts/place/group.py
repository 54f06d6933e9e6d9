"""Several hosts as one place for multi-node steps.

An attempt runs on all hosts, which start together and end together.

Node 0 provides the outputs, the metrics and the log of the attempt.  The other nodes have
directories and logs with the suffixes `.1`, `.2`, ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drivers.base import Command, DriverError, Exit, HostLost, Job

from ...storage.content.disk import delete
from ...storage.workspace import Workspace
from . import launch, rendezvous
from .capacity import LONGEST_QUESTION, Capacity, GpuPick
from .checkpoint_sync import CheckpointSync, HostCheckpoints
from .folder import Folder
from .host_task import FOREVER, HostTask, Paths, StateFolder, TaskResult
from .place import GRACE, Place
from .remote import RemotePlace
from .rendezvous import Rendezvous, RendezvousNode, gather_all
from .staging import AttemptDirectory
from .state_union import NodesCheckpoints

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...storage.checkpoints import Newest

BEGIN: Final = 60.0
"""Seconds until all nodes must have started, once their inputs are there."""
UNTOUCHED: Final = Rendezvous(0, ())


class GroupCapacity(Capacity):
    """The capacity of several hosts together, one per node.

    The first `heads` hosts contribute only their slots.
    """

    def __init__(self, members: Sequence[Capacity], heads: int) -> None:
        first = members[heads]
        super().__init__(first.machine, lambda: first.devices, None, first._free)
        self._members, self._heads = members, heads

    def share(self, rank: int, devices: Sequence[Device]) -> tuple[Device, ...]:
        worker = rank - self._heads
        if worker < 0:
            return ()
        each = len(devices) // (len(self._members) - self._heads)
        return tuple(devices[worker * each : (worker + 1) * each])

    async def pick(self, count: int, but: Sequence[Device] = ()) -> GpuPick:
        """Pick `count` GPUs of every host, those of node 0 first."""
        picks: list[GpuPick] = []
        devices: list[Device] = []
        for each in self._members[self._heads :]:
            # Several members may be slots of one machine, and would pick the same cards.
            pick = await each.pick(count, [*but, *devices])
            picks.append(pick)
            devices += pick.devices
        if all(pick.devices for pick in picks):
            return GpuPick(tuple(devices), 0.0, 0)
        again = max(pick.again for pick in picks)
        return GpuPick((), again, sum(pick.others for pick in picks))

    def reserve(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        for rank, each in enumerate(self._members):
            each.reserve(self._wants_of(rank, wants), self.share(rank, devices))

    def release(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        for rank, each in enumerate(self._members):
            each.release(self._wants_of(rank, wants), self.share(rank, devices))

    def _wants_of(self, rank: int, wants: Mapping[str, float]) -> Mapping[str, float]:
        return wants if rank >= self._heads else {}


class GroupFolder(Folder):
    """The directories of recipe on several hosts."""

    def __init__(self, ws: Workspace, members: Sequence[Folder]) -> None:
        super().__init__(ws)
        self._members = members

    @property
    def root(self) -> str:
        return self._members[0].root

    async def find_free_space(self) -> tuple[int, int | None]:
        return await self._members[0].find_free_space()

    def holds(self, content: str) -> bool:
        return all(each.holds(content) for each in self._members)

    async def look_up(self, contents: Collection[str]) -> None:
        await gather_all(each.look_up(contents) for each in self._members)

    async def clear(self, paths: Paths, others: Sequence[str] = ()) -> None:
        name = Path(paths.cwd).name.partition(".")[0]
        await gather_all(
            each.clear(Paths.at(f"{each.root}/attempts/{name}.{rank}"))
            for rank, each in enumerate(self._members)
        )


class HostGroup(Place):
    """The hosts of a multi-node step, in the order of their ranks."""

    def __init__(self, members: Sequence[RemotePlace]) -> None:
        first = members[0]
        name = ", ".join(each.name for each in members)
        super().__init__(
            first.ws,
            name,
            first.host,
            first.capacity.machine,
            lambda: first.capacity.devices,
            first.shell,
        )
        self._members = tuple(members)
        self._lost_members: dict[Place, str] = {}
        self.contact = first.contact
        self.capacity = GroupCapacity([each.capacity for each in members], int(first.port > 0))
        self.folder = GroupFolder(first.ws, [each.folder for each in members])

    @property
    def members(self) -> Sequence[RemotePlace]:
        return self._members

    @property
    def lost_members(self) -> Mapping[Place, str]:
        return self._lost_members

    def paths(self, attempt: AttemptDirectory) -> Paths:
        if not attempt.called:
            attempt = AttemptDirectory(attempt.path, called=f"{Path(attempt.path).name}.0")
        return self._members[0].paths(attempt)

    def describe_python(self, python: str, *, may_ask: bool) -> str:
        return self._members[0].describe_python(python, may_ask=may_ask)

    def may_have_made(self, attempt: AttemptDirectory, outputs: Sequence[object]) -> bool:
        return True

    async def clear_after(self, task: HostTask, states: Sequence[StateFolder]) -> None:
        await gather_all(
            each.clear_after(part, states)
            for each, part in zip(self._members, task.parts, strict=True)
        )
        for part in task.parts[1:]:
            delete(Path(part.attempt.path))
            for ending in (".log", ".metrics", ".host", ".sh", ".given"):
                with contextlib.suppress(FileNotFoundError):
                    Path(part.attempt.path + ending).unlink()

    # -- attempts

    async def stop(self, job: Job, grace: timedelta) -> None:
        await self._stop_nodes(job.key, grace, range(len(self._members)))

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """Wait for the end of all nodes.

        If a node fails, the others are stopped first.  None if nodes still run after `patience`.
        """
        ranks = range(len(self._members))
        ends = await self._wait_for(job, ranks, patience)
        running = [rank for rank in ranks if rank not in ends]
        if all(_is_success(exit) for exit in ends.values()):
            return None if running else ends[0]
        await self._stop_nodes(job.key, GRACE, running)
        ends |= await self._wait_for(job, running, 2 * GRACE)
        return ends[_find_first_failed(ends, UNTOUCHED)]

    async def _wait_for(
        self, job: Job, ranks: Collection[int], patience: timedelta
    ) -> dict[int, Exit]:
        """Return the exits of the nodes that end within `patience`, by rank."""
        exits = await gather_all(
            self._members[rank].host.wait(Job(f"{job.key}.{rank}"), patience) for rank in ranks
        )
        return {rank: exit for rank, exit in zip(ranks, exits, strict=True) if exit is not None}

    async def run_attempt(self, task: HostTask) -> TaskResult:
        try:
            return await self._run_attempt(task)
        except HostLost as error:
            losses = await gather_all(map(self._find_loss, self._members))
            lost = {member: why for member, why in losses if why}
            self._lost_members = lost or {self._members[0]: str(error)}
            raise

    async def _find_loss(self, member: RemotePlace) -> tuple[Place, str]:
        """Return the member with the reason why it does not answer; an empty reason if it does."""
        try:
            async with asyncio.timeout(LONGEST_QUESTION):
                async for _ in member.host.call(("true",)):
                    pass
        except (DriverError, TimeoutError) as error:
            return member, str(error) or f"no response from {member.name}"
        return member, ""

    async def _run_attempt(self, task: HostTask) -> TaskResult:
        met, checkpoints = UNTOUCHED, self._checkpoint_sync(task)
        if task.job is None:
            restored: Mapping[str, Newest] = {}
            if checkpoints is not None:
                restored = await self._members[0].contact.insist(checkpoints.restore)
            try:
                met = await self._start_nodes(task, restored)
            except TimeoutError:
                detail = f"not all nodes had started after {BEGIN:.0f} s"
                return TaskResult(Exit(None, reason="stopped", detail=detail))
            task.job = Job(task.name)
        else:
            for part in task.parts:
                part.job = Job(part.name, {"log": f"{part.attempt.path}.log"})
                part.rejoined = True
        if checkpoints is None:
            return await self._finish_nodes(task, met)
        copying = asyncio.ensure_future(checkpoints.run())
        try:
            return await self._finish_nodes(task, met)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
            await checkpoints.finish()

    def _checkpoint_sync(self, task: HostTask) -> CheckpointSync | None:
        """Return the checkpoint sync: all nodes write one state together."""
        if not task.states:
            return None

        nodes = NodesCheckpoints(
            [HostCheckpoints(each.host_store) for each in self._members], task.say
        )
        return CheckpointSync(nodes, task.states, task.round, processes=task.processes)

    async def _start_nodes(self, task: HostTask, restored: Mapping[str, Newest]) -> Rendezvous:
        """Prepare all nodes, find a common port, and start the commands.

        After an error, all are stopped.
        """
        pairs = list(zip(self._members, task.parts, strict=True))
        commands = await gather_all(each.prepare(part, restored) for each, part in pairs)
        nodes = [
            RendezvousNode(
                each.name, each.host, each.address, part.python or each.python, bool(part.python)
            )
            for each, part in pairs
        ]
        met = await self._members[0].contact.insist(
            lambda: rendezvous.check_nodes(nodes, self._members[0].port)
        )

        async def start(each: RemotePlace, part: HostTask, command: Command) -> None:
            part.job = await each.start(part, _with_port(command, met.port))

        try:
            async with asyncio.timeout(BEGIN):
                await gather_all(
                    start(*pair, command) for pair, command in zip(pairs, commands, strict=True)
                )
        except BaseException:
            await self._stop_nodes(task.name, GRACE, range(len(pairs)))
            raise
        return met

    async def _finish_nodes(self, task: HostTask, met: Rendezvous) -> TaskResult:
        """Wait for the end of all nodes.

        The first failed node ends the others and provides the result.
        """
        results = await self._collect_results(task)
        exits = [result.exit for result in results]
        failed = {rank: exit for rank, exit in enumerate(exits) if not _is_success(exit)}
        if failed:
            rank = _find_first_failed(failed, met)
            return results[rank]._replace(node=rank)
        rank = next((rank for rank, result in enumerate(results) if result.problem), 0)
        return results[rank]._replace(node=rank, exit=_combine_exits(exits))

    async def _collect_results(self, task: HostTask) -> list[TaskResult]:
        """Return the results of all nodes by rank.

        Raises the error of a lost node first, otherwise the first error.
        """
        finishing: list[asyncio.Future[TaskResult]] = []
        for each, part in zip(self._members, task.parts, strict=True):
            assert part.job is not None
            finishing.append(asyncio.ensure_future(each.finish(part, part.job, None)))
        stopping = asyncio.ensure_future(self._stop_after_failure(task))
        try:
            ends = await asyncio.gather(*finishing, return_exceptions=True)
        finally:
            stopping.cancel()
            for future in finishing:
                future.cancel()
            await asyncio.gather(stopping, *finishing, return_exceptions=True)
        results: list[TaskResult] = []
        errors: list[BaseException] = []
        for end in ends:
            if isinstance(end, HostLost):
                raise end
            if isinstance(end, BaseException):
                errors.append(end)
            else:
                results.append(end)
        if errors:
            raise errors[0]
        return results

    async def _stop_after_failure(self, task: HostTask) -> None:
        """Stop all nodes as soon as one fails or is lost, because the others would wait for it."""
        ranks = range(len(self._members))
        waiting = {
            asyncio.ensure_future(self._wait_for_failure(task, rank)): rank for rank in ranks
        }
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended = {waiting[future] for future in done}
            others = [rank for rank in ranks if rank not in ended]
            await self._stop_nodes(task.name, GRACE, others)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _wait_for_failure(self, task: HostTask, rank: int) -> None:
        """Return when the job of a node fails.  After a success, wait until cancelled."""
        member, job = self._members[rank], Job(task.parts[rank].name)
        exit: Exit | None = None
        while exit is None:
            exit = await member.contact.insist(lambda: member.host.wait(job, FOREVER))
        if _is_success(exit):
            await asyncio.Event().wait()

    async def _stop_nodes(self, name: str, grace: timedelta, ranks: Collection[int]) -> None:
        """Stop the commands of these nodes: SIGTERM, and SIGKILL after `grace`."""

        async def stop(rank: int) -> None:
            # The wait for the node's end reports a lost or unreachable host.
            with contextlib.suppress(DriverError):
                await self._members[rank].host.stop(Job(f"{name}.{rank}"), grace)

        await asyncio.gather(*map(stop, ranks))


def group_of(places: Sequence[Place]) -> Place:
    """Return several hosts as one place; the first is node 0."""
    if len(places) == 1:
        return places[0]
    return HostGroup([place for place in places if isinstance(place, RemotePlace)])


def rank_name(name: str, rank: int) -> str:
    """Return the name of a local file of one node: node 0 has the plain name."""
    return f"{name}.{rank}" if rank else name


def _is_success(exit: Exit) -> bool:
    return exit.code == 0 and exit.reason == "exit"


def _find_first_failed(exits: Mapping[int, Exit], met: Rendezvous) -> int:
    """Return the node that failed first, if possible not one that was stopped because of another
    failure.

    A lost node counts first: a restarting host is noticed late, after the failures that it caused
    on other nodes.
    """
    ahead = dict(enumerate(met.ahead))

    def sort_key(rank: int) -> tuple[int, float, int]:
        exit = exits[rank]
        if exit.reason == "lost":
            order = 0
        elif _is_success(exit) or exit.reason == "stopped":
            order = 2
        else:
            order = 1
        return order, exit.ended - ahead.get(rank, 0.0), rank

    return min(exits, key=sort_key)


def _combine_exits(exits: Sequence[Exit]) -> Exit:
    """Combine the exits of successful nodes: the whole duration and the total resource use."""
    started = min(exit.started for exit in exits)
    ended = max(exit.ended for exit in exits)
    cpu = sum(exit.cpu for exit in exits)
    peak_memory = max(exit.peak_memory for exit in exits)
    strays = sum(exit.strays for exit in exits)
    return exits[0]._replace(
        started=started, ended=ended, cpu=cpu, peak_memory=peak_memory, strays=strays
    )


def _with_port(command: Command, port: int) -> Command:
    """Insert the rendezvous port into the command of one node."""

    def put(text: str) -> str:
        return text.replace(launch.PORT, str(port))

    return replace(
        command,
        argv=tuple(map(put, command.argv)),
        env={name: put(value) for name, value in command.env.items()},
    )
