"""Compile used recipes: the steps, inputs and outputs of a `uses` step.

Inner steps have ids `outer/inner` and the same keys as when the recipe runs alone.  Only published
paths have the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Invalid, Problem
from ..language import presets
from ..language.spelling import value_as_written
from .axes import Axes, instance_id
from .choices import (
    KnownResults,
    axis_leaves,
    choose_branches,
    needed_steps,
    results_of,
    wanted_steps,
)
from .drafts import (
    LATE_NAMES,
    Instance,
    NodeDraft,
    PathValue,
    Results,
    Scope,
    Sketch,
    is_path_value,
)
from .mentions import resolve_recipe, templates, walk
from .plan import SKIP

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe, Step, Uses
    from ..language.template import Reference
    from ..language.values import Tree, Where


class UsesCompiler:
    """Compiler of the recipes in `uses` steps of one plan.

    `used` maps `resolve_recipe` names to recipes.  `depth` holds the ids of the recipes under
    compilation, outermost first.  `compile_recipe` adds the steps of one recipe and returns its
    scope.
    """

    def __init__(
        self,
        sketch: Sketch,
        axes: Axes,
        used: Mapping[str, Recipe],
        bind: Callable[..., dict[str, Tree]],
        depth: Sequence[str],
        compile_recipe: Callable[..., Scope],
    ) -> None:
        self.sketch, self.axes, self.used, self.bind, self.depth, self.compile_recipe = (
            sketch,
            axes,
            used,
            bind,
            depth,
            compile_recipe,
        )

    def add(self, scope: Scope, step: Step, uses: Uses, preset: str | None) -> None:
        """Add the steps of a used recipe, once per matrix instance of the `uses` step."""
        other = self.used.get(resolve_recipe(scope.recipe, uses))
        scope.results[step.id] = {}
        if other is None:
            return  # the search for the recipe has reported it
        if other.id in self.depth:
            path = " -> ".join([*self.depth, other.id])
            message = f"recipes use each other: {path}"
            self.sketch.problem(scope.recipe, "cycle", message, (*step.origin, "uses"))
            return
        if not self.sketch.mentions_known(scope, step):
            return
        axes = self.axes.combinations(scope, step)
        wanted = wanted_steps(self.sketch, scope, step)
        if axes is None or not scope.pending.isdisjoint(wanted):
            self.sketch.wait(scope, step, wanted)
            return
        inner_preset = uses.preset or presets.filter_known(other, preset)
        instances: list[Instance] = []
        for combination in axes:
            instance = self._add_instance(scope, step, uses, other, combination, inner_preset)
            if instance is None:
                return
            instances.append(instance)
        _record_instances(scope, step, instances)

    def _add_instance(
        self,
        scope: Scope,
        step: Step,
        uses: Uses,
        other: Recipe,
        combination: Mapping[str, Any],
        preset: str | None,
    ) -> Instance | None:
        """Add the steps of a used recipe for one matrix instance.

        Return None after a problem.
        """
        names = {
            "inputs": scope.inputs,
            "steps": results_of(scope, combination),
            "matrix": combination,
        }
        required = self._required_groups(scope, step, names)
        given, variables = self._bind_with(scope, step, uses, other, names)
        when = self._condition(scope, step, names)
        # An invalid template has the value null, which `bind` would report again.
        if self.sketch.problems:
            return None
        values = self._bind_inputs(scope, step, other, given, preset)
        if values is None:
            return None
        start = len(self.sketch.drafts)
        # Paths keep their origins, whatever `bind` makes of their texts.
        paths = {name: value for name, value in given.items() if is_path_value(value)}
        inner = self.compile_recipe(
            other,
            {**values, **paths},
            prefix=instance_id(scope, step.id, combination) + "/",
            preset=preset,
            variables=variables,
            asked=step.resources.over(scope.asked),
            named=uses.preset is not None,
        )
        inner.used_by = (scope, step, combination)
        drafts = self.sketch.drafts[start:]
        if when is False:
            for draft in drafts:
                draft.flags |= SKIP
        self._add_needs(scope, step, drafts, required)
        if inner.pending:
            scope.pending.add(step.id)
        exported = self._export_outputs(inner, other, inner.prefix[len(scope.prefix) :])
        return Instance(combination, exported, drafts)

    def _add_needs(
        self, scope: Scope, step: Step, drafts: list[NodeDraft], required: list[list[NodeDraft]]
    ) -> None:
        """Make the steps of a used recipe depend on the dependencies of their `uses` step."""
        after: list[NodeDraft] = []
        for id in step.needs:
            after += scope.group(id)
        is_doubtful = any(self.sketch.skip_state(group).doubtful for group in required)
        for draft in drafts:
            draft.after += after
            draft.required = [*draft.required, *required]
            draft.doubtful |= is_doubtful
            self.sketch.skips |= draft.doubtful or bool(draft.flags & SKIP)

    def _required_groups(
        self, scope: Scope, step: Step, names: Mapping[str, Any]
    ) -> list[list[NodeDraft]]:
        """Return the nodes of each step that an instance of a `uses` step certainly depends on."""
        leaves = [leaf for _, leaf in templates(step, {})]
        known = {**names, "steps": KnownResults(self.sketch, scope, names["matrix"])}
        certain, _ = needed_steps([*leaves, *axis_leaves(step)], known)
        return scope.groups_of({*step.needs, *certain})

    def _bind_inputs(
        self, scope: Scope, step: Step, other: Recipe, given: dict[str, Any], preset: str | None
    ) -> dict[str, Tree] | None:
        """Bind the inputs of a used recipe, or report problems and return None."""
        try:
            return self.bind(other, given, preset=preset)
        except Invalid as error:
            at_with = scope.recipe.document.locate((*step.origin, "with"))
            for each in error.problems:
                message = f'in `with` of "{step.id}": {each.message}'
                found = Problem(each.code, message, each.where or at_with, each.fix)
                self.sketch.problems.append(found)
            return None

    def _bind_with(
        self, scope: Scope, step: Step, uses: Uses, other: Recipe, names: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the input values and secret variables that a `uses` step passes by `with`."""
        given: dict[str, Any] = {}
        variables: dict[str, str] = {}
        for name, leaf in uses.given.items():
            spec = other.inputs.get(name)
            place = (*step.origin, "with", name)
            if spec is not None and spec.type == "secret":
                variables |= self._hand_secret(scope, name, leaf, place)
                continue
            given[name] = value = self._evaluate_with(scope, step, spec, leaf, names, place)
            if _names_content(spec) and not is_path_value(value):
                self._check_whole_path(scope, name, leaf, names, place)
        return given, variables

    def _evaluate_with(
        self,
        scope: Scope,
        step: Step,
        spec: Input | None,
        leaf: Any,
        names: Mapping[str, Any],
        where: Where,
    ) -> Any:
        """Return the value of an entry of `with`, and report what is known only during the run.

        `spec` is the input of the used recipe, or None if it has no such input.
        """
        references = self.sketch.references(scope, leaf, where)
        late = [ref for ref in references if _is_late_reference(ref)]
        for ref in late:
            fix = "use this value in a step of this recipe instead"
            self._late(scope, step, ref, where, fix)
        if spec is not None:
            leaf = value_as_written(scope.recipe.document, spec, leaf, where)
        choice = choose_branches(self.sketch, scope, leaf, names)
        if choice.late and not late:
            self._chosen_late(scope, step, where)
        return self.sketch.evaluate(scope, leaf, choice.names, where)

    def _check_whole_path(
        self, scope: Scope, name: str, leaf: Any, names: Mapping[str, Any], where: Where
    ) -> None:
        """Report an entry of `with` that puts a path into a longer text."""
        # The inner recipe could not tell which step creates a file that is named in a text.
        if self._names_paths(scope, leaf, names, where):
            self.sketch.problem(
                scope.recipe,
                "path-in-text",
                f'"{name}" requires a whole output or input, not a path inside one',
                where,
                fix="pass the whole output and read the path in a step of that recipe, or declare the path as a separate output",
            )

    def _condition(self, scope: Scope, step: Step, names: Mapping[str, Any]) -> bool | None:
        """Evaluate the `when` of a `uses` step for one instance; return None if unknown."""
        if step.when is None:
            return True
        place = (*step.origin, "when")
        references = self.sketch.references(scope, step.when, place)
        late = [ref for ref in references if _is_metrics_reference(ref)]
        for ref in late:
            fix = "use this value in the `when` of a step with a command"
            self._late(scope, step, ref, place, fix)
        if late:
            return None
        choice = choose_branches(self.sketch, scope, step.when, names)
        if choice.late:
            self._chosen_late(scope, step, place)
        return self.sketch.condition(scope, step, choice.names)

    def _chosen_late(self, scope: Scope, step: Step, where: Where) -> None:
        message = (
            f'"{step.id}" depends on which steps are skipped, and that is not known before the run'
        )
        fix = "choose in a step with a command, and pass on its output"
        self.sketch.problem(scope.recipe, "late-name", message, where, fix=fix)

    def _late(self, scope: Scope, step: Step, ref: Reference, where: Where, fix: str) -> None:
        message = f'"{".".join(ref.path)}" is not known yet when "{step.id}" is planned'
        self.sketch.reference_problem(scope, "late-name", message, where, ref, fix)

    def _names_paths(self, scope: Scope, leaf: Any, names: Mapping[str, Any], where: Where) -> bool:
        """Return whether a template reads a path in the attempt directory."""
        for _, text in walk(leaf, where):
            for ref in self.sketch.references(scope, text, where):
                value: Any = names
                for part in ref.path:
                    value = value.get(part) if isinstance(value, Mapping) else None
                if is_path_value(value):
                    return True
        return False

    def _hand_secret(self, scope: Scope, name: str, leaf: Any, where: Where) -> dict[str, str]:
        """Return the environment variable for a secret input of a used recipe.

        It is the variable of the outer secret in `with`.
        """
        secret = _find_only_input(self.sketch.references(scope, leaf, where))
        if secret in scope.variables:
            return {name: scope.variables[secret]}
        self.sketch.problem(
            scope.recipe,
            "secret",
            f'"{name}" requires a secret',
            where,
            fix='pass a secret input, for example "{{ inputs.token }}"',
        )
        return {}

    def _export_outputs(self, inner: Scope, other: Recipe, prefix: str) -> dict[str, Any]:
        """Return the outputs of a used recipe, with paths below `prefix`."""
        found: dict[str, Any] = {}
        if other.outputs is None:
            for made in inner.results.values():
                found |= made
        else:
            for name, leaf in other.outputs.items():
                if inner.awaits(self.sketch.references(inner, leaf, ("outputs", name))):
                    continue
                names = {"inputs": inner.inputs, "steps": Results(inner)}
                choice = choose_branches(self.sketch, inner, leaf, names)
                value = self.sketch.evaluate(inner, leaf, choice.names, ("outputs", name))
                if value is not None:
                    found[name] = value
        moved: dict[str, Any] = {}
        for name, value in found.items():
            if isinstance(value, PathValue):
                moved[name] = _move_below(prefix, value)
            elif isinstance(value, list):
                moved[name] = [_move_below(prefix, each) for each in value]
        return moved


