"""Result types of the Python API: run status, outputs, metrics, log lines and forecasts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeAlias

from ..storage.records.runs import FINAL

Facts: TypeAlias = Mapping[str, Any]
"""A mapping of JSON values.

The models in `server.runs` and `server.artifacts` define its fields.
"""

_HALF: Final = re.compile("[\ud800-\udfff]")
LAST: Final = 253402300799.0
"""The last second of the year 9999. RFC 3339 cannot express later times."""


def moment(at: float | None) -> str | None:
    """Format a timestamp (seconds since the epoch) as RFC 3339."""
    if at is None:
        return None
    when = datetime.fromtimestamp(min(at, LAST), UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def whole(text: str) -> str:
    """Replace lone surrogates, from non-UTF-8 names, so that a text can be encoded as UTF-8."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


class Progress(NamedTuple):
    """Progress of a run: finished steps, percentage, and remaining time in seconds if known.

    During a training, the training's own step counts are included. Only a COMPLETED run has 100 %.
    """

    step: int = 0
    total: int | None = None
    percent: float | None = None
    eta: float | None = None


class StepCounts(NamedTuple):
    """Number of steps by final state."""

    ran: int = 0
    fresh: int = 0
    failed: int = 0
    other: int = 0


class StepProgress(NamedTuple):
    """Progress last reported by a step. `eta` is in seconds. None means unknown."""

    step: float | None = None
    total: float | None = None
    percent: float | None = None
    eta: float | None = None


class StepStatus(NamedTuple):
    """State of one step of a run."""

    id: str
    state: str = ""
    reason: str = ""
    """Kind of failure of a FAILED step, or phase of a RUNNING step."""
    attempts: int = 0
    """Number of started attempts, including a running attempt."""
    host: str = ""
    detail: str = ""
    """Error message of a FAILED step."""
    began: str | None = None
    """Start time of the last attempt."""
    ended: str | None = None
    seconds: float | None = None
    """Total run time of all attempts in seconds."""
    expected: float | None = None
    """Duration of earlier runs of the step in seconds."""
    progress: StepProgress = StepProgress()
    values: Mapping[str, float] = {}
    """Metrics that the step reported last, such as loss."""
    exit: int | None = None
    """Exit code of a FAILED step's command."""
    signal: int | None = None
    lines: Sequence[str] = ()
    """Last output lines of a FAILED step."""
    fix: str = ""
    warnings: Sequence[str] = ()
    key: str = ""
    """Cache key of the last attempt or of the cached result."""
    cost: float = 0.0
    """Share of the run's cost in US dollars, by seconds on rented machines."""
    machine: Mapping[str, float] = {}
    """Last machine metrics of a RUNNING step, such as gpu_percent."""


class Failed(NamedTuple):
    """Failure of a run. `step` is empty if no step failed. `lines` are the last lines of output."""

    kind: str
    words: str = ""
    step: str = ""
    exit: int | None = None
    signal: int | None = None
    lines: Sequence[str] = ()
    fix: str = ""


class Training(NamedTuple):
    """Metrics last reported by a training step, with its current and total training steps."""

    of: str
    step: float | None = None
    total: float | None = None
    percent: float | None = None
    eta: float | None = None
    at: str | None = None
    values: Mapping[str, float] = {}


class OutputFile(NamedTuple):
    """An output of a run. `bytes` is None if the size is unknown."""

    name: str
    content: str = ""
    bytes: int | None = None
    folder: bool = False
    path: str = ""
    """Path of the output as declared by its step."""


class LinkTo(NamedTuple):
    """A link to a step's metrics: a URL, an output with a path, or a command that shows them."""

    step: str
    name: str = ""
    to: str = ""


class Reason(NamedTuple):
    """Reason why a run waits: a `planning.waiting.WaitKind`, a message, and a fix."""

    kind: str
    words: str = ""
    fix: str = ""


class Status(NamedTuple):
    """State of a run. Times are RFC 3339 and costs are US dollars.

    `state` is QUEUED, ACTIVE, PAUSED, COMPLETED, FAILED or CANCELLED. `word` is more specific.
    """

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
    """Kind of failure of a FAILED run, such as `oom`, `exit` or `provisioning`.

    `reason` is the message.
    """
    failed: Failed | None = None
    """The failure that ended the run, or the first failure of a run that continues."""
    warnings: Sequence[str] = ()
    training: Training | None = None
    position: int | None = None
    """Position in the workspace's queue, or None if the run does not wait."""
    waits: Reason | None = None
    name: str = ""
    tags: Sequence[str] = ()
    note: str = ""
    given: Mapping[str, object] = {}
    """Inputs set by the caller. `inputs` holds all inputs."""
    tried: Mapping[str, Sequence[str]] = {}
    """First values of each swept input."""
    counts: StepCounts = StepCounts()

    @property
    def over(self) -> bool:
        """True if the run has finished."""
        return self.state in FINAL


