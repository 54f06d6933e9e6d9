"""The training step of a plan: its step count, and the stored metrics of its result."""

from __future__ import annotations

from typing import Final, TypeGuard

from ..planning.run_view import training_from
from ..planning.training import ReportingStep, find_training
from ..storage.workspace import Workspace
from .survey import Survey

_TOTALS: Final = ("max_steps", "total_steps", "train_steps", "num_steps")
"""Inputs with the number of training steps. `epochs` takes precedence, but depends on the data."""


def training_length(found: Survey, id: str) -> float | None:
    """Return the number of training steps of a step, or None if its inputs do not tell."""
    n = found.plan.index.get(id)
    author = found.plan.specs()[n].author if n is not None else {}
    reads = author.get("reads", {})
    if any(_is_positive(reads.get(f"{kind}.epochs")) for kind in ("matrix", "inputs")):
        return None
    for name in _TOTALS:
        for kind in ("matrix", "inputs"):
            value = reads.get(f"{kind}.{name}")
            if _is_positive(value):
                return float(value)
    return None


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and value > 0


def reporting_steps(ws: Workspace, found: Survey) -> list[ReportingStep]:
    """Return the plan's steps that report metrics, in order."""
    plan = found.plan
    specs = plan.specs()
    nodes = {n: node.id for n, node in enumerate(plan.nodes) if specs[n].metrics is not None}
    expected = ws.store.index.expected_seconds(plan.recipe, nodes.values()) if nodes else {}
    steps = []
    for n, id in nodes.items():
        keeps_checkpoints = any(each.checkpoint for each in specs[n].state)
        length, seconds = training_length(found, id), expected.get(id, 0.0)
        steps.append(ReportingStep(id, keeps_checkpoints, length, seconds))
    return steps


def training_progress(ws: Workspace, found: Survey) -> tuple[str, str]:
    """Return the training step of a plan and its stored metrics. Either may be empty."""
    id = find_training(reporting_steps(ws, found))
    key = found.verdicts[found.plan.index[id]].key if id else None
    trace = ws.store.index.trace(key) if key is not None else None
    if trace is None:
        return id, ""
    return id, training_from(trace.numbers, training_length(found, id)).text()