def _move_below(prefix: str, path: PathValue) -> PathValue:
    return PathValue(prefix + path.name, path.kind, path.address, path.member)


def _record_instances(scope: Scope, step: Step, instances: list[Instance]) -> None:
    """Record the nodes and outputs of a `uses` step for later templates.

    A matrix step has the outputs that all its instances have, as lists.
    """
    drafts: list[NodeDraft] = []
    for instance in instances:
        drafts += instance.drafts
    scope.inner[step.id] = drafts
    scope.made[step.id] = instances
    results = [instance.outputs for instance in instances]
    if step.matrix is None:
        scope.results[step.id] = dict(results[0]) if results else {}
        return
    scope.many.add(step.id)
    scope.results[step.id] = _join_outputs(results)


def _join_outputs(results: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Return the values of the outputs that all results have, as lists by name."""
    joined: dict[str, Tree] = {}
    if not results:
        return joined
    for name in results[0]:
        if all(name in outputs for outputs in results):
            joined[name] = [outputs[name] for outputs in results]
    return joined


def _names_content(spec: Input | None) -> bool:
    """Return whether the value of an input names files: a path, a dataset or a model."""
    if spec is None:
        return False
    return not {"file", "dataset", "model"}.isdisjoint((spec.type, spec.items))


def _find_only_input(refs: Sequence[Reference]) -> str:
    """Return the input that a template reads if it reads nothing else, or an empty string."""
    if len(refs) != 1:
        return ""
    path = refs[0].path
    return path[1] if len(path) == 2 and path[0] == "inputs" else ""


def _is_late_reference(ref: Reference) -> bool:
    """Return whether a reference has a value only during the run."""
    return _is_metrics_reference(ref) or ref.path[0] in LATE_NAMES


def _is_metrics_reference(ref: Reference) -> bool:
    """Return whether a reference has the form `steps.ID.metrics`."""
    return ref.path[0] == "steps" and ref.path[2:3] == ("metrics",)
