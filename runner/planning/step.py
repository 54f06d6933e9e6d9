"""Types for the parts of a step, stored as JSON arrays in a compiled plan.

`plan.Node` holds the outputs, sources and upstream edges for judging.  A StepSpec holds the data
for running, which a run with nothing to do never reads.  Templates in a StepSpec stay unrendered
until an attempt.
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
"""Default for mappings; never written to."""

NO_IDS: Final[list[str]] = []
"""Default for lists of ids, as in JSON; never written to."""

# Flags of an output.
OPTIONAL, NONEMPTY, TEMPORARY, DIRECTORY = 1, 2, 4, 8


def unwritable(path: str, kinds: Collection[str]) -> str:
    """Return the reason for which values of these types cannot be written to a file `path`, or an empty string."""
    suffix = posixpath.splitext(path)[1]
    if "text" in kinds or suffix in (".json", ".yaml", ".yml"):
        return ""
    if suffix == ".toml":
        return "" if "mapping" in kinds else "a .toml file holds a mapping"
    return "a mapping, list or number can be written as .json, .yaml or .toml"


class OutputSpec(NamedTuple):
    """Output path of a step, relative to its attempt."""

    name: str
    path: str
    flags: int


class Source(NamedTuple):
    """Source from outside the plan: a path of the caller, a model or a dataset."""

    name: str  # its path in the attempt
    kind: str  # path, hf, s3, gs, https or stream
    address: str
    only: Sequence[str]  # globs of the selected files; empty means all

    @property
    def in_bucket(self) -> bool:
        """Return whether its objects can have signed URLs."""
        return self.kind in ("s3", "gs")

    @property
    def lookup_key(self) -> tuple[str, ...]:
        """Lookup key of its identity."""
        return (self.kind, self.address, *self.only)


class Upstream(NamedTuple):
    """Output of another step that a step reads."""

    producer: int
    output: str
    name: str  # its path in the attempt
    below: str  # a path below the output, or ""


class LateValue(NamedTuple):
    """Metric of another step that a step reads."""

    producer: int
    metric: str
    name: str  # its name in the key, or "" if it is not part of the key


class Publication(NamedTuple):
    """Output that is published in the workspace."""

    step: int
    output: str
    path: str
    name: str  # its name among the recipe's outputs, or ""


class SecretSpec(NamedTuple):
    """Secret that a step gets as an environment variable."""

    input: str
    variable: str  # in the step's environment
    source: str  # the caller's environment variable that holds it
    required: bool


class StateSpec(NamedTuple):
    """State of a step: a path with its checkpoints, kept between attempts."""

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
    """Code pinned to a commit."""

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
    """Metrics source of a step: a file, or a pattern over its log, otherwise the file in $RECIPE_METRICS."""

    file: str | None
    pattern: str | None

    @property
    def in_environment(self) -> bool:
        """Return whether the step gets $RECIPE_METRICS, which is then part of its key."""
        return not self.file and not self.pattern

    @property
    def rule(self) -> str:
        """Digest of the metrics rule, or an empty string if the rule is part of the key."""
        return "" if self.in_environment else of_value("metrics/1", list(self))


class SelectSpec(NamedTuple):
    """Criterion of a `select` step."""

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
        """Requested resources by name, in the form that is hashed in a key."""
        return {
            name: value
            for name, value in self._asdict().items()
            if value is not None and (name != "pools" or value)
        }

    @property
    def room(self) -> dict[str, float]:
        """Requested cpus, gpus and bytes of memory on a host, without unset and zero amounts."""
        takes = (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory))
        return {name: float(amount) for name, amount in takes if amount}


class LimitSpec(NamedTuple):
    """Limits of a whole run.  None means unset."""

    time: float | None = None  # seconds
    cost: float | None = None  # USD


class HealthSpec(NamedTuple):
    """Health check command of a host."""

    run: str | Sequence[Tree]
    every: float  # seconds


class RunSettings(NamedTuple):
    """Settings of a whole run: setup, cleanup and health commands, and limits."""

    setup: Sequence[str | Sequence[Tree]] = ()
    cleanup: Sequence[str | Sequence[Tree]] = ()
    limits: LimitSpec = LimitSpec()
    health: HealthSpec | None = None

    @classmethod
    def load(cls, row: Sequence[Any]) -> RunSettings:
        """Build settings from their JSON array."""
        setup, cleanup, limits, health = row
        return cls(
            setup, cleanup, LimitSpec._make(limits), HealthSpec._make(health) if health else None
        )


class Names(NamedTuple):
    """Values for the templates of a step that are known before an attempt, by namespace."""

    inputs: Mapping[str, Tree]
    steps: Mapping[str, Mapping[str, Tree]]  # paths of outputs
    outputs: Mapping[str, str]
    matrix: Mapping[str, Tree]


class Author(TypedDict, total=False):
    """Author half of a key before hashing: the step's text with unrendered templates, and the values that they read."""

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
    """Instructions for running a step.  Times are in seconds."""

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
        """Number of nodes on which the step runs.  An undecided expression counts as 1."""
        return self.nodes if isinstance(self.nodes, int) else 1

    @property
    def names_python(self) -> bool:
        """Return whether the command names Python or a Python script."""
        text = str(self.run)
        return self.accelerate is not None or "python" in text or ".py" in text

    @classmethod
    def load(cls, row: Sequence[Any]) -> StepSpec:
        """Build a spec from its JSON array."""
        spec = cls._make(row)
        return spec._replace(
            resources=ResourceSpec._make(spec.resources),
            select=SelectSpec._make(spec.select) if spec.select else None,
            secrets=[SecretSpec._make(each) for each in spec.secrets],
            git=[GitSpec._make(each) for each in spec.git],
            names=Names._make(spec.names),
            sync=[SyncSpec._make(each) for each in spec.sync],
            state=[StateSpec._make(each) for each in spec.state],
            # A plan stored by an earlier version may lack the last options.
            options=StepOptions(*spec.options),
            asks={
                step: [MetricAsked._make(each) for each in asked]
                for step, asked in spec.asks.items()
            },
            metrics=MetricsSpec._make(spec.metrics) if spec.metrics else None,
        )
