"""Try to render the templates of a plan's steps at compile time.

Their locations in the recipe are still known then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..errors import Problem
from ..language.inputs import find_dependents
from ..language.template import TemplateError, evaluate, references
from ..language.unknowns import A_TEXT, ANYTHING, TEXTS, Unknown, of_input, unknown
from .assemble import run_settings
from .drafts import NodeDraft, Scope, Sketch
from .mentions import is_template, walk
from .plan import SELECT, SKIP
from .trial import Scene, faults, find_hook_faults, is_never_true, scene_of

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe
    from ..language.values import Tree, Where

HOOKS: Final = ""
"""Id of the setup, cleanup and health commands in `wanted`."""


_RESULT: Final = unknown("text", "list", items=A_TEXT)


class DryRun:
    """Dry run of step templates at compile time, to find templates that no attempt can render.

    All steps are tried, or only the `wanted` ones.  `made_up` names inputs with placeholder values.
    `given` names the inputs set by the caller.  With `all_values`, each step is also tried with all
    other inputs unknown, to cover steps that are skipped by default.
    """

    def __init__(
        self,
        *,
        wanted: Callable[[str], bool] = lambda id: True,
        made_up: Collection[str] = (),
        given: Collection[str] = (),
        all_values: bool = False,
    ) -> None:
        self.wanted, self.made_up, self.given, self.all_values = wanted, made_up, given, all_values
        self.problems: list[Problem] = []

    def try_all(self, sketch: Sketch) -> None:
        """Render the templates of every step, and the setup, cleanup and health commands."""
        places = set(sketch.wrong)  # report one problem per location
        self._try_values(sketch, places, open=False)
        if self.all_values:
            self._try_values(sketch, places, open=True)

    def _try_values(self, sketch: Sketch, places: set[tuple[str, Where]], *, open: bool) -> None:
        """Render all templates once.

        With `open`, the values of all inputs that the caller did not set are unknown.
        """
        open_inputs = _UnknownInputs(self, open)
        self._try_hooks(sketch, open_inputs, places)
        by_prefix = {scope.prefix: scope for scope in sketch.scopes}
        skipped = set[int]()
        for draft in [*sketch.drafts, *sketch.samples]:
            if draft.flags & SELECT:
                continue
            scope = by_prefix[draft.prefix]
            scene = _scene(draft, scope, open_inputs)
            # An unknown input may have a value with which the plan does not skip the step.
            exact = not open and not open_inputs.of(scope)
            if _is_never_run(draft, scene, skipped, exact=exact):
                skipped.add(id(draft))
                continue
            if not self.wanted(draft.id):
                continue
            for where, error in faults(draft.spec, scene):
                self._report(scope.recipe, (*draft.step.origin, *where), error, places)

    def _try_hooks(
        self, sketch: Sketch, open_inputs: _UnknownInputs, places: set[tuple[str, Where]]
    ) -> None:
        """Render the setup, cleanup and health commands of the recipe."""
        top = sketch.top
        if top is None or not self.wanted(HOOKS):
            return
        inputs = {**top.inputs, **open_inputs.of(top)}
        for where, error in find_hook_faults(run_settings(top.recipe), inputs):
            self._report(top.recipe, where, error, places)

    def _report(
        self, recipe: Recipe, where: Where, error: TemplateError, places: set[tuple[str, Where]]
    ) -> None:
        """Add a template error to the problems, unless its location already has one."""
        if (recipe.id, where) in places:
            return
        places.add((recipe.id, where))
        sketch = Sketch()
        sketch.problem(
            recipe,
            "template",
            str(error),
            where,
            fix=error.fix,
            offset=error.offset,
            length=error.length,
        )
        self.problems += [each for each in sketch.problems if each not in self.problems]


class AnyResults(dict[str, Any]):
    """Mapping of a step's outputs that returns an unknown value for a missing name.

    Missing names are reported elsewhere.
    """

    def __missing__(self, name: str) -> object:
        return AnyResults() if name == "same" else _RESULT


class _AnySteps(dict[str, AnyResults]):
    """Mapping of outputs by step that returns unknown outputs for a missing step."""

    def __missing__(self, id: str) -> AnyResults:
        return AnyResults()


class _UnknownInputs:
    """Inputs whose values are treated as unknown in a template trial, for each recipe."""

    def __init__(self, trial: DryRun, open: bool) -> None:
        self._trial, self._open = trial, open
        self._known: dict[str, dict[str, Unknown]] = {}

    def of(self, scope: Scope) -> dict[str, Unknown]:
        """Return the unknown inputs of a recipe, each with its possible types."""
        if scope.prefix not in self._known:
            self._known[scope.prefix] = dict(self._find(scope))
        return self._known[scope.prefix]

    def _find(self, scope: Scope) -> Iterator[tuple[str, Unknown]]:
        specs = scope.recipe.inputs.items()
        inputs = {name: spec for name, spec in specs if spec.type != "secret"}
        for name in self._names(scope, inputs) & set(inputs):
            made_up = scope.used_by is None and name in self._trial.made_up
            yield name, _unknown_of(inputs[name], given=made_up)

    def _names(self, scope: Scope, inputs: Collection[str]) -> set[str]:
        """Return the names of inputs with unknown values, and of inputs derived from them."""
        trial = self._trial
        if scope.used_by is None:
            if self._open:
                return set(inputs) - set(trial.given)
            return find_dependents(scope.recipe, trial.given, scope.preset, trial.made_up)
        outer, step, combination = scope.used_by
        given = step.uses.given if step.uses is not None else {}
        above = {("inputs", name) for name in self.of(outer)}
        above |= {("matrix", axis) for axis in combination if _open_axis(step, axis, above)}
        direct = {name for name, leaf in given.items() if _mentions(leaf, above)}
        return find_dependents(scope.recipe, given, scope.preset, direct)


def _unknown_of(spec: Input, *, given: bool) -> Unknown:
    found = of_input(spec.type, spec.items, required=spec.required)
    return found.without_null if given else found


def _is_never_run(draft: NodeDraft, scene: Scene, skipped: set[int], *, exact: bool) -> bool:
    """Return whether a step is skipped for all values of its unknown inputs.

    `skipped` are the drafts of which this is known, and with `exact` no input is unknown.
    """
    if exact and draft.flags & SKIP:
        return True
    if is_never_true(draft.step.when, scene):
        return True
    required = [group for group in draft.required if group]
    return any(skipped.issuperset(map(id, group)) for group in required)


def _scene(draft: NodeDraft, scope: Scope, open_inputs: _UnknownInputs) -> Scene:
    """Return the names and values for a trial of a step's templates."""
    scene = scene_of(draft.spec, draft.id, scope.recipe.id)
    inputs = open_inputs.of(scope)
    steps = _AnySteps({id: AnyResults(made) for id, made in scene.names["steps"].items()})
    if not inputs:
        return Scene({**scene.names, "steps": steps})
    paths = {("inputs", name) for name in inputs}
    step = draft.step
    axes: dict[str, Unknown] = {}
    for axis, tree in (step.matrix or {}).items():
        if _mentions(tree, paths):
            axes[axis] = _axis(tree, inputs)
    names = dict(scene.names)
    names["inputs"] = {**names["inputs"], **inputs}
    names["matrix"] = {**names["matrix"], **axes}
    names["outputs"] = dict.fromkeys(names["outputs"], A_TEXT)
    names["steps"] = _AnySteps({id: AnyResults(_vague(made)) for id, made in steps.items()})
    optional: dict[tuple[str, ...], object] = {}
    for name, value in inputs.items():
        if value.may_be_null:
            optional["inputs", name] = value.without_null
    return Scene(names, optional)


