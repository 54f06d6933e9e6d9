"""Print the differences between two runs as text or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...api.differences import ASPECTS, Differences, StepDifference
from ..differences import all_of, as_json
from ..tail import safe_ids, safe_line, span
from .one_run import format_moment
from .overview import overview

if TYPE_CHECKING:
    from ...api.values import Status

_LISTED, _STEPS = 10, 50
"""Number of listed steps that only one run has, and of listed steps that differ."""


def print_differences(a: Status, b: Status, found: Differences, args: argparse.Namespace) -> None:
    """Print the differences between two runs."""
    if args.json:
        facts = {"a": overview(a), "b": overview(b), **_facts(found)}
        print(json.dumps(facts, indent=2))
        return
    print(f"A  {_head(a)}\nB  {_head(b)}")
    lines = ["inputs", *all_of(found.inputs, "  ")] if found.inputs else []
    lines += _of_steps(found.steps, all=bool(args.verbose))
    print("\n".join(lines or ["no differences in the steps that both ran"]))
    for letter, other in (("A", "B"), ("B", "A")):
        only = [step.id for step in found.steps if step.only == letter]
        if only:
            more = f" and {len(only) - _LISTED} more" if len(only) > _LISTED else ""
            ids = safe_ids(", ".join(only[:_LISTED]))
            print(f"only in {letter}, cached in {other} or not part of it: {ids}{more}")


def _facts(found: Differences) -> dict[str, object]:
    inputs = [as_json(change) for change in found.inputs]
    return {"inputs": inputs, "steps": [_step_facts(step) for step in found.steps]}


def _step_facts(step: StepDifference) -> dict[str, object]:
    changes = {name: list(map(as_json, each)) for name, each in step.changes.items()}
    return {
        "id": step.id,
        "states": list(step.states),
        "only": step.only or None,
        "changes": changes,
    }


def _head(run: Status) -> str:
    """Format a run's summary line."""
    seconds = overview(run)["seconds"]
    took = f" in {span(seconds)}" if seconds is not None else ""
    tally = f"{run.counts.ran} ran, {run.counts.fresh} fresh, {run.counts.failed} failed"
    return f"{run.id}  {safe_line(run.recipe)}  {format_moment(run.created)}  {run.word}{took}: {tally}"


def _differs(step: StepDifference) -> bool:
    before, after = step.states
    return bool(step.changes) or before != after


def _of_steps(steps: Sequence[StepDifference], *, all: bool) -> list[str]:
    """Return lines for the steps of both runs that differ; at most 50 steps unless `all`."""
    differing = [step for step in steps if not step.only and _differs(step)]
    listed = differing if all else differing[:_STEPS]
    lines = []
    for step in listed:
        before, after = step.states
        states = f"  {before} -> {after}" if before != after else ""
        lines.append(f"{safe_ids(step.id)}{states}")
        for name in ASPECTS:
            changes = step.changes.get(name, ())
            if changes:
                lines += [f"  {name}", *all_of(changes, "    ")]
    if len(differing) > len(listed):
        lines.append(f"… and {len(differing) - len(listed)} more steps differ (-v shows all)")
    return lines
