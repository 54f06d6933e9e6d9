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
        sketch.problem(
            scope.recipe,
            compared.code,
            compared.message,
            (*step.origin, "select"),
            fix=compared.fix,
        )
    if compared is None or isinstance(compared, TargetProblem):
        return
    source = scope.instances(step.select.step)
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
    made = (
        {name: flags for name, (_, flags) in source[0].outputs.items()}
        if source
        else {o.name: output_flags(o) for o in compared.outputs}
    )
    for name, flags in made.items():
        suffixes = {posixpath.splitext(d.outputs[name][0])[1] for d in source}
        suffix = suffixes.pop() if len(suffixes) == 1 else ""
        draft.outputs[name] = (f"{step.id}/{name}{suffix}", flags)
        for d in source:
            if not d.flags & SKIP:
                draft.upstream[f"{d.id}/{name}"] = (d, name, "")
    for d in source:
        if not d.flags & SKIP:
            draft.late[(d.id, step.select.metric)] = d
    draft.after = [
        d for id in step.needs for d in (scope.groups.get(id) or scope.inner.get(id) or [])
    ]
    draft.wants = [*([source] if source else ()), *([d] for d in draft.after)]
    if (
        step.when is not None
        and sketch.condition(scope, step, {"inputs": scope.inputs, "steps": Results(scope)})
        is False
    ):
        draft.flags |= SKIP
    standings = [sketch.skip_state(group) for group in draft.wants]
    if any(standing.skipped for standing in standings):
        draft.flags |= SKIP
    draft.doubtful = any(standing.doubtful for standing in standings)
    sketch.skips |= draft.doubtful or bool(draft.flags & SKIP)
    draft.author = {"select": [step.select.metric, step.select.best]}
    draft.spec = StepSpec(
        recipe=scope.recipe.id,
        step=step.id,
        author=draft.author,
        resources=resource_spec(step.resources),
        select=SelectSpec(step.select.metric, step.select.best),
    )
    scope.results[step.id] = {name: output_of(draft, name) for name in draft.outputs}
