"""The parts of a step as types: what judging it reads, and what doing it reads.  A compiled plan stores them as JSON arrays.

Judging a step (`plan.Node`) needs its outputs, sources and upstream; doing it needs a `StepSpec`, which a run with nothing to do never reads.
Templates in a StepSpec stay unrendered until an attempt.
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
"""The default of every mapping below; never written to."""

NO_IDS: Final[list[str]] = []
"""The default of a list of ids, as JSON has it; never written to."""

# Flags of an output.
OPTIONAL, NONEMPTY, TEMPORARY, DIRECTORY = 1, 2, 4, 8


def unwritable(path: str, kinds: Collection[str]) -> str:
    """Why a value of these types cannot be written as this file of `files`; empty where one can."""
    suffix = posixpath.splitext(path)[1]
    if "text" in kinds or suffix in (".json", ".yaml", ".yml"):
        return ""
    if suffix == ".toml":
        return "" if "mapping" in kinds else "a .toml file holds a mapping"
    return "a mapping, list or number can be written as .json, .yaml or .toml"


class OutputSpec(NamedTuple):
    """A path that a step makes, relative to its attempt."""

    name: str
    path: str
    flags: int


class Source(NamedTuple):
    """An input that comes from outside the plan: a caller's path, a model, a dataset."""

    name: str  # its path in the attempt
    kind: str  # path, hf, s3, gs, https or stream
    address: str
    only: Sequence[str]  # globs of the files that are wanted; empty: all

    @property
    def in_bucket(self) -> bool:
        """Whether its objects may be signed for."""
        return self.kind in ("s3", "gs")

    @property
    def lookup_key(self) -> tuple[str, ...]:
        """What its identity is looked up by."""
        return (self.kind, self.address, *self.only)


class Upstream(NamedTuple):
    """An output of another step that a step reads."""

    producer: int
    output: str
    name: str  # its path in the attempt
    below: str  # a path below the output, or ""


class LateValue(NamedTuple):
    """A metric of another step that a step reads."""

    producer: int
    metric: str
    name: str  # its name in the key, or "" when it is no part of the key


class Publication(NamedTuple):
    """An output that is shown in the workspace."""

    step: int
    output: str
    path: str
    name: str  # its name among the recipe's outputs, or ""


class SecretSpec(NamedTuple):
    """A secret that a step gets as an environment variable."""

    input: str
    variable: str  # in the step's environment
    source: str  # the caller's environment variable that holds it
    required: bool


class StateSpec(NamedTuple):
    """A path that a step may leave half-done: its checkpoints."""

    name: str
    path: str
    checkpoint: str | None  # the glob of one checkpoint below the path
    every: float | None  # seconds between downloads of new checkpoints from another host
    keep: int | None  # how many checkpoints are kept
    shared: bool = False  # whether they go to the shared store, too
    every_steps: int | None = None  # steps between two that are downloaded


class SyncSpec(NamedTuple):
    """An output that is downloaded while its step still runs."""

    output: str
    every: float  # seconds


class GitSpec(NamedTuple):
    """Code pinned by commit."""

    url: str
    commit: str
    at: str  # the folder in the attempt


class MetricAsked(NamedTuple):
    """A metric of another step that a template reads."""

    metric: str
    many: bool  # the step has a matrix: a list with a value for each instance
    same: Sequence[str] = NO_IDS  # of these instances alone, those that have the reader's axes


class MetricsSpec(NamedTuple):
    """Where a step reports its metrics: a file, or a pattern over its log; neither: the file that $RECIPE_METRICS names."""

    file: str | None
    pattern: str | None

    @property
    def in_environment(self) -> bool:
        """Whether the step is given $RECIPE_METRICS, which is a part of what it does, and so of its key."""
        return not self.file and not self.pattern

    @property
    def rule(self) -> str:
        """The digest of how numbers are read from what a step leaves anyway; empty when the key says how."""
        return "" if self.in_environment else of_value("metrics/1", list(self))


