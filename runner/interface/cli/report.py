"""`recipe report`: how a run went, and where the time of its trainings went, from what is stored.  Decides nothing about either; changes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ...advice import bottleneck
from ...errors import CannotRun, NotFound
from ...language.units import about
from ...language.values import is_number
from ...paths import temporary_name
from ...planning import causes
from ...planning.ids import bare, names, stored
from ...storage import metrics
from ...survey import rows, samples
from ...survey.comparison import less, of_note
from ...survey.results import reported, summary
from .. import costs
from ..reported import links
from ..tables import aligned
from ..tail import named, shown, span
from .chosen import find_run, makers, moment, near_step, opened
from .flags import JSON_HELP, RUN_HELP
from .history import earlier, overview

if TYPE_CHECKING:
    from ...storage.records.runs import AttemptRow, RunRow
    from ...storage.workspace import Workspace


_LISTED = 60  # steps
_COLUMNS = 5  # metrics of a table


@dataclass(slots=True)
class _Done:
    """What a run remembers of one step."""

    id: str
    state: str
    attempts: int = 0
    seconds: float = 0.0
    memory: int = 0  # bytes of main memory, the most of any attempt
    tries: list[AttemptRow] = field(default_factory=list)  # those that are over
    following: Path | None = None  # what the one that runs reports
    attempt: int = 1  # its number
    sampled: Path | None = None  # what is seen of its machine
    usd: float = 0.0


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        default="last",
        metavar="RUN",
        help=f"{RUN_HELP} (default: last)",
    )
    parser.add_argument(
        "--step",
        type=stored,
        metavar="STEP",
        help="Only this step; a matrix step includes all its instances",
    )
    parser.add_argument(
        "--html",
        action="store_true",
        help="Write a single HTML file with graph, timeline, curves, images, tables and logs",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="Output file of --html, `-` for standard output (default: NAME-RUN.html)",
    )
    parser.add_argument("--cost", action="store_true", help="Show the cost of rented machines")
    parser.add_argument(
        "--month",
        action="store_true",
        help="With --cost, sum the costs of all your runs this month",
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.epilog = "Examples:\n  recipe report\n  recipe report last~1 --step train --json\n  recipe report --html -o sweep.html"


def run(args: argparse.Namespace) -> int:
    if args.cost and args.month:
        return _costs(costs.of_month(), args)
    with opened(args.workspace) as ws:
        row = find_run(ws.store, args.run)
        if args.cost:
            return _costs(costs.of_run(row.id), args)
        if args.html:
            return _html(ws, row, args.output)
        try:
            found = described(ws, row, args.step)
        except NotFound:
            made = makers(ws, row, args.step)
            if not made:
                raise
            last = max(made, key=lambda attempt: attempt.ended or 0.0)
            print(earlier(last.ended or 0.0, last.run), file=sys.stderr)
            found = described(ws, ws.store.runs.get(last.run), args.step)
    print(json.dumps(found, indent=2) if args.json else "\n".join(as_text(found)))
    return 0


def _costs(found: costs.Costs, args: argparse.Namespace) -> int:
    print(costs.as_json(found) if args.json else "\n".join(costs.as_text(found)))
    return 0


def _html(ws: Workspace, row: RunRow, output: str | None) -> int:
    """Write the report as a page.  Raises CannotRun where it cannot be written."""
    from ..page import of_run

    text = of_run(ws, row.id, ws.run_views.summaries([row])[0].word)
    if output == "-":
        sys.stdout.write(text)
        return 0
    target = Path(output or f"{row.recipe.partition('@')[0]}-{row.id}.html")
    if target.resolve().is_relative_to(ws.home):
        raise CannotRun(
            f"{target} is in the folder that recipe keeps", fix="name another place with -o"
        )
    new = target.with_name(temporary_name(target.name))
    new.write_text(text, "utf-8")
    new.replace(target)
    print(shown(str(target)))
    return 0


class Part(TypedDict):
    """A part of a training step."""

    seconds: float
    share: float


class Training(TypedDict):
    """What a step printed of its training, as `--json` prints it."""

    steps: int
    last_step: object
    loss: list[float | None]  # first and last
    memory_gb: float | None
    gpu: str | None
    speeds: dict[str, float]
    step_seconds: float | None
    parts: dict[str, Part]
    verdict: str | None
    why: str
    advice: list[str]


class Value(TypedDict):
    """A metric of a step; min and max are of all that was reported, and null where no numbers are kept."""

    last: object
    min: float | None
    max: float | None


class StepReport(TypedDict):
    """A step that was begun, as `--json` prints it.  Memory in bytes."""

    id: str
    state: str
    reason: str  # why its last attempt failed, or `stalled` for one that tells no more steps
    attempts: int
    seconds: float | None
    peak_memory: int | None
    usd: float  # its share of the machines that were rented
    metrics: dict[str, Value]
    kept: bool  # whether all that its metrics are read from is kept
    training: Training | None
    machine: dict[
        str, float
    ]  # what it used of its machine: means, and the most; empty for a step of less than 5 seconds


class RunReport(TypedDict):
    """A run and its steps, as `--json` prints it."""

    id: str
    recipe: str
    created: float
    state: str
    failure: str
    reason: str
    seconds: float | None
    fresh: int
    links: list[
        dict[str, str]
    ]  # where else its numbers can be looked at: of which step, what, and where
    steps: list[StepReport]


def described(ws: Workspace, row: RunRow, step: str | None) -> RunReport:
    """A run and its steps, for programs; the text is a part of it.  Raises NotFound when it has no such step."""
    summary = overview(row, ws.run_views.summaries([row])[0])
    if summary["seconds"] is None and ws.store.runs.live(row.id):
        summary["seconds"] = time.time() - row.created
    done = _steps(ws, row)
    chosen = [each for each in done if step is None or step in names(each.id)]
    if step is not None and not chosen:
        raise NotFound(
            f'"{step}" had nothing to do in {row.id}',
            fix=near_step(step, [each.id for each in done]) if done else "all was fresh in it",
        )
    return {
        "id": row.id,
        "recipe": row.recipe,
        "created": row.created,
        "state": summary["state"],
        "failure": row.failure,
        "reason": row.reason,
        "seconds": summary["seconds"],
        "fresh": summary["steps"]["fresh"],
        "links": [
            each._asdict() for each in links(ws, row) if step is None or step in names(each.step)
        ],
        "steps": [_report_of(ws, row.id, each, row.inputs) for each in chosen],
    }


def _steps(ws: Workspace, row: RunRow) -> list[_Done]:
    """The steps that were begun, in that order, and those that are yet to begin."""
    found: dict[str, _Done] = {}
    began: dict[str, float] = {}
    there: dict[str, dict[str, float]] = {}  # by place and step, seconds
    places: dict[str, str] = {}
    for event in ws.store.runs.events(row.id):
        if event.subject != "step":
            continue
        done = found.setdefault(event.id, _Done(event.id, event.after))
        done.state = (
            "STOPPED" if (event.before, event.after) == ("RUNNING", "SKIPPED") else event.after
        )
        if event.after == "RUNNING" and event.before != "RUNNING":
            began[event.id] = event.at
            places[event.id] = str(event.data.get("site", ""))
            done.attempts += 1
            followed = event.data.get("metrics")
            done.following = Path(followed) if isinstance(followed, str) else None
            log, number = event.data.get("log"), event.data.get("attempt")
            done.attempt = number if isinstance(number, int) else 1
            done.sampled = samples.beside(log) if isinstance(log, str) else None
        elif event.before == "RUNNING" and event.after != "RUNNING":
            spent = there.setdefault(places.get(event.id, ""), {})
            spent[event.id] = spent.get(event.id, 0.0) + event.at - began.pop(event.id, event.at)
            done.following = done.sampled = None
    if ws.store.runs.live(row.id):
        for id, since in began.items():
            found[id].seconds += max(0.0, time.time() - since)
            spent = there.setdefault(places[id], {})
            spent[id] = spent.get(id, 0.0) + max(0.0, time.time() - since)
    # Events are stored in groups, and so are their moments: rows of attempts are nearer.  One that was taken over from a worker that died began
    # before its row did, which its trace knows.
    attempts = ws.store.runs.attempts(row.id)
    traces = ws.store.index.traces(
        [attempt.key for attempt in attempts if attempt.outcome == "done" and attempt.key]
    )
    for attempt in attempts:
        if attempt.step not in found:
            continue
        found[attempt.step].tries.append(attempt)
        trace = traces.get(attempt.key)
        if attempt.outcome == "done" and trace is not None and trace.run == row.id:
            found[attempt.step].seconds += trace.seconds
        elif attempt.started is not None and attempt.ended is not None:
            found[attempt.step].seconds += attempt.ended - attempt.started
        peak = attempt.exit.get("peak_memory")
        if isinstance(peak, int):
            found[attempt.step].memory = max(found[attempt.step].memory, peak)
    for id, usd in costs.by_step(costs.of_run(row.id).leases, there).items():
        found[id].usd = usd
    return sorted(found.values(), key=lambda done: done.attempts == 0)


def _report_of(ws: Workspace, run: str, done: _Done, inputs: Mapping[str, Any]) -> StepReport:
    live = (
        rows.so_far(ws, run, done.id, done.attempt, done.following)
        if done.following is not None
        else []
    )
    live_samples = (
        rows.so_far(ws, run, done.id, done.attempt, done.sampled)
        if done.sampled is not None
        else []
    )
    ended = reported(ws, done.tries)
    lines = _lines([*(point for each in ended for point in each.points or ()), *live])
    known = {**(ended[0].metrics if ended else {}), **summary(live, {})}
    found = bottleneck.breakdown(lines)
    report: StepReport = {
        "id": done.id, "state": done.state, "reason": _cause(done),
        "attempts": done.attempts, "seconds": round(done.seconds, 3) or None, "peak_memory": done.memory or None, "usd": done.usd,
        "metrics": {name: {"last": metric.last, "min": metric.least, "max": metric.greatest} for name, metric in known.items()},
        "kept": all(each.points is not None for each in ended),
        "training": None,
        "machine": samples.summary([*(each for row in done.tries for each in samples.kept(ws, row)), *live_samples]),
    }  # fmt: skip
    if len(lines) < 2 and found is None:
        return report  # numbers of a whole step, an evaluation's say, and no training
    last = lines[-1]
    gpu = last.get("gpu")
    training: Training = {
        "steps": len(lines),
        "last_step": last.get("step"),
        "loss": [_first(lines, "loss"), _first(lines[::-1], "loss")],
        "memory_gb": max(
            (float(line["memory_gb"]) for line in lines if is_number(line.get("memory_gb"))),
            default=None,
        ),
        "gpu": gpu if isinstance(gpu, str) else None,
        "speeds": {
            name: round(rate, 3)
            for name in ("samples_per_second", "tokens_per_second")
            if (rate := metrics.mean_rate(lines, name))
        },
        "step_seconds": None,
        "parts": {},
        "verdict": None,
        "why": "",
        "advice": [],
    }
    if found is not None:
        said = bottleneck.judge(found, inputs, gpu=training["gpu"] is not None)
        parts: dict[str, Part] = {
            name: {"seconds": round(seconds, 6), "share": round(found.share(name), 4)}
            for name, seconds in found.parts.items()
        }
        training["step_seconds"], training["parts"] = round(found.seconds, 6), parts
        training["verdict"], training["why"], training["advice"] = (
            said.word,
            said.why,
            list(said.advice),
        )
    report["training"] = training
    return report


def _cause(done: _Done) -> str:
    """Why a step failed, or does not get on; empty where nothing is wrong."""
    if done.state == "FAILED" and done.tries:
        return done.tries[-1].reason
    if done.following is None or done.state != "RUNNING":
        return ""
    return "stalled" if causes.is_stalled(*metrics.pace(done.following)) else ""


def _lines(points: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What the attempts reported, a mapping a step; of a step that two of them did, the later counts."""
    found: dict[Any, Mapping[str, Any]] = {}
    for point in points:
        found[point.get("step", len(found))] = point
    return list(found.values())


