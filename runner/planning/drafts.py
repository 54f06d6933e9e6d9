"""Data of a plan under compilation: unfinished nodes, recipe scopes and problems.

Makes no decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ..errors import Problem, did_you_mean
from ..language.template import Reference, TemplateError, evaluate, references
from ..language.unknowns import BOOLEAN, Unknown, holds_unknown
from .ids import bare
from .mentions import steps_among, templates
from .path_rules import explain_no_path
from .plan import SKIP, PendingMatrix
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
    from ..language.values import Tree, Where


Namespaces: TypeAlias = "Mapping[str, Mapping[str, Tree]]"
"""Names that a template can read at compile time, by namespace such as `inputs` or `steps`."""
UNKNOWN_PATH: Final = ""
"""Placeholder for an output path that depends on unknown values."""
UNCOMPILED: Final = StepSpec("", "", {})
"""Placeholder StepSpec of a step that is not compiled yet."""


LATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("id", "recipe"),
    "step": ("id", "key"),
    "node": ("rank",),
    "nodes": ("count", "addresses"),
    "host": ("gpus", "cpus"),
}
"""Names that are known only during an attempt, by namespace."""


class PathValue(str):
    """Template value that is a path in the attempt directory, with its origin.

    The origin is a file of the caller, a model, or an output of a step.  The text of a PathValue is
    `name` followed by `member`, the `:NAME` of an object in a Python file.
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
class NodeDraft:
    """Plan node under construction: one step instance.

    Its dependencies are drafts too, until nodes are numbered.
    """

    id: str
    step: Step
    recipe: Recipe
    home: int
    prefix: str
    inputs: dict[str, Tree]
    matrix: dict[str, Tree]
    outputs: dict[str, tuple[str, int]] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)  # outputs with an invalid path, already reported
    upstream: dict[str, tuple[NodeDraft, str, str]] = field(
        default_factory=dict
    )  # path in the attempt -> producer, output, path below the output
    takes: dict[str, Source] = field(default_factory=dict)
    late: dict[tuple[str, str], NodeDraft] = field(default_factory=dict)
    asked: dict[tuple[str, str], NodeDraft] = field(
        default_factory=dict
    )  # metrics that only `when` and `nodes` read, which are not part of the key
    after: list[NodeDraft] = field(default_factory=list)  # drafts that must end first
    required: list[list[NodeDraft]] = field(
        default_factory=list
    )  # drafts of each required step; if all of one step are skipped, this is skipped
    required_ids: set[str] = field(default_factory=set)  # ids of the required steps
    asked_for: set[str] = field(
        default_factory=set
    )  # ids of the steps among which its templates choose
    required_pairs: list[list[NodeDraft]] = field(
        default_factory=list
    )  # matching instances of required steps
    choices: list[list[NodeDraft]] = field(
        default_factory=list
    )  # drafts of the steps among which its templates choose, by step, without the required ones
    doubtful: bool = False  # only the run knows whether the step is skipped
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
    def is_sample(self) -> bool:
        """Return whether the draft is only a sample of a step whose matrix is not known yet."""
        return self.order < 0

    @property
    def several(self) -> bool:
        """Return whether the draft is a sample that may represent several instances."""
        return self.is_sample and any(map(holds_unknown, self.matrix.values()))


class Instance(NamedTuple):
    """One combination of matrix values, with its outputs and nodes."""

    matrix: Mapping[str, Tree]
    outputs: Mapping[str, Tree]
    drafts: list[NodeDraft]


