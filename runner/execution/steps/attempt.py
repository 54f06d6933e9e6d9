"""Attempt of a step, from its start until its result is stored."""

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
from ...hosts.place.spare_dirs import SparePool
from ...planning.fingerprint import World
from ...planning.plan import Node
from ...planning.step import StepSpec
from ...storage.locks import Lock

if TYPE_CHECKING:
    from drivers.devices import Device

    from ...storage import checkpoints

GRACE: Final = timedelta(seconds=10)
"""Time between SIGTERM and SIGKILL."""
SAVING: Final = timedelta(seconds=30)
"""Time between SIGTERM and SIGKILL for a step that may save a checkpoint."""
STEP: Final = timedelta(minutes=5)
"""Timeout for a trainer to finish its training step and save a checkpoint, before SIGTERM."""
ASK_AGAIN_SECONDS: Final = 1.0
"""Interval between checks of a stopped job on an unreachable machine, in seconds."""


@dataclass(slots=True, eq=False)
class Attempt:
    """Attempt of a step, with its host, key, files and job.

    Its stages are considered (step, key and host are set), holding (GPUs and state), prepared
    (`name`, `directory`, `task`), executing (`execution`) and finished (`result`).
    """

    number: int
    """Number of the step in the current plan."""
    node: Node
    spec: StepSpec
    key: Digest | None
    world: World
    """Content part of the cache key: inputs, tools and packages."""
    place: Place

    # Claims.
    devices: tuple[Device, ...] = ()
    """Reserved GPUs; unknown for an earlier worker's attempt."""
    state: checkpoints.Generation | None = None
    lock: Lock | None = None
    """Lock on the checkpoint directory."""
    restored: Mapping[str, checkpoints.Newest] = field(default_factory=dict)
    """Local checkpoints when the attempt was prepared."""

    # After its preparation.
    name: str = ""
    started: float = 0.0
    """Start time, in seconds since the epoch."""
    directory: staging.AttemptDirectory = field(init=False)
    task: HostTask = field(init=False)
    is_reattached: bool = False
    """True if an earlier worker started the attempt."""

    # During its execution.
    execution: asyncio.Task[None] | None = None
    resumed_from: Mapping[str, checkpoints.Newest] = field(default_factory=dict)
    """Checkpoints on the attempt's host at its start."""
    resumed_step: int | None = None
    """Training step of these checkpoints."""
    checkpoint_bytes: int = 0
    """Bytes of checkpoints downloaded during the attempt."""
    stop_asked: bool = False
    """True if this worker asked the attempt to stop."""
    save_asked: bool = False
    """True if this worker asked the trainer to save and exit by itself."""
    result: TaskResult | None = None

    @property
    def id(self) -> str:
        """ID of the attempt's step."""
        return self.node.id

    @property
    def wants(self) -> Mapping[str, float]:
        """Host capacity that the attempt occupies, by resource."""
        return self.spec.resources.room

    @property
    def gpus(self) -> int:
        """Number of GPUs that the step needs on its host."""
        return int(self.wants.get("gpus", 0))

    @property
    def log(self) -> str:
        """Path of the first node's log."""
        return f"{self.directory.path}.log"

    @property
    def logs(self) -> Sequence[str]:
        """Paths of the logs of all nodes, by rank."""
        return [f"{part.attempt.path}.log" for part in self.task.parts] or [self.log]

    @property
    def last_log(self) -> str:
        """Path of the log of the first node that failed, or of node 0."""
        return f"{self.directory_of_end.path}.log"

    @property
    def directory_of_end(self) -> staging.AttemptDirectory:
        """Attempt directory of the first node that failed, or of node 0."""
        if self.result is not None and self.result.node:
            return self.task.parts[self.result.node].attempt
        return self.directory

    @property
    def metrics_file(self) -> str:
        """Path in the step's RECIPE_METRICS variable."""
        return f"{self.directory.path}.metrics"

    def begun_by_earlier_worker(self, name: str, place: Place) -> Attempt:
        """Return a copy that stands for the attempt `name`, started by an earlier worker.

        The copy is not prepared yet.
        """
        return dataclasses.replace(self, name=name, place=place, devices=(), is_reattached=True)

    def release_lock(self) -> None:
        """Release the lock on the checkpoint directory."""
        if self.lock is not None:
            self.lock.release()

    def left_checkpoint(self) -> bool:
        """Return True if the attempt left a new checkpoint on this machine."""
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

    def clear_up(self, scrap: SparePool) -> None:
        """Delete the local files of an attempt that never started."""
        rest = self.directory.retire(scrap)
        if rest is not None:
            rest()
        script = f"{self.directory.path}.sh"
        if os.path.exists(script):
            scrap.add_script(script)
        if os.path.exists(self.log):
            scrap.add_log(self.log)

    def stop(
        self, grace: timedelta = GRACE, *, may_save: bool = False
    ) -> Coroutine[Any, Any, None]:
        """Stop the attempt's job; if it has not started yet, it never starts.

        With `may_save`, a program that reads the control file is asked to save at the end of its
        training step. The coroutine finishes when the job has ended, or when the wait is given up.
        """
        self.stop_asked = True
        return self._stop(grace, may_save)

    async def _stop(self, grace: timedelta, may_save: bool) -> None:
        job = self.task.job
        if job is None:
            if self.execution is not None:
                self.execution.cancel()
            return
        # The execution reports a lost or unreachable host.
        with contextlib.suppress(DriverError):
            if may_save and self.task.states and await self._saves_and_ends():
                return
            await self.place.stop(job, grace)
            if self.place.is_rented:
                await self._await_end(job, grace + GRACE)

    async def _saves_and_ends(self) -> bool:
        """Ask the trainer to save a checkpoint and exit.

        Return False if it does not support this or takes too long.
        """
        if self.execution is None:
            return False
        # Set before the request, because a fast trainer exits before the answer arrives.
        self.save_asked = True
        cwd = self.place.paths(self.directory).cwd
        self.save_asked = await control_file.ask_trainer(self.place.host, cwd, "pause")
        if not self.save_asked:
            return False
        ended, _ = await asyncio.wait({self.execution}, timeout=STEP.total_seconds())
        return bool(ended)

    async def _await_end(self, job: Job, patience: timedelta) -> None:
        """Wait until a stopped job on a rented machine has ended, at most `patience`."""
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
        """Stop waiting for a job; it ends when its rented machine is released."""
        if self.execution is not None:
            reason = "cannot reach the host to stop its job"
            self.place.lost = self.place.lost or reason
            self.execution.cancel()
