"""Where attempts run: hosts, what they have room for, and how an attempt runs there.  Knows contents, not order or keys.

`Site.carry` is the one way to run an attempt: make it ready, start it, wait, take what it made.  A place that shares our disk runs it where it lies;
one with a disk of its own is an `Away`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from drivers.base import Command, Exit, Job, Unreachable

from ..errors import Infrastructure
from ..planning.step import MetricsSpec, OutputSpec
from ..storage.crash import crashpoint
from ..storage.disk import delete
from ..storage.workspace import Workspace
from . import interpreters, variables
from .scrap import Scrap
from .staging import Attempt, OutputProblem

if TYPE_CHECKING:
    from drivers.devices import Device

    from ..storage.checkpoints import Newest
    from .checkpoint_sync import Round
    from .client import Client
    from .containers import Mount
    from .output_sync import Synced

_T = TypeVar("_T")
FOREVER = timedelta(days=3650)
GRACE = timedelta(seconds=10)
NOTICE = timedelta(seconds=20)
SOONEST_LOOK, LATEST_LOOK = 0.1, 1.0
"""Seconds between looks whether another run has given a GPU back: at first, and after a while."""
LONGEST_QUESTION = 5.0
"""Seconds that such a look may take."""
PRUNING = 60.0
"""Seconds between looks at the checkpoints that a step writes on this disk."""


class Paths(NamedTuple):
    """Where the parts of one attempt are, on the host that it runs on."""

    cwd: str
    script: str
    log: str
    metrics: str
    host: str  # what the agent there sees of the machine meanwhile

    @classmethod
    def at(cls, path: str) -> Paths:
        return cls(path, f"{path}.sh", f"{path}.log", f"{path}.metrics", f"{path}.host")


class Pick(NamedTuple):
    """GPUs for one attempt.  Without any: seconds until the next look, and how many were held by others at this one, if there was one."""

    devices: tuple[Device, ...]
    again: float
    others: int


class Site:
    """A host that sees our disk: attempts run where they are made."""

    def __init__(
        self,
        ws: Workspace,
        name: str,
        host: Client,
        machine: Mapping[str, float],
        devices: Callable[[], Sequence[Device]],
        *,
        slots: int | None = None,
        python: str,
        path: str,
        login: Mapping[str, str],
    ) -> None:
        self.ws, self.name, self.host, self.machine, self.slots, self.python = ws, name, host, machine, slots, python
        self.path = path
        self.installer = sys.executable
        """The Python that makes environments from locks."""
        self.login = variables.inherited(login)
        """What every step gets of the variables of the login there."""
        self.elsewhere = "" if name == "local" else name
        """The name of a machine that is not this one."""
        self._described: dict[str, str] = {}
        self._devices = devices
        self.address = ""
        """What other nodes dial; empty where a host has no name for them."""
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
        self.silent = False
        """Whether it does not answer now; what runs there may go on, but there are better places to start something."""
        self._running = 0
        self._used: dict[str, float] = {}
        self._given: set[Device] = set()
        self._crowded: dict[int, float] = {}  # GPUs that could not be had at once -> the time of the next look
        self._pause = SOONEST_LOOK

    @property
    def members(self) -> Sequence[Site]:
        """The hosts that a step here has, one for each node."""
        return (self,)

    def devices_of(self, rank: int, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The share of one node in the GPUs that were picked here."""
        return tuple(devices)

    @property
    def gone(self) -> Mapping[Site, str]:
        """Those of them that are known to be lost, and why; of one host its own steps tell."""
        return {}

    def ending(self, why: str) -> None:
        """It has ended what ran on it: where its time is limited, that is over, and nothing begins there any more."""
        for each in self.members:
            if each.leave_at < math.inf:
                each.leaving = each.leaving or why

    def paths(self, attempt: Attempt) -> Paths:
        return Paths.at(attempt.path)

    async def stop(self, job: Job, grace: timedelta) -> None:
        """SIGTERM to all that an attempt began, SIGKILL after `grace`.  Raises DriverError."""
        await self.host.stop(job, grace)

    async def wait(self, job: Job, patience: timedelta) -> Exit | None:
        """The end of an attempt; None when `patience` passed and it is still going.  Raises DriverError."""
        return await self.host.wait(job, patience)

    def env(self, own: Collection[str] = ()) -> dict[str, str]:
        """What the environment of every command there begins with.  `own` are names that it sets itself."""
        return {"PATH": self.path, "PYTHONUNBUFFERED": "1", **self.login, **variables.settled(own)}

    @property
    def root(self) -> str:
        """The folder of ours on that host."""
        return str(self.ws.home)

    async def scratch(self, name: str, files: Mapping[str, bytes], script: bytes | None) -> Paths:
        """A directory with these files and nothing else, for a command that is no step's; its script lies beside it."""
        paths = Paths.at(f"{self.root}/attempts/{name}")
        Path(paths.cwd).mkdir(parents=True)
        for path, data in files.items():
            self.ws.write(Path(paths.cwd, path), data)
        if script is not None:
            self.ws.write(Path(paths.script), script)
        return paths

    async def program(self, path: str) -> str:
        """Where a program of this machine lies there; brought if it is not there."""
        return path

    async def clear(self, paths: Paths, others: Sequence[str] = ()) -> None:
        """Delete all that there is of an attempt or a scratch directory, and other things of ours."""
        for path in (*paths, *others):
            delete(Path(path))

    async def noted(self, path: str) -> bool:
        """Whether a note was made below the root."""
        return os.path.exists(f"{self.root}/{path}")

    async def note(self, path: str) -> None:
        self.ws.write(Path(self.root, path), b"done\n")

    async def insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask until the host answers.  Ours does."""
        return await ask()

    async def room(self) -> tuple[int, int | None]:
        """Bytes that are free where attempts run, and inodes where that is counted."""
        found = os.statvfs(f"{self.root}/attempts")
        return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None

    def described(self, python: str) -> str:
        """A Python there as people read it: its path, and its version where that is known."""
        if python not in self._described:
            self._described[python] = interpreters.described(python)
        return self._described[python]

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs that a program sees here which is given none."""
        return tuple(self._devices())

    def has(self, name: str) -> float:
        """How much there is of cpus, gpus, or memory in bytes.  GPUs are not listed before somebody asks for them."""
        return float(len(self.devices)) if name == "gpus" else self.machine[name]

    def seen(self, share: int | None) -> Mapping[str, int]:
        """`host` in templates, for a step that asks for so many GPUs, None where it says nothing about them."""
        return _Seen(self, share)

    def could(self, wants: Mapping[str, float]) -> bool:
        """Whether a step that takes so many cpus, gpus and bytes of memory could ever run here."""
        return not self.lost and all(amount <= self.has(name) for name, amount in wants.items())

    def has_room(self, wants: Mapping[str, float]) -> bool:
        """Whether it may start here now."""
        if self.leaving or not self.could(wants) or (self.slots is not None and self._running >= self.slots):
            return False
        if self._crowded.get(int(wants.get("gpus", 0)), 0.0) > time.monotonic():
            return False
        return all(self._used.get(name, 0.0) + amount <= self.has(name) + 1e-9 for name, amount in wants.items())

    @property
    def busy(self) -> bool:
        """Whether a step runs here."""
        return self._running > 0

    async def pick(self, count: int) -> Pick:
        """GPUs for a step that asks for so many: some that no run holds now, or none, and when to look again.  Raises DriverError."""
        now = time.monotonic()
        if (again := self._crowded.get(count, 0.0)) > now:
            return Pick((), again - now, 0)
        ours = [device for device in self.devices if device not in self._given]
        free: Sequence[str] = ()
        with contextlib.suppress(Unreachable, TimeoutError):  # there will be another look; what runs there says what is wrong
            async with asyncio.timeout(LONGEST_QUESTION):
                free = await self.host.free([device.lock for device in ours])
        found = tuple(device for device in ours if device.lock in free)
        if len(found) >= count:
            self._crowded.clear()
            self._pause = SOONEST_LOOK
            return Pick(found[:count], 0.0, 0)
        pause, self._pause = self._pause, min(LATEST_LOOK, self._pause * 2)
        self._crowded[count] = now + pause
        return Pick((), pause, len(ours) - len(found))

    def enter(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        self._running += 1
        self._given.update(devices)
        for name, amount in wants.items():
            self._used[name] = self._used.get(name, 0.0) + amount

    def leave(self, wants: Mapping[str, float], devices: Sequence[Device] = ()) -> None:
        self._running -= 1
        self._given.difference_update(devices)
        if devices:
            self._crowded.clear()
        for name, amount in wants.items():
            self._used[name] -= amount

    # -- attempts

    def holds(self, content: str) -> bool:
        """Whether this output of a step of this run, which is not in our store, lies there."""
        return False

    async def look_for(self, contents: Collection[str]) -> None:
        """Ask the host which of these it has, that are not in our store."""

    def give_states(self, attempt: Attempt, states: Sequence[StateFolder]) -> None:
        """Let an attempt that is being made find its states."""
        for state in states:
            os.symlink(state.here.resolve(), attempt.place(state.path))

    def mounts(self, attempt: Attempt, command: Command, states: Sequence[StateFolder]) -> Sequence[Mount]:
        """What a container there has to see: the attempt, and all that it leads to."""
        from .containers import mounts

        return mounts(command, f"{self.root}/objects", [str(state.here) for state in states])

    def may_have_made(self, attempt: Attempt, outputs: Sequence[OutputSpec]) -> bool:
        """Whether the outputs of an attempt that ended well may all be there still."""
        return attempt.whole(outputs)

    async def carry(self, errand: Errand) -> Brought:
        """Run an attempt to its end and take what it made.  Raises DriverError (HostLost when the host is gone), RecipeError and OSError."""
        if errand.job is None:
            command, script = errand.compose(errand.restored)
            if script is not None:
                paths = self.paths(errand.attempt)
                errand.scrap.write_script(paths.script, script)
                errand.scrap.log(paths.log)
            crashpoint("attempt-staged")
            errand.job = await self.host.start(command, errand.name)
            crashpoint("job-started")
        pruning = asyncio.ensure_future(self._prune(errand)) if errand.states else None
        try:
            exit: Exit | None = None
            while exit is None:
                exit = await self.host.wait(errand.job, FOREVER)
        finally:
            if pruning is not None:
                pruning.cancel()
        if exit.code != 0 or exit.reason != "exit":
            return Brought(exit)
        crashpoint("job-over")
        if errand.attempt.heavy(errand.outputs):
            return await asyncio.to_thread(self._take, errand, exit)
        return self._take(errand, exit)

    def _take(self, errand: Errand, exit: Exit) -> Brought:
        """The contents of an attempt's outputs, stored; or what is wrong with them, or with its inputs."""
        attempt = errand.attempt
        if tampered := attempt.tampered(self.ws.cache, self.ws.objects):
            who = "it, or somebody meanwhile, changed" if tampered[0] in attempt.links else "it changed"
            return Brought(exit, problem="input", words=f"{who} its input {tampered[0]}")
        try:
            return Brought(exit, attempt.collect(errand.outputs, self.ws.objects, [state.path for state in errand.states]))
        except OutputProblem as error:
            return Brought(exit, problem="output", words=str(error))
        except Infrastructure as error:
            return Brought(exit, problem="disk", words=str(error))

    async def _prune(self, errand: Errand) -> None:
        """Delete old checkpoints while their trainer writes here, until cancelled."""
        from .checkpoint_sync import CheckpointPruner

        pruners = [CheckpointPruner(state.here, state.pattern, state.keep) for state in errand.states]
        while True:
            await asyncio.sleep(PRUNING)
            for pruner in pruners:
                _, words = await asyncio.to_thread(pruner.look)
                if words:
                    errand.say(words)

    async def aclose(self) -> None:
        """Let go of our connections to it.  Jobs stay."""
        await self.host.aclose()

    async def clear_after(self, errand: Errand, states: Sequence[StateFolder]) -> None:
        """The results of an attempt are stored: what it used on another disk than ours goes, `states` too."""


class _Seen(Mapping[str, int]):
    def __init__(self, site: Site, share: int | None) -> None:
        self._site, self._share = site, share

    def __getitem__(self, name: str) -> int:
        if name == "gpus":
            return len(self._site.devices) if self._share is None else self._share
        if name == "cpus":
            return int(self._site.machine["cpus"])
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(("gpus", "cpus"))

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True, slots=True)
class Brought:
    """How an attempt ended, and the contents of its outputs; or, in `words`, why they cannot be taken."""

    exit: Exit
    outputs: Mapping[str, str] = field(default_factory=dict)
    problem: Literal["", "input", "output", "disk"] = ""
    words: str = ""
    node: int = 0
    """The node whose end this is: of several, the one that failed first."""


