"""What a plan is made of while it is compiled: nodes that have no numbers yet, the names of one recipe, and what is wrong.  Decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ..errors import Problem, did_you_mean
from ..language.unknowns import BOOLEAN, Unknown, holds_unknown
from .ids import bare
from .mentions import templates
from .plan import SKIP
from .roots import shift_at
from .step import (
    DIRECTORY,
    NONEMPTY,
    NOTHING,
    OPTIONAL,
    TEMPORARY,
    Author,
    ResourceSpec,
    Source,
    StepSpec,
)

if TYPE_CHECKING:
    from ..language.recipe import Output, Recipe, Resources, Step
    from ..language.template import Reference, TemplateError
    from ..language.values import Tree, Where
    from .plan import Pending


Namespaces: TypeAlias = "Mapping[str, Mapping[str, Tree]]"
"""What a template can mention while a plan is compiled: `inputs`, `steps`, `matrix` and so on, each with its names."""
UNKNOWN_PATH: Final = ""
"""Stands for the path of an output that depends on what is not known."""
UNCOMPILED: Final = StepSpec("", "", {})
"""What a draft does before it is compiled."""


LATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("id", "recipe"),
    "step": ("id", "key"),
    "node": ("rank",),
    "nodes": ("count", "addresses"),
    "host": ("gpus", "cpus"),
}
"""What only an attempt knows, by its first name."""


class PathValue(str):
    """The name of a path in the attempt directory, and where it comes from: a caller's file, a model, or outputs of a step.

    As text it has `member` behind it: the `:NAME` of what is meant in a Python file, or nothing.
    """

    name: str
    kind: str
    address: Any
    member: str

    def __new__(cls, name: str, kind: str, address: Any, member: str = "") -> PathValue:
        self = super().__new__(cls, name + member)
        self.name, self.kind, self.address, self.member = name, kind, address, member
        return self


@dataclass(slots=True)
class Draft:
    """A node being made; producers are drafts until numbers are known."""

    id: str
    step: Step
    recipe: Recipe
    home: int
    prefix: str
    inputs: dict[str, Tree]
    matrix: dict[str, Tree]
    outputs: dict[str, tuple[str, int]] = field(default_factory=dict)
    upstream: dict[str, tuple[Draft, str, str]] = field(
        default_factory=dict
    )  # name in the attempt -> producer, output, path below it
    takes: dict[str, Source] = field(default_factory=dict)
    late: dict[tuple[str, str], Draft] = field(default_factory=dict)
    asked: dict[tuple[str, str], Draft] = field(
        default_factory=dict
    )  # metrics that only `when` and `nodes` read: no part of the key
    after: list[Draft] = field(default_factory=list)
    wants: list[list[Draft]] = field(
        default_factory=list
    )  # each a step that it needs: one skipped whole skips this too
    needed: set[str] = field(default_factory=set)  # the ids of these steps
    asked_for: set[str] = field(
        default_factory=set
    )  # of steps that it only asks for, or may need: these do not
    needed_pairs: list[list[Draft]] = field(default_factory=list)  # single instances of others
    choices: list[list[Draft]] = field(default_factory=list)
    doubtful: bool = False  # whether it is skipped is known only in a run
    author: Author = field(default_factory=Author)
    spec: StepSpec = UNCOMPILED
    deps: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    lock: str = ""
    tools: Sequence[str] = ()
    flags: int = 0
    number: int = -1
    order: int = 0

    @property
    def ghost(self) -> bool:
        """Whether it stands for the instances of a step that waits, and is no node."""
        return self.order < 0

    @property
    def several(self) -> bool:
        """Whether it stands for instances that may be several."""
        return self.ghost and any(map(holds_unknown, self.matrix.values()))


class Instance(NamedTuple):
    """One combination of a matrix: its values, what it makes, and its nodes."""

    matrix: Mapping[str, Tree]
    outputs: Mapping[str, Tree]
    drafts: list[Draft]


class Scope:
    """The namespace of one recipe while it is compiled: what `steps.x` means there."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: dict[str, Tree],
        prefix: str,
        home: int,
        asked: Resources,
        named: bool,
        preset: str | None = None,
    ) -> None:
        self.recipe, self.inputs, self.prefix, self.home = recipe, inputs, prefix, home
        self.asked = asked  # resources that stand beside `uses`
        self.named = named  # the preset stands there, too: then they are over its own; a preset of the whole run is over them
        self.preset = preset
        self.used_by: tuple[Scope, Step, Mapping[str, Tree]] | None = None  # the instance of a step
        self.groups: dict[str, list[Draft]] = {}  # plain, matrix and select steps
        self.results: dict[
            str, dict[str, Tree]
        ] = {}  # step id -> output name -> PathValue or list of them
        self.pending: set[str] = set()  # steps that wait for an expansion
        self.foreseen: dict[str, dict[str, Any]] = {}  # their outputs, as far as they are known
        self.many: set[str] = set()
        self.inner: dict[str, list[Draft]] = {}  # uses steps: every draft below
        self.made: dict[str, list[Instance]] = {}  # by step with a matrix
        self.pairs: dict[tuple[str, tuple[str, ...]], dict[tuple[str, ...], Any]] = {}
        """By step and some of its axes: its instances, by their values of these."""
        self.makers: dict[str, tuple[str, str]] = {}
        self.variables = {
            name: spec.env or "" for name, spec in recipe.inputs.items() if spec.type == "secret"
        }  # where each secret comes from

    def awaits(self, refs: Iterable[Reference]) -> bool:
        """Whether one of these names a step of this recipe that waits for an expansion."""
        return any(
            ref.path[0] == "steps" and len(ref.path) > 1 and ref.path[1] in self.pending
            for ref in refs
        )

    def group(self, id: str) -> list[Draft]:
        """The nodes of a step; of one with `uses` all below it."""
        return self.groups.get(id) or self.inner.get(id) or []

    def instances(self, step: str) -> list[Draft]:
        """What `select` compares: the instances of a step of this recipe, `train`, or of one inside a recipe that is used, `s/train`."""
        head, _, inside = step.partition("/")
        if not inside:
            return self.groups.get(head, [])
        return [
            draft
            for draft in self.inner.get(head, ())
            if bare(draft.id.removeprefix(self.prefix)) == step
        ]


