"""Recipe and its parts as values.

A `Leaf` may hold a template and stays as written. Everything else is parsed: durations are in
seconds, sizes in bytes. `Step.origin` is the path of the step in the document, so that
`document.locate(origin + …)` can locate any of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from .step_options import DEFAULTS, StepOptions
from .values import Leaf, Tree, Where

if TYPE_CHECKING:
    from .document import Document

_T = TypeVar("_T")

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
        """Split a `member` input's value, FILE:NAME. NAME is empty for other inputs."""
        file, _, name = address.rpartition(":")
        # The query of an address may look like a file: https://host/a.py?key=1.py:Hook.
        is_file = file.endswith(".py") and "?" not in file
        has_member = is_file and name.isidentifier()
        if self.member and has_member:
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
class StateDirectory:
    """A checkpoint directory of a step. Checkpoints may be incomplete when the step stops."""

    name: str
    path: str  # a template; `state/<name>` unless the author says otherwise
    checkpoint: str | None = None
    every: float | None = None  # seconds
    keep: int | None = None
    shared: bool = False  # to: store
    every_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Glob:
    """A glob pattern with exclusion patterns."""

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
    """The setting `code: auto`: all scripts in the command, and their imported files."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource requirements of a step, per node. Unset values are None."""

    cpus: float | None = None
    memory: int | None = None  # bytes
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: int | None = None  # bytes
    disk: int | None = None  # bytes
    pools: Mapping[str, float] = field(default_factory=dict)
    key: bool = False

    def over(self, base: Resources) -> Resources:
        """Fill unset values with those of `base`."""
        return Resources(
            cpus=_first_set(self.cpus, base.cpus),
            memory=_first_set(self.memory, base.memory),
            gpus=_first_set(self.gpus, base.gpus),
            gpu=_first_set(self.gpu, base.gpu),
            gpu_memory=_first_set(self.gpu_memory, base.gpu_memory),
            disk=_first_set(self.disk, base.disk),
            pools={**base.pools, **self.pools},
            key=self.key or base.key,
        )

    def of_step(self, own: Resources, gpus: int | None) -> Resources:
        """Return the resources that a step with its `own` resources inherits from its recipe.

        `gpus` is the number for steps without their own. A step with `gpus: 0` does not inherit the
        properties of GPU machines.
        """
        if own.gpus == 0 and gpus:
            return Resources(pools=self.pools, key=self.key)
        return self


def _first_set(value: _T | None, default: _T | None) -> _T | None:
    # 0 is a setting: `gpus: 0` must not become the recipe's number.
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Select:
    """A `select` step: the outputs of the matrix instance with the lowest or highest metric.

    `step` is as written: `train`, or `s/train` for a step of the recipe that `s` uses.
    """

    step: str
    metric: str
    best: Literal["min", "max"]

    @property
    def source(self) -> str:
        """The matrix step in this recipe, or the `uses` step that contains the matrix step."""
        return self.step.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Uses:
    """A `uses` step, which runs another recipe."""

    recipe: str
    given: Mapping[str, Tree] = field(default_factory=dict)  # `with`
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Python:
    """Python settings of a step: a lock file, a version, or both. Empty allows any Python.

    The lock is a requirements file with hashes, or `pylock.toml`, beside the recipe.
    """

    lock: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics source of a step: a JSONL file, or a regex for log lines.

    Without either, JSONL at `$RECIPE_METRICS`.
    """

    file: str | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a recipe, with its command, dependencies and outputs.

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
    state: tuple[StateDirectory, ...] = ()
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
        """Paths and glob patterns in `deps`, without exclusion patterns."""
        return [pattern_of(dep) for dep in self.deps]


def pattern_of(dep: str | Glob) -> str:
    """Return the path or pattern of a `deps` or `code` entry as written."""
    return dep if isinstance(dep, str) else dep.pattern


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of input values and setting overrides for a recipe."""

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
    """A parsed recipe of one version."""

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
