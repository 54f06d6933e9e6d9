"""What a caller in Python gets of a run: how it stands, what it made, reported and printed, and what it would do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ..storage.records.runs import FINAL

Facts: TypeAlias = Mapping[str, Any]
"""A mapping as JSON has it.  The models of `server.runs` and `server.artifacts` say what is in it, and in which unit."""

_HALF: Final = re.compile("[\ud800-\udfff]")
LAST: Final = 253402300799.0
"""The last second of the year 9999: one that was asked for in a zone to the west of Greenwich may be later, and RFC 3339 has none."""


def moment(at: float | None) -> str | None:
    """A time as RFC 3339 writes it."""
    if at is None:
        return None
    when = datetime.fromtimestamp(min(at, LAST), UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def whole(text: str) -> str:
    """A text as UTF-8 can have it: a name on this disk, or a word that was typed, may have bytes in it that are none."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


class Progress(NamedTuple):
    """Steps that are over, how far the run is in percent, and how long the rest will take, in seconds, where that is known.

    While a training runs its own numbers count.  Only a run that is COMPLETED has 100 %.
    """

    step: int = 0
    total: int | None = None
    percent: float | None = None
    eta: float | None = None


class StepCounts(NamedTuple):
    """How many steps of a run came to which end."""

    ran: int = 0
    fresh: int = 0
    failed: int = 0
    other: int = 0


class StepProgress(NamedTuple):
    """How far a step is, by what it reported last: its own step, of how many; `eta` in seconds.  None: not known."""

    step: float | None = None
    total: float | None = None
    percent: float | None = None
    eta: float | None = None


class StepStatus(NamedTuple):
    id: str
    state: str = ""
    reason: str = ""
    """Of a step that FAILED the kind of its failure, of one that is RUNNING its phase."""
    attempts: int = 0
    """Those that began, with the one that runs."""
    host: str = ""
    detail: str = ""
    """The error of a step that FAILED, in words."""
    began: str | None = None
    """When its last attempt did."""
    ended: str | None = None
    seconds: float | None = None
    """For which its attempts have run."""
    expected: float | None = None
    """Seconds that it took before."""
    progress: StepProgress = StepProgress()
    values: Mapping[str, float] = {}
    """Numbers that it reported last, such as loss."""
    exit: int | None = None
    """Of a step that FAILED the exit code of its command."""
    signal: int | None = None
    lines: Sequence[str] = ()
    """Of a step that FAILED the last lines that it printed."""
    fix: str = ""
    warnings: Sequence[str] = ()
    key: str = ""
    """The fingerprint of its last attempt, or of its result."""
    cost: float = 0.0
    """US dollars: its share of the run's cost, by the seconds that it ran on rented machines."""
    machine: Mapping[str, float] = {}
    """Of a step that is RUNNING what its machine had to do last, such as gpu_percent."""


class Failed(NamedTuple):
    """Why a run failed; `step` is empty where no step did.  `lines` are the last that it printed."""

    kind: str
    words: str = ""
    step: str = ""
    exit: int | None = None
    signal: int | None = None
    lines: Sequence[str] = ()
    fix: str = ""


class Training(NamedTuple):
    """What the step that trains reported last: the step of the recipe, its own step, of how many, and its other numbers."""

    of: str
    step: float | None = None
    total: float | None = None
    percent: float | None = None
    eta: float | None = None
    at: str | None = None
    values: Mapping[str, float] = {}


class OutputFile(NamedTuple):
    """An output of a run; `bytes` is None where the size is not known."""

    name: str
    content: str = ""
    bytes: int | None = None
    folder: bool = False
    path: str = ""
    """Where its step makes it."""


class LinkTo(NamedTuple):
    """Where else the numbers of a step can be looked at: an http(s) address, an output with a path in it, or the command that shows it."""

    step: str
    name: str = ""
    to: str = ""


class Reason(NamedTuple):
    """Why a run waits: a `planning.waiting.WaitKind`, in words, and what may help."""

    kind: str
    words: str = ""
    fix: str = ""


class Status(NamedTuple):
    """How a run stands.  `state` is QUEUED, ACTIVE, PAUSED, COMPLETED, FAILED or CANCELLED; `word` says more.  Times are RFC 3339, costs USD."""

    id: str
    recipe: str = ""
    state: str = ""
    word: str = ""
    reason: str = ""
    request: str = ""
    user: str = ""
    labels: Mapping[str, str] = {}
    priority: int = 0
    driver: str = ""
    preset: str | None = None
    inputs: Mapping[str, object] = {}
    created: str = ""
    not_before: str | None = None
    ended: str | None = None
    seq: int = 0
    progress: Progress = Progress()
    cost: float = 0.0
    steps: Sequence[StepStatus] = ()
    outputs: Sequence[OutputFile] = ()
    links: Sequence[LinkTo] = ()
    failure: str = ""
    """The kind of failure of a run that FAILED, such as `oom`, `exit` or `provisioning`; `reason` has the words."""
    failed: Failed | None = None
    """The failure that ended it; of one that goes on, the first."""
    warnings: Sequence[str] = ()
    training: Training | None = None
    position: int | None = None
    """Its place among the runs of its workspace that wait; None where it does not."""
    waits: Reason | None = None
    name: str = ""
    tags: Sequence[str] = ()
    note: str = ""
    given: Mapping[str, object] = {}
    """The inputs that were given; `inputs` has all."""
    tried: Mapping[str, Sequence[str]] = {}
    """Of a sweep the first values of each input that differs."""
    counts: StepCounts = StepCounts()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in FINAL


