"""`recipe status`: what is fresh and what is not, files edited by hand or left by earlier runs, runs under way or dead.  Changes nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from ...execution.session import look
from ...planning.judge import FRESH, SKIPPED
from ...survey.upkeep import examined, stale
from .. import costs
from ..differences import lines
from ..tail import named, shown, span
from .chosen import add_words, answers, in_all, moment, opened, requests, title
from .why import differences, unremembered

if TYPE_CHECKING:
    from ...storage.records.runs import RunRow
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey

FEW = 20


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    add_words(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.description = (
        "What is fresh and what is not. Exit code 0: a run would do nothing; 1: it would."
    )
    parser.epilog = (
        "examples:\n  recipe status\n  recipe status -q ./pipeline.yaml || echo 'not up to date'"
    )


def run(args: argparse.Namespace) -> int:
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
                print(
                    f"running: {row['run']} {shown(row['recipe'])}, since {moment(row['created'])}{_spent(row)} (recipe logs {row['run']} -f)"
                )
                for id, sample in row["steps"].items():
                    print(f"  {named(id)}: {pulse(sample)}")
                for link in row["links"]:
                    print(f"  {named(link['step'])}: {shown(link['name'])} {shown(link['to'])}")
            for row in queued:
                print(
                    f"queued: {row['run']} {shown(row['recipe'])}, since {moment(row['created'])}; `recipe worker` carries it out"
                )
            for row in died:
                print(
                    f"died: {row['run']} {shown(row['recipe'])}, begun {moment(row['created'])}{_spent(row)}; `recipe run` resumes it"
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
    steps: dict[str, dict[str, float]]
    """Of each step that runs for longer than 5 seconds: how far it is, and what its machine has to do."""
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
                reasons.append("it has not run here before" if row is None else unremembered(row))
        steps.append({"id": nodes[n].id, "answer": verdict.answer, "reasons": reasons})
    steps += [
        {"id": later.shown, "answer": "maybe", "reasons": [later.why]} for later in found.later
    ]
    old = examined(ws, stale(ws, found))
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
            + (f" (and {len(more)} more: recipe why)" if more else "")
        )
    if len(report["steps"]) > len(steps):
        text.append(f"  … and {len(report['steps']) - len(steps)} more (-v lists all)")
    if report["edited"]:
        text += [
            "edited by hand (`recipe adopt STEP` takes them, `recipe run --overwrite` replaces them):"
        ]
        text += [f"  {shown(path)}" for path in report["edited"]]
    if report["stale"]:
        text += [
            "left by earlier runs and not made now (`recipe clean --stale` removes them):",
            *(f"  {shown(path)}" for path in report["stale"]),
        ]
    return text


def unfinished(ws: Workspace) -> tuple[list[Begun], list[Begun], list[Begun]]:
    """Runs under way here, runs whose worker died and that no later run of their recipe has made good, and runs that wait for a worker."""
    from ..reported import links

    going, died, queued = [], [], []
    good: set[str] = set()
    for row in ws.store.runs.latest(last=1000):
        if row.state == "COMPLETED":
            good.add(row.recipe)
        elif row.state in ("ACTIVE", "QUEUED"):
            if ws.store.runs.live(row.id):
                going.append(
                    _run(row, _seen(ws, row.id), [each._asdict() for each in links(ws, row)])
                )
            elif row.due is not None:
                queued.append(_run(row))
            elif row.state == "ACTIVE" and row.recipe not in good:
                died.append(_run(row))
    return going, died, queued


def _run(
    row: RunRow,
    steps: dict[str, dict[str, float]] | None = None,
    found: list[dict[str, str]] | None = None,
) -> Begun:
    usd = costs.of_run(row.id).usd
    return {
        "run": row.id,
        "recipe": row.recipe,
        "created": row.created,
        "steps": steps or {},
        "usd": usd,
        "links": found or [],
    }


def _seen(ws: Workspace, run: str) -> dict[str, dict[str, float]]:
    from ...survey.samples import latest
    from ..logs import parts

    going = {part.step: part for part in parts(ws.store.runs.events(run)) if not part.ended}
    found = {id: dict(latest(ws, run, id, part.number, part.raw)) for id, part in going.items()}
    return {id: sample for id, sample in found.items() if sample}


def pulse(sample: Mapping[str, float]) -> str:
    """`step 120/1000 12%, ETA 3m05s, GPU 87%, 22.1 GB; processors 35%`."""
    from ...survey.samples import words

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
    return ", ".join([*said, words(sample)])


def _spent(row: Begun) -> str:
    return f", ${row['usd']:.2f} so far" if row["usd"] else ""
