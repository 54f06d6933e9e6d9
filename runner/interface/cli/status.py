"""`recipe status`: list outdated steps, edited and stale outputs, and unfinished runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from ...api.differences import without_files
from ...execution.session import preview
from ...planning.judge import FRESH, SKIPPED
from ...planning.waiting import WaitKind
from ...survey.upkeep import examine_published, find_stale
from ..differences import lines
from ..handle.local_transport import LocalTransport
from ..handle.shells import runs_of
from ..handle.transport import Listing
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP
from .overview import overview
from .places import transport_for_reading
from .targets import (
    add_request_words,
    count_verdicts,
    describe_counts,
    describe_request,
    format_time,
    resolve_requests,
)
from .why import differences, explain_unremembered

if TYPE_CHECKING:
    from ...api.values import Status, StepProgress
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey
    from ..handle.transport import Transport
    from .overview import ProgressOverview


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
    with closing(transport_for_reading(args)) as place:
        # A server has no workspace whose outputs could be up to date.
        here = place.ws if isinstance(place, LocalTransport) else None
        reports = (
            [report(here, preview(here, each)) for each in resolve_requests(here, args)]
            if here
            else []
        )
        found = find_unfinished(place)
    if args.json:
        print(json.dumps({"recipes": reports, **found._asdict()}, indent=2))
    elif not args.quiet:
        for each in reports:
            print("\n".join(as_text(each, all=bool(args.verbose))))
        told = runs_as_text(found) or ([] if here else ["no run is under way or waits"])
        print("\n".join(told), end="\n" if told else "")
    return 0 if all(each["fresh"] for each in reports) else 1


def runs_as_text(found: Unfinished) -> list[str]:
    """Format the unfinished runs."""
    text = []
    for row in found.running:
        since = f"since {format_time(row['created'])}{_far(row)}{_cost_so_far(row)}"
        text.append(
            f"running: {row['run']} {safe_line(row['recipe'])}, {since} (recipe logs {row['run']} -f)"
        )
        text += [
            f"  {safe_ids(id)}: {pulse(each, _last_numbers(row, id))}"
            for id, each in row["steps"].items()
        ]
        text += [
            f"  {safe_ids(link['step'])}: {safe_line(link['name'])} {safe_line(link['to'])}"
            for link in row["links"]
        ]
    for row in found.queued:
        text.append(f"queued: {_since(row)}; execute it with `recipe worker`")
    for row in found.paused:
        text.append(f"paused: {_since(row)}; `recipe resume {row['run']}` continues it")
    for row in found.died:
        begun = f"{row['run']} {safe_line(row['recipe'])}, begun {format_time(row['created'])}"
        text.append(f"died: {begun}{_cost_so_far(row)}; resume it with `recipe run`")
    return text


def _since(row: Begun) -> str:
    return f"{row['run']} {safe_line(row['recipe'])}, since {format_time(row['created'])}"


class StepStatus(TypedDict):
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
    steps: list[StepStatus]
    edited: list[str]
    stale: list[str]


class Begun(TypedDict):
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
    steps: list[StepStatus] = []
    going = [
        n for n, verdict in enumerate(found.verdicts) if verdict.answer not in (FRESH, SKIPPED)
    ]
    nodes = found.plan.nodes
    rows = ws.store.runs.latest_attempts(
        found.plan.recipe, [nodes[n].id for n in going if found.verdicts[n].answer == "run"]
    )
    for n in going:
        verdict, row = found.verdicts[n], rows.get(nodes[n].id)
        reasons = list(verdict.reasons)
        if verdict.answer == "run":
            changes = differences(found, n, row)
            reasons += [lines(without_files(change))[0] for change in changes or ()]
            if not reasons:
                reasons.append(
                    "no earlier run in this workspace" if row is None else explain_unremembered(row)
                )
        steps.append({"id": nodes[n].id, "answer": verdict.answer, "reasons": reasons})
    steps += [
        {"id": later.shown, "answer": "maybe", "reasons": [later.why]} for later in found.later
    ]
    old = examine_published(ws, find_stale(ws, found))
    # Stored contents come from a run: of two concurrent runs, the last recorded need not be the last to publish.
    edited = [
        path for path in found.facts.there if path in found.facts.ours and found.facts.strange(path)
    ]
    return {
        "recipe": found.plan.recipe,
        "title": describe_request(found),
        "fresh": not steps,
        "counts": count_verdicts(found),
        "steps": steps,
        "edited": sorted(edited),
        "stale": [item.row.path for item in old if item.now != "gone"],
    }


def as_text(report: RecipeStatus, *, all: bool) -> list[str]:
    total = describe_counts(report["counts"])
    state = f"everything is fresh ({total})" if report["fresh"] else total
    text = [f"{safe_line(report['title'])}: {state}"]
    steps = report["steps"] if all else report["steps"][:FEW]
    width = min(40, max((len(safe_ids(step["id"])) for step in steps), default=0))
    for step in steps:
        first, *more = step["reasons"] or [""]
        text.append(
            f"  {step['answer']:8} {safe_ids(step['id']):<{width}}  {safe_ids(first)}"
            + (f" (and {len(more)} more reasons: run `recipe why`)" if more else "")
        )
    if len(report["steps"]) > len(steps):
        text.append(f"  … and {len(report['steps']) - len(steps)} more (-v lists all)")
    if report["edited"]:
        text += [
            "edited outputs (`recipe adopt STEP` accepts them, `recipe run --overwrite` replaces them):"
        ]
        text += [f"  {safe_line(path)}" for path in report["edited"]]
    if report["stale"]:
        text += [
            "stale outputs of earlier runs (`recipe clean --stale` removes them):",
            *(f"  {safe_line(path)}" for path in report["stale"]),
        ]
    return text


class Unfinished(NamedTuple):
    """Unfinished runs, by state."""

    running: list[Begun]
    died: list[Begun]
    """Runs that lost their worker, unless a later run of the recipe completed."""
    queued: list[Begun]
    paused: list[Begun]


def find_unfinished(place: Transport) -> Unfinished:
    """Return the unfinished runs, newest first."""
    found = Unfinished([], [], [], [])
    for row in runs_of(place, Listing(LISTED, ("ACTIVE", "QUEUED", "PAUSED"))):
        run = place.run(row.id)
        if run.state == "PAUSED":
            found.paused.append(_begun_of(run))
        elif run.waits is None:
            found.running.append(_begun_of(run))
        elif run.waits.kind != WaitKind.SUBMITTER:
            found.queued.append(_begun_of(run))
        elif run.state == "ACTIVE" and not _made_good(place, run):
            found.died.append(_begun_of(run))
    return found


def _made_good(place: Transport, run: Status) -> bool:
    """Return True if a later run of the same recipe is COMPLETED."""
    newest = [*runs_of(place, Listing(1, ("COMPLETED",), run.recipe))]
    return bool(newest) and newest[0].created > run.created


def _begun_of(run: Status) -> Begun:
    short = overview(run)
    going = [each for each in run.steps if each.state == "RUNNING"]
    pace = {each.id: _pace(each.progress) | dict(each.machine) for each in going}
    told = {each.id for each in going if pace[each.id] or each.values}
    return {
        "run": run.id,
        "recipe": run.recipe,
        "created": short["created"],
        "state": run.word,
        "progress": short["progress"],
        "steps": {id: each for id, each in pace.items() if id in told},
        "numbers": {each.id: dict(each.values) for each in going if each.id in told},
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
    from ...survey.samples import describe_samples

    said = []
    if "step" in sample:
        of = (
            f"/{sample['total']:.0f} {sample['percent']:.0f}%"
            if "total" in sample and "percent" in sample
            else ""
        )
        said.append(f"step {sample['step']:.0f}{of}")
    if "eta" in sample:
        said.append(f"ETA {span(sample['eta'])}")
    return ", ".join(filter(None, [*said, *numbers, describe_samples(sample)]))


def _last_numbers(row: Begun, step: str) -> list[str]:
    """Format the first SOME of a step's last metric values."""
    return [
        f"{name} {value:.4g}" for name, value in list(row["numbers"].get(step, {}).items())[:SOME]
    ]


def _far(row: Begun) -> str:
    """Format the progress of a run."""
    percent, eta = row["progress"]["percent"], row["progress"]["eta"]
    said = f", {percent:.0f}%" if percent else ""
    return f"{said}, {span(eta)} left" if eta else said


def _cost_so_far(row: Begun) -> str:
    return f", ${row['usd']:.2f} so far" if row["usd"] else ""