def _first(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(line[name]) for line in lines if is_number(line.get(name))), None)


def as_text(run: RunReport) -> list[str]:
    took = f" in {span(run['seconds'])}" if run["seconds"] is not None else ""
    text = [
        f"{run['id']}  {run['recipe']}  {moment(run['created'])}  {run['state']}{took}"
        + (f"  {run['reason']}" if run["reason"] else "")
    ]
    if run["failure"] in causes.REMEDIES:
        text.append(causes.REMEDIES[run["failure"]])
    steps = run["steps"]
    if run["fresh"]:
        text.append(f"{run['fresh']} step{'s were' if run['fresh'] > 1 else ' was'} fresh")
    if not steps:
        return [*text, "no step was begun"]
    table = [("STEP", "STATE", "ATTEMPTS", "TIME", "MEMORY", "COST")]
    for step in steps[:_LISTED]:
        memory = about(step["peak_memory"]) if step["peak_memory"] else ""
        table.append(
            (
                named(step["id"]), step["state"], str(step["attempts"] or ""), span(step["seconds"]) if step["seconds"] is not None else "", memory,
                f"${step['usd']:.2f}" if step["usd"] else "",
            )
        )  # fmt: skip
    text += aligned(
        table if any(step["usd"] for step in steps) else [row[:-1] for row in table], range(2, 6)
    )
    if len(steps) > _LISTED:
        text.append(f"… and {len(steps) - _LISTED} more (--step names one, --json has all)")
    for step in steps[:_LISTED]:
        if step["reason"]:
            remedy = causes.REMEDIES.get(
                step["reason"], f"`recipe logs {run['id']}/{step['id']}` shows its end"
            )
            text.append(
                f"{named(step['id'])} {'is' if step['state'] == 'RUNNING' else 'failed:'} {step['reason']}; {remedy}"
            )
    text += [
        f"{shown(each['name'])}: {shown(each['to'])}  ({named(each['step'])})"
        for each in run["links"][:_LISTED]
    ]
    for many in _alike(steps):
        text += ["", *_metrics(many)]
    for step in [step for step in steps if step["machine"]][:_LISTED]:
        text.append(f"the machine of {named(step['id'])}: {samples.words(step['machine'])}")
    timed = [
        (step["id"], training)
        for step in steps
        if (training := step["training"]) is not None and training["parts"]
    ]
    for id, training in timed[:_LISTED]:
        text += ["", *_training(id, training)]
    if not any(step["metrics"] for step in steps):
        text += [
            "",
            "no step reported metrics: write `metrics: true` and append JSON lines to $RECIPE_METRICS, or `metrics: {pattern: …}`",
        ]
    elif not timed:
        text += [
            "",
            "no timings (time_step, time_data, time_model, …) among the metrics: no bottleneck analysis",
        ]
    return text


