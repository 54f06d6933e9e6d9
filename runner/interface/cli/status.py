"""`recipe status`: list outdated steps, edited and stale outputs, and unfinished runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from ...api.differences import without_files
from ...execution.session import preview
from ...planning.judge import FRESH, SKIPPED
from ...planning.waiting import WaitKind
from ...survey.samples import describe_samples
from ...survey.upkeep import examine_published, find_stale
from ..differences import lines
from ..handle.local_transport import LocalTransport
from ..handle.shells import runs_of
from ..handle.transport import Listing, Transport
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP
from .overview import ProgressOverview, overview
from .targets import (
    add_request_words,
    count_verdicts,
    describe_counts,
    describe_request,
    format_time,
    resolve_requests,
)
from .transports import transport_for_reading
from .why import differences, explain_missing_result

if TYPE_CHECKING:
    from ...api.values import Status, StepProgress
    from ...storage.records.runs import AttemptRow
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey


FEW = 20
LISTED: Final = 1000
"""Maximum number of unfinished runs to read."""
SOME = 3
"""Maximum number of metrics shown for a running step."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_request_words(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.description = (
        "Show which outputs are up to date, out of date or stale (left by earlier runs "
        "and no longer produced). Exits with 0 if everything is up to date, otherwise "
        "with 1."
    )
    parser.epilog = (
        "Examples:\n  recipe status\n  recipe status -q ./pipeline.yaml || echo 'not up to date'"
    )


def run(args: argparse.Namespace) -> int:
    with closing(transport_for_reading(args)) as transport:
        reports = _report_recipes(transport, args)
        unfinished = find_unfinished(transport)
    if args.json:
        print(json.dumps({"recipes": reports, **unfinished._asdict()}, indent=2))
    elif not args.quiet:
        lines = []
        for each in reports:
            lines += as_text(each, all=bool(args.verbose))
        lines += runs_as_text(unfinished)
        print("\n".join(lines or ["no run is active, queued or paused"]))
    is_fresh = all(each["fresh"] for each in reports)
    return 0 if is_fresh else 1


def _report_recipes(transport: Transport, args: argparse.Namespace) -> list[RecipeStatus]:
    """Return the status of each requested recipe.

    A server has no status of recipes, because it has no workspace whose outputs could be up to
    date.
    """
    if not isinstance(transport, LocalTransport):
        return []
    ws = transport.ws
    return [report(ws, preview(ws, request)) for request in resolve_requests(ws, args)]


def runs_as_text(found: UnfinishedRuns) -> list[str]:
    """Format the unfinished runs."""
    lines = []
    for row in found.running:
        lines += _running_lines(row)
    for row in found.queued:
        lines.append(f"queued: {_since(row)}; execute it with `recipe worker`")
    for row in found.paused:
        lines.append(f"paused: {_since(row)}; `recipe resume {row['run']}` continues it")
    for row in found.died:
        begun = f"{row['run']} {safe_line(row['recipe'])}, started {format_time(row['created'])}"
        lines.append(f"died: {begun}{_cost_so_progress_text(row)}; resume it with `recipe run`")
    return lines


def _running_lines(row: UnfinishedRun) -> list[str]:
    """Return lines for a running run, its running steps and its links."""
    since = f"since {format_time(row['created'])}{_progress_text(row)}{_cost_so_progress_text(row)}"
    recipe, logs = safe_line(row["recipe"]), f"recipe logs {row['run']} -f"
    lines = [f"running: {row['run']} {recipe}, {since} ({logs})"]
    for id, sample in row["steps"].items():
        lines.append(f"  {safe_ids(id)}: {pulse(sample, _last_numbers(row, id))}")
    for link in row["links"]:
        name, url = safe_line(link["name"]), safe_line(link["to"])
        lines.append(f"  {safe_ids(link['step'])}: {name} {url}")
    return lines


def _since(row: UnfinishedRun) -> str:
    return f"{row['run']} {safe_line(row['recipe'])}, since {format_time(row['created'])}"


