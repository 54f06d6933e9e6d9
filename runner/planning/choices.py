"""Find the steps that a template depends on, given the values known so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..language.template import TemplateError, evaluate, expressions
from ..language.template_choices import ReferencedNames
from ..language.unknowns import (
    A_TEXT,
    AN_INTEGER,
    ANYTHING,
    Unknown,
    holds_unknown,
    of_input,
    unknown,
)
from .drafts import NodeDraft, PathValue, Results, Scope, Sketch
from .mentions import find_templates, steps_among, templates
from .pairs import SAME, SameResults
from .plan import SKIP

if TYPE_CHECKING:
    from ..language.recipe import Step
    from .step import StepSpec

_PERHAPS_A_PATH = unknown("null", "text")
_PERHAPS_PATHS = unknown("null", "list", items=A_TEXT)
LATE: Mapping[str, Mapping[str, Unknown]] = {
    "run": {"id": A_TEXT, "recipe": A_TEXT},
    "step": {"id": A_TEXT, "key": A_TEXT},
    "node": {"rank": AN_INTEGER},
    "nodes": {"count": AN_INTEGER, "addresses": unknown("list", items=A_TEXT)},
    "host": {"gpus": AN_INTEGER, "cpus": AN_INTEGER},
}
"""Names with values that are known only during an attempt."""


def chooses(leaf: str) -> bool:
    """Return whether a template has a condition that decides which names it reads.

    Raises TemplateError.
    """
    return any(expression.chooses for expression in expressions(leaf))


def needs(leaf: str, names: Mapping[str, Any]) -> ReferencedNames:
    """Return the names that a template certainly or possibly reads with these values.

    Raises TemplateError.
    """
    found = ReferencedNames()
    for expression in expressions(leaf):
        found.add(expression.needs(names))
    found.possible -= found.certain
    return found


def known_names(
    sketch: Sketch, scope: Scope, step: Step, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of all template names at compile time, with unknown values where needed.

    `given` holds the step's inputs, matrix and outputs.
    """
    inputs = dict(given["inputs"])
    for name in step.options.oom:  # an out-of-memory retry divides these inputs
        spec = scope.recipe.inputs.get(name)
        inputs[name] = of_input(spec.type, spec.items) if spec is not None else ANYTHING
    steps = KnownResults(sketch, scope, given["matrix"])
    return {**LATE, **given, "inputs": inputs, "steps": steps, "state": ANY_STATE}


def wanted_steps(sketch: Sketch, scope: Scope, step: Step) -> list[str]:
    """Return the ids of the steps that any instance of a step depends on or may depend on."""
    given = {
        "inputs": scope.inputs,
        "matrix": dict.fromkeys(step.matrix or {}, ANYTHING),
        "outputs": {output.name: A_TEXT for output in step.outputs},
    }
    names = known_names(sketch, scope, step, given)
    leaves = [leaf for _, leaf in templates(step, step.env)]
    certain, possible = needed_steps([*leaves, *axis_leaves(step)], names)
    selected = [step.select.source] if step.select else []
    return [*dict.fromkeys([*step.needs, *selected, *sorted(certain), *sorted(possible)])]


def leaves_of(spec: StepSpec) -> list[str]:
    """Return all templates of a compiled step."""
    return find_templates([spec.run, spec.accelerate, spec.files, spec.env, spec.when, spec.nodes])


def axis_leaves(step: Step) -> list[str]:
    """Return the templates in a step's matrix."""
    return find_templates(step.matrix or {})


def results_of(scope: Scope, matrix: Mapping[str, Any]) -> Results:
    """Return the `steps` namespace for the templates of one matrix instance at compile time."""
    return Results(scope, lambda id: SameResults(scope, id, matrix))


class ChoiceNames(NamedTuple):
    """Template names for evaluating a value with conditions at compile time.

    `late` is set if the condition can only be decided during the run.
    """

    names: Mapping[str, Any]
    late: bool


