"""How two runs differ, as people and programs read it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import NamedTuple

from ..differences import ASPECTS, Manifest, Ran, all_of, as_json, compare, values
from ..tail import named

_LISTED, _STEPS = 10, 50
"""Steps that only one run has, and that differ, which are listed."""


class Compared(NamedTuple):
    """A run that is compared with another."""

    head: str
    inputs: Mapping[str, object]
    ran: Mapping[str, Ran]
    facts: Mapping[str, object]
    """What `--json` prints of it."""


def tell(a: Compared, b: Compared, held: Manifest, args: argparse.Namespace) -> None:
    """Print what differs between two runs."""
    inputs, steps = values(a.inputs, b.inputs), compare(a.ran, b.ran)
    if args.json:
        differences = [
            {
                "id": step.id,
                "states": list(step.states),
                "only": step.only or None,
                "changes": {
                    name: [as_json(change, held) for change in changes]
                    for name, changes in step.changes.items()
                },
            }
            for step in steps
        ]
        print(
            json.dumps(
                {
                    "a": a.facts,
                    "b": b.facts,
                    "inputs": [as_json(change, held) for change in inputs],
                    "steps": differences,
                },
                indent=2,
            )
        )
        return
    for letter, run in (("A", a), ("B", b)):
        print(f"{letter}  {run.head}")
    lines = ["inputs", *all_of(inputs, held, "  ")] if inputs else []
    differing = [
        step
        for step in steps
        if not step.only and (step.changes or step.states[0] != step.states[1])
    ]
    listed = differing if args.verbose else differing[:_STEPS]
    for step in listed:
        lines.append(
            named(step.id)
            + (
                f"  {step.states[0]} -> {step.states[1]}"
                if step.states[0] != step.states[1]
                else ""
            )
        )
        for name in ASPECTS:
            changes = step.changes.get(name, ())
            lines += [f"  {name}", *all_of(changes, held, "    ")] if changes else []
    if len(differing) > len(listed):
        lines.append(f"… and {len(differing) - len(listed)} more steps differ (-v shows all)")
    print("\n".join(lines) if lines else "no differences in the steps that both ran")
    for letter, other in (("A", "B"), ("B", "A")):
        only = [step.id for step in steps if step.only == letter]
        if only:
            more = f" and {len(only) - _LISTED} more" if len(only) > _LISTED else ""
            print(
                f"only in {letter}, cached in {other} or not part of it: {named(', '.join(only[:_LISTED]))}{more}"
            )
