"""`recipe report`: summarize a run's time, bottlenecks and cost from stored data."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ...advice import bottleneck
from ...api import costs
from ...api.finding import find_run
from ...api.logs import AttemptLog as Attempt
from ...api.logs import list_attempt_logs
from ...api.metrics import list_links
from ...errors import CannotRun, NotFound
from ...language.units import about, count_text
from ...language.values import is_number
from ...paths import temporary_name
from ...planning import causes
from ...planning.ids import bare, names, stored_form
from ...storage import metrics
from ...survey import rows, samples
from ...survey.comparison import is_outcome, lower_is_better
from ...survey.results import Metric, peak_memory, reported_metrics, summarize_points
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
        if self.view.state == "SKIPPED" and self.view.attempts:
            return "STOPPED"
        return self.view.state

    @property
    def running_metrics(self) -> Path | None:
        """Return the path of the running attempt's metrics; None if no attempt is running."""
        if self.going is None:
            return None
        return Path(f"{self.going.raw.removesuffix('.log')}.metrics")


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
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(as_text(found)))
    return 0


def _costs(found: costs.Costs, args: argparse.Namespace) -> int:
    if args.json:
        print(told.as_json(found))
    else:
        print("\n".join(told.as_text(found)))
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
    chosen = _choose_steps(_steps(ws, row, view), step, row.id)
    links = list_links(ws, row)
    if step is not None:
        links = [each for each in links if step in names(each.step)]
    reports = [_report_of(ws, row.id, each, row.inputs) for each in chosen]
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
        "links": [each._asdict() for each in links],
        "steps": reports,
    }


def _choose_steps(done: Sequence[_Done], step: str | None, run: str) -> Sequence[_Done]:
    """Return the instances of `step`, or all steps for None.  Raises NotFound."""
    if step is None:
        return done
    chosen = [each for each in done if step in names(each.view.id)]
    if chosen:
        return chosen
    if done:
        fix = suggest_step(step, [each.view.id for each in done])
    else:
        fix = "its result was up to date; choose a run in which the step ran"
    raise NotFound(f'"{step}" did not run in {run}', fix=fix)


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
    found = []
    for id, step in view.steps.items():
        found.append(_Done(step, tries.get(id, ()), usd.get(id, 0.0), going.get(id)))
    return sorted(found, key=lambda done: done.view.attempts == 0)


def _report_of(ws: Workspace, run: str, done: _Done, inputs: Mapping[str, Any]) -> StepReport:
    """Return the report of a step, with its training if its metrics have several steps or timings."""
    step = done.view
    live, live_samples = _live_points(ws, run, done)
    ended = reported_metrics(ws, done.tries)
    points: list[Mapping[str, Any]] = []
    for each in ended:
        points += each.points or ()
    points += live
    stored = ended[0].metrics if ended else {}
    # The running attempt's values are newer than those of earlier attempts.
    known = {**stored, **summarize_points(live, {})}
    stored_samples = chain.from_iterable(samples.load_samples(ws, row) for row in done.tries)
    machine = samples.summarize_samples([*stored_samples, *live_samples])
    is_kept = all(each.points is not None for each in ended)
    exit_code, fix = None, ""
    if step.failure is not None:
        exit_code, fix = step.failure.exit, step.failure.fix
    return {
        "id": step.id,
        "state": done.state,
        "reason": _cause(done),
        "detail": step.detail,
        "exit": exit_code,
        "fix": fix,
        "warnings": list(step.warnings),
        "attempts": step.attempts,
        "seconds": step.seconds or None,
        "peak_memory": peak_memory(done.tries) or None,
        "usd": done.usd,
        "metrics": _values_of(known),
        "kept": is_kept,
        "training": _training_of(points, inputs),
        "machine": machine,
    }


