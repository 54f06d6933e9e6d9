"""`recipe report`: summarize a run's time, bottlenecks and cost from stored data."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ...advice import bottleneck
from ...api import costs
from ...api.finding import find_run
from ...api.logs import AttemptLog as Attempt
from ...api.logs import list_attempt_logs
from ...api.metrics import list_links
from ...errors import CannotRun, NotFound
from ...language.units import about
from ...language.values import is_number
from ...paths import temporary_name
from ...planning import causes
from ...planning.ids import bare, names, stored_form
from ...storage import metrics
from ...survey import rows, samples
from ...survey.comparison import is_outcome, lower_is_better
from ...survey.results import reported_metrics, summarize_points
from .. import costs as told
from ..page import of_run
from ..tables import align
from ..tail import safe_ids, safe_line, span
from .flags import JSON_HELP, RUN_HELP
from .history import describe_producer
from .overview import ProgressOverview
from .targets import find_producers, format_time, open_for_reading, suggest_step

if TYPE_CHECKING:
    from ...planning.run_view import RunView, StepView
    from ...storage.records.runs import AttemptRow, RunRow
    from ...storage.workspace import Workspace


_LISTED = 60  # steps
_COLUMNS = 5  # metrics of a table


class _Done(NamedTuple):
    """A step with its finished attempts, its cost, and its running attempt."""

    view: StepView
    tries: Sequence[AttemptRow]  # finished attempts
    usd: float
    going: Attempt | None = None  # the running attempt

    @property
    def state(self) -> str:
        """Return the step's state; STOPPED for a started step that the run then skipped."""
        stopped = self.view.state == "SKIPPED" and self.view.attempts
        return "STOPPED" if stopped else self.view.state

    @property
    def running_metrics(self) -> Path | None:
        """Return the path of the running attempt's metrics; None if no attempt is running."""
        return Path(f"{self.going.raw.removesuffix('.log')}.metrics") if self.going else None


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
        type=stored_form,
        metavar="STEP",
        help="Show only this step; for a matrix step, all its instances",
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
    with open_for_reading(args.workspace) as ws:
        row = find_run(ws.store, args.run)
        if args.cost:
            return _costs(costs.of_run(row.id), args)
        if args.html:
            return _html(ws, row, args.output)
        try:
            found = describe_run(ws, row, args.step)
        except NotFound:
            made = find_producers(ws, row, args.step)
            if not made:
                raise
            last = max(made, key=lambda attempt: attempt.ended or 0.0)
            print(describe_producer(last.ended or 0.0, last.run), file=sys.stderr)
            found = describe_run(ws, ws.store.runs.get(last.run), args.step)
    print(json.dumps(found, indent=2) if args.json else "\n".join(as_text(found)))
    return 0


def _costs(found: costs.Costs, args: argparse.Namespace) -> int:
    print(told.as_json(found) if args.json else "\n".join(told.as_text(found)))
    return 0


def _html(ws: Workspace, row: RunRow, output: str | None) -> int:
    """Write the report as an HTML page to a file or stdout.

    Raises CannotRun for a file inside `.recipe`.
    """
    text = of_run(ws, row.id, ws.run_views.summaries([row])[0].word)
    if output == "-":
        sys.stdout.write(text)
        return 0
    target = Path(output or f"{row.recipe.partition('@')[0]}-{row.id}.html")
    if target.resolve().is_relative_to(ws.home):
        raise CannotRun(
            f"cannot write {target}: the directory .recipe/ is reserved",
            fix="choose another path with `-o`",
        )
    new = target.with_name(temporary_name(target.name))
    new.write_text(text, "utf-8")
    new.replace(target)
    print(safe_line(str(target)))
    return 0


class PhaseTime(TypedDict):
    """Mean duration of a phase of a training step, and its fraction of the step."""

    seconds: float
    share: float


class TrainingStatistics(TypedDict):
    """Training statistics of a step in `--json` output."""

    steps: int
    last_step: object
    loss: list[float | None]  # first and last
    memory_gb: float | None
    gpu: str | None
    speeds: dict[str, float]
    step_seconds: float | None
    parts: dict[str, PhaseTime]
    verdict: str | None
    why: str
    advice: list[str]


class Value(TypedDict):
    """A metric of a step.  Minimum and maximum are null if no metric history is stored."""

    last: object
    min: float | None
    max: float | None