class Scope:
    """Compilation scope of one recipe, in which `steps.x` is resolved."""

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
        self.asked = asked  # resources of the `uses` step
        self.named = named  # whether `uses` names the preset: then `asked` overrides the preset, otherwise the preset overrides `asked`
        self.preset = preset
        self.used_by: tuple[Scope, Step, Mapping[str, Tree]] | None = (
            None  # the outer scope, the `uses` step and its axis values
        )
        self.groups: dict[str, list[NodeDraft]] = {}  # plain, matrix and select steps
        self.results: dict[
            str, dict[str, Tree]
        ] = {}  # step id -> output name -> PathValue or list of them
        self.pending: set[str] = set()  # steps that wait for an expansion
        self.foreseen: dict[str, dict[str, Any]] = {}  # placeholder outputs of waiting steps
        self.many: set[str] = set()
        self.inner: dict[str, list[NodeDraft]] = {}  # by `uses` step: every draft below
        self.made: dict[str, list[Instance]] = {}  # by matrix step and `uses` step
        self.pairs: dict[tuple[str, tuple[str, ...]], dict[tuple[str, ...], Any]] = {}
        """Instances by their values of some axes, for each step and choice of axes."""
        self.makers: dict[str, tuple[str, str]] = {}
        self.variables: dict[str, str] = {}  # environment variable of each secret
        for name, spec in recipe.inputs.items():
            if spec.type == "secret":
                self.variables[name] = spec.env or ""

    def awaits(self, refs: Iterable[Reference]) -> bool:
        """Return whether a reference names a step of this recipe that cannot be expanded yet."""
        return not self.pending.isdisjoint(steps_among(ref.path for ref in refs))

    def group(self, id: str) -> list[NodeDraft]:
        """Return all nodes under construction of a step.

        For a `uses` step, these are the nodes of the used recipe.
        """
        return self.groups.get(id) or self.inner.get(id) or []

    def groups_of(self, ids: Iterable[str]) -> list[list[NodeDraft]]:
        """Return the nodes of each step, without steps that have none."""
        groups = map(self.group, ids)
        return [group for group in groups if group]

    def instances(self, step: str) -> list[NodeDraft]:
        """Return the step instances that a `select` step compares.

        `step` is a step of this recipe, such as `train`, or of a used recipe, such as `s/train`.
        """
        head, _, inside = step.partition("/")
        if not inside:
            return self.groups.get(head, [])
        drafts = self.inner.get(head, ())
        return [draft for draft in drafts if bare(draft.id.removeprefix(self.prefix)) == step]


class SkipState(NamedTuple):
    """Whether a step is skipped, or may still be skipped."""

    skipped: bool
    doubtful: bool