def _values_of(known: Mapping[str, Metric]) -> dict[str, Value]:
    return {
        name: {"last": metric.last, "min": metric.least, "max": metric.greatest}
        for name, metric in known.items()
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
    named = lines[-1].get("gpu")
    gpu = named if isinstance(named, str) else None
    training: TrainingStatistics = {
        "steps": len(lines),
        "last_step": lines[-1].get("step"),
        "loss": [_first(lines, "loss"), _first(lines[::-1], "loss")],
        "memory_gb": max(_numbers(lines, "memory_gb"), default=None),
        "gpu": gpu,
        "speeds": _mean_speeds(lines),
        "step_seconds": None,
        "parts": {},
        "verdict": None,
        "why": "",
        "advice": [],
    }
    if phases is not None:
        verdict = bottleneck.judge(phases, inputs, gpu=gpu is not None)
        training["step_seconds"] = round(phases.seconds, 6)
        training["parts"] = {
            name: {"seconds": round(seconds, 6), "share": round(phases.share(name), 4)}
            for name, seconds in phases.parts.items()
        }
        training["verdict"] = verdict.word
        training["why"] = verdict.why
        training["advice"] = list(verdict.advice)
    return training


def _mean_speeds(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    speeds = {}
    for name in ("samples_per_second", "tokens_per_second"):
        rate = metrics.mean_rate(lines, name)
        if rate:
            speeds[name] = round(rate, 3)
    return speeds


def _cause(done: _Done) -> str:
    """Return the reason for a failed or stalled step; empty if the step is healthy."""
    if done.view.failure is not None:
        return done.view.failure.kind
    if done.running_metrics is None or done.state != "RUNNING":
        return ""
    if causes.is_stalled(*metrics.pace(done.running_metrics)):
        return "stalled"
    return ""


def _lines(points: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the reported metrics by training step; a later value for the same step wins."""
    found: dict[Any, Mapping[str, Any]] = {}
    for point in points:
        step = point.get("step", len(found))
        found[step] = {**found.get(step, {}), **point}
    return list(found.values())


def _first(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next(_numbers(lines, name), None)


def _numbers(lines: Sequence[Mapping[str, Any]], name: str) -> Iterator[float]:
    """Yield the values of a metric that are numbers."""
    for line in lines:
        if is_number(line.get(name)):
            yield float(line[name])


def as_text(run: RunReport) -> list[str]:
    """Format the report: summary, steps, failures, warnings, links, metrics, machines and
    trainings.
    """
    steps = run["steps"]
    text = _summary_lines(run)
    if not steps:
        return [*text, "no step started"]
    text += _step_table(steps)
    listed = steps[:_LISTED]
    for step in listed:
        if step["reason"]:
            text.append(_failure_line(run["id"], step))
    for step in listed:
        text += [f"{safe_ids(step['id'])}: warning: {safe_line(each)}" for each in step["warnings"]]
    for link in run["links"][:_LISTED]:
        name, url = safe_line(link["name"]), safe_line(link["to"])
        text.append(f"{name}: {url}  ({safe_ids(link['step'])})")
    for alike in _alike(steps):
        text += ["", *_metrics(alike)]
    measured = [step for step in steps if step["machine"]]
    for step in measured[:_LISTED]:
        load = samples.describe_samples(step["machine"])
        text.append(f"machine of {safe_ids(step['id'])}: {load}")
    timed = _timed_trainings(steps)
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


def _timed_trainings(steps: Sequence[StepReport]) -> list[tuple[str, TrainingStatistics]]:
    """Return the trainings whose bottleneck is known, with the ids of their steps."""
    found = []
    for step in steps:
        training = step["training"]
        if training is not None and training["parts"]:
            found.append((step["id"], training))
    return found


def _summary_lines(run: RunReport) -> list[str]:
    """Return lines with the state of a run, the remedy for its failure, and its up-to-date steps."""
    took = f" in {span(run['seconds'])}" if run["seconds"] is not None else ""
    reason = f"  {run['reason']}" if run["reason"] else ""
    began = format_time(run["created"])
    text = [f"{run['id']}  {run['recipe']}  {began}  {run['state']}{took}{reason}"]
    if run["failure"] in causes.REMEDIES:
        text.append(causes.REMEDIES[run["failure"]])
    if run["fresh"]:
        verb = "was" if run["fresh"] == 1 else "were"
        text.append(f"{count_text(run['fresh'], 'step')} {verb} up to date")
    return text


def _step_table(steps: Sequence[StepReport]) -> list[str]:
    """Return a table of at most _LISTED steps; the cost only if any step has costs."""
    table = [["STEP", "STATE", "ATTEMPTS", "TIME", "MEMORY", "COST"]]
    table += [_step_row(step) for step in steps[:_LISTED]]
    has_costs = any(step["usd"] for step in steps)
    if not has_costs:
        table = [row[:-1] for row in table]
    text = align(table, range(2, 6))
    if len(steps) > _LISTED:
        text.append(f"… and {len(steps) - _LISTED} more (--step names one, --json has all)")
    return text


def _step_row(step: StepReport) -> list[str]:
    """Return the cells of a step in the order of the columns of `_step_table`."""
    seconds = span(step["seconds"]) if step["seconds"] is not None else ""
    memory = about(step["peak_memory"]) if step["peak_memory"] else ""
    cost = f"${step['usd']:.2f}" if step["usd"] else ""
    attempts = str(step["attempts"] or "")
    return [safe_ids(step["id"]), step["state"], attempts, seconds, memory, cost]


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
        if _outcomes(step):
            groups.setdefault(bare(step["id"]), []).append(step)
    yield from groups.values()


def _outcomes(step: StepReport) -> list[str]:
    """Return the names of the step's outcome metrics whose last value is a number."""
    values = step["metrics"].items()
    return [name for name, value in values if is_outcome(name) and is_number(value["last"])]


def _metrics(steps: Sequence[StepReport]) -> list[str]:
    """Return a table of the last metric values, with the best value if any step's best was earlier."""
    wanted = list(dict.fromkeys(chain.from_iterable(map(_outcomes, steps))))
    columns = _metric_columns(steps, wanted[:_COLUMNS])
    table = [["METRICS", *(column.head for column in columns)]]
    for step in steps[:_LISTED]:
        cells = [_cell(step, column.metric, column.which) for column in columns]
        table.append([safe_ids(step["id"]), *cells])
    text = align(table, range(1, len(table[0])))
    if len(wanted) > _COLUMNS:
        text.append(f"… and {len(wanted) - _COLUMNS} more metrics (--json has all)")
    lost = [safe_ids(step["id"]) for step in steps if not step["kept"]]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        text.append(
            f"the log or metrics file of {', '.join(lost[:5])}{more} is no longer stored: only the last values are known"
        )
    return text


class _MetricColumn(NamedTuple):
    """A column of the metrics table."""

    head: str
    metric: str
    which: str  # last, min or max


def _metric_columns(steps: Sequence[StepReport], metrics: Sequence[str]) -> list[_MetricColumn]:
    columns = []
    for name in metrics:
        columns.append(_MetricColumn(safe_line(name), name, "last"))
        best = "min" if lower_is_better(name) else "max"
        if any(_was_better(step, name, best) for step in steps):
            columns.append(_MetricColumn(f"{best} {safe_line(name)}", name, best))
    return columns


def _was_better(step: StepReport, name: str, best: str) -> bool:
    """Return True if the table would show a best value unlike the last value of a metric."""
    # The text decides, as numbers that look alike need no second column.
    return _cell(step, name, best) not in ("", _cell(step, name, "last"))


def _cell(step: StepReport, name: str, which: str) -> str:
    """Return the `last`, `min` or `max` of a metric as text; empty if it is unknown."""
    value = dict(step["metrics"].get(name, {})).get(which)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    if value is None:
        return ""
    return safe_line(str(value))


def _training(id: str, training: TrainingStatistics) -> list[str]:
    """Return lines with the facts of a training, the phases of its steps, and its verdict."""
    text = [f"{safe_ids(id)}: {', '.join(_training_facts(training))}"]
    for name, part in training["parts"].items():
        bar = "#" * round(part["share"] * 30)
        text.append(
            f"  {name:<13} {part['share']:>4.0%}  {_short(part['seconds']):>8}  {bar:<30} {bottleneck.PARTS[name]}".rstrip()
        )
    text.append(f"  {training['verdict']}: {training['why']}")
    return text + [f"    - {line}" for line in training["advice"]]


def _training_facts(training: TrainingStatistics) -> list[str]:
    """Describe the steps, speed, loss and peak memory of a training."""
    steps = count_text(training["steps"], "step")
    if training["step_seconds"]:
        steps += f" of {_short(training['step_seconds'])}"
    facts = [steps]
    for name, value in training["speeds"].items():
        facts.append(f"{value:g} {name.replace('_per_second', '/s')}")
    first, last = training["loss"]
    if first is not None and last is not None:
        facts.append(f"loss {first:.4g} -> {last:.4g}")
    if training["memory_gb"] is not None:
        place = f"on {safe_line(training['gpu'])}" if training["gpu"] else "of CPU memory"
        facts.append(f"peak {training['memory_gb']:g} GB {place}")
    return facts


def _short(seconds: float) -> str:
    """Format a duration: milliseconds below a second, hundredths below a minute."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return span(seconds)
