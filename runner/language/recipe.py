"""Recipe and its parts as values.

A `Leaf` may hold a template and stays as written. Everything else is parsed: durations are in
seconds, sizes in bytes. `Step.origin` is the path of the step in the document, so that
`document.locate(origin + …)` can locate any of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from .step_options import DEFAULTS, StepOptions
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
    """A typed input of a recipe."""

    name: str
    type: InputType
    doc: str = ""
    items: InputType | None = None
    default: Tree = None
    has_default: bool = False
    required: bool = True  # false: may be null; an input with a default is never missing
    # Keywords of JSON Schema, such as minimum and pattern, and `choices`.
    limits: Mapping[str, Tree] = field(default_factory=dict)
    env: str | None = None
    secret: str | None = None
    key: bool = True
    continues: bool = False
    only: tuple[str, ...] = ()
    stream: bool = False
    member: bool = False  # FILE.py:NAME, a class or function in a file

    def split_member(self, address: str) -> tuple[str, str]:
        """Split the value of a `member` input, FILE:NAME; the name is empty for other inputs."""
        file, _, name = address.rpartition(":")
        is_file = file.endswith(".py") and "?" not in file
        if self.member and is_file and name.isidentifier():
            return file, f":{name}"
        return address, ""


@dataclass(frozen=True, slots=True)
class Output:
    """An output path of a step."""

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
    """A path for checkpoints, which may be incomplete when a step stops."""

    name: str
    path: str  # a template; `state/<name>` unless the author says otherwise
    checkpoint: str | None = None
    every: float | None = None  # seconds
    keep: int | None = None
    shared: bool = False  # to: store
    every_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern of paths, and patterns of excluded paths."""

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
    """`code: auto`: the scripts in the command, and the files that they import."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a step, per node; None for unset values."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None  # bytes
    disk: int | None = None  # bytes
    pools: Mapping[str, float] = field(default_factory=dict)
    key: bool = False

    def over(self, base: Resources) -> Resources:
        """Return these resources with unset values from `base`."""
        return Resources(
            cpus=base.cpus if self.cpus is None else self.cpus,
            memory=base.memory if self.memory is None else self.memory,
            gpus=base.gpus if self.gpus is None else self.gpus,
            gpu=base.gpu if self.gpu is None else self.gpu,
            gpu_memory=base.gpu_memory if self.gpu_memory is None else self.gpu_memory,
            disk=base.disk if self.disk is None else self.disk,
            pools={**base.pools, **self.pools},
            key=self.key or base.key,
        )

    def of_step(self, own: Resources, gpus: int | None) -> Resources:
        """Return the resources that a step with `own` resources inherits from its recipe.

        `gpus` is the number for steps without their own. A step with `gpus: 0` does not inherit the
        properties of GPU machines.
        """
        if own.gpus == 0 and gpus:
            return Resources(pools=self.pools, key=self.key)
        return self


@dataclass(frozen=True, slots=True)
class Select:
    """`select`: the outputs of the matrix instance with the lowest or highest metric.

    `step` is as written: `train`, or `s/train` for a step of the recipe that `s` uses.
    """

    step: str
    metric: str
    best: Literal["min", "max"]

    @property
    def source(self) -> str:
        """The step of this recipe with the matrix, or the `uses` step that contains it."""
        return self.step.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Uses:
    """`uses`: another recipe as a step."""

    recipe: str
    given: Mapping[str, Tree] = field(default_factory=dict)  # `with`
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Python:
    """The Python of a step: a lock file, a version, or both; empty for any Python.

    The lock is a requirements file with hashes, or `pylock.toml`, beside the recipe.
    """

    lock: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The source of metrics: a JSONL file, or a pattern for log lines.

    Without either, JSONL at `$RECIPE_METRICS`.
    """

    file: str | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step with its command, dependencies and outputs.

    Exactly one of `run`, `accelerate`, `uses` and `select` is set.
    """

    id: str
    origin: Where
    run: list[Tree] | str | None = None  # a list is argv, a string is a script
    # script module args processes mixed_precision config
    accelerate: Mapping[str, Tree] | None = None
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
    tools: tuple[str, ...] | None = None  # None: the recipe's
    image: str | None = None
    python: Python | None = None
    resources: Resources = Resources()
    nodes: int | str | None = None
    matrix: Mapping[str, Tree] | None = None  # axis -> list | template | a mapping with "glob"
    allow_failure: bool = False
    when: Leaf = None
    options: StepOptions = DEFAULTS
    cache: bool = True
    metrics: Metrics | None = None
    local: bool = False  # `where: local`

    @property
    def reads(self) -> list[str]:
        """Paths and patterns in `deps`, without excluded patterns."""
        return [dep if isinstance(dep, str) else dep.pattern for dep in self.deps]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of input values and replacements for parts of the recipe."""

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
    """One versioned recipe, as written."""

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
    tools: tuple[str, ...] = ()
    code: tuple[str | Glob | GitCode | AutoCode, ...] = ()
    # Directory in which the paths of its code and locks begin: the root of its workspace; empty:
    # the directory of its file.
    home: str = ""
    partial: bool = False  # parts with mistakes are left out
    # Directory of the recipe file below `home`; paths with ./ or ../ are relative to it.
    folder: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"