class SelectSpec(NamedTuple):
    """Which instance of a matrix a `select` step takes."""

    metric: str
    best: str  # min or max


class ResourceSpec(NamedTuple):
    """What a step asks of a host.  Memory and disk in bytes; None: it does not say."""

    cpus: float | None = None
    memory: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    disk: int | None = None
    pools: Mapping[str, float] = NOTHING

    @property
    def as_key(self) -> dict[str, object]:
        """What it says, by name: the form that stands in a key."""
        return {
            name: value
            for name, value in self._asdict().items()
            if value is not None and (name != "pools" or value)
        }

    @property
    def room(self) -> dict[str, float]:
        """What it takes of a host's cpus, gpus and bytes of memory."""
        takes = (("cpus", self.cpus), ("gpus", self.gpus), ("memory", self.memory))
        return {name: float(amount) for name, amount in takes if amount}


class LimitSpec(NamedTuple):
    """What a whole run may take; None: it does not say."""

    time: float | None = None  # seconds
    cost: float | None = None  # USD


class HealthSpec(NamedTuple):
    """How a host is asked whether it is well."""

    run: str | Sequence[Tree]
    every: float  # seconds


class RunSettings(NamedTuple):
    """What a recipe says of a whole run: commands around its steps, and limits."""

    setup: Sequence[str | Sequence[Tree]] = ()
    cleanup: Sequence[str | Sequence[Tree]] = ()
    limits: LimitSpec = LimitSpec()
    health: HealthSpec | None = None

    @classmethod
    def load(cls, row: Sequence[Any]) -> RunSettings:
        """From its JSON array."""
        setup, cleanup, limits, health = row
        return cls(
            setup, cleanup, LimitSpec._make(limits), HealthSpec._make(health) if health else None
        )


class Names(NamedTuple):
    """What the templates of a step may read, before an attempt: by namespace."""

    inputs: Mapping[str, Tree]
    steps: Mapping[str, Mapping[str, Tree]]  # paths of outputs
    outputs: Mapping[str, str]
    matrix: Mapping[str, Tree]


class Author(TypedDict, total=False):
    """The author's half of a key, before it is hashed: what the recipe says of a step, its templates unrendered, and the values that they read."""

    id: list[str]  # of a step without outputs: the recipe's name and its own
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
    """What a step does.  Times are in seconds."""

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
    asks: Mapping[str, Sequence[MetricAsked]] = NOTHING  # by step: metrics that its templates read
    metrics: MetricsSpec | None = None
    when: Leaf = None  # only one that reads metrics; others were decided when the plan was compiled
    nodes: int | str | None = (
        None  # an expression where only an earlier step's metrics can tell; None: it does not say
    )
    python: str = ""  # a version such as 3.12; empty: any
    unlisted: Mapping[str, str] = (
        NOTHING  # secret inputs of the recipe that the step does not get, by environment variable
    )

    @property
    def node_count(self) -> int:
        """On how many machines it runs."""
        return self.nodes if isinstance(self.nodes, int) else 1

    @classmethod
    def load(cls, row: Sequence[Any]) -> StepSpec:
        """From its JSON array."""
        spec = cls._make(row)
        return spec._replace(
            resources=ResourceSpec._make(spec.resources),
            select=SelectSpec._make(spec.select) if spec.select else None,
            secrets=[SecretSpec._make(each) for each in spec.secrets],
            git=[GitSpec._make(each) for each in spec.git],
            names=Names._make(spec.names),
            sync=[SyncSpec._make(each) for each in spec.sync],
            state=[StateSpec._make(each) for each in spec.state],
            # A plan that was kept by an earlier version may lack the last ones.
            options=StepOptions(*spec.options),
            asks={
                step: [MetricAsked._make(each) for each in asked]
                for step, asked in spec.asks.items()
            },
            metrics=MetricsSpec._make(spec.metrics) if spec.metrics else None,
        )
