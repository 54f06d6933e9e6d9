"""Where attempts run: hosts, what they have room for, and how an attempt runs there.

`Place.carry` is the one way to run an attempt: make it ready, start it, wait, take what it made.  A place that shares our disk runs it where it is;
one with a disk of its own is a `RemotePlace`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from drivers.base import Command, Exit, Job

from ...errors import Infrastructure, StoreUnavailable
from ...planning.step import OutputSpec
from ...storage.content.files import is_full, no_space
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from .. import interpreters, variables
from ..link.contact import Contact
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
"""Seconds between looks at the checkpoints that a step writes on this disk."""


class Shell(NamedTuple):
    """What commands on a host begin with: the Python without a lock, the command path, the variables of the login, and which Python that is."""

    python: str
    path: str
    login: Mapping[str, str]
    version: str = ""


class Place:
    """A host that sees our disk: attempts run where they are made."""

    own_disk = False
    """Whether an attempt directory here is only a model of the one that its command sees."""
    is_rented = False
    """Whether it is given back after the run, and what runs there ends with it."""

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
        self.capacity = Capacity(machine, devices, slots, host.free)
        self.contact = Contact()
        self.folder = Folder(ws)
        self.installer = sys.executable
        """The Python that makes environments from locks."""
        self.login = variables.inherit_variables(shell.login)
        """What every step gets of the variables of the login there."""
        self.elsewhere = "" if name == "local" else name
        """The name of a machine that is not this one."""
        self._described: dict[str, str] = {}
        self.address = ""
        """What other nodes dial; empty where a host has no name for them."""
        self.zone = ""
        """Where it is, if it can be a node of a step only together with others there."""
        self.port = 0
        """The one port at which they do, where it is the head of a stack: node 0, and the only node that others dial.  0: any that is free."""
        self.image = ""
        """The image that the machine itself is a container of, because a step asked for it; empty: none that a step asked for."""
        self.lost = ""
        """Why nothing can run here any more; empty as long as it can."""
        self.leaving = ""
        """Why nothing is started here any more, though what runs may save; empty as long as there is no such reason."""
        self.leave_at = math.inf
        """Seconds since the epoch, when that is known before: from then on what runs here is to save and to end."""
        self.notice = NOTICE
        """The time that it has for that, before it is killed: what it saved is to come home, too."""

    @property
    def members(self) -> Sequence[Place]:
        """The hosts that a step here has, one for each node."""
        return (self,)

    @property
    def gone(self) -> Mapping[Place, str]:
        """Those of them that are known to be lost, and why; of one host its own steps tell."""
        return {}

    def ending(self, why: str) -> None:
        """It has ended what ran on it: where its time is limited, that is over, and nothing begins there any more."""
        for each in self.members:
            if each.leave_at < math.inf:
                each.leaving = each.leaving or why

    def paths(self, attempt: AttemptDirectory) -> Paths:
        return Paths.at(attempt.path)

    async def stop(self, job: Job, grace: timedelta) -> None:
        """SIGTERM to all that an attempt began, SIGKILL after `grace`.  Raises DriverError."""
        await self.host.stop(job, grace)

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """The end of an attempt; None when `patience` passed and it is still going.  Raises DriverError."""
        return await self.host.wait(job, patience)

    def env(self, own: Collection[str] = ()) -> dict[str, str]:
        """What the environment of every command there begins with.  `own` are names that it sets itself."""
        return {
            "PATH": self.path,
            "PYTHONUNBUFFERED": "1",
            **self.login,
            **variables.settled_variables(own),
        }

    def described(self, python: str) -> str:
        """A Python there as people read it: its path, and its version where that is known."""
        if python not in self._described:
            self._described[python] = interpreters.describe_python(python)
        return self._described[python]

    def could(self, wants: Mapping[str, float]) -> bool:
        """Whether a step that takes so many cpus, gpus and bytes of memory could ever run here."""
        return not self.lost and self.capacity.could(wants)

    def has_room(self, wants: Mapping[str, float]) -> bool:
        """Whether it may start here now."""
        return not (self.lost or self.leaving) and self.capacity.has_room(wants)

    # -- attempts

    def give_states(self, attempt: AttemptDirectory, states: Sequence[StateFolder]) -> None:
        """Let an attempt that is being made find its states."""
        for state in states:
            os.symlink(state.here.resolve(), attempt.target_of(state.path))

    def mounts(
        self, attempt: AttemptDirectory, command: Command, states: Sequence[StateFolder]
    ) -> Sequence[Mount]:
        """What a container there has to see: the attempt, and all that it leads to."""
        from ..containers import mounts
        from ..engines import Mount

        shown = [Mount(path, at=f"{attempt.path}/{name}") for name, path in attempt.mounted.items()]
        writable = [str(state.here) for state in states]
        return [*mounts(command, f"{self.folder.root}/objects", writable), *shown]

    def may_have_made(self, attempt: AttemptDirectory, outputs: Sequence[OutputSpec]) -> bool:
        """Whether the outputs of an attempt that ended well may all be there still."""
        return attempt.whole(outputs)

    async def carry(self, task: HostTask) -> TaskResult:
        """Run an attempt to its end and take what it made.  Raises DriverError (HostLost when the host is gone), RecipeError and OSError."""
        if task.job is None:
            command, script = task.compose(task.restored)
            if script is not None:
                paths = self.paths(task.attempt)
                task.scrap.write_script(paths.script, script)
                task.scrap.log(paths.log)
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
        if task.attempt.heavy(task.outputs):
            return await asyncio.to_thread(self._take, task, exit)
        return self._take(task, exit)

    def _take(self, task: HostTask, exit: Exit) -> TaskResult:
        """The contents of an attempt's outputs, stored; or what is wrong with them, or with its inputs."""
        attempt = task.attempt
        if words := attempt.tampered(self.ws.cache, self.ws.objects):
            return TaskResult(exit, problem="input", words=words)
        try:
            return TaskResult(
                exit,
                attempt.collect(
                    task.outputs, self.ws.objects, [state.path for state in task.states]
                ),
            )
        except OutputProblem as error:
            return TaskResult(exit, problem="output", words=str(error))
        except StoreUnavailable:
            raise
        except Infrastructure as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and is_full(cause)
            return TaskResult(exit, problem="full" if full else "disk", words=str(error))
        except OSError as error:
            if not is_full(error):
                raise
            words = str(no_space(error, str(error.filename or attempt.path)))
            return TaskResult(exit, problem="full", words=words)

    async def _prune(self, task: HostTask) -> None:
        """Delete old checkpoints while their trainer writes here, until cancelled."""
        from .checkpoint_sync import CheckpointPruner

        pruners = [CheckpointPruner(state.here, state.pattern, state.keep) for state in task.states]
        while True:
            await asyncio.sleep(PRUNING)
            for pruner in pruners:
                _, words = await asyncio.to_thread(pruner.look)
                if words:
                    task.say(words)

    async def aclose(self) -> None:
        """Let go of our connections to it.  Jobs stay; where it is lost, those who wait for them get to know it."""
        await self.host.aclose(self.lost)

    async def clear_after(self, task: HostTask, states: Sequence[StateFolder]) -> None:
        """The results of an attempt are stored: what it used on another disk than ours goes, `states` too."""
