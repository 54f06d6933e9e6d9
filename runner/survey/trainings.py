"""Which step of a plan trains, how many steps it takes, and what it reported when its result was made."""

from __future__ import annotations

from typing import Final, TypeGuard

from ..planning.run_view import training_from
from ..planning.training import Reporting, training_of
from ..storage.workspace import Workspace
from .survey import Survey

_TOTALS: Final = ("max_steps", "total_steps", "train_steps", "num_steps")
"""Inputs that say how many steps a training takes, unless `epochs` does, which takes counted data."""


def training_length(found: Survey, id: str) -> float | None:
    """Return how many steps the training of a step takes; None if its inputs do not say."""
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


def reporting_steps(ws: Workspace, found: Survey) -> list[Reporting]:
    """The steps of a plan that report metrics, in its order."""
    plan = found.plan
    specs = plan.specs()
    nodes = {n: node.id for n, node in enumerate(plan.nodes) if specs[n].metrics is not None}
    expected = ws.store.index.expected_seconds(plan.recipe, nodes.values()) if nodes else {}
    return [
        Reporting(
            id,
            any(each.checkpoint for each in specs[n].state),
            training_length(found, id),
            expected.get(id, 0.0),
        )
        for n, id in nodes.items()
    ]


def training_progress(ws: Workspace, found: Survey) -> tuple[str, str]:
    """The step of a plan that trains, and what is stored of what it reported if its result is there; both empty where none is."""
    id = training_of(reporting_steps(ws, found))
    key = found.verdicts[found.plan.index[id]].key if id else None
    trace = ws.store.index.trace(key) if key is not None else None
    if trace is None:
        return id, ""
    return id, training_from(trace.numbers, training_length(found, id)).text()
