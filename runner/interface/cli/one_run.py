"""Print one run with its steps and outputs, as text or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from ...language.units import about
from ..tables import align
from ..tail import safe_ids, safe_line, span
from .targets import format_time

if TYPE_CHECKING:
    from ...api.values import Failed, LinkTo, OutputFile, Status, StepProgress, StepStatus

SHOWN: Final = ("loss", "train_loss", "eval_loss")
"""Training metrics that are shown next to a step's progress."""


def print_run(found: Status, args: argparse.Namespace) -> int:
    """Print the state, steps and outputs of one run."""
    if args.json:
        print(json.dumps(fields_as_json(found), indent=2))
    else:
        print("\n".join(_run_lines(found)))
    return 0


def _run_lines(found: Status) -> list[str]:
    lines = [_headline(found)]
    lines += [f"{name}: {safe_line(value)}" for name, value in _facts(found) if value]
    if found.steps:
        head = ("STEP", "STATE", "ATTEMPTS", "TIME", "HOST", "WHY")
        lines += align([head, *map(_step_cells, found.steps)], range(2, 4))
    if found.failed is not None:
        lines += _failure(found.failed)
    lines += [f"warning: {safe_ids(warning)}" for warning in found.warnings]
    lines += [_link_line(link) for link in found.links]
    lines += [_output_line(output) for output in found.outputs]
    return lines


def _link_line(link: LinkTo) -> str:
    return f"{safe_line(link.name)}: {safe_line(link.to)}  ({safe_ids(link.step)})"


def _output_line(output: OutputFile) -> str:
    """Return the name of an output, its size if known, and a mark of directories."""
    size = about(output.bytes) if output.bytes is not None else ""
    kind = " (folder)" if output.folder else ""
    return f"{safe_ids(output.name)}  {size}{kind}"


def _headline(found: Status) -> str:
    """Format the id, recipe, start, state and progress or duration of a run."""
    line = f"{found.id}  {found.recipe}  {format_moment(found.created)}  {found.word}"
    duration = format_duration(found)
    if found.over and duration:
        line += f" in {duration}"
    if not found.over:
        if found.progress.percent is not None:
            line += f" {found.progress.percent:.0f}%"
        if found.progress.eta:
            line += f", {span(found.progress.eta)} left"
    return safe_line(line)


def _facts(found: Status) -> list[tuple[str, str]]:
    """Return the named facts of a run; the text of an absent fact is empty."""
    # The default driver is not worth a line.
    driver = found.driver if found.driver != "local" else ""
    cost = f"${found.cost:.2f}" if found.cost else ""
    return [
        ("reason", found.reason),
        ("waits", _waits(found)),
        ("asked", found.request),
        ("inputs", inputs_as_typed(found)),
        ("driver", driver),
        ("user", found.user),
        ("cost", cost),
        *sorted(found.labels.items()),
    ]


def _step_cells(step: StepStatus) -> tuple[str, ...]:
    duration = span(step.seconds) if step.seconds is not None else ""
    return (
        safe_ids(step.id),
        step.state,
        str(step.attempts or ""),
        duration,
        safe_line(step.host),
        _activity_of(step),
    )


def _waits(found: Status) -> str:
    """Return why a run waits, the remedy, and its position in the queue; empty if it does not wait."""
    if found.waits is None:
        return ""
    fix = f"; {found.waits.fix}" if found.waits.fix else ""
    return f"{found.waits.words}{fix} (position {found.position} in the queue)"


def _activity_of(step: StepStatus) -> str:
    """Return the progress of a running step; for other steps, the reason for their state."""
    if step.state != "RUNNING":
        return safe_line(step.reason)
    metrics = [f"{name} {value:.4g}" for name, value in step.values.items() if name in SHOWN]
    parts = [step.reason, *_progress_parts(step.progress), *metrics]
    return safe_line("  ".join(filter(None, parts)))


def _progress_parts(progress: StepProgress) -> Iterator[str]:
    """Yield the training step, the percentage and the remaining time, if known."""
    number, total, percent, eta = progress
    if number is not None:
        of_total = f"/{total:.0f}" if total else ""
        yield f"step {number:.0f}{of_total}"
    if percent is not None:
        yield f"{percent:.0f}%"
    if eta:
        yield f"{span(eta)} left"


def _failure(failed: Failed) -> list[str]:
    """Return lines with a run's failure, the last log lines of the failed step, and the fix."""
    name = safe_ids(failed.step)
    subject = f"{name}: " if name else ""
    lines = [f"{subject}failed: {safe_ids(failed.words)}"]
    lines += [f"  {name} | {safe_line(line)}" for line in failed.lines]
    if failed.fix:
        lines.append(f"  fix: {safe_ids(failed.fix)}")
    return lines


def fields_as_json(found: NamedTuple) -> dict[str, object]:
    """Convert a named tuple to a mapping for JSON output."""
    return {name: _as_json(value) for name, value in found._asdict().items()}


def _as_json(value: object) -> object:
    """Convert a value for JSON; named tuples become mappings and other tuples lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _as_json(inner) for name, inner in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    return value


def inputs_as_typed(found: Status) -> str:
    """Format the preset and inputs of a run as on the command line."""
    words = [f"--preset {found.preset}"] if found.preset else []
    words += [f"{name}={value}" for name, value in found.inputs.items()]
    return " ".join(words)


def format_moment(text: str) -> str:
    """Format an RFC 3339 time in the local time zone."""
    if not text:
        return ""
    return format_time(datetime.fromisoformat(text).timestamp())


def format_duration(found: Status) -> str:
    """Return the duration of a finished run; empty for an unfinished run."""
    if not found.ended or not found.created:
        return ""
    duration = datetime.fromisoformat(found.ended) - datetime.fromisoformat(found.created)
    return span(duration.total_seconds())
