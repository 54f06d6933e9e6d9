"""Compile a `select` step, whose outputs are those of the best instance of another step."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .drafts import NodeDraft, Results, Scope, Sketch, output_flags, output_of, resource_spec
from .mentions import TargetProblem, find_selected, steps_of
from .plan import SELECT, SKIP
from .step import SelectSpec, StepSpec

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step


def add_select(sketch: Sketch, used: Mapping[str, Recipe], scope: Scope, step: Step) -> None:
    """Add the node of a `select` step.

    If its target cannot be compared, report a problem instead.
    """
    assert step.select is not None
    if step.select.source in scope.pending:
        sketch.wait(scope, step, steps_of(step))
        return
    scope.results[step.id] = {}
    compared = find_selected(scope.recipe, used, step.select.step)
    if isinstance(compared, TargetProblem):
        where = (*step.origin, "select")
        sketch.problem(scope.recipe, compared.code, compared.message, where, fix=compared.fix)
        return
    if compared is None:
        return
    instances = scope.instances(step.select.step)
    draft = NodeDraft(
        f"{scope.prefix}{step.id}",
        step,
        scope.recipe,
        scope.home,
        scope.prefix,
        scope.inputs,
        {},
        flags=SELECT,
        order=len(sketch.drafts),
    )
    sketch.drafts.append(draft)
    scope.groups[step.id] = [draft]
    _add_outputs(draft, compared, instances)
    _add_producers(draft, step.select.metric, instances)
    if instances:
        draft.required.append(instances)
    _add_needs(scope, draft)
    _decide_skip(sketch, scope, draft)
    draft.author = {"select": [step.select.metric, step.select.best]}
    draft.spec = StepSpec(
        recipe=scope.recipe.id,
        step=step.id,
        author=draft.author,
        resources=resource_spec(step.resources),
        select=SelectSpec(step.select.metric, step.select.best),
    )
    scope.results[step.id] = {name: output_of(draft, name) for name in draft.outputs}


def _add_outputs(draft: NodeDraft, compared: Step, instances: list[NodeDraft]) -> None:
    """Give a `select` node the outputs of the compared step, with their common suffixes."""
    if instances:
        flags_by_name = {name: flags for name, (_, flags) in instances[0].outputs.items()}
    else:
        flags_by_name = {output.name: output_flags(output) for output in compared.outputs}
    for name, flags in flags_by_name.items():
        suffixes = {posixpath.splitext(each.outputs[name][0])[1] for each in instances}
        suffix = suffixes.pop() if len(suffixes) == 1 else ""
        draft.outputs[name] = (f"{draft.step.id}/{name}{suffix}", flags)


def _add_producers(draft: NodeDraft, metric: str, instances: list[NodeDraft]) -> None:
    """Make a `select` node read the outputs and the metric of the compared instances."""
    possible = [each for each in instances if not each.flags & SKIP]
    for name in draft.outputs:
        for each in possible:
            draft.upstream[f"{each.id}/{name}"] = (each, name, "")
    for each in possible:
        draft.late[each.id, metric] = each


def _add_needs(scope: Scope, draft: NodeDraft) -> None:
    """Run a `select` node after the steps in its `needs`."""
    for id in draft.step.needs:
        draft.after += scope.group(id)
    draft.required += [[each] for each in draft.after]


def _decide_skip(sketch: Sketch, scope: Scope, draft: NodeDraft) -> None:
    """Skip a `select` node if its condition is false or its dependencies are skipped."""
    step = draft.step
    if step.when is not None:
        names = {"inputs": scope.inputs, "steps": Results(scope)}
        if sketch.condition(scope, step, names) is False:
            draft.flags |= SKIP
    standings = [sketch.skip_state(group) for group in draft.required]
    if any(standing.skipped for standing in standings):
        draft.flags |= SKIP
    draft.doubtful = any(standing.doubtful for standing in standings)
    sketch.skips |= draft.doubtful or bool(draft.flags & SKIP)