def _vague(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace outputs by unknown values of the same type.

    Their paths or instances depend on unknown inputs.
    """
    vague = {}
    for name, value in outputs.items():
        if name == "metrics" or isinstance(value, Unknown):
            vague[name] = value
        elif isinstance(value, Mapping):
            vague[name] = AnyResults(_vague(value))
        else:
            vague[name] = TEXTS if isinstance(value, list) else A_TEXT
    return vague


def _axis(tree: Tree, inputs: Mapping[str, Unknown]) -> Unknown:
    """Return the unknown value of a matrix axis that depends on unknown inputs."""
    if not isinstance(tree, str):
        return ANYTHING
    try:
        values = evaluate(tree, {"inputs": inputs})
    except TemplateError:
        return ANYTHING
    if not isinstance(values, Unknown):
        return ANYTHING
    return values.items or ANYTHING


def _open_axis(step: Any, axis: str, above: Collection[tuple[str, ...]]) -> bool:
    return _mentions((step.matrix or {}).get(axis), above)


def _mentions(tree: object, paths: Collection[tuple[str, ...]]) -> bool:
    """Return whether a template reads a name in `paths`, or an entire namespace of such a name."""
    for _, leaf in walk(tree, ()):
        if not is_template(leaf):
            continue
        try:
            found = references(str(leaf))
        except TemplateError:
            continue
        roots = {path[0] for path in paths}
        for ref in found:
            if ref.path[:2] in paths or (len(ref.path) == 1 and ref.path[0] in roots):
                return True
    return False