class StepReport(TypedDict):
    """A step in `--json` output.  Memory is in bytes."""

    id: str
    state: str
    reason: str  # failure kind of the last attempt, or `stalled` if the running step reports no progress
    detail: str  # failure message
    exit: int | None  # exit code of a failed step
    fix: str
    warnings: list[str]
    attempts: int
    seconds: float | None
    peak_memory: int | None
    usd: float  # the step's part of the cost of rented machines
    metrics: dict[str, Value]
    kept: bool  # whether the sources of all its metrics are still stored
    training: TrainingStatistics | None
    machine: dict[
        str, float
    ]  # mean and peak usage of its machine; empty for a step of less than 5 seconds


class RunReport(TypedDict):
    """A run and its steps in `--json` output."""

    id: str
    recipe: str
    created: float
    state: str
    failure: str
    reason: str
    seconds: float | None
    progress: ProgressOverview
    fresh: int
    links: list[dict[str, str]]  # LinkTo as mappings: step, name and target
    steps: list[StepReport]


def describe_run(ws: Workspace, row: RunRow, step: str | None) -> RunReport:
    """Return the report of a run for JSON output.

    Raises NotFound if `step` is not part of the run.
    """
    view = ws.run_views.of(row)
    seconds = row.ended - row.created if row.ended is not None else None
    if seconds is None and ws.store.runs.live(row.id):
        seconds = time.time() - row.created
    done_steps, total, percent, eta = view.progress
    done = _steps(ws, row, view)
    chosen = [each for each in done if step is None or step in names(each.view.id)]
    if step is not None and not chosen:
        raise NotFound(
            f'"{step}" did not run in {row.id}',
            fix=suggest_step(step, [each.view.id for each in done])
            if done
            else "its result was up to date; choose a run in which the step ran",
        )
    return {
        "id": row.id,
        "recipe": row.recipe,
        "created": row.created,
        "state": view.word,
        "failure": row.failure,
        "reason": row.reason,
        "seconds": seconds,
        "progress": {"step": done_steps, "total": total, "percent": percent, "eta": eta},
        "fresh": view.counts.get("FRESH", 0),
        "links": [
            each._asdict()
            for each in list_links(ws, row)
            if step is None or step in names(each.step)
        ],
        "steps": [_report_of(ws, row.id, each, row.inputs) for each in chosen],
    }


def _steps(ws: Workspace, row: RunRow, view: RunView) -> list[_Done]:
    """Return the run's steps, started steps first."""
    there: dict[str, dict[str, float]] = {}  # seconds by place and step
    for step in view.steps.values():
        for place, seconds in step.spent.items():
            there.setdefault(place, {})[step.id] = seconds
    usd = costs.by_step(costs.of_run(row.id).leases, there)
    tries: dict[str, list[AttemptRow]] = {}
    for attempt in ws.store.runs.attempts(row.id):
        tries.setdefault(attempt.step, []).append(attempt)
    moves = ws.store.runs.step_moves(row.id)
    going = {part.step: part for part in list_attempt_logs(moves) if not part.ended}
    found = [
        _Done(step, tries.get(id, ()), usd.get(id, 0.0), going.get(id))
        for id, step in view.steps.items()
    ]
    return sorted(found, key=lambda done: done.view.attempts == 0)


def _report_of(ws: Workspace, run: str, done: _Done, inputs: Mapping[str, Any]) -> StepReport:
    """Return the report of a step, with its training if its metrics have several steps or timings."""
    step = done.view
    live, live_samples = _live_points(ws, run, done)
    peaks = [attempt.exit.get("peak_memory") for attempt in done.tries]
    memory = max((peak for peak in peaks if isinstance(peak, int)), default=0)
    ended = reported_metrics(ws, done.tries)
    points = [*(point for each in ended for point in each.points or ()), *live]
    known = {**(ended[0].metrics if ended else {}), **summarize_points(live, {})}
    stored_samples = [each for row in done.tries for each in samples.load_samples(ws, row)]
    return {
        "id": step.id,
        "state": done.state,
        "reason": _cause(done),
        "detail": step.detail,
        "exit": step.failure.exit if step.failure is not None else None,
        "fix": step.failure.fix if step.failure is not None else "",
        "warnings": list(step.warnings),
        "attempts": step.attempts,
        "seconds": step.seconds or None,
        "peak_memory": memory or None,
        "usd": done.usd,
        "metrics": {
            name: {"last": metric.last, "min": metric.least, "max": metric.greatest}
            for name, metric in known.items()
        },
        "kept": all(each.points is not None for each in ended),
        "training": _training_of(points, inputs),
        "machine": samples.summarize_samples([*stored_samples, *live_samples]),
    }


_Points = Sequence[Mapping[str, Any]]


