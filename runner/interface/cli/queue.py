"""`recipe queue`: list the workers, and the queued runs with the reason why each waits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ..tables import align
from ..tail import safe_line
from .flags import JSON_HELP
from .one_run import fields_as_json, format_moment
from .transports import transport_for_changes

if TYPE_CHECKING:
    from ...api.values import QueuedRun, WorkerStatus


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.description = (
        "List the queued runs in the order in which workers claim them, with the reason why each "
        "run waits, and list the workers. To change the order, use `recipe prioritize`."
    )
    parser.epilog = "Examples:\n  recipe queue\n  recipe queue --json"


def run(args: argparse.Namespace) -> int:
    with closing(transport_for_changes(args)) as transport:
        runs, workers = transport.queue(), transport.workers()
    if args.json:
        facts = {
            "runs": list(map(fields_as_json, runs)),
            "workers": list(map(fields_as_json, workers)),
        }
        print(json.dumps(facts, indent=2))
        return 0
    print("\n".join([*_runs(runs), "", *_workers(workers)]))
    return 0


def _runs(runs: Sequence[QueuedRun]) -> list[str]:
    if not runs:
        return ["no queued runs"]
    head = ("", "RUN", "RECIPE", "PRIORITY", "USER", "WAITS BECAUSE")
    return align([head, *map(_run_row, runs)], (0, 3))


def _run_row(queued: QueuedRun) -> tuple[str, ...]:
    waits = queued.waits
    reason = f"{waits.words}; {waits.fix}" if waits.fix else waits.words
    return (
        str(queued.position),
        queued.run,
        queued.recipe,
        str(queued.priority),
        safe_line(queued.user),
        safe_line(reason),
    )


def _workers(workers: Sequence[WorkerStatus]) -> list[str]:
    if not workers:
        return ["no worker is running; start one with `recipe worker`"]
    head = ("WORKER", "STATE", "TAKES", "LAST SEEN", "RUNS")
    return align([head, *map(_worker_row, workers)], ())


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    if worker.idle:
        state = "idle"
    elif worker.alive:
        state = "busy"
    else:
        state = "dead"
    claims = safe_line(_describe_claims(worker))
    seen = format_moment(worker.heard) if worker.heard else ""
    return (worker.worker, state, claims, seen, " ".join(worker.runs))


def _describe_claims(worker: WorkerStatus) -> str:
    """Describe the runs that a worker claims."""
    if not worker.takes_runs:
        return "its own run"
    words = [f"driver {worker.driver}"] if worker.driver else []
    words += [f"{name}={value}" for name, value in worker.labels.items()]
    words += [f"at most {most} per {kind}" for kind, most in worker.at_most.items()]
    if worker.any_workspace:
        words.append("any workspace")
    return ", ".join(words) or "any"
