"""An attempt that is to be run on a place, and how it ended: the values that pass between the loop and a place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from drivers.base import Command, Exit, Job

from ...planning.step import MetricsSpec, OutputSpec
from .spare_dirs import Scrap
from .staging import AttemptDirectory

if TYPE_CHECKING:
    from ...storage.checkpoints import Newest
    from .output_sync import Synced

FOREVER = timedelta(days=3650)


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


def replaced_words(name: str) -> str:
    """What is said of a file beside an attempt, called `name`, that its step replaced."""
    return f"it replaced {name} by something that is no regular file: nothing is kept of it"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How an attempt ended, and the contents of its outputs; or, in `words`, why they cannot be taken."""

    exit: Exit
    outputs: Mapping[str, str] = field(default_factory=dict)
    problem: Literal["", "input", "output", "disk", "full"] = ""
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
    every_steps: int | None = None
    """Steps between two that are brought, by the numbers in their names."""


@dataclass(slots=True)
class Round:
    """What one look at a state came to, to be reported when it is over."""

    brought: list[str] = field(default_factory=list)
    size: int = 0  # bytes that travelled
    passed: list[tuple[str, str]] = field(
        default_factory=list
    )  # (checkpoint, why it does not count), each shown once
    warning: str = ""  # of a disk, shown once until it is better
    problem: str = ""  # what kept it from being done; it is tried again


Phase: TypeAlias = Literal["TRANSFERRING_DATA", "EXECUTING", "FETCHING_RESULTS"]
"""What is being done of an attempt on a host with a disk of its own, as people call it."""


def _unheard(_phase: Phase) -> None:
    """No caller wants to know."""


async def _nothing() -> None:
    """All comes from us."""


@dataclass(slots=True)
class HostTask:
    """One attempt that is to be run."""

    name: str
    outputs: Sequence[OutputSpec]
    attempt: AttemptDirectory
    compose: Callable[[Mapping[str, Newest]], tuple[Command, bytes | None]]
    """Makes the attempt directory here, when it is known from which checkpoints it goes on; answers its command and its script."""
    scrap: Scrap
    say: Callable[[str], None]
    """Words for people about this step."""
    confirm: Callable[[], Awaitable[None]]
    """Called right before the job begins.  Raises Stale where another worker has the run by now: this one stood still."""
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
    phase: Callable[[Phase], None] = _unheard
    """Hears what begins on a host with a disk of its own."""
    bring: Callable[[], Awaitable[None]] = _nothing
    """Awaited before `compose` on a host with a disk of its own: what it has from elsewhere than from us."""
    job: Job | None = None
    """Set at once where it was begun by a worker that is gone."""
    rejoined: bool = False
    """It was."""
    python: str = ""
    """The interpreter of the step there, where its packages matter to other nodes; empty in an image, which has its own."""
    parts: Sequence[HostTask] = ()
    """Of an attempt on several nodes: what each of them does, in the order of their ranks."""