def _live_points(ws: Workspace, run: str, done: _Done) -> tuple[_Points, _Points]:
    """Return the metrics of a running attempt and the samples of its machine; else empty."""
    running, metrics_path = done.going, done.running_metrics
    if running is None or metrics_path is None:
        return (), ()

    def read(path: Path) -> _Points:
        return rows.read_points(ws, run, done.view.id, running.number, path)

    return read(metrics_path), read(samples.samples_path(running.raw))


def _training_of(
    points: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
) -> TrainingStatistics | None:
    """Return the progress, speed and bottleneck of a training.

    None for metrics of a whole step, such as an evaluation.
    """
    lines = _lines(points)
    phases = bottleneck.average_phases(_lines(filter(bottleneck.is_timed, points)))
    if len(lines) < 2 and phases is None:
        return None
    gpu = lines[-1].get("gpu")
    memory = [float(line["memory_gb"]) for line in lines if is_number(line.get("memory_gb"))]
    speeds = {
        name: metrics.mean_rate(lines, name) for name in ("samples_per_second", "tokens_per_second")
    }
    training: TrainingStatistics = {
        "steps": len(lines),
        "last_step": lines[-1].get("step"),
        "loss": [_first(lines, "loss"), _first(lines[::-1], "loss")],
        "memory_gb": max(memory, default=None),
        "gpu": gpu if isinstance(gpu, str) else None,
        "speeds": {name: round(rate, 3) for name, rate in speeds.items() if rate},
        "step_seconds": None,
        "parts": {},
        "verdict": None,
        "why": "",
        "advice": [],
    }
    if phases is not None:
        verdict = bottleneck.judge(phases, inputs, gpu=training["gpu"] is not None)
        training["step_seconds"] = round(phases.seconds, 6)
        training["parts"] = {
            name: {"seconds": round(seconds, 6), "share": round(phases.share(name), 4)}
            for name, seconds in phases.parts.items()
        }
        training["verdict"] = verdict.word
        training["why"] = verdict.why
        training["advice"] = list(verdict.advice)
    return training


def _cause(done: _Done) -> str:
    """Return the reason for a failed or stalled step; empty if the step is healthy."""
    if done.view.failure is not None:
        return done.view.failure.kind
    if done.running_metrics is None or done.state != "RUNNING":
        return ""
    return "stalled" if causes.is_stalled(*metrics.pace(done.running_metrics)) else ""


