"""`recipe status`: what is fresh and what is not, files edited by hand or left by earlier runs, runs under way or dead.  Changes nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from ...execution.session import look
from ...planning.judge import FRESH, SKIPPED
from ...survey.upkeep import examine_published, find_stale
from .. import costs
from ..differences import lines
from ..tail import named, shown, span
from .chosen import add_words, answers, in_all, moment, opened, requests, title
from .flags import JSON_HELP
from .why import differences, unremembered

if TYPE_CHECKING:
    from ...planning.run_view import RunView
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey
    from .history import ProgressOverview


FEW = 20
SOME = 3
"""Numbers of a running step that are shown."""
_PACE = ("step", "total", "percent", "eta")
"""How a sample of a machine calls how far the step is: that is the view's to say."""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_words(parser)
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
    if args.server:
        from . import there

        return there.run(args)
    with opened(args.workspace) as ws:
        reports = [report(ws, look(ws, request)) for request in requests(ws, args)]
        going, died, queued = unfinished(ws)
        if args.json:
            print(
                json.dumps(
                    {"recipes": reports, "running": going, "died": died, "queued": queued}, indent=2
                )
            )
        elif not args.quiet:
            for each in reports:
                print("\n".join(as_text(each, all=bool(args.verbose))))
            for row in going:
                since = f"since {moment(row['created'])}{_far(row)}{_spent(row)}"
                print(
                    f"running: {row['run']} {shown(row['recipe'])}, {since} (recipe logs {row['run']} -f)"
                )
                for id, sample in row["steps"].items():
                    print(f"  {named(id)}: {pulse(sample, _told(row, id))}")
                for link in row["links"]:
                    print(f"  {named(link['step'])}: {shown(link['name'])} {shown(link['to'])}")
            for row in queued:
                print(
                    f"queued: {row['run']} {shown(row['recipe'])}, since {moment(row['created'])}; execute it with `recipe worker`"
                )
            for row in died:
                print(
                    f"died: {row['run']} {shown(row['recipe'])}, begun {moment(row['created'])}{_spent(row)}; resume it with `recipe run`"
                )
    return 0 if all(each["fresh"] for each in reports) else 1


class StepStatus(TypedDict):
    """A step that is not fresh, as `--json` prints it."""

    id: str
    answer: str
    reasons: list[str]


class RecipeStatus(TypedDict):
    """How things stand with one recipe, as `--json` prints it."""

    recipe: str
    title: str
    fresh: bool
    counts: dict[str, int]
    steps: list[StepStatus]
    edited: list[str]
    stale: list[str]


class Begun(TypedDict):
    """A run that was begun, as `--json` prints it."""

    run: str
    recipe: str
    created: float
    state: str
    progress: ProgressOverview
    steps: dict[str, dict[str, float]]
    """Of each step that runs: how far it is, and, from 5 seconds on, what its machine has to do."""
    numbers: dict[str, dict[str, float]]
    """Of each step that runs: the other numbers that it reported last."""
    usd: float  # what its machines cost so far
    links: list[dict[str, str]]
    """Where else the numbers of its steps can be looked at."""


def report(ws: Workspace, found: Survey) -> RecipeStatus:
    """How things stand with one recipe."""
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
            reasons += [lines(change, lambda _content: None)[0] for change in changes or ()]
            if not reasons:
                reasons.append(
                    "no earlier run in this workspace" if row is None else unremembered(row)
                )
        steps.append({"id": nodes[n].id, "answer": verdict.answer, "reasons": reasons})
    steps += [
        {"id": later.shown, "answer": "maybe", "reasons": [later.why]} for later in found.later
    ]
    old = examine_published(ws, find_stale(ws, found))
    # What we hold was put there by a run: of two at once, the last to say so need not be the last to publish.
    edited = [
        path for path in found.facts.there if path in found.facts.ours and found.facts.strange(path)
    ]
    return {
        "recipe": found.plan.recipe,
        "title": title(found),
        "fresh": not steps,
        "counts": answers(found),
        "steps": steps,
        "edited": sorted(edited),
        "stale": [item.row.path for item in old if item.now != "gone"],
    }


