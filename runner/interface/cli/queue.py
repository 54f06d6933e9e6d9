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
        found = {
            "runs": [fields_as_json(each) for each in runs],
            "workers": [fields_as_json(each) for each in workers],
        }
        print(json.dumps(found, indent=2))
        return 0
    print("\n".join([*_runs(runs), "", *_workers(workers)]))
    return 0


def _runs(runs: Sequence[QueuedRun]) -> list[str]:
    if not runs:
        return ["no queued runs"]
    rows = [
        (
            str(each.position),
            each.run,
            each.recipe,
            str(each.priority),
            safe_line(each.user),
            safe_line(
                f"{each.waits.words}; {each.waits.fix}" if each.waits.fix else each.waits.words
            ),
        )
        for each in runs
    ]
    return align([("", "RUN", "RECIPE", "PRIORITY", "USER", "WAITS BECAUSE"), *rows], (0, 3))


def _workers(workers: Sequence[WorkerStatus]) -> list[str]:
    if not workers:
        return ["no worker is running; start one with `recipe worker`"]
    rows = [
        (
            each.worker,
            "idle" if each.idle else "busy" if each.alive else "dead",
            safe_line(_describe_claims(each)),
            format_moment(each.heard) if each.heard else "",
            " ".join(each.runs),
        )
        for each in workers
    ]
    return align([("WORKER", "STATE", "TAKES", "LAST SEEN", "RUNS"), *rows], ())


def _describe_claims(worker: WorkerStatus) -> str:
    """Describe the runs that a worker claims."""
    if not worker.takes_runs:
        return "its own run"
    words = [f"driver {worker.driver}"] if worker.driver else []
    words += [f"{name}={value}" for name, value in worker.labels.items()]
    words += [f"at most {most} per {kind}" for kind, most in worker.at_most.items()]
    words += ["any workspace"] if worker.any_workspace else []
    return ", ".join(words) or "any"
