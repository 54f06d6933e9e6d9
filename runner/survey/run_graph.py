"""Build and store the graph of a run: step dependencies, instance counts, and the keys of
up-to-date steps.
"""

from __future__ import annotations

import json

from ..planning.ids import bare
from ..planning.judge import FRESH, RESTORE
from ..storage.run_graph import RunGraph, file_of
from ..storage.workspace import Workspace
from .survey import Survey
from .trainings import training_progress

MOST = 5000
"""Maximum up-to-date instances stored by name."""


def build_graph(ws: Workspace, found: Survey) -> RunGraph:
    """Build the step graph of a plan, with its up-to-date steps and its training step."""
    steps = [bare(node.id) for node in found.plan.nodes]
    needs: dict[str, dict[str, None]] = {}
    instances: dict[str, int] = {}
    for n, step in enumerate(steps):
        instances[step] = instances.get(step, 0) + 1
        needed = needs.setdefault(step, {})
        for each in sorted(found.plan.dependencies(n)):
            if steps[each] != step:
                needed[steps[each]] = None
    fresh = []
    for node, verdict in zip(found.plan.nodes, found.verdicts, strict=True):
        if verdict.answer in (FRESH, RESTORE):
            fresh.append((node.id, verdict.key))
    needs_of_step = {step: list(needed) for step, needed in needs.items()}
    keys = {id: key for id, key in fresh[:MOST] if key}
    return RunGraph(needs_of_step, instances, keys, *training_progress(ws, found))


def store_graph(ws: Workspace, run: str, found: Survey) -> RunGraph:
    """Store the step graph of a starting run, and return the graph."""
    graph = build_graph(ws, found)
    ws.write(file_of(ws.home, run), json.dumps(graph._asdict()).encode())
    return graph
