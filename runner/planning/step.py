"""Types for the parts of a step, stored as JSON arrays in a compiled plan.

`plan.Node` holds the outputs, sources and upstream edges for deciding whether a step must run.  A
StepSpec holds the data for running, which a run with nothing to do never reads.  Templates in a
StepSpec stay unrendered until an attempt.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Never, TypedDict

from ..digest import of_value
from ..language.step_options import StepOptions

if TYPE_CHECKING:
    from ..language.values import Leaf, Tree

NOTHING: Final[Mapping[str, Never]] = {}
"""Empty default for mappings; never written to."""

NO_IDS: Final[list[str]] = []
"""Empty default for lists of ids, as in JSON; never written to."""

# Flags of an output.
OPTIONAL, NONEMPTY, TEMPORARY, DIRECTORY = 1, 2, 4, 8

# Kinds of a path that is no file and no directory, as returned by `agent/outputs.py`.
MISSING, BROKEN_LINK, SPECIAL, OUTSIDE = "-", "l", "o", "b"


_UNFIT_KINDS: Final = {
    OUTSIDE: "is behind a link that points outside the attempt directory",
    BROKEN_LINK: "is a broken symbolic link",
    SPECIAL: "is neither a file nor a directory",
}


def unfit_output(kind: str, flags: int, *, is_empty: bool) -> str:
    """Return why a path of this kind cannot be an output with these flags, or an empty string."""
    if kind == MISSING:
        return "" if flags & OPTIONAL else "was not created"
    if kind in _UNFIT_KINDS:
        return _UNFIT_KINDS[kind]
    if flags & DIRECTORY and kind != "d":
        return "is not a directory"
    if flags & NONEMPTY and is_empty:
        return "is empty, but the recipe requires content"
    return ""


def unwritable(path: str, kinds: Collection[str]) -> str:
    """Return why values of these types cannot be written to the file `path`, or an empty string."""
    suffix = posixpath.splitext(path)[1]
    if "text" in kinds or suffix in (".json", ".yaml", ".yml"):
        return ""
    if suffix == ".toml":
        return "" if "mapping" in kinds else "a .toml file holds a mapping"
    return "a mapping, list or number can be written as .json, .yaml or .toml"


class OutputSpec(NamedTuple):
    """Declared output of a step, with its path relative to the attempt."""

    name: str
    path: str
    flags: int


class Source(NamedTuple):
    """Input from outside the plan: a path of the caller, a model or a dataset."""

    name: str  # its path in the attempt
    kind: str  # path, hf, s3, gs, https or stream
    address: str
    only: Sequence[str]  # globs of the selected files; empty means all

    @property
    def in_bucket(self) -> bool:
        """Return whether the source is in a bucket that can have signed URLs."""
        return self.kind in ("s3", "gs")

    @property
    def lookup_key(self) -> tuple[str, ...]:
        """Key for looking up the content digest of this source."""
        return (self.kind, self.address, *self.only)


class Upstream(NamedTuple):
    """Output of another step that this step reads."""

    producer: int
    output: str
    name: str  # its path in the attempt
    below: str  # a path below the output, or ""


class LateValue(NamedTuple):
    """Metric of another step that this step reads."""

    producer: int
    metric: str
    name: str  # its name in the key, or "" if it is not part of the key


class Publication(NamedTuple):
    """Step output that is published in the workspace."""

    step: int
    output: str
    path: str
    name: str  # its name among the recipe's outputs, or ""


class SecretSpec(NamedTuple):
    """Secret that a step receives as an environment variable."""

    input: str
    variable: str  # in the step's environment
    source: str  # the caller's environment variable that holds it
    required: bool


class StateSpec(NamedTuple):
    """Checkpoint path of a step, kept between attempts."""

    name: str
    path: str
    checkpoint: str | None  # the glob of one checkpoint below the path
    every: float | None  # seconds between downloads of new checkpoints from another host
    keep: int | None  # how many checkpoints are kept
    shared: bool = False  # whether checkpoints are also uploaded to the shared store
    every_steps: int | None = None  # steps between two downloaded checkpoints


class SyncSpec(NamedTuple):
    """Output that is downloaded while its step runs."""

    output: str
    every: float  # seconds


class GitSpec(NamedTuple):
    """Git repository pinned to a commit, as code of a step."""

    url: str
    commit: str
    at: str  # the directory in the attempt


class MetricAsked(NamedTuple):
    """Metric of another step that a template reads."""

    metric: str
    many: bool  # whether the value is a list over instances
    same: Sequence[str] = (
        NO_IDS  # ids of the instances with the reader's axis values; empty means all
    )


class MetricsSpec(NamedTuple):
    """Source of a step's metrics: a file, a log pattern, or else the file in $RECIPE_METRICS."""

    file: str | None
    pattern: str | None

    @property
    def in_environment(self) -> bool:
        """Return whether the step receives $RECIPE_METRICS, which is then part of its cache key."""
        return not self.file and not self.pattern

    @property
    def rule(self) -> str:
        """Digest of the metrics rule, or an empty string if the rule is part of the cache key."""
        return "" if self.in_environment else of_value("metrics/1", list(self))


class SelectSpec(NamedTuple):
    """Metric and direction by which a `select` step compares instances."""

    metric: str
    best: str  # min or max


