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
    from ..language.recipe import Recipe, Select, Step


def add_select(sketch: Sketch, used: Mapping[str, Recipe], scope: Scope, step: Step) -> None:
    """Add the node of a `select` step.

    If its target cannot be compared, report a problem instead.
    """
    select = step.select
    assert select is not None
    if select.source in scope.pending:
        sketch.wait(scope, step, steps_of(step))
        return
    scope.results[step.id] = {}
    compared = _find_compared(sketch, used, scope, step, select)
    if compared is None:
        return
    instances = scope.instances(select.step)
    draft = _add_draft(sketch, scope, step)
    _add_outputs(draft, compared, instances)
    _add_producers(draft, select.metric, instances)
    _add_needs(scope, draft)
    _decide_skip(sketch, scope, draft)
    draft.author = {"select": [select.metric, select.best]}
    draft.spec = _spec_of(draft, select)
    scope.results[step.id] = {name: output_of(draft, name) for name in draft.outputs}


def _find_compared(
    sketch: Sketch, used: Mapping[str, Recipe], scope: Scope, step: Step, select: Select
) -> Step | None:
    """Return the step whose instances are compared; None if there is none.

    A target that cannot be compared is reported.
    """
    found = find_selected(scope.recipe, used, select.step)
    if not isinstance(found, TargetProblem):
        return found
    where = (*step.origin, "select")
    sketch.problem(scope.recipe, found.code, found.message, where, fix=found.fix)
    return None


def _add_draft(sketch: Sketch, scope: Scope, step: Step) -> NodeDraft:
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
    return draft


def _spec_of(draft: NodeDraft, select: Select) -> StepSpec:
    return StepSpec(
        recipe=draft.recipe.id,
        step=draft.step.id,
        author=draft.author,
        resources=resource_spec(draft.step.resources),
        select=SelectSpec(select.metric, select.best),
    )


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
    """Make a `select` node read the outputs and the metric of the compared instances.

    If all of them are skipped, so is the node.
    """
    possible = [each for each in instances if not each.flags & SKIP]
    for name in draft.outputs:
        for each in possible:
            draft.upstream[f"{each.id}/{name}"] = (each, name, "")
    for each in possible:
        draft.late[each.id, metric] = each
    if instances:
        draft.required.append(instances)


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
