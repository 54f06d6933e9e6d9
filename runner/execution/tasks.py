"""Input of the scheduler: one task for each step of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from ..planning.plan import ALLOW_FAILURE, Plan
from ..planning.schedule import Task, priorities
from ..survey.survey import Survey


def tasks_of(
    plan: Plan, ids: Collection[str], todo: set[str], expected: Mapping[str, float]
) -> list[Task]:
    """Return scheduler tasks for the steps `ids` in plan order, with dependencies among `todo`.

    Steps on the longest path to the end get the highest priority.
    """
    specs = plan.specs()
    tasks = []
    for n, node in enumerate(plan.nodes):
        if node.id not in ids:
            continue
        spec = specs[n]
        dependencies = {plan.nodes[u].id for u in plan.dependencies(n)} & todo
        # The choices of a `select`, and matrix instances or steps inside one.
        many = {plan.nodes[u].id for u in node.choices} & dependencies
        many |= {each for each in dependencies if "[" in each.removeprefix(node.prefix)}
        pools = dict(spec.resources.room)
        for name, amount in spec.resources.pools.items():
            pools[name] = float(amount)
        if spec.node_count > 1:
            pools = {name: amount * spec.node_count for name, amount in pools.items()}
        tasks.append(
            Task(
                node.id,
                tuple(dependencies - many),
                tuple(many),
                pools,
                spec.options.retries,
                spec.options.preemptions,
                bool(node.flags & ALLOW_FAILURE),
            )
        )
    if len(tasks) > 1 and expected:
        weights = priorities(tasks, expected) if ids == todo else {}
        tasks = [each._replace(priority=weights.get(each.id, 0.0)) for each in tasks]
    return tasks


MANY: Final = 200
"""Maximum number of contents that a host is asked about in advance."""


def find_given_contents(found: Survey) -> list[str]:
    """Return the digests of the caller's files that the steps to run read, at most `MANY`."""
    nodes = [found.plan.nodes[n] for n in found.todo]
    contents: list[str | None] = []
    for node in nodes:
        for dep in node.deps:
            paths = found.facts.matches.get(dep, (dep,))
            contents += [found.facts.files.get(path) for path in paths]
    for node in nodes:
        whole = [source for source in node.takes if source.kind == "path" and not source.only]
        contents += [found.facts.takes.get(source.lookup_key) for source in whole]
    return list(dict.fromkeys(filter(None, contents)))[:MANY]


def pattern_of(found: Survey, id: str) -> str | None:
    """Return the pattern for metrics in a step's log; None if the step has no such pattern."""
    n = found.plan.index.get(id)
    metrics = found.plan.specs()[n].metrics if n is not None else None
    return metrics.pattern if metrics is not None else None