class ResourceSpec(NamedTuple):
    """Requested resources of a step.  Memory and disk are in bytes.  None means unset."""

    cpus: float | None = None
    memory: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    disk: int | None = None
    pools: Mapping[str, float] = NOTHING

    @property
    def as_key(self) -> dict[str, object]:
        """Requested resources by name, in the form that is hashed in a cache key."""
        found = {name: value for name, value in self._asdict().items() if value is not None}
        if not self.pools:
            found.pop("pools", None)
        return found

    @property
    def room(self) -> dict[str, float]:
        """Requested CPUs, GPUs and bytes of memory on a host, without unset and zero amounts."""
        amounts = (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory))
        return {name: float(amount) for name, amount in amounts if amount}


class LimitSpec(NamedTuple):
    """Time and cost limits of a run.

    None means unset.
    """

    time: float | None = None  # seconds
    cost: float | None = None  # USD


class HealthSpec(NamedTuple):
    """Health check command of a host."""

    run: str | Sequence[Tree]
    every: float  # seconds


class RunSettings(NamedTuple):
    """Settings of a run: setup, cleanup and health commands, and limits."""

    setup: Sequence[str | Sequence[Tree]] = ()
    cleanup: Sequence[str | Sequence[Tree]] = ()
    limits: LimitSpec = LimitSpec()
    health: HealthSpec | None = None

    @classmethod
    def load(cls, row: Sequence[Any]) -> RunSettings:
        """Build run settings from their JSON array."""
        setup, cleanup, limits, health = row
        check = HealthSpec._make(health) if health else None
        return cls(setup, cleanup, LimitSpec._make(limits), check)


class Names(NamedTuple):
    """Template values of a step that are known before an attempt, by namespace."""

    inputs: Mapping[str, Tree]
    steps: Mapping[str, Mapping[str, Tree]]  # paths of outputs
    outputs: Mapping[str, str]
    matrix: Mapping[str, Tree]


class Author(TypedDict, total=False):
    """Recipe's part of a cache key before hashing.

    It holds the step's text with unrendered templates, and the values that they read.
    """

    id: list[str]  # recipe name and step id, for a step without outputs
    run: list[Tree]
    script: str
    shell: str
    accelerate: dict[str, Tree]
    select: list[str]
    outputs: dict[str, list[str | int]]  # a path and flags
    files: dict[str, Tree]
    env: dict[str, Leaf]
    secrets: list[str]
    image: str
    python: str  # a version
    setup: list[list[Tree] | str]
    metrics: list[str | None]
    resources: dict[str, object]
    git: list[list[str]]
    reads: dict[str, Tree]


class StepSpec(NamedTuple):
    """Data for running a step: commands, environment, resources and options.

    Times are in seconds.
    """

    recipe: str
    step: str
    author: Author
    resources: ResourceSpec = ResourceSpec()
    select: SelectSpec | None = None
    run: str | Sequence[Tree] | None = None
    accelerate: Mapping[str, Tree] | None = None
    shell: str = "sh"
    files: Mapping[str, Tree] = NOTHING
    env: Mapping[str, Leaf] = NOTHING
    pass_env: Sequence[str] = ()
    env_files: Sequence[str] = ()  # paths below the root
    secrets: Sequence[SecretSpec] = ()
    image: str | None = None
    git: Sequence[GitSpec] = ()
    names: Names = Names({}, {}, {}, {})
    sync: Sequence[SyncSpec] = ()
    state: Sequence[StateSpec] = ()
    continues: Mapping[str, Tree] = NOTHING
    options: StepOptions = StepOptions()
    asks: Mapping[str, Sequence[MetricAsked]] = NOTHING  # metrics that its templates read, by step
    metrics: MetricsSpec | None = None
    when: Leaf = None  # set only if it reads step results; others are decided at compile time
    nodes: int | str | None = (
        None  # node count, or an expression over metrics of earlier steps; None if unset
    )
    python: str = ""  # a version such as 3.12; empty: any
    unlisted: Mapping[str, str] = (
        NOTHING  # the recipe's secret inputs that the step does not get, by environment variable
    )

    @property
    def node_count(self) -> int:
        """Number of nodes on which the step runs.

        An undecided expression counts as 1.
        """
        return self.nodes if isinstance(self.nodes, int) else 1

    @property
    def names_python(self) -> bool:
        """Return whether the command names Python or a Python script."""
        if self.accelerate is not None:
            return True
        text = str(self.run)
        return "python" in text or ".py" in text

    @classmethod
    def load(cls, row: Sequence[Any]) -> StepSpec:
        """Build a StepSpec from its JSON array."""
        spec = cls._make(row)
        select = SelectSpec._make(spec.select) if spec.select else None
        metrics = MetricsSpec._make(spec.metrics) if spec.metrics else None
        asks: dict[str, list[MetricAsked]] = {}
        for step, asked in spec.asks.items():
            asks[step] = list(map(MetricAsked._make, asked))
        return spec._replace(
            resources=ResourceSpec._make(spec.resources),
            select=select,
            secrets=list(map(SecretSpec._make, spec.secrets)),
            git=list(map(GitSpec._make, spec.git)),
            names=Names._make(spec.names),
            sync=list(map(SyncSpec._make, spec.sync)),
            state=list(map(StateSpec._make, spec.state)),
            # A plan stored by an earlier version may lack the last options.
            options=StepOptions(*spec.options),
            asks=asks,
            metrics=metrics,
        )
