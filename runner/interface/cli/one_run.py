"""Print one run with its steps and outputs, as text or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from ...language.units import about
from ..tables import align
from ..tail import safe_ids, safe_line, span
from .targets import format_time

if TYPE_CHECKING:
    from ...api.values import Failed, Status, StepStatus

SHOWN: Final = ("loss", "train_loss", "eval_loss")
"""Training metrics that are shown next to a step's progress."""


def print_run(found: Status, args: argparse.Namespace) -> int:
    """Print the state, steps and outputs of one run."""
    if args.json:
        print(json.dumps(fields_as_json(found), indent=2))
        return 0
    percent = (
        f" {found.progress.percent:.0f}%"
        if found.progress.percent is not None and not found.over
        else ""
    )
    eta = f", {span(found.progress.eta)} left" if found.progress.eta and not found.over else ""
    took = format_duration(found)
    print(
        safe_line(
            f"{found.id}  {found.recipe}  {format_moment(found.created)}  {found.word}{percent}{eta}{f' in {took}' if took and found.over else ''}"
        )
    )
    facts = [
        ("reason", found.reason),
        ("waits", _waits(found)),
        ("asked", found.request),
        ("inputs", inputs_as_typed(found)),
        ("driver", found.driver if found.driver != "local" else ""),
    ]
    facts += [
        ("user", found.user),
        ("cost", f"${found.cost:.2f}" if found.cost else ""),
        *sorted(found.labels.items()),
    ]
    for name, value in facts:
        if value:
            print(f"{name}: {safe_line(value)}")
    steps = [
        (
            safe_ids(each.id),
            each.state,
            str(each.attempts or ""),
            span(each.seconds) if each.seconds is not None else "",
            safe_line(each.host),
            _activity_of(each),
        )
        for each in found.steps
    ]
    if steps:
        head = ("STEP", "STATE", "ATTEMPTS", "TIME", "HOST", "WHY")
        print("\n".join(align([head, *steps], range(2, 4))))
    if found.failed is not None:
        print("\n".join(_failure(found.failed)))
    for warning in found.warnings:
        print(f"warning: {safe_ids(warning)}")
    for link in found.links:
        print(f"{safe_line(link.name)}: {safe_line(link.to)}  ({safe_ids(link.step)})")
    for output in found.outputs:
        print(
            f"{safe_ids(output.name)}  {about(output.bytes) if output.bytes is not None else ''}{' (folder)' if output.folder else ''}"
        )
    return 0


def _waits(found: Status) -> str:
    """Return why a run waits, the remedy, and its position in the queue; empty if it does not wait."""
    if found.waits is None:
        return ""
    fix = f"; {found.waits.fix}" if found.waits.fix else ""
    return f"{found.waits.words}{fix} (number {found.position} of those that wait)"


def _activity_of(step: StepStatus) -> str:
    """Return the progress of a running step; for other steps, the reason for their state."""
    at, total, percent, eta = step.progress
    if step.state != "RUNNING":
        return safe_line(step.reason)
    said = [step.reason]
    if at is not None:
        said.append(f"step {at:.0f}" + (f"/{total:.0f}" if total else ""))
    if percent is not None:
        said.append(f"{percent:.0f}%")
    if eta:
        said.append(f"{span(eta)} left")
    said += [f"{name} {value:.4g}" for name, value in step.values.items() if name in SHOWN]
    return safe_line("  ".join(filter(None, said)))


def _failure(failed: Failed) -> list[str]:
    """Return lines with a run's failure, the last log lines of the failed step, and the fix."""
    name = safe_ids(failed.step)
    text = [
        f"{name}: failed: {safe_ids(failed.words)}" if name else f"failed: {safe_ids(failed.words)}"
    ]
    text += [f"  {name} | {safe_line(line)}" for line in failed.lines]
    return [*text, f"  fix: {safe_ids(failed.fix)}"] if failed.fix else text


def fields_as_json(found: NamedTuple) -> dict[str, object]:
    """Convert a named tuple to a mapping for JSON output."""
    return {name: _as_json(value) for name, value in found._asdict().items()}


def _as_json(value: object) -> object:
    """Convert a value for JSON; named tuples become mappings and other tuples lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _as_json(inner) for name, inner in value._asdict().items()}
    return [_as_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def inputs_as_typed(found: Status) -> str:
    """Format the preset and inputs of a run as on the command line."""
    words: Sequence[str] = [f"--preset {found.preset}"] if found.preset else []
    return " ".join([*words, *(f"{name}={value}" for name, value in found.inputs.items())])


def format_moment(text: str) -> str:
    """Format an RFC 3339 time in the local time zone."""
    return format_time(datetime.fromisoformat(text).timestamp()) if text else ""


def format_duration(found: Status) -> str:
    """Return the duration of a finished run; empty for an unfinished run."""
    if not found.ended or not found.created:
        return ""
    return span(
        (
            datetime.fromisoformat(found.ended) - datetime.fromisoformat(found.created)
        ).total_seconds()
    )