def _alike(steps: Sequence[StepReport]) -> Iterator[list[StepReport]]:
    """Steps with metrics, the instances of one together."""
    groups: dict[str, list[StepReport]] = {}
    for step in steps:
        if any(
            of_note(name) and is_number(value["last"]) for name, value in step["metrics"].items()
        ):
            groups.setdefault(bare(step["id"]), []).append(step)
    yield from groups.values()


def _metrics(steps: Sequence[StepReport]) -> list[str]:
    """A table of the last values of metrics, and of the best where they were better before."""
    names = dict.fromkeys(
        name
        for step in steps
        for name, value in step["metrics"].items()
        if is_number(value["last"])
    )
    wanted = [name for name in names if of_note(name)]
    columns: list[tuple[str, str, str]] = []  # head, metric, which value of it
    for name in wanted[:_COLUMNS]:
        best = "min" if less(name) else "max"
        columns.append((shown(name), name, "last"))
        if any(_cell(step, name, best) not in ("", _cell(step, name, "last")) for step in steps):
            columns.append((f"{best} {shown(name)}", name, best))
    table = [("METRICS", *(head for head, _, _ in columns))]
    table += [
        (named(step["id"]), *(_cell(step, name, which) for _, name, which in columns))
        for step in steps[:_LISTED]
    ]
    text = aligned(table, range(1, len(table[0])))
    if len(wanted) > _COLUMNS:
        text.append(f"… and {len(wanted) - _COLUMNS} more metrics (--json has all)")
    if lost := [named(step["id"]) for step in steps if not step["kept"]]:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        text.append(
            f"no log or file is kept of {', '.join(lost[:5])}{more}: only last values are known"
        )
    return text


