"""Check before a run that the templates of all steps that may run can be rendered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import Invalid
from ..planning.judge import MAYBE, RUN
from ..planning.plan import SKIP
from .plan_cache import compile_on_trial

if TYPE_CHECKING:
    from pathlib import Path

    from ..planning.plan import Plan
    from ..storage.workspace import Workspace
    from .request import Request
    from .survey import Survey


def refuse_unrenderable(ws: Workspace, found: Survey) -> None:
    """Raise Invalid, with all locations, if templates of a step that may run cannot be rendered."""
    nodes = [n for n in found.todo if found.verdicts[n].answer in (RUN, MAYBE)]
    if nodes:
        refuse_nodes(ws, found.source, found.request, found.plan, nodes, found.globs)


def refuse_nodes(
    ws: Workspace,
    source: Path,
    request: Request,
    plan: Plan,
    nodes: Iterable[int],
    known: dict[str, tuple[str, ...]],
) -> None:
    """Raise Invalid if the templates of one of these plan nodes cannot be rendered.

    `known` has the matches of globs below outputs.
    """
    from ..planning.trial import faults, find_hook_faults, scene_of

    specs = plan.specs()
    wrong: set[str] = set()
    for n in nodes:
        spec, node = specs[n], plan.nodes[n]
        if spec.select is not None or node.flags & SKIP:
            continue
        if list(faults(spec, scene_of(spec, node.id, plan.recipe))):
            wrong.add(node.id)
    hooks = any(True for _ in find_hook_faults(plan.settings, plan.inputs))
    if not wrong and not hooks:
        return
    from ..planning.beforehand import HOOKS, DryRun

    if hooks:
        wrong.add(HOOKS)
    # What cannot be rendered is compiled again, slowly, for the errors with their places.
    trial = DryRun(wanted=wrong.__contains__)
    compile_on_trial(ws, source, request, known, trial)
    raise Invalid(trial.problems)