class Point(NamedTuple):
    """Metric values that an attempt reported together."""

    step: str
    attempt: int
    n: int
    values: Mapping[str, float | str]
    source: str = ""
    """The run that executed the attempt, if the result was cached. `from` in REST."""


class Line(NamedTuple):
    """A line of output of an attempt, without the line end."""

    step: str
    attempt: int
    text: str

    def __str__(self) -> str:
        return self.text


class File(NamedTuple):
    """A file, link or directory of a downloaded output.

    The content of a regular file (`f:`) or executable (`x:`) follows. `content` includes its digest
    if known. `l:` is a link with its target, and `d:` a directory.
    """

    path: str
    content: str
    size: int | None


class ArtifactFile(NamedTuple):
    """A file in an output directory. `content` is as in `File`."""

    path: str
    content: str = ""
    bytes: int | None = None


class Artifact(NamedTuple):
    """An output of a run, with all or one page of its files.

    `stored` tells if the content is available.
    """

    name: str
    content: str = ""
    bytes: int | None = None
    folder: bool = False
    stored: bool = False
    files: Sequence[ArtifactFile] = ()


class WorkerStatus(NamedTuple):
    """A process that executes runs, one at a time. Times are RFC 3339."""

    worker: str
    alive: bool = False
    idle: bool = False
    """True if the worker is alive and has no run."""
    takes_runs: bool = True
    """False for `recipe run`, which executes only its own run."""
    capacity: int = 1
    driver: str = ""
    """The only driver whose runs the worker takes. Empty for any driver."""
    labels: Mapping[str, str] = {}
    at_most: Mapping[str, int] = {}
    any_workspace: bool = False
    since: str | None = None
    heard: str | None = None
    """Time of the last heartbeat."""
    runs: Sequence[str] = ()


class QueuedRun(NamedTuple):
    """A waiting run, with its position in the workspace's queue from 1."""

    run: str
    recipe: str = ""
    user: str = ""
    position: int = 0
    priority: int = 0
    due: str | None = None
    """Time from which workers may claim the run. None if workers may not claim it."""
    waits: Reason = Reason("")


class RecipeEntry(NamedTuple):
    """A recipe that can be run by its name, NAME@VERSION."""

    id: str
    summary: str = ""
    package: str = ""
    """Python package of the recipe. Empty for recipes of the library and the workspace."""
    file: str = ""
    """File of a workspace recipe."""
    used: str | None = None
    """Time of the last run or sweep in RFC 3339, among the latest 500 runs."""


class GpuMemory(NamedTuple):
    """Estimated memory use of a training step per GPU, and usable memory of the GPU, in bytes."""

    bytes: int | None = None
    """None if unknown. `words` gives the reason."""
    usable: int | None = None
    gpu: str = ""
    fits: str | None = None
    """FITS, TIGHT or NO."""
    words: str = ""


class ExpectedStep(NamedTuple):
    """Forecast of a step: run, maybe, restore, fresh or skip.

    `seconds` and `usd` are upper estimates. None means unknown.
    """

    id: str
    answer: str = ""
    reasons: Sequence[str] = ()
    needs: Sequence[str] = ()
    seconds: float | None = None
    usd: float | None = None
    memory: GpuMemory | None = None
    """None for a step that does not train on a GPU."""


class Machine(NamedTuple):
    """The machine that a driver would rent for a step: currently the cheapest matching offer."""

    step: str
    driver: str = ""
    offer: str | None = None
    """None if no offer matches. `failed` gives the reason."""
    gpu: str | None = None
    gpus: int | None = None
    region: str | None = None
    market: str | None = None
    usd_an_hour: float | None = None
    hours: float | None = None
    usd: float | None = None
    failed: str = ""


class Forecast(NamedTuple):
    """Steps, duration and cost of a run.

    `seconds`, `usd` and `usd_of_machines` are None unless known for every part.
    """

    recipe: str
    instances: int = 1
    """Number of combinations of a sweep."""
    command: str | None = None
    """The equivalent shell command, or None if no command line can express the request."""
    driver: str = "local"
    machines: Sequence[Machine] = ()
    goes_to: Sequence[str] = ()
    """Drivers whose machines may receive data and secrets of the run.

    With `any`, all candidates.
    """
    usd_of_machines: float | None = None
    inputs: Mapping[str, object] = {}
    steps: Sequence[ExpectedStep] = ()
    seconds: float | None = None
    usd: float | None = None
    bytes: int = 0
    """Total size in bytes of the outputs to restore."""