def _cell(step: StepReport, name: str, which: str) -> str:
    value = dict(step["metrics"].get(name, {})).get(which)
    return (
        f"{value:.4g}"
        if isinstance(value, (int, float))
        else shown(str(value))
        if value is not None
        else ""
    )


def _training(id: str, training: Training) -> list[str]:
    facts = [f"{training['steps']} step{'s' if training['steps'] != 1 else ''}"]
    if training["step_seconds"]:
        facts[0] += f" of {_short(training['step_seconds'])}"
    facts += [
        f"{value:g} {name.replace('_per_second', '/s')}"
        for name, value in training["speeds"].items()
    ]
    first, last = training["loss"]
    if first is not None and last is not None:
        facts.append(f"loss {first:.4g} -> {last:.4g}")
    if training["memory_gb"] is not None:
        facts.append(
            f"peak {training['memory_gb']:g} GB "
            + (f"on {shown(training['gpu'])}" if training["gpu"] else "of main memory")
        )
    text = [f"{named(id)}: {', '.join(facts)}"]
    for name, part in training["parts"].items():
        bar = "#" * round(part["share"] * 30)
        text.append(
            f"  {name:<13} {part['share']:>4.0%}  {_short(part['seconds']):>8}  {bar:<30} {bottleneck.PARTS[name]}".rstrip()
        )
    text.append(f"  {training['verdict']}: {training['why']}")
    return text + [f"    - {line}" for line in training["advice"]]


def _short(seconds: float) -> str:
    return (
        f"{seconds * 1000:.1f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
        if seconds < 60
        else span(seconds)
    )