class Point(NamedTuple):
    """What an attempt of a step reported at once."""

    step: str
    attempt: int
    n: int
    values: Mapping[str, float | str]
    source: str = ""
    """The run whose attempt it was, where the step's result was there before; `from` in REST."""


class Line(NamedTuple):
    """A line that an attempt of a step printed, without its end."""

    step: str
    attempt: int
    text: str

    def __str__(self) -> str:
        return self.text


class File(NamedTuple):
    """What a download brings next.  Of a plain file or a program the bytes follow, which have the digest behind `f:` or `x:` where that is known.

    `l:` and where it leads is a link, `d:` a folder.
    """

    path: str
    content: str
    size: int | None


class ArtifactFile(NamedTuple):
    """A file in an output that is a folder; `content` as `File` has it."""

    path: str
    content: str = ""
    bytes: int | None = None


class Artifact(NamedTuple):
    """An output of a run, with the files of a folder, or a page of them.  `stored`: whether its bytes are there."""

    name: str
    content: str = ""
    bytes: int | None = None
    folder: bool = False
    stored: bool = False
    files: Sequence[ArtifactFile] = ()


class WorkerStatus(NamedTuple):
    """Who takes runs, or has one: a process, which carries out one run after another.  Times are RFC 3339."""

    worker: str
    alive: bool = False
    idle: bool = False
    """It lives, and has no run."""
    takes_runs: bool = True
    """False: it is a `recipe run`, and has its own run alone."""
    capacity: int = 1
    driver: str = ""
    """It takes runs for this driver alone; empty: for any."""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    any_workspace: bool = False
    since: str | None = None
    heard: str | None = None
    """When it said last that it is there."""
    runs: Sequence[str] = ()


class QueuedRun(NamedTuple):
    """A run that waits, and its place among those of its workspace that do, from 1."""

    run: str
    recipe: str = ""
    user: str = ""
    position: int = 0
    priority: int = 0
    due: str | None = None
    """From when on workers take it; None: they do not."""
    waits: Reason = Reason("")


class RecipeEntry(NamedTuple):
    """A recipe that may be run by its name, NAME@VERSION."""

    id: str
    summary: str = ""
    package: str = ""
    """Which brings it; empty for the library and for recipes of the workspace."""
    file: str = ""
    """Of a recipe of the workspace its file."""
    used: str | None = None
    """When a run of it, or a sweep, was stored last, RFC 3339; of the latest 500 runs."""


class GpuMemory(NamedTuple):
    """What a step that trains takes of each GPU, as estimated, and what such a GPU has for it, in bytes."""

    bytes: int | None = None
    """None where it is not known: `words` say why."""
    usable: int | None = None
    gpu: str = ""
    fits: str | None = None
    """FITS, TIGHT or NO."""
    words: str = ""


class ExpectedStep(NamedTuple):
    """What would become of a step: run, maybe, restore, fresh or skip; `seconds` and `usd` at most, None where that is not known."""

    id: str
    answer: str = ""
    reasons: Sequence[str] = ()
    needs: Sequence[str] = ()
    seconds: float | None = None
    usd: float | None = None
    memory: GpuMemory | None = None
    """None for a step that does not train on a GPU."""


class Machine(NamedTuple):
    """The machine that a driver would rent for a step: the cheapest that does, as offered now."""

    step: str
    driver: str = ""
    offer: str | None = None
    """None where nothing is offered: `failed` says why."""
    gpu: str | None = None
    gpus: int | None = None
    region: str | None = None
    market: str | None = None
    usd_an_hour: float | None = None
    hours: float | None = None
    usd: float | None = None
    failed: str = ""


class Forecast(NamedTuple):
    """What a run would do, take and cost.  `seconds`, `usd` and `usd_of_machines` are None where they are not known of each part."""

    recipe: str
    instances: int = 1
    """Of a sweep the combinations."""
    command: str | None = None
    """What does the same in a terminal; None where no command line says it."""
    driver: str = "local"
    machines: Sequence[Machine] = ()
    goes_to: Sequence[str] = ()
    """Drivers to whose machines data and secrets of the run may go; with `any` all among which it chooses."""
    usd_of_machines: float | None = None
    inputs: Mapping[str, object] = {}
    steps: Sequence[ExpectedStep] = ()
    seconds: float | None = None
    usd: float | None = None
    bytes: int = 0
    """The size of what would be restored."""
