"""Skipped steps of a run and their reasons, for the summary."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..planning.ids import bare
from ..planning.plan import SKIP, Node, Plan


def list_skipped_steps(plan: Plan, skipped: Collection[str], wanted: Collection[int]) -> list[str]:
    """Return a summary line for each step with skipped instances.

    Includes instances skipped by the plan among `wanted`, and by the run.
    """
    gone: set[int] = set()
    for n, node in enumerate(plan.nodes):
        is_skipped_by_plan = node.flags & SKIP and n in wanted
        if is_skipped_by_plan or node.id in skipped:
            gone.add(n)
    instances: dict[tuple[str, str], int] = {}
    for n in sorted(gone):
        line = bare(plan.nodes[n].id), _explain_skip(plan, n, gone)
        instances[line] = instances.get(line, 0) + 1
    several = {step for (step, _), count in instances.items() if count > 1}
    lines = []
    for (step, reason), count in instances.items():
        shown = f"{step} ({count} instances)" if step in several else step
        lines.append(f"{shown}: {reason}")
    return lines


def add_skipped_steps(
    counts: Mapping[str, int], plan: Plan, wanted: Collection[int]
) -> dict[str, int]:
    """Return the number of steps by state, including steps skipped during planning."""
    planned = sum(bool(plan.nodes[n].flags & SKIP) for n in wanted)
    if not planned:
        return dict(counts)
    return {**counts, "SKIPPED": counts.get("SKIPPED", 0) + planned}


def _explain_skip(plan: Plan, n: int, gone: Collection[int]) -> str:
    """Explain why a step is skipped: missing outputs, a skipped dependency, or its own condition."""
    node = plan.nodes[n]
    missing = _missing_outputs(plan, node, gone)
    if missing:
        more = ", …" if len(missing) > 3 else ""
        verb = "is" if len(missing) == 1 else "are"
        return f"{', '.join(missing[:3])}{more} {verb} missing"
    needed = [*(each.producer for each in node.late), *node.after, *node.choices]
    skipped = [bare(plan.nodes[each].id) for each in needed if each in gone]
    if skipped:
        names = list(dict.fromkeys(skipped))
        return f"{', '.join(names[:3])} is skipped"
    if "/" in node.id:
        return "its `when`, or the `when` of an enclosing step, is false"
    return "its `when` is false"


def _missing_outputs(plan: Plan, node: Node, gone: Collection[int]) -> list[str]:
    """Return the outputs of skipped steps that a step reads, except for a choice of steps."""
    choices = set(node.choices)
    missing: dict[str, None] = {}
    for each in node.upstream:
        if each.producer in gone and each.producer not in choices:
            missing[f"{each.name} of {bare(plan.nodes[each.producer].id)}"] = None
    return list(missing)