class OutdatedStep(TypedDict):
    """An outdated step in `--json` output."""

    id: str
    answer: str
    reasons: list[str]


class RecipeStatus(TypedDict):
    """Status of a recipe in `--json` output."""

    recipe: str
    title: str
    fresh: bool
    counts: dict[str, int]
    steps: list[OutdatedStep]
    edited: list[str]
    stale: list[str]


class UnfinishedRun(TypedDict):
    """A started run in `--json` output."""

    run: str
    recipe: str
    created: float
    state: str
    progress: ProgressOverview
    steps: dict[str, dict[str, float]]
    """Progress of each running step, with the load of its machine after the first 5 seconds."""
    numbers: dict[str, dict[str, float]]
    """Last metric values of each running step."""
    usd: float  # cost of its machines so far
    links: list[dict[str, str]]
    """Links to the metrics of its steps, as mappings with the fields of LinkTo."""


def report(ws: Workspace, found: Survey) -> RecipeStatus:
    """Return the status of a recipe."""
    steps = [*_outdated_steps(ws, found)]
    for later in found.later:
        steps.append({"id": later.shown, "answer": "maybe", "reasons": [later.why]})
    stale = examine_published(ws, find_stale(ws, found))
    # Stored contents come from a run: of two concurrent runs, the last recorded need not be the
    # last to publish.
    edited = []
    for path in found.facts.there:
        if path in found.facts.ours and found.facts.strange(path):
            edited.append(path)
    left = [item.row.path for item in stale if item.now != "gone"]
    return {
        "recipe": found.plan.recipe,
        "title": describe_request(found),
        "fresh": not steps,
        "counts": count_verdicts(found),
        "steps": steps,
        "edited": sorted(edited),
        "stale": left,
    }


def _outdated_steps(ws: Workspace, found: Survey) -> Iterator[OutdatedStep]:
    """Yield the steps that are neither up to date nor skipped, with the reasons."""
    nodes = found.plan.nodes
    to_run = [nodes[n].id for n, verdict in enumerate(found.verdicts) if verdict.answer == "run"]
    attempts = ws.store.runs.latest_attempts(found.plan.recipe, to_run)
    for n, verdict in enumerate(found.verdicts):
        if verdict.answer in (FRESH, SKIPPED):
            continue
        id, reasons = nodes[n].id, list(verdict.reasons)
        if verdict.answer == "run":
            reasons += _reasons_to_run(found, n, attempts.get(id), is_explained=bool(reasons))
        yield {"id": id, "answer": verdict.answer, "reasons": reasons}


def _reasons_to_run(
    found: Survey, n: int, last: AttemptRow | None, *, is_explained: bool
) -> list[str]:
    """Return the changes since a step's last attempt.

    Without changes, return why no result is stored, unless the verdict `is_explained`.
    """
    changes = differences(found, n, last) or ()
    reasons = [lines(without_files(change))[0] for change in changes]
    if reasons or is_explained:
        return reasons
    return [explain_missing_result(last)]


def as_text(report: RecipeStatus, *, all: bool) -> list[str]:
    """Format the status of a recipe; at most FEW steps unless `all`."""
    total = describe_counts(report["counts"])
    state = f"everything is fresh ({total})" if report["fresh"] else total
    text = [f"{safe_line(report['title'])}: {state}"]
    steps = report["steps"] if all else report["steps"][:FEW]
    width = min(40, max((len(safe_ids(step["id"])) for step in steps), default=0))
    text += [_step_line(step, width) for step in steps]
    if len(report["steps"]) > len(steps):
        text.append(f"  … and {len(report['steps']) - len(steps)} more (-v lists all)")
    if report["edited"]:
        text.append(
            "edited outputs (`recipe adopt STEP` accepts them, `recipe run --overwrite` replaces them):"
        )
        text += [f"  {safe_line(path)}" for path in report["edited"]]
    if report["stale"]:
        text.append("stale outputs of earlier runs (`recipe clean --stale` removes them):")
        text += [f"  {safe_line(path)}" for path in report["stale"]]
    return text


