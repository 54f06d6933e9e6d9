"""Data types between the run loop and a place: an attempt to run, and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from drivers.base import Command, Exit, Job

from ...planning.step import NOTHING, MetricsSpec, OutputSpec
from .spare_dirs import SparePool
from .staging import AttemptDirectory

if TYPE_CHECKING:
    from ...storage.checkpoints import Newest
    from .output_sync import SyncedOutput

FOREVER = timedelta(days=3650)


class Paths(NamedTuple):
    """The paths of one attempt on its host."""

    cwd: str
    script: str
    log: str
    metrics: str
    host: str  # the agent's record of the machine

    @classmethod
    def at(cls, path: str) -> Paths:
        return cls(path, f"{path}.sh", f"{path}.log", f"{path}.metrics", f"{path}.host")


def replaced_message(name: str) -> str:
    """Return the message about a file beside an attempt, `name`, that the step replaced."""
    return f"the step replaced {name} by a special file; nothing is kept"


class TaskResult(NamedTuple):
    """The result of an attempt: its exit, and the contents of its outputs.

    If the outputs are invalid, `words` says why.
    """

    exit: Exit
    outputs: Mapping[str, str] = NOTHING
    problem: Literal["", "input", "output", "disk", "full"] = ""
    words: str = ""
    node: int = 0
    """The node that this exit belongs to: of several, the first that failed."""


class StateFolder(NamedTuple):
    """One state directory of an attempt."""

    name: str
    path: str
    """Path in the attempt directory."""
    local_path: Path
    host_path: str
    """Path below the root of a host with a disk of its own."""
    pattern: str | None
    """Name pattern of the checkpoints; None if the whole directory is one checkpoint."""
    every: float | None
    """Seconds between two checks for a new checkpoint."""
    keep: int | None
    """Number of checkpoints to keep."""
    every_steps: int | None = None
    """Training steps between two copied checkpoints, by the numbers in their names."""


@dataclass(slots=True)
class SyncRound:
    """The result of one round of a checkpoint sync."""

    copied: list[str] = field(default_factory=list)
    size: int = 0  # transferred bytes
    rejected: list[tuple[str, str]] = field(
        default_factory=list
    )  # (checkpoint, reason why it does not count), each shown once
    warning: str = ""  # about a disk, shown once until it has space again
    problem: str = ""  # why the round failed; the next one tries again


Phase: TypeAlias = Literal["TRANSFERRING_DATA", "EXECUTING", "FETCHING_RESULTS"]
"""Phase of an attempt on a host with a disk of its own, as shown to users."""


def _ignore_phase(_phase: Phase) -> None:
    pass


async def _do_nothing() -> None:
    pass


@dataclass(slots=True)
class HostTask:
    """One attempt that a place is to run."""

    name: str
    outputs: Sequence[OutputSpec]
    attempt: AttemptDirectory
    compose: Callable[[Mapping[str, Newest]], tuple[Command, bytes | None]]
    """Creates the local attempt directory, and returns the command and its script.

    Called once the checkpoints to resume from are known.
    """
    scrap: SparePool
    say: Callable[[str], None]
    """Shows a message about this step."""
    confirm: Callable[[], Awaitable[None]]
    """Called right before the job starts.

    Raises Stale if another worker has claimed the run while this worker was suspended.
    """
    metrics: MetricsSpec | None = None
    """Name pattern of metrics files in the attempt, and pattern for lines of the log.

    An empty name pattern stands for $RECIPE_METRICS.
    """
    states: Sequence[StateFolder] = ()
    restored: Mapping[str, Newest] = field(default_factory=dict)
    """The local checkpoints from which the states resume."""
    processes: int | None = None
    """Number of training processes that the checkpoints must fit; None for any."""
    round: Callable[[SyncRound], None] = lambda _round: None
    """Receives the result of each round of the checkpoint sync."""
    synced: Sequence[SyncedOutput] = ()
    """Outputs that are also copied while the step runs."""
    phase: Callable[[Phase], None] = _ignore_phase
    """Receives the phases on a host with a disk of its own."""
    bring: Callable[[], Awaitable[None]] = _do_nothing
    """Provides inputs that do not come from this machine.

    Awaited before `compose` on a host with a disk of its own.
    """
    make_room: Callable[[], Awaitable[None]] = _do_nothing
    """Lets another step start on the local disk's host.

    Awaited once the command succeeded, before the outputs are collected.
    """
    job: Job | None = None
    """The job; already set if an earlier worker started it."""
    rejoined: bool = False
    """Whether an earlier worker started the job."""
    python: str = ""
    """The step's interpreter on the host, if other nodes need the same packages; empty in an image."""
    parts: Sequence[HostTask] = ()
    """The tasks of the nodes of a multi-node attempt, by rank."""