class Standing(NamedTuple):
    """What is known of whether a step is skipped: surely, or perhaps."""

    skipped: bool
    doubtful: bool


class Sketch:
    """All drafts of one plan, in the order in which they were made, and every problem so far."""

    def __init__(self, as_disk: Callable[[str], str] = str) -> None:
        self.as_disk = as_disk  # of two paths that are one file the same text
        self.drafts: list[Draft] = []
        self.ghosts: list[Draft] = []  # one for each step that waits, to see what is wrong with it
        self.scopes: list[Scope] = []
        self.empty: list[tuple[str, str]] = []  # step and pattern: axes without a value
        self.globs: dict[
            tuple[str, str], bool | None
        ] = {}  # step and pattern, in `deps`: its `allow_empty`
        self.problems: list[Problem] = []
        self.wrong: set[tuple[str, Where]] = set()  # the recipe and place of each problem
        self._reported: set[Problem] = (
            set()
        )  # the first `_counted` of them: looked up, not searched
        self._counted = 0
        self.pending: list[Pending] = []
        self.waiting: dict[str, list[str]] = {}
        self.homes: list[str] = []
        self.top: Scope | None = None
        self.skips = False  # whether a step is, or may be, skipped
        self._standings: dict[int, Standing] = {}  # by a list of drafts, which steps share

    def skip_state(self, group: list[Draft]) -> Standing:
        """Whether a step is skipped, as far as that is known.  Its instances are complete."""
        if not group:
            return Standing(False, False)
        found = self._standings.get(id(group))
        if found is None:
            skipped = all(draft.flags & SKIP for draft in group)
            doubtful = not skipped and any(draft.doubtful for draft in group)
            found = self._standings[id(group)] = Standing(skipped, doubtful)
        return found

    def wait(self, scope: Scope, step: Step, needs: Iterable[str]) -> None:
        """A step of a recipe waits for an expansion; `needs` are the steps of that recipe that it needs, besides the makers of what is expanded."""
        scope.pending.add(step.id)
        id = f"{scope.prefix}{step.id}"
        makers = [pending.producer for pending in self.pending if pending.step == id]
        self.waiting[id] = list(
            dict.fromkeys([*makers, *(f"{scope.prefix}{need}" for need in needs)])
        )

    def problem(
        self,
        recipe: Recipe,
        code: str,
        message: str,
        where: Where,
        *,
        fix: str = "",
        key: bool = False,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        self.wrong.add((recipe.id, where))
        where = _where_written(recipe, where)
        at = None if offset is None else offset + shift_at(recipe, where)
        problem = recipe.document.problem(
            code, message, where, fix=fix, key=key, offset=at, length=length
        )
        self._reported.update(self.problems[self._counted :])
        self._counted = len(self.problems)
        if problem not in self._reported:
            self.problems.append(problem)

    def template_problem(self, scope: Scope, error: TemplateError, where: Where) -> None:
        self.problem(
            scope.recipe,
            "template",
            str(error),
            where,
            fix=error.fix,
            offset=error.offset,
            length=error.length,
        )

    def unknown(
        self, scope: Scope, name: str, known: list[str], where: Where, ref: Reference
    ) -> None:
        if scope.recipe.partial and _left_out(scope.recipe, ref.path, where):
            self.wrong.add((scope.recipe.id, where))  # it has a problem of its own
            return
        fix = did_you_mean(name, known) or (
            f"available: {', '.join(sorted(known)[:8])}" if known else ""
        )
        self.problem(
            scope.recipe,
            "unknown-name",
            f'unknown name "{name}"',
            where,
            fix=fix,
            offset=ref.offset,
            length=ref.length,
        )

    def references(self, scope: Scope, leaf: object, where: Where) -> tuple[Reference, ...]:
        """What a leaf mentions; nothing, and a problem, when it is no template."""
        from ..language.template import TemplateError, references

        if not isinstance(leaf, str) or "{{" not in leaf:
            return ()
        try:
            return references(leaf)
        except TemplateError as error:
            self.template_problem(scope, error, where)
            return ()

    def evaluate(self, scope: Scope, leaf: Tree, names: Namespaces, where: Where) -> Any:
        """The value of a leaf, or of all in a list or mapping; None, and a problem, where there is none."""
        if isinstance(leaf, list):
            return [self.evaluate(scope, item, names, (*where, n)) for n, item in enumerate(leaf)]
        if isinstance(leaf, dict):
            return {k: self.evaluate(scope, item, names, (*where, k)) for k, item in leaf.items()}
        return self.try_render(scope, leaf, names, where)[0]

    def try_render(
        self, scope: Scope, leaf: Tree, names: Namespaces, where: Where
    ) -> tuple[Any, bool]:
        """The value of a leaf, and whether it has one: else None, and a problem."""
        if not isinstance(leaf, str) or "{{" not in leaf:
            return leaf, True
        from ..language.template import TemplateError, evaluate

        try:
            return evaluate(leaf, names), True
        except TemplateError as error:
            self.template_problem(scope, error, where)
            return None, False

    def condition(self, scope: Scope, step: Step, names: Mapping[str, Any]) -> bool | None:
        """The value of a `when`; None where it is not known, or with a problem."""
        where = (*step.origin, "when")
        value, sound = self.try_render(scope, step.when, names, where)
        if isinstance(value, bool):
            return value
        if isinstance(value, Unknown) and BOOLEAN in value.kinds:
            return None
        if sound:
            self.problem(
                scope.recipe,
                "when",
                f'`when` of "{step.id}" is {_show_value(value)}, not true or false',
                where,
                fix='use a boolean expression, such as "{{ inputs.steps > 10 }}"',
            )
        return None

    def mentions_known(self, scope: Scope, step: Step) -> bool:
        """Every step and output that a step mentions exists."""
        good = True
        for where, leaf in templates(step, step.env):
            for ref in self.references(scope, leaf, where):
                good &= self.step_name(scope, ref, where)
        return good

    def step_name(self, scope: Scope, ref: Reference, where: Where) -> bool:
        """Whether a mention, if it is of a step, is of one that exists and of something that it makes."""
        if ref.path[0] != "steps":
            return True
        if len(ref.path) < 2:
            self.problem(
                scope.recipe,
                "unknown-name",
                "the name of a step must be literal; it cannot depend on a value",
                where,
                fix="write steps.NAME.OUTPUT",
                offset=ref.offset,
                length=ref.length,
            )
            return False
        steps = scope.recipe.steps
        target = steps.get(ref.path[1])
        if target is None:
            self.unknown(scope, f"steps.{ref.path[1]}", [f"steps.{id}" for id in steps], where, ref)
            return False
        if len(ref.path) == 2:
            # The items of a plain list of paths are named by these, which no mention can spell.
            outputs = [
                f"steps.{target.id}.{o.name}" for o in target.outputs if o.name.isidentifier()
            ]
            no_names = (
                "name the outputs, as in `outputs: {model: model.bin}`, or list the step in `needs`"
                if target.outputs
                else ""
            )
            self.problem(
                scope.recipe,
                "unknown-name",
                f'"steps.{target.id}" is a step, not a value',
                where,
                fix=f"use one of its outputs: {', '.join(outputs[:8])}"
                if outputs
                else no_names or "to run after this step, list it in `needs`",
                offset=ref.offset,
                length=ref.length,
            )
            return False
        if target.uses or target.select:
            known = list(scope.results.get(target.id, {}))
            if not known or target.id in scope.pending:
                return True  # what it gives is not known yet, or it has problems of its own
        else:
            known = [o.name for o in target.outputs]
        if ref.path[2:3] == ("same",) and len(ref.path) > 3 and "same" not in known:
            return self._same_name(scope, target, known, ref, where)
        if ref.path[2] in known or (
            ref.path[2] == "metrics" and not target.uses and not target.select
        ):
            return True
        self.unknown(
            scope, ".".join(ref.path[:3]), [f"steps.{target.id}.{n}" for n in known], where, ref
        )
        return False

    def _same_name(
        self, scope: Scope, target: Step, known: list[str], ref: Reference, where: Where
    ) -> bool:
        """Whether the same instance of a step can be meant here, and makes this."""
        step = scope.recipe.steps.get(str(where[1])) if where[0] == "steps" else None
        if step is None or (target.matrix or {}).keys().isdisjoint(step.matrix or {}):
            self._report_no_common_axis(scope, target, ref, where)
            return False
        name = ref.path[3]
        if name in known or (name == "metrics" and not target.uses):
            return True
        names = [f"steps.{target.id}.same.{each}" for each in known]
        self.unknown(scope, ".".join(ref.path[:4]), names, where, ref)
        return False

    def _report_no_common_axis(
        self, scope: Scope, target: Step, ref: Reference, where: Where
    ) -> None:
        axes = list(target.matrix or {})
        message = f'"steps.{target.id}.same" is the instance with the same axes, but the two steps share no axis'
        fix = f"add the axis {axes[0]} to this step" if axes else "remove `.same`"
        self.problem(
            scope.recipe, "same-instance", message, where, fix=fix, offset=ref.offset, length=ref.length
        )  # fmt: skip


def _left_out(recipe: Recipe, path: tuple[str, ...], where: Where) -> bool:
    """Whether a name is in the document of a recipe that could be read in part only."""
    written: Any = recipe.document.value
    root, *names = path
    if root not in ("inputs", "steps") and where[:1] == ("steps",):
        written = written["steps"][where[1]]
    for name in (root, *names[:1]):
        if not isinstance(written, Mapping):
            return True
        if name not in written:
            return False
        written = written[name]
    if root != "steps" or len(names) < 2:
        return True
    if not isinstance(written, Mapping):
        return True
    outputs = written.get("outputs")
    return not isinstance(outputs, Mapping) or names[1] in outputs


def _show_value(value: Any) -> str:
    return value.word if isinstance(value, Unknown) else json.dumps(plain_value(value))


def _where_written(recipe: Recipe, where: Where) -> Where:
    """Where the recipe says what is in a step's `env`: there, or for all steps."""
    if where[2:3] != ("env",) or where[3:4] == () or where[3] not in recipe.env:
        return where
    step = recipe.steps.get(str(where[1]))
    return where if step is not None and where[3] in step.env else where[2:]


class Results(Mapping[str, "dict[str, Tree]"]):
    """`steps` as templates see it."""

    def __init__(self, scope: Scope, same: Callable[[str], Any] | None = None) -> None:
        self._scope, self._same = scope, same

    def __getitem__(self, id: str) -> dict[str, Tree]:
        found = self._scope.results.get(id)
        found = found if found is not None else self._scope.foreseen[id]
        return found if self._same is None else {"same": self._same(id), **found}

    def __iter__(self) -> Iterator[str]:
        return iter({**self._scope.results, **self._scope.foreseen})

    def __len__(self) -> int:
        return len({**self._scope.results, **self._scope.foreseen})


def producers(draft: Draft) -> list[Draft]:
    """All that come before a draft, some of them perhaps twice."""
    return [
        *(p for p, _, _ in draft.upstream.values()),
        *draft.late.values(),
        *draft.asked.values(),
        *draft.after,
    ]


def plain_value(value: Tree) -> Tree:
    """The same as JSON has it: a path is its name."""
    if isinstance(value, PathValue):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(v) for v in value]
    if isinstance(value, dict):
        return {k: plain_value(v) for k, v in value.items()}
    return value


def is_path_value(value: object) -> bool:
    """Whether a value is a path of an attempt directory, or a list with one."""
    return isinstance(value, PathValue) or (
        isinstance(value, list) and any(isinstance(item, PathValue) for item in value)
    )


def output_of(draft: Draft, output: str) -> PathValue:
    """An output as templates of later steps see it."""
    return PathValue(draft.outputs[output][0], "step", (draft, output))


def output_flags(output: Output) -> int:
    """What an output may be, as a number."""
    return (
        (OPTIONAL if output.optional else 0)
        | (NONEMPTY if output.nonempty else 0)
        | (TEMPORARY if output.temporary else 0)
        | (DIRECTORY if output.directory else 0)
    )


def resource_spec(asked: Resources) -> ResourceSpec:
    """What a step asks for, as its spec has it."""
    return ResourceSpec(
        asked.cpus,
        asked.memory,
        asked.gpus,
        asked.gpu,
        asked.gpu_memory,
        asked.disk,
        dict(asked.pools) or NOTHING,
    )