def _step_line(step: OutdatedStep, width: int) -> str:
    """Format a step with its first reason."""
    first, *others = step["reasons"] or [""]
    more = f" (and {len(others)} more reasons: run `recipe why`)" if others else ""
    return f"  {step['answer']:8} {safe_ids(step['id']):<{width}}  {safe_ids(first)}{more}"


class UnfinishedRuns(NamedTuple):
    """Unfinished runs, by state."""

    running: list[UnfinishedRun]
    died: list[UnfinishedRun]
    """Runs that lost their worker, unless a later run of the recipe completed."""
    queued: list[UnfinishedRun]
    paused: list[UnfinishedRun]


def find_unfinished(transport: Transport) -> UnfinishedRuns:
    """Return the unfinished runs, newest first."""
    found = UnfinishedRuns([], [], [], [])
    for row in runs_of(transport, Listing(LISTED, ("ACTIVE", "QUEUED", "PAUSED"))):
        run = transport.run(row.id)
        if run.state == "PAUSED":
            found.paused.append(_unfinished_run(run))
        elif run.waits is None:
            found.running.append(_unfinished_run(run))
        elif run.waits.kind != WaitKind.SUBMITTER:
            found.queued.append(_unfinished_run(run))
        elif run.state == "ACTIVE" and not _has_later_success(transport, run):
            found.died.append(_unfinished_run(run))
    return found


def _has_later_success(transport: Transport, run: Status) -> bool:
    """Return True if a later run of the same recipe is COMPLETED."""
    newest = [*runs_of(transport, Listing(1, ("COMPLETED",), run.recipe))]
    return bool(newest) and newest[0].created > run.created


def _unfinished_run(run: Status) -> UnfinishedRun:
    summary = overview(run)
    steps: dict[str, dict[str, float]] = {}
    numbers: dict[str, dict[str, float]] = {}
    for step in run.steps:
        if step.state != "RUNNING":
            continue
        sample = _pace(step.progress) | dict(step.machine)
        if sample or step.values:
            steps[step.id] = sample
            numbers[step.id] = dict(step.values)
    return {
        "run": run.id,
        "recipe": run.recipe,
        "created": summary["created"],
        "state": run.word,
        "progress": summary["progress"],
        "steps": steps,
        "numbers": numbers,
        "usd": run.cost,
        "links": [each._asdict() for each in run.links],
    }


def _pace(progress: StepProgress) -> dict[str, float]:
    """Return the known progress of a step."""
    return {name: each for name, each in progress._asdict().items() if each is not None}


def pulse(sample: Mapping[str, float], numbers: Sequence[str]) -> str:
    """Format a step's progress, metrics and machine load in one line.

    For example `step 120/1000 12%, ETA 3m05s, loss 0.21, GPU 87%, 22.1 GB; processors 35%`.
    """
    progress = f"step {sample['step']:.0f}" if "step" in sample else ""
    has_total = "total" in sample and "percent" in sample
    if progress and has_total:
        progress += f"/{sample['total']:.0f} {sample['percent']:.0f}%"
    remaining = f"ETA {span(sample['eta'])}" if "eta" in sample else ""
    parts = [progress, remaining, *numbers, describe_samples(sample)]
    return ", ".join(filter(None, parts))


def _last_numbers(row: UnfinishedRun, step: str) -> list[str]:
    """Format the first SOME of a step's last metric values."""
    numbers = row["numbers"].get(step, {})
    return [f"{name} {value:.4g}" for name, value in islice(numbers.items(), SOME)]


def _progress_text(row: UnfinishedRun) -> str:
    """Format the progress of a run."""
    percent, eta = row["progress"]["percent"], row["progress"]["eta"]
    fraction = f", {percent:.0f}%" if percent else ""
    remaining = f", {span(eta)} left" if eta else ""
    return fraction + remaining


def _cost_so_progress_text(row: UnfinishedRun) -> str:
    return f", ${row['usd']:.2f} so far" if row["usd"] else ""
