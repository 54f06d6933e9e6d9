"""Places: hosts on which attempts run, and their capacity.

`Place.run_attempt` is the only way to run an attempt: prepare it, start it, wait, collect its
outputs.  A place that shares the local disk runs the attempt in its local directory.  A
`RemotePlace` has a disk of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from drivers.base import Command, Exit, Job

from ...errors import Infrastructure, StoreUnavailable
from ...planning.step import OutputSpec
from ...storage.content.files import is_full, no_space
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from .. import interpreters, variables
from ..link.contact import HostContact
from .capacity import Capacity
from .folder import Folder
from .host_task import FOREVER, HostTask, Paths, StateFolder, TaskResult
from .staging import AttemptDirectory, OutputProblem

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..engines import Mount
    from ..link.client import Client

GRACE = timedelta(seconds=10)
NOTICE = timedelta(seconds=20)
PRUNING = 60.0
"""Seconds between two deletions of old checkpoints on the local disk."""


class Shell(NamedTuple):
    """The environment of commands on a host.

    It has the Python for steps without a lock, PATH, login variables, and the Python version.
    """

    python: str
    path: str
    login: Mapping[str, str]
    version: str = ""


class Place:
    """A host that shares the local disk."""

    own_disk = False
    """Whether the command sees a copy of the attempt directory on another disk."""
    is_rented = False
    """Whether the place is released after the run, which ends all its jobs."""

    def __init__(
        self,
        ws: Workspace,
        name: str,
        host: Client,
        machine: Mapping[str, float],
        devices: Callable[[], Sequence[Device]],
        shell: Shell,
        slots: int | None = None,
    ) -> None:
        self.ws, self.name, self.host, self.shell = ws, name, host, shell
        self.python, self.path = shell.python, shell.path
        self.capacity = Capacity(machine, devices, slots, host.find_free_locks)
        self.contact = HostContact()
        self.folder = Folder(ws)
        self.installer = sys.executable
        """The Python that creates environments from locks."""
        self.login = variables.inherit_variables(shell.login)
        """Login variables that every step inherits."""
        self.elsewhere = "" if name == "local" else name
        """Name of the machine; empty for this machine."""
        self._described: dict[tuple[str, bool], str] = {}
        self.address = ""
        """Address for other nodes; empty if the host has none."""
        self.zone = ""
        """Zone of the machine if the nodes of a step must be in one zone."""
        self.port = 0
        """Rendezvous port of a stack's head; 0 for any free port.

        The head is node 0, and the only node that others dial.
        """
        self.image = ""
        """Image of a machine that is itself a container, as requested by a step; otherwise empty."""
        self.lost = ""
        """Reason why the place is lost; empty while it is not."""
        self.leaving = ""
        """Reason why no more steps start here, while running steps may still save; otherwise empty."""
        self.leave_at = math.inf
        """Unix time at which running steps must save and stop, if known in advance."""
        self.notice = NOTICE
        """Time between that stop and the kill, enough to download the saved files."""

    @property
    def members(self) -> Sequence[Place]:
        """The hosts of the place, one per node."""
        return (self,)

    @property
    def lost_members(self) -> Mapping[Place, str]:
        """The members known to be lost, with the reasons; empty for a single host, whose steps report the loss."""
        return {}

    def record_end(self, why: str) -> None:
        """Record that a host has stopped its jobs.

        No more steps start on members with a limited time.
        """
        for each in self.members:
            if each.leave_at < math.inf:
                each.leaving = each.leaving or why

    def paths(self, attempt: AttemptDirectory) -> Paths:
        return Paths.at(attempt.path)

    async def stop(self, job: Job, grace: timedelta) -> None:
        """Send SIGTERM to all processes of an attempt, and SIGKILL after `grace`.

        Raises DriverError.
        """
        await self.host.stop(job, grace)

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """Wait for the end of an attempt; None if it still runs after `patience`.  Raises DriverError."""
        return await self.host.wait(job, patience)

    def env(self, own: Collection[str] = ()) -> dict[str, str]:
        """Return the base environment of every command.

        `own` are names that the command sets itself.
        """
        return {
            "PATH": self.path,
            "PYTHONUNBUFFERED": "1",
            **self.login,
            **variables.fixed_variables(own),
        }

    def describe_python(self, python: str, *, may_ask: bool) -> str:
        """Return the path of a Python and its version, if known, for messages.

        `may_ask` allows to run the Python for its version.
        """
        if (python, may_ask) not in self._described:
            self._described[python, may_ask] = interpreters.describe_python(python, may_ask)
        return self._described[python, may_ask]

    def fits(self, wants: Mapping[str, float]) -> bool:
        """Return whether the host is large enough for a step: its cpus, gpus and bytes of memory."""
        return not self.lost and self.capacity.fits(wants)

    def has_room(self, wants: Mapping[str, float]) -> bool:
        """Return whether a step may start now."""
        return not (self.lost or self.leaving) and self.capacity.has_room(wants)

    # -- attempts

    def link_states(self, attempt: AttemptDirectory, states: Sequence[StateFolder]) -> None:
        """Link the states into a new attempt directory."""
        for state in states:
            os.symlink(state.local_path.resolve(), attempt.target_of(state.path))

    def find_mounts(
        self, attempt: AttemptDirectory, command: Command, states: Sequence[StateFolder]
    ) -> Sequence[Mount]:
        """Return the mounts of a container for an attempt: its directory and the targets of its
        links.
        """
        from ..containers import find_mounts
        from ..engines import Mount

        shown = [Mount(path, at=f"{attempt.path}/{name}") for name, path in attempt.mounted.items()]
        writable = [str(state.local_path) for state in states]
        return [*find_mounts(command, f"{self.folder.root}/objects", writable), *shown]

    def may_have_made(self, attempt: AttemptDirectory, outputs: Sequence[OutputSpec]) -> bool:
        """Return whether the outputs of a successful attempt may all still exist."""
        return attempt.has_outputs(outputs)

    async def run_attempt(self, task: HostTask) -> TaskResult:
        """Run an attempt to its end and collect its outputs.

        Raises DriverError (HostLost if the host is lost), RecipeError and OSError.
        """
        if task.job is None:
            command, script = task.compose(task.restored)
            if script is not None:
                paths = self.paths(task.attempt)
                task.scrap.write_script(paths.script, script)
                task.scrap.take_log(paths.log)
            crashpoint("attempt-staged")
            await task.confirm()
            task.job = await self.host.start(command, task.name)
            crashpoint("job-started")
        pruning = asyncio.ensure_future(self._prune(task)) if task.states else None
        try:
            exit: Exit | None = None
            while exit is None:
                exit = await self.host.wait(task.job, FOREVER)
        finally:
            if pruning is not None:
                pruning.cancel()
        if exit.code != 0 or exit.reason != "exit":
            return TaskResult(exit)
        crashpoint("job-over")
        is_slow = task.attempt.is_slow_to_collect(task.outputs)
        # Before the next step starts, whose staging restores an object that this step changed.
        check = partial(task.attempt.find_changed_input, self.ws.cache, self.ws.objects)
        changed_input = await asyncio.to_thread(check) if is_slow else check()
        if changed_input:
            return TaskResult(exit, problem="input", words=changed_input)
        if task.attempt.has_outputs(task.outputs):  # otherwise, the step fails
            await task.make_room()
        if is_slow:
            return await asyncio.to_thread(self._store_outputs, task, exit)
        return self._store_outputs(task, exit)

    def _store_outputs(self, task: HostTask, exit: Exit) -> TaskResult:
        """Store the outputs of an attempt, or return the problem with its outputs."""
        attempt = task.attempt
        states = {state.path: str(state.local_path) for state in task.states}
        try:
            return TaskResult(exit, attempt.collect(task.outputs, self.ws.objects, states))
        except OutputProblem as error:
            return TaskResult(exit, problem="output", words=str(error))
        except StoreUnavailable:
            raise
        except Infrastructure as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and is_full(cause):
                return TaskResult(exit, problem="full", words=str(error))
            return TaskResult(exit, problem="disk", words=str(error))
        except OSError as error:
            if not is_full(error):
                raise
            words = str(no_space(error, str(error.filename or attempt.path)))
            return TaskResult(exit, problem="full", words=words)

    async def _prune(self, task: HostTask) -> None:
        """Delete old checkpoints while the training runs, until cancelled."""
        from .checkpoint_sync import CheckpointPruner

        pruners = [
            CheckpointPruner(state.local_path, state.pattern, state.keep) for state in task.states
        ]
        while True:
            await asyncio.sleep(PRUNING)
            for pruner in pruners:
                _, warning = await asyncio.to_thread(pruner.delete_old)
                if warning:
                    task.say(warning)

    async def aclose(self) -> None:
        """Close the connections; jobs continue.  If the place is lost, waiting callers get the reason."""
        await self.host.aclose(self.lost)

    async def clear_after(self, task: HostTask, states: Sequence[StateFolder]) -> None:
        """Delete the files of a stored attempt on another disk, and its `states`."""
