"""Plan of a run: the action for each step, with expected duration and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..execution.session import preview
from ..execution.terms import EVERYTHING, Choice
from ..planning.judge import MAYBE, RESTORE, RUN
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from ..survey.request import Request
from ..survey.survey import Survey
from ..survey.templates import refuse_unrenderable

if TYPE_CHECKING:
    from ..advice.estimates import StepEstimate


def plan_run(ws: Workspace, request: Request, choice: Choice = EVERYTHING) -> Survey:
    """Plan a run without executing it.

    Raises RecipeError with all problems, including templates that no attempt could render.
    """
    found = preview(ws, request, choice)
    refuse_unrenderable(ws, found)
    return found


class StepForecast(NamedTuple):
    """Forecast of a step: action (run, maybe, restore, fresh or skip), maximum duration and cost."""

    id: str
    answer: str
    reasons: Sequence[str]
    needs: Sequence[str]
    seconds: float | None
    usd: float | None
    estimate: StepEstimate | None
    """Set for a step that trains on GPUs and may run."""


def step_plans(ws: Workspace, found: Survey) -> list[StepForecast]:
    """Return the forecast of each step, in plan order."""
    from ..advice import estimates

    plan = found.plan
    expected = ws.store.index.expected_seconds(plan.recipe, [node.id for node in plan.nodes])
    estimated = estimates.estimate_plan(ws, plan, found.todo)
    steps = []
    for n, (node, verdict) in enumerate(zip(plan.nodes, found.verdicts, strict=True)):
        estimate: StepEstimate | None = None
        seconds: float | None = 0.0
        usd: float | None = 0.0
        if verdict.answer in (RUN, MAYBE):
            estimate = estimated.get(n)
            seconds, usd = expected.get(node.id), None
        if estimate is not None:
            if estimate.seconds:
                seconds = estimate.seconds[1]
            if estimate.usd:
                usd = estimate.usd[1]
        needs = sorted(plan.nodes[each].id for each in plan.dependencies(n))
        steps.append(
            StepForecast(node.id, verdict.answer, verdict.reasons, needs, seconds, usd, estimate)
        )
    return steps


def restored_bytes(ws: Workspace, found: Survey) -> int:
    """Return the total size of the outputs to restore, in bytes."""
    total = 0
    for n, verdict in enumerate(found.verdicts):
        if verdict.answer == RESTORE and n in found.made:
            total += sum(_size(ws, content) for content in found.made[n].outputs.values())
    return total


def _size(ws: Workspace, content: str) -> int:
    seal = ws.store.index.seal(Content(content))
    return seal.size if seal is not None and isinstance(seal.size, int) else 0