class StateFolder(NamedTuple):
    """One state of an attempt."""

    name: str
    path: str
    """In the attempt."""
    here: Path
    below: str
    """Its folder below the root of a host with a disk of its own."""
    pattern: str | None
    """Of the names of its checkpoints; None: the whole folder is one."""
    every: float | None
    """Seconds between two looks for a new one."""
    keep: int | None
    """How many are kept."""


@dataclass(slots=True)
class Errand:
    """One attempt that is to be run."""

    name: str
    outputs: Sequence[OutputSpec]
    attempt: Attempt
    compose: Callable[[Mapping[str, Newest]], tuple[Command, bytes | None]]
    """Makes the attempt directory here, when it is known from which checkpoints it goes on; answers its command and its script."""
    scrap: Scrap
    say: Callable[[str], None]
    """Words for people about this step."""
    metrics: MetricsSpec | None = None
    """A pattern of files in the attempt that hold metrics (empty: the file that the environment names), and one for lines of the log."""
    states: Sequence[StateFolder] = ()
    restored: Mapping[str, Newest] = field(default_factory=dict)
    """The checkpoints here from which the states go on."""
    processes: int | None = None
    """Of a training, which its checkpoints have to fit; None: any."""
    round: Callable[[Round], None] = lambda _round: None
    """Hears what each look at the checkpoints there came to."""
    synced: Sequence[Synced] = ()
    """Outputs that are also brought while it runs."""
    job: Job | None = None
    """Set at once where it was begun by a worker that is gone."""
    rejoined: bool = False
    """It was."""
    python: str = ""
    """The interpreter of the step there, where its packages matter to other nodes; empty in an image, which has its own."""
    parts: Sequence[Errand] = ()
    """Of an attempt on several nodes: what each of them does, in the order of their ranks."""
