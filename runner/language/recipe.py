"""Recipe and its parts as values.

Leaves that may hold a template stay as written (`Leaf`); everything else is parsed: durations are seconds, sizes are bytes.
`Step.origin` is the path of the step in the document, so that `document.locate(origin + …)` can point at any of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from .values import Leaf, Tree, Where

if TYPE_CHECKING:
    from .document import Document


InputType: TypeAlias = Literal[
    "string",
    "integer",
    "number",
    "boolean",
    "choice",
    "list",
    "object",
    "file",
    "dataset",
    "model",
    "secret",
]


@dataclass(frozen=True, slots=True)
class Input:
    """A typed value that the caller gives."""

    name: str
    type: InputType
    doc: str = ""
    items: InputType | None = None
    default: Tree = None
    has_default: bool = False
    required: bool = True  # false: may be null; an input with a default is never missing
    limits: Mapping[str, Tree] = field(
        default_factory=dict
    )  # JSON Schema keywords: minimum, pattern, enum (from `choices`), …
    env: str | None = None
    secret: str | None = None
    key: bool = True
    continues: bool = False
    only: tuple[str, ...] = ()
    stream: bool = False
    member: bool = False  # FILE.py:NAME, a class or function in a file

    def parted(self, address: str) -> tuple[str, str]:
        """The file that a value names, and the `:NAME` behind it, which only a `member` has."""
        file, _, name = address.rpartition(":")
        return (
            (file, f":{name}")
            if self.member and name.isidentifier() and file.endswith(".py") and "?" not in file
            else (address, "")
        )


@dataclass(frozen=True, slots=True)
class Output:
    """A path that a step makes."""

    name: str
    path: str  # a template; without its trailing slash
    directory: bool = False  # written with a trailing slash: exists, empty, when the step starts
    optional: bool = False
    nonempty: bool = False
    temporary: bool = False
    sync: float | None = None  # seconds
    doc: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """A path that a step may leave half-done on purpose."""

    name: str
    path: str  # a template; `state/<name>` unless the author says otherwise
    checkpoint: str | None = None
    every: float | None = None  # seconds
    keep: int | None = None
    shared: bool = False  # to: store


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern of paths, and patterns of those that are no match."""

    pattern: str
    exclude: tuple[str, ...]
    allow_empty: bool | None = None  # true: nothing may match; false: that is refused


@dataclass(frozen=True, slots=True)
class GitCode:
    url: str
    commit: str
    at: str


@dataclass(frozen=True, slots=True)
class AutoCode:
    """`code: auto`: the scripts that the command starts, and all that they import."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a step needs, per node.  `None` is unsaid."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None  # bytes
    disk: int | None = None  # bytes
    pools: Mapping[str, float] = field(default_factory=dict)
    key: bool = False

    def over(self, base: Resources) -> Resources:
        """These values, and `base` where they say nothing."""
        pick = {
            name: mine if (mine := getattr(self, name)) is not None else getattr(base, name)
            for name in ("cpus", "memory", "gpus", "gpu", "gpu_memory", "disk")
        }
        return Resources(**pick, pools={**base.pools, **self.pools}, key=self.key or base.key)

    def of_step(self, own: Resources, gpus: int | None) -> Resources:
        """Return what a step that says `own` has of these, which stand above it in its recipe, a preset or a `uses`.

        `gpus`: how many the steps have by then that say nothing themselves.  Their machine is not that of a step that says
        `gpus: 0`.
        """
        if own.gpus == 0 and gpus:
            return Resources(pools=self.pools, key=self.key)
        return self


@dataclass(frozen=True, slots=True)
class Select:
    """`select`: the outputs of the instance of a matrix step whose metric is least or greatest.

    `step` is as written: `train`, or `s/train` for a step of the recipe that `s` uses.
    """

    step: str
    metric: str
    best: Literal["min", "max"]

    @property
    def source(self) -> str:
        """The step of this recipe that it is, or is inside of."""
        return self.step.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Uses:
    """`uses`: another recipe as a step."""

    recipe: str
    given: Mapping[str, Tree] = field(default_factory=dict)  # `with`
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Python:
    """What a step's Python is: made from a hash-pinned requirements file or `pylock.toml` beside the recipe, of a version, or both; empty: any."""

    lock: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where metrics are read: JSONL at `$RECIPE_METRICS` (neither given), a JSONL file of the step's, or a pattern over its log."""

    file: str | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One command with what it needs and what it makes.  Exactly one of `run`, `accelerate`, `uses`, `select` is there."""

    id: str
    origin: Where
    run: list[Tree] | str | None = None  # a list is argv, a string is a script
    accelerate: Mapping[str, Tree] | None = (
        None  # script module args processes mixed_precision config
    )
    uses: Uses | None = None
    select: Select | None = None
    shell: Literal["sh", "bash"] = "sh"
    needs: tuple[str, ...] = ()
    deps: tuple[str | Glob, ...] = ()
    code: tuple[str | Glob | GitCode | AutoCode, ...] | None = None  # None: the recipe's
    files: Mapping[str, Tree] = field(default_factory=dict)
    outputs: tuple[Output, ...] = ()
    state: tuple[State, ...] = ()
    env: Mapping[str, Leaf] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    secrets: tuple[str, ...] | None = None  # None: the recipe's
    image: str | None = None
    python: Python | None = None
    resources: Resources = Resources()
    nodes: int | str | None = None
    matrix: Mapping[str, Tree] | None = None  # axis -> list | template | a mapping with "glob"
    allow_failure: bool = False
    when: Leaf = None
    retries: int = 0  # task failures
    preemptions: int = 10
    oom: Mapping[str, int] = field(
        default_factory=dict
    )  # inputs, and by how much each is divided when memory ran out
    timeout: float | None = None  # seconds
    idle_timeout: float | None = None  # seconds
    cache: bool = True
    metrics: Metrics | None = None
    local: bool = False  # `where: local`

    @property
    def reads(self) -> list[str]:
        """The paths and patterns among `deps`, without what they exclude."""
        return [dep if isinstance(dep, str) else dep.pattern for dep in self.deps]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of input values, and replacements for parts of the recipe."""

    name: str
    inputs: Mapping[str, Tree] = field(default_factory=dict)
    resources: Resources | None = None
    limits: Limits | None = None
    image: str | None = None
    python: Python | None = None
    env: Mapping[str, Leaf] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    time: float | None = None  # seconds
    cost: float | None = None  # USD


@dataclass(frozen=True, slots=True)
class Health:
    run: list[Tree] | str
    every: float = 60.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One versioned training tool, as written."""

    name: str
    version: int
    summary: str
    document: Document
    doc: str = ""
    inputs: Mapping[str, Input] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    outputs: Mapping[str, str] | None = None  # name -> template; None: every step output
    resources: Resources = Resources()
    limits: Limits = Limits()
    image: str | None = None
    python: Python | None = None
    setup: tuple[list[Tree] | str, ...] = ()
    health: Health | None = None
    cleanup: tuple[list[Tree] | str, ...] = ()
    env: Mapping[str, Leaf] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    env_files: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    code: tuple[str | Glob | GitCode | AutoCode, ...] = ()
    home: str = ""  # where the paths of its code and locks begin: the root of its workspace, or, empty, the folder of its file
    partial: bool = False  # parts with mistakes are left out
    folder: str = ""  # of its file, from there: where paths with ./ or ../ in front begin

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"