class Sketch:
    """Plan under compilation: its nodes in order of creation, and all problems so far."""

    def __init__(self, as_disk: Callable[[str], str] = str) -> None:
        self.as_disk = as_disk  # returns the same text for two paths of one file
        self.drafts: list[NodeDraft] = []
        self.samples: list[
            NodeDraft
        ] = []  # a sample for each waiting step, to report its problems early
        self.scopes: list[Scope] = []
        self.empty: list[tuple[str, str]] = []  # step and pattern of each axis without a value
        self.globs: dict[
            tuple[str, str], bool | None
        ] = {}  # `allow_empty` by step and pattern in `deps`
        self.problems: list[Problem] = []
        self.wrong: set[tuple[str, Where]] = set()  # recipe and location of each problem
        self._reported: set[Problem] = (
            set()
        )  # set of the first `_counted` problems, for fast lookup
        self._counted = 0
        self.pending: list[PendingMatrix] = []
        self.waiting: dict[str, list[str]] = {}
        self.homes: list[str] = []
        self.top: Scope | None = None
        self.skips = False  # whether a step is, or may be, skipped
        self._standings: dict[int, SkipState] = {}  # by the id of a list of drafts

    def skip_state(self, group: list[NodeDraft]) -> SkipState:
        """Return whether a step is skipped or may be skipped, from all its instances."""
        if not group:
            return SkipState(False, False)
        found = self._standings.get(id(group))
        if found is None:
            skipped = all(draft.flags & SKIP for draft in group)
            doubtful = not skipped and any(draft.doubtful for draft in group)
            found = self._standings[id(group)] = SkipState(skipped, doubtful)
        return found

    def wait(self, scope: Scope, step: Step, needs: Iterable[str]) -> None:
        """Record that a step cannot be expanded before other steps finish.

        `needs` are its dependencies in the same recipe, in addition to the steps that create its
        axes.
        """
        scope.pending.add(step.id)
        id = f"{scope.prefix}{step.id}"
        awaited = [pending.producer for pending in self.pending if pending.step == id]
        awaited += [f"{scope.prefix}{need}" for need in needs]
        self.waiting[id] = list(dict.fromkeys(awaited))

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
        # Some callers add to `problems` themselves, so the set may be behind.
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

    def reference_problem(
        self,
        scope: Scope,
        code: str,
        message: str,
        where: Where,
        ref: Reference,
        fix: str = "",
    ) -> None:
        """Report a problem with a name in a template, whose text is underlined."""
        self.problem(
            scope.recipe, code, message, where, fix=fix, offset=ref.offset, length=ref.length
        )

    def unknown(
        self, scope: Scope, name: str, known: list[str], where: Where, ref: Reference
    ) -> None:
        if scope.recipe.partial and _left_out(scope.recipe, ref.path, where):
            self.wrong.add((scope.recipe.id, where))  # the unreadable part is reported elsewhere
            return
        fix = did_you_mean(name, known)
        if not fix and known:
            fix = f"available: {', '.join(sorted(known)[:8])}"
        self.reference_problem(scope, "unknown-name", f'unknown name "{name}"', where, ref, fix)

    def references(self, scope: Scope, leaf: object, where: Where) -> tuple[Reference, ...]:
        """Return the names that a template reads.

        An invalid template is reported and has none.
        """
        if not isinstance(leaf, str) or "{{" not in leaf:
            return ()
        try:
            return references(leaf)
        except TemplateError as error:
            self.template_problem(scope, error, where)
            return ()

    def evaluate(self, scope: Scope, leaf: Tree, names: Namespaces, where: Where) -> Any:
        """Evaluate a template, or all templates in a list or mapping.

        An invalid template is reported and has the value None.
        """
        if isinstance(leaf, list):
            return [self.evaluate(scope, item, names, (*where, n)) for n, item in enumerate(leaf)]
        if isinstance(leaf, dict):
            return {k: self.evaluate(scope, item, names, (*where, k)) for k, item in leaf.items()}
        return self.try_render(scope, leaf, names, where)[0]

    def try_render(
        self, scope: Scope, leaf: Tree, names: Namespaces, where: Where
    ) -> tuple[Any, bool]:
        """Return a rendered template and True, or report a problem and return None and False."""
        if not isinstance(leaf, str) or "{{" not in leaf:
            return leaf, True

        try:
            return evaluate(leaf, names), True
        except TemplateError as error:
            self.template_problem(scope, error, where)
            return None, False

    def path_text(self, scope: Scope, leaf: str, value: object, where: Where) -> str | None:
        """Return the text of a path or pattern that was rendered from `leaf`; None for null.

        A list and a mapping are reported and have no text.
        """
        if value is None:
            return None
        wrong = explain_no_path(value)
        if wrong:
            fix = "use a template with text as its value"
            self.problem(scope.recipe, "path-escape", f'"{leaf}" {wrong}', where, fix=fix)
            return None
        return str(value)

    def exclusions(
        self, scope: Scope, leaves: Sequence[str], names: Namespaces, where: Where
    ) -> list[str]:
        """Return the rendered patterns of an `exclude` list, without those that are null."""
        found: list[str] = []
        for n, leaf in enumerate(leaves):
            place = (*where, n)
            value = self.evaluate(scope, leaf, names, place)
            text = self.path_text(scope, leaf, value, place)
            if text is not None:
                found.append(text)
        return found

    def condition(self, scope: Scope, step: Step, names: Mapping[str, Any]) -> bool | None:
        """Return the value of a step's `when`, or None if it is unknown or invalid."""
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
        """Return whether all steps and outputs in a step's templates exist, or report problems."""
        good = True
        for where, leaf in templates(step, step.env):
            for ref in self.references(scope, leaf, where):
                good &= self.step_name(scope, ref, where)
        return good

    def step_name(self, scope: Scope, ref: Reference, where: Where) -> bool:
        """Return whether a reference names an existing step and output, and report a missing one.

        Return True for references to other namespaces.
        """
        if ref.path[0] != "steps":
            return True
        if len(ref.path) < 2:
            message = "the name of a step must be literal; it cannot depend on a value"
            fix = "write steps.NAME.OUTPUT"
            self.reference_problem(scope, "unknown-name", message, where, ref, fix)
            return False
        steps = scope.recipe.steps
        target = steps.get(ref.path[1])
        if target is None:
            self.unknown(scope, f"steps.{ref.path[1]}", [f"steps.{id}" for id in steps], where, ref)
            return False
        if len(ref.path) == 2:
            message = f'"steps.{target.id}" is a step, not a value'
            fix = _suggest_output(target)
            self.reference_problem(scope, "unknown-name", message, where, ref, fix)
            return False
        return self._has_result(scope, target, ref, where)

    def _has_result(self, scope: Scope, target: Step, ref: Reference, where: Where) -> bool:
        """Return whether a step has the output or metric of a reference, and report a missing one.

        Also return True if the outputs of the step are not known yet.
        """
        has_metrics = not target.uses and not target.select
        if has_metrics:
            known = [o.name for o in target.outputs]
        else:
            known = list(scope.results.get(target.id, {}))
            if not known or target.id in scope.pending:
                return True  # its outputs are not known yet, or its problems are reported elsewhere
        name = ref.path[2]
        # An output may be named `same`, and then hides the matching instance.
        names_same = name == "same" and "same" not in known
        if names_same and len(ref.path) > 3:
            return self._same_name(scope, target, known, ref, where)
        if name in known or (name == "metrics" and has_metrics):
            return True
        names = [f"steps.{target.id}.{each}" for each in known]
        self.unknown(scope, ".".join(ref.path[:3]), names, where, ref)
        return False

    def _same_name(
        self, scope: Scope, target: Step, known: list[str], ref: Reference, where: Where
    ) -> bool:
        """Check that `steps.ID.same.NAME` has a matching instance and output.

        Report a problem and return False otherwise.
        """
        if not _shares_axis(scope.recipe, target, where):
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
        self.reference_problem(scope, "same-instance", message, where, ref, fix)