def as_text(report: RecipeStatus, *, all: bool) -> list[str]:
    total = in_all(report["counts"])
    state = f"everything is fresh ({total})" if report["fresh"] else total
    text = [f"{shown(report['title'])}: {state}"]
    steps = report["steps"] if all else report["steps"][:FEW]
    width = min(40, max((len(named(step["id"])) for step in steps), default=0))
    for step in steps:
        first, *more = step["reasons"] or [""]
        text.append(
            f"  {step['answer']:8} {named(step['id']):<{width}}  {named(first)}"
            + (f" (and {len(more)} more reasons: run `recipe why`)" if more else "")
        )
    if len(report["steps"]) > len(steps):
        text.append(f"  … and {len(report['steps']) - len(steps)} more (-v lists all)")
    if report["edited"]:
        text += [
            "edited outputs (`recipe adopt STEP` accepts them, `recipe run --overwrite` replaces them):"
        ]
        text += [f"  {shown(path)}" for path in report["edited"]]
    if report["stale"]:
        text += [
            "stale outputs of earlier runs (`recipe clean --stale` removes them):",
            *(f"  {shown(path)}" for path in report["stale"]),
        ]
    return text


def unfinished(ws: Workspace) -> tuple[list[Begun], list[Begun], list[Begun]]:
    """Runs under way here, runs whose worker died and that no later run of their recipe has made good, and runs that wait for a worker."""
    from ...api.metrics import links

    going, died, queued = [], [], []
    good: set[str] = set()
    rows = ws.store.runs.latest(last=1000)
    open_runs = [row for row in rows if row.state in ("ACTIVE", "QUEUED")]
    views = {view.id: view for view in ws.run_views.summaries(open_runs)}
    for row in rows:
        if row.state == "COMPLETED":
            good.add(row.recipe)
        elif row.id in views:
            view = views[row.id]
            if ws.store.runs.live(row.id):
                found = [each._asdict() for each in links(ws, row)]
                going.append(_run(row, view, _seen(ws, view), found))
            elif row.due is not None:
                queued.append(_run(row, view))
            elif row.state == "ACTIVE" and row.recipe not in good:
                died.append(_run(row, view))
    return going, died, queued


def _run(
    row: RunRow,
    view: RunView,
    steps: dict[str, dict[str, float]] | None = None,
    found: list[dict[str, str]] | None = None,
) -> Begun:
    usd = costs.of_run(row.id).usd
    step, total, percent, eta = view.progress
    return {
        "run": row.id,
        "recipe": row.recipe,
        "created": row.created,
        "state": view.word,
        "progress": {"step": step, "total": total, "percent": percent, "eta": eta},
        "steps": steps or {},
        "numbers": {
            id: dict(each.training.values)
            for id, each in view.steps.items()
            if steps is not None and id in steps and each.training is not None
        },
        "usd": usd,
        "links": found or [],
    }


def _seen(ws: Workspace, view: RunView) -> dict[str, dict[str, float]]:
    """Of each running step how far it is, and what its machine has to do."""
    from ...api.logs import parts
    from ...survey.samples import latest_sample

    events = ws.store.runs.events(view.id)
    found: dict[str, dict[str, float]] = {}
    for part in parts(events):
        if part.ended or part.step not in view.steps:
            continue
        machine = latest_sample(ws, view.id, part.step, part.number, part.raw)
        sample = {name: value for name, value in machine.items() if name not in _PACE}
        if (training := view.steps[part.step].training) is not None:
            pace = (training.step, training.total, training.percent, training.eta)
            known = zip(_PACE, pace, strict=True)
            sample = {name: value for name, value in known if value is not None} | sample
        if sample or (training is not None and training.values):
            found[part.step] = sample
    return found


def pulse(sample: Mapping[str, float], numbers: Sequence[str]) -> str:
    """`step 120/1000 12%, ETA 3m05s, loss 0.21, GPU 87%, 22.1 GB; processors 35%`."""
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


def _told(row: Begun, step: str) -> list[str]:
    """The first numbers that a step reported last."""
    return [
        f"{name} {value:.4g}" for name, value in list(row["numbers"].get(step, {}).items())[:SOME]
    ]


def _far(row: Begun) -> str:
    """How far a run is."""
    percent, eta = row["progress"]["percent"], row["progress"]["eta"]
    said = f", {percent:.0f}%" if percent else ""
    return f"{said}, {span(eta)} left" if eta else said


def _spent(row: Begun) -> str:
    return f", ${row['usd']:.2f} so far" if row["usd"] else ""