def choose_branches(
    sketch: Sketch, scope: Scope, tree: Any, names: Mapping[str, Any]
) -> ChoiceNames:
    """Return the names for evaluating a value whose templates may choose among steps.

    Outputs of skipped steps are null, unless the value needs them.
    """
    leaves = find_templates(tree)
    try:
        if not any(map(chooses, leaves)):
            return ChoiceNames(names, False)
    except TemplateError:
        return ChoiceNames(names, False)  # the evaluation of the value reports the error
    known = {**names, "steps": KnownResults(sketch, scope, names.get("matrix"))}
    _, possible = needed_steps(leaves, known)
    skipped = {id for id in possible if sketch.skip_state(scope.group(id)).skipped}
    steps: dict[str, Any] = {}
    for id, made in names["steps"].items():
        steps[id] = _Any(None) if id in skipped else made
    return ChoiceNames({**names, "steps": steps}, _is_late(leaves, known))


def _is_late(leaves: Iterable[str], known: Mapping[str, Any]) -> bool:
    """Return whether the value of a conditional template depends on unknown steps."""
    for leaf in leaves:
        try:
            if chooses(leaf) and holds_unknown(evaluate(leaf, known)):
                return True
        except TemplateError:
            continue
    return False


class KnownResults(Mapping[str, Mapping[str, Any]]):
    """Mapping of step results for templates at compile time, the `steps` namespace.

    Outputs of skipped steps are null.  Outputs of steps that may still be skipped are unknown.
    """

    def __init__(
        self, sketch: Sketch, scope: Scope, matrix: Mapping[str, Any] | None = None
    ) -> None:
        self._sketch, self._scope, self._matrix = sketch, scope, matrix or {}

    def __getitem__(self, id: str) -> Mapping[str, Any]:
        scope = self._scope
        if id in scope.pending:
            value = _PERHAPS_PATHS if id in scope.many else _PERHAPS_A_PATH
            return _Any(value)
        standing = self._sketch.skip_state(scope.group(id))
        if standing.skipped:
            return _Any(None)
        same = SameResults(scope, id, self._matrix)
        return _StepResults(scope.results[id], standing.doubtful, same)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._scope.results, **dict.fromkeys(self._scope.pending)})

    def __len__(self) -> int:
        return len({*self._scope.results, *self._scope.pending})


class _StepResults(Mapping[str, Any]):
    """Outputs and metrics of one step, for templates at compile time."""

    def __init__(self, made: Mapping[str, Any], doubtful: bool, same: Mapping[str, Any]) -> None:
        self._made, self._doubtful, self._same = made, doubtful, same

    def __getitem__(self, name: str) -> Any:
        if name == "metrics":
            return _Any(ANYTHING)
        if name == SAME and SAME not in self._made:
            return self._same if not self._doubtful else _Any(_PERHAPS_A_PATH)
        return _known_part(self._made[name], self._doubtful)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _known_part(value: Any, doubtful: bool) -> Any:
    """Return an output path, null if its step is skipped, or unknown if its step may be skipped."""
    if isinstance(value, PathValue) and value.kind in ("step", "below"):
        maker: NodeDraft = value.address[0]
        if maker.flags & SKIP:
            return None
        return _PERHAPS_A_PATH if maker.doubtful else value
    if isinstance(value, list):
        return _PERHAPS_PATHS if doubtful else value
    return value


class _Any(Mapping[str, Any]):
    """Mapping that returns the same value for every name.

    `metrics` and `same` return the mapping itself.
    """

    def __init__(self, value: object) -> None:
        self._value = value

    def __getitem__(self, name: str) -> Any:
        return self if name in ("metrics", SAME) else self._value

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _States(Mapping[str, Any]):
    """`state` namespace before an attempt, in which the latest checkpoint may be null."""

    def __getitem__(self, name: str) -> Any:
        return {"latest": _PERHAPS_A_PATH}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_STATE: Final = _States()


def needed_steps(leaves: Iterable[str], names: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the steps that templates certainly depend on, and those that they may depend on.

    Invalid templates are ignored here and reported elsewhere.
    """
    found = ReferencedNames()
    for leaf in leaves:
        try:
            found.add(needs(leaf, names))
        except TemplateError:
            continue
    certain = set(steps_among(found.certain))
    return certain, set(steps_among(found.possible)) - certain