def _suggest_output(target: Step) -> str:
    """Return the fix for a template that uses a step as a value."""
    # Outputs in a plain list are named by their paths, which are usually no identifiers.
    named = [o.name for o in target.outputs if o.name.isidentifier()]
    if named:
        values = [f"steps.{target.id}.{name}" for name in named[:8]]
        return f"use one of its outputs: {', '.join(values)}"
    if target.outputs:
        return "name the outputs, as in `outputs: {model: model.bin}`, or list the step in `needs`"
    return "to run after this step, list it in `needs`"


def _shares_axis(recipe: Recipe, target: Step, where: Where) -> bool:
    """Return whether the step at a recipe location has a matrix axis in common with `target`."""
    step = recipe.steps.get(str(where[1])) if where[0] == "steps" else None
    if step is None:
        return False
    return not (target.matrix or {}).keys().isdisjoint(step.matrix or {})


def _left_out(recipe: Recipe, path: tuple[str, ...], where: Where) -> bool:
    """Return whether a partly invalid recipe contains a name in its document."""
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
    """Return the recipe location of an `env` value: in the step, or in the recipe-wide `env`."""
    if len(where) < 4 or where[2] != "env":
        return where
    name = where[3]
    step = recipe.steps.get(str(where[1]))
    in_step = step is not None and name in step.env
    return where if in_step or name not in recipe.env else where[2:]


class Results(Mapping[str, "dict[str, Tree]"]):
    """Mapping of step outputs for the templates of a recipe, the `steps` namespace."""

    def __init__(self, scope: Scope, same: Callable[[str], Any] | None = None) -> None:
        self._scope, self._same = scope, same

    def __getitem__(self, id: str) -> dict[str, Tree]:
        found = self._scope.results.get(id)
        if found is None:
            found = self._scope.foreseen[id]
        return found if self._same is None else {"same": self._same(id), **found}

    def __iter__(self) -> Iterator[str]:
        return iter({**self._scope.results, **self._scope.foreseen})

    def __len__(self) -> int:
        return len({**self._scope.results, **self._scope.foreseen})


def producers(draft: NodeDraft) -> list[NodeDraft]:
    """Return all steps that a step instance depends on, possibly with duplicates."""
    return [
        *(p for p, _, _ in draft.upstream.values()),
        *draft.late.values(),
        *draft.asked.values(),
        *draft.after,
    ]


def plain_value(value: Tree) -> Tree:
    """Convert a template value to plain JSON data.

    A path becomes its text.
    """
    if isinstance(value, PathValue):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(v) for v in value]
    if isinstance(value, dict):
        return {k: plain_value(v) for k, v in value.items()}
    return value


def is_path_value(value: object) -> bool:
    """Return whether a value is a path in the attempt directory, or a list with such a path."""
    if isinstance(value, list):
        return any(isinstance(item, PathValue) for item in value)
    return isinstance(value, PathValue)


def output_of(draft: NodeDraft, output: str) -> PathValue:
    """Return an output path as the templates of downstream steps see it."""
    return PathValue(draft.outputs[output][0], "step", (draft, output))


def output_flags(output: Output) -> int:
    """Return the flags of an output declaration as an integer."""
    flags = 0
    if output.optional:
        flags |= OPTIONAL
    if output.nonempty:
        flags |= NONEMPTY
    if output.temporary:
        flags |= TEMPORARY
    if output.directory:
        flags |= DIRECTORY
    return flags


def resource_spec(asked: Resources) -> ResourceSpec:
    """Convert requested resources to a ResourceSpec."""
    return ResourceSpec(
        asked.cpus,
        asked.memory,
        asked.gpus,
        asked.gpu,
        asked.gpu_memory,
        asked.disk,
        dict(asked.pools) or NOTHING,
    )