def _lines(points: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the reported metrics by training step; a later value for the same step wins."""
    found: dict[Any, Mapping[str, Any]] = {}
    for point in points:
        step = point.get("step", len(found))
        found[step] = {**found.get(step, {}), **point}
    return list(found.values())


def _first(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(line[name]) for line in lines if is_number(line.get(name))), None)


def as_text(run: RunReport) -> list[str]:
    """Format the report: summary, steps, failures, warnings, links, metrics, machines and
    trainings.
    """
    steps = run["steps"]
    text = _summary_lines(run)
    if not steps:
        return [*text, "no step started"]
    text += _step_table(steps)
    text += [_failure_line(run["id"], step) for step in steps[:_LISTED] if step["reason"]]
    for step in steps[:_LISTED]:
        text += [f"{safe_ids(step['id'])}: warning: {safe_line(each)}" for each in step["warnings"]]
    text += [
        f"{safe_line(each['name'])}: {safe_line(each['to'])}  ({safe_ids(each['step'])})"
        for each in run["links"][:_LISTED]
    ]
    for alike in _alike(steps):
        text += ["", *_metrics(alike)]
    for step in [step for step in steps if step["machine"]][:_LISTED]:
        load = samples.describe_samples(step["machine"])
        text.append(f"machine of {safe_ids(step['id'])}: {load}")
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
            "no step reported metrics: set `metrics: true` and append JSON lines to $RECIPE_METRICS, or set `metrics: {pattern: …}`",
        ]
    elif not timed:
        text += [
            "",
            "no bottleneck analysis: the metrics contain no timings (time_step, time_data, …, or the timings of prime-rl)",
        ]
    return text


def _summary_lines(run: RunReport) -> list[str]:
    """Return lines with the state of a run, the remedy for its failure, and its up-to-date steps."""
    took = f" in {span(run['seconds'])}" if run["seconds"] is not None else ""
    reason = f"  {run['reason']}" if run["reason"] else ""
    began = format_time(run["created"])
    text = [f"{run['id']}  {run['recipe']}  {began}  {run['state']}{took}{reason}"]
    if run["failure"] in causes.REMEDIES:
        text.append(causes.REMEDIES[run["failure"]])
    if run["fresh"]:
        text.append(f"{run['fresh']} step{'s were' if run['fresh'] > 1 else ' was'} up to date")
    return text


def _step_table(steps: Sequence[StepReport]) -> list[str]:
    """Return a table of at most _LISTED steps; the cost only if any step has costs."""
    table = [("STEP", "STATE", "ATTEMPTS", "TIME", "MEMORY", "COST")]
    for step in steps[:_LISTED]:
        table.append(
            (
                safe_ids(step["id"]),
                step["state"],
                str(step["attempts"] or ""),
                span(step["seconds"]) if step["seconds"] is not None else "",
                about(step["peak_memory"]) if step["peak_memory"] else "",
                f"${step['usd']:.2f}" if step["usd"] else "",
            )
        )
    has_costs = any(step["usd"] for step in steps)
    text = align(table if has_costs else [row[:-1] for row in table], range(2, 6))
    if len(steps) > _LISTED:
        text.append(f"… and {len(steps) - _LISTED} more (--step names one, --json has all)")
    return text


def _failure_line(run: str, step: StepReport) -> str:
    """Return a line with the reason for a failed or stalled step, and the remedy."""
    logs = f"see its log with `recipe logs {run}/{step['id']}`"
    remedy = step["fix"] or causes.REMEDIES.get(step["reason"], logs)
    detail = f" ({safe_ids(step['detail'])})" if step["detail"] else ""
    verb = "is" if step["state"] == "RUNNING" else "failed:"
    return f"{safe_ids(step['id'])} {verb} {step['reason']}{detail}; {safe_ids(remedy)}"


def _alike(steps: Sequence[StepReport]) -> Iterator[list[StepReport]]:
    """Yield the steps with outcome metrics, grouped by name without matrix values."""
    groups: dict[str, list[StepReport]] = {}
    for step in steps:
        if any(
            is_outcome(name) and is_number(value["last"]) for name, value in step["metrics"].items()
        ):
            groups.setdefault(bare(step["id"]), []).append(step)
    yield from groups.values()


def _metrics(steps: Sequence[StepReport]) -> list[str]:
    """Return a table of the last metric values, with the best value if any step's best was earlier."""
    names = dict.fromkeys(
        name
        for step in steps
        for name, value in step["metrics"].items()
        if is_number(value["last"])
    )
    wanted = [name for name in names if is_outcome(name)]
    columns: list[
        tuple[str, str, str]
    ] = []  # column header, metric, and its value: last, min or max
    for name in wanted[:_COLUMNS]:
        best = "min" if lower_is_better(name) else "max"
        columns.append((safe_line(name), name, "last"))
        if any(_cell(step, name, best) not in ("", _cell(step, name, "last")) for step in steps):
            columns.append((f"{best} {safe_line(name)}", name, best))
    table = [("METRICS", *(head for head, _, _ in columns))]
    table += [
        (safe_ids(step["id"]), *(_cell(step, name, which) for _, name, which in columns))
        for step in steps[:_LISTED]
    ]
    text = align(table, range(1, len(table[0])))
    if len(wanted) > _COLUMNS:
        text.append(f"… and {len(wanted) - _COLUMNS} more metrics (--json has all)")
    if lost := [safe_ids(step["id"]) for step in steps if not step["kept"]]:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        text.append(
            f"the log or metrics file of {', '.join(lost[:5])}{more} is no longer stored: only the last values are known"
        )
    return text


def _cell(step: StepReport, name: str, which: str) -> str:
    """Return the `last`, `min` or `max` of a metric as text; empty if it is unknown."""
    value = dict(step["metrics"].get(name, {})).get(which)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return safe_line(str(value)) if value is not None else ""


def _training(id: str, training: TrainingStatistics) -> list[str]:
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
            + (f"on {safe_line(training['gpu'])}" if training["gpu"] else "of CPU memory")
        )
    text = [f"{safe_ids(id)}: {', '.join(facts)}"]
    for name, part in training["parts"].items():
        bar = "#" * round(part["share"] * 30)
        text.append(
            f"  {name:<13} {part['share']:>4.0%}  {_short(part['seconds']):>8}  {bar:<30} {bottleneck.PARTS[name]}".rstrip()
        )
    text.append(f"  {training['verdict']}: {training['why']}")
    return text + [f"    - {line}" for line in training["advice"]]


def _short(seconds: float) -> str:
    """Format a duration with milliseconds or hundredths of a second."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 60 else span(seconds)
