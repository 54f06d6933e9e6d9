"""One attempt of a step, from the moment it is considered until its end is stored."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from drivers.base import DriverError, Job, Unreachable

from ...digest import Digest
from ...hosts.link import control_file
from ...hosts.place import staging
from ...hosts.place.host_task import HostTask, TaskResult
from ...hosts.place.place import Place
from ...hosts.place.spare_dirs import Scrap
from ...planning.fingerprint import World
from ...planning.plan import Node
from ...planning.step import StepSpec
from ...storage.locks import Lock

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...storage import checkpoints

GRACE: Final = timedelta(seconds=10)
"""Between the request to end and the kill."""
SAVING: Final = timedelta(seconds=30)
"""The same for a step that may save where it is: of a run that is paused or cancelled."""
STEP: Final = timedelta(minutes=5)
"""So long a training that was asked to save has until the end of its step and of its checkpoint.

Then it gets SIGTERM.
"""
ASK_AGAIN_SECONDS: Final = 1.0
"""Until a machine that cannot be reached is asked again whether what it was to end has ended."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a step.

    It is considered with what it would run and where, then holds what it needs, then is prepared
    (`name`, `directory`, `task`), carried out (`carrier`), and over (`result`).
    """

    number: int
    """Of its step in the plan of now."""
    node: Node
    spec: StepSpec
    key: Digest | None
    world: World
    """The part of the key that was found when it was considered."""
    place: Place

    # What it holds.
    devices: tuple[Device, ...] = ()
    """Its GPUs; not known of one that an earlier worker began."""
    state: checkpoints.Generation | None = None
    lock: Lock | None = None
    """Of the state."""
    restored: Mapping[str, checkpoints.Newest] = field(default_factory=dict)
    """The checkpoints here when it was prepared."""

    # Once it is prepared.
    name: str = ""
    started: float = 0.0
    """Seconds since the epoch."""
    directory: staging.AttemptDirectory = field(init=False)
    task: HostTask = field(init=False)
    is_reattached: bool = False
    """An earlier worker began it."""

    # While it is carried out.
    carrier: asyncio.Task[None] | None = None
    resumed_from: Mapping[str, checkpoints.Newest] = field(default_factory=dict)
    """The checkpoints that its host began with."""
    resumed_step: int | None = None
    """The training step of those."""
    checkpoint_bytes: int = 0
    """Brought here while it ran."""
    stop_asked: bool = False
    """We asked for its end."""
    save_asked: bool = False
    """We asked it to save and to end by itself."""
    result: TaskResult | None = None

    @property
    def id(self) -> str:
        """The step's id."""
        return self.node.id

    @property
    def wants(self) -> Mapping[str, float]:
        """What it takes of its host."""
        return self.spec.resources.room

    @property
    def log(self) -> str:
        """The log of the first node."""
        return f"{self.directory.path}.log"

    @property
    def logs(self) -> Sequence[str]:
        """The log of each node, by rank."""
        return [f"{part.attempt.path}.log" for part in self.task.parts] or [self.log]

    @property
    def last_log(self) -> str:
        """The log that tells how it ended: of several nodes, that of the one which failed first."""
        return f"{self.directory_of_end.path}.log"

    @property
    def directory_of_end(self) -> staging.AttemptDirectory:
        """The directory of the node that failed first; else of the first."""
        if self.result is not None and self.result.node:
            return self.task.parts[self.result.node].attempt
        return self.directory

    @property
    def metrics_file(self) -> str:
        """The file that the step's environment names for its numbers."""
        return f"{self.directory.path}.metrics"

    def begun_by_earlier_worker(self, name: str, place: Place) -> Attempt:
        """The same attempt as an earlier worker began it under that name; it is yet to be prepared."""
        return dataclasses.replace(self, name=name, place=place, devices=(), is_reattached=True)

    def release_lock(self) -> None:
        """Let other attempts have the state."""
        if self.lock is not None:
            self.lock.release()

    def left_checkpoint(self) -> bool:
        """Whether it left a checkpoint here that is not the one it resumed from."""
        if self.state is None:
            return False
        from ...storage import checkpoints

        before = self.resumed_from or self.task.restored
        for each in self.spec.state:
            folder = self.state.folder(each.name)
            found = checkpoints.newest(folder, each.checkpoint, thorough=False).name
            if found is not None and (each.name not in before or before[each.name].name != found):
                return True
        return False

    def clear_up(self, scrap: Scrap) -> None:
        """Take away what an attempt that never began has on this disk."""
        rest = self.directory.retire(scrap)
        if rest is not None:
            rest()
        script = f"{self.directory.path}.sh"
        if os.path.exists(script):
            scrap.give_script(script)
        if os.path.exists(self.log):
            scrap.give_log(self.log)

    def stop(
        self, grace: timedelta = GRACE, *, may_save: bool = False
    ) -> Coroutine[Any, Any, None]:
        """End it; one that has not begun yet on its host never does.

        `may_save`: a program that listens is asked to save at the end of the training step that
        it is in, and has time for that. The coroutine ends when the job has ended or is given up.
        """
        self.stop_asked = True
        return self._stop(grace, may_save)

    async def _stop(self, grace: timedelta, may_save: bool) -> None:
        job = self.task.job
        if job is None:
            if self.carrier is not None:
                self.carrier.cancel()
            return
        # The wait for its end finds that the host is gone, or cannot be reached.
        with contextlib.suppress(DriverError):
            if may_save and self.task.states and await self._saves_and_ends():
                return
            await self.place.stop(job, grace)
            if self.place.is_rented:
                await self._await_end(job, grace + GRACE)

    async def _saves_and_ends(self) -> bool:
        """Ask a program that listens to save and to end.  False: it does not, or takes too long."""
        if self.carrier is None:
            return False
        # Before the question: a quick trainer has saved and ended before the answer is here.
        self.save_asked = True
        cwd = self.place.paths(self.directory).cwd
        self.save_asked = await control_file.ask_trainer(self.place.host, cwd, "pause")
        if not self.save_asked:
            return False
        ended, _ = await asyncio.wait({self.carrier}, timeout=STEP.total_seconds())
        return bool(ended)

    async def _await_end(self, job: Job, patience: timedelta) -> None:
        """Wait for the end of a job that was asked to end on a rented machine.

        It is given up where no word of that comes.
        """
        try:
            async with asyncio.timeout(patience.total_seconds()):
                while True:
                    try:
                        if await self.place.wait(job, patience) is not None:
                            return
                    except Unreachable:
                        await asyncio.sleep(ASK_AGAIN_SECONDS)
        except TimeoutError:
            self._give_up()

    def _give_up(self) -> None:
        """Wait no longer: the job ends with its rented machine, which is given back."""
        if self.carrier is not None:
            reason = "it could not be reached to end what runs there"
            self.place.lost = self.place.lost or reason
            self.carrier.cancel()
