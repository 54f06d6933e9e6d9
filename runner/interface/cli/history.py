"""`recipe runs`, `logs` and `diff`: list and compare stored runs, and print their logs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Final

from ...api.runs import TRIED
from ...errors import NotFound, did_you_mean
from ...planning.ids import names, readable, stored_form
from ...planning.waiting import WaitKind
from ..handle import core
from ..handle.local_transport import LocalTransport
from ..handle.shells import drive, runs_of
from ..handle.transport import Listing, LogPart
from ..logs import LogFollower, for_stdout, show
from ..tables import align
from ..tail import safe_line, span
from .flags import JSON_HELP, positive
from .one_run import format_moment
from .overview import overview
from .run_differences import print_differences
from .targets import find_producers, has_recent_step, suggest_step
from .transports import describe_transport, resolve_recipe, transport_for_reading

if TYPE_CHECKING:
    from ...api.values import Status
    from ...storage.records.runs import AttemptRow
    from ..handle.core import LogPosition
    from ..handle.transport import Transport
    from ..logs import Writer


_ALL: Final = 1_000_000
"""A number above that of any store, to search all runs."""
BROKEN: Final = ("FAILED", "ACTIVE", "QUEUED")
"""States of the candidates for `--failed`: failed runs, and runs that may have lost their worker.
"""


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "runs":
        parser.add_argument(
            "-n",
            dest="last",
            type=positive,
            default=20,
            metavar="N",
            help="Number of runs to list, newest first (default: 20)",
        )
        parser.add_argument(
            "--recipe", metavar="RECIPE", help="List only runs of this recipe, by its name or path"
        )
        parser.add_argument(
            "--failed",
            action="store_true",
            help="List only failed runs, including runs whose worker exited",
        )
        parser.add_argument("--tag", metavar="TAG", help="List only runs with this tag")
        parser.add_argument("--json", action="store_true", help=JSON_HELP)
        parser.epilog = "Examples:\n  recipe runs\n  recipe runs -n 1 --json\n  recipe runs --recipe sweep --failed"
    elif verb == "logs":
        parser.add_argument(
            "run",
            nargs="?",
            default="last",
            metavar="RUN[/STEP]",
            help=(
                "RUN or RUN/STEP, with a run ID, a unique part of an ID, `last` or `last~1` (default: last); or STEP, a step of the last run"
            ),
        )
        parser.add_argument(
            "-f",
            "--follow",
            action="store_true",
            help="Follow the log until the run or step finishes",
        )
        parser.add_argument(
            "--attempt",
            type=positive,
            metavar="N",
            help="Show attempt N of each step (default: the last)",
        )
        parser.add_argument(
            "--node",
            type=_rank,
            default=0,
            metavar="N",
            help="Show the log of node N of a multi-node step (default: 0)",
        )
        parser.epilog = (
            "Examples:\n  recipe logs train -f\n  recipe logs 20261121-055609 | grep loss"
        )
    else:
        parser.add_argument(
            "a",
            metavar="A",
            nargs="?",
            help="First run (default: the run of the same recipe before B)",
        )
        parser.add_argument("b", metavar="B", nargs="?", help="Second run (default: last)")
        parser.add_argument("--json", action="store_true", help=JSON_HELP)
        parser.epilog = "Examples:\n  recipe diff\n  recipe diff last~3 last\n  recipe diff 3f1035 41252c --json"


def run(args: argparse.Namespace) -> int:
    with closing(transport_for_reading(args)) as transport:
        return {"runs": _runs, "logs": _logs, "diff": _diff}[args.verb](transport, args)


# -- runs ------------------------------------------------------------------------------------------


def _runs(transport: Transport, args: argparse.Namespace) -> int:
    recipe = resolve_recipe(transport, args) if args.recipe is not None else ""
    found = _list_runs(transport, recipe, args)
    if args.json:
        print(json.dumps([overview(row) for row in found], indent=2))
    elif found:
        print("\n".join(_table(found)))
    else:
        where = describe_transport(transport)
        has_filter = recipe or args.failed or args.tag is not None
        message = f"no matching run {where}" if has_filter else f"no runs {where} yet"
        print(message, file=sys.stderr)
    return 0


def _list_runs(transport: Transport, recipe: str, args: argparse.Namespace) -> list[Status]:
    """Return the runs that match the flags, newest first."""
    tag = args.tag or ""
    if not args.failed:
        rows = runs_of(transport, Listing(args.last, recipe=recipe, tag=tag))
    else:
        candidates = runs_of(transport, Listing(_ALL, BROKEN, recipe, tag=tag))
        # Lazily, so that pages of runs after the last one needed are not read.
        rows = filter(_is_broken, candidates)
    return list(islice(rows, args.last))


def _is_broken(row: Status) -> bool:
    return row.state == "FAILED" or row.word == "NEEDS_RECOVERY"


COLUMNS: Final = (
    "RUN", "BEGAN", "STATE", "RAN", "FRESH", "FAILED", "TIME", "COST", "RECIPE", "INPUTS", "USER", "LABEL",
)  # fmt: skip
SOMETIMES: Final = frozenset({"COST", "USER", "LABEL"})
"""Columns that are omitted if they are empty."""
RIGHT: Final = frozenset({"RAN", "FRESH", "FAILED", "TIME", "COST"})


def _table(found: Sequence[Status]) -> list[str]:
    """Return the table of runs, one line per run."""
    has_several_users = len({row.user for row in found}) > 1
    rows = [_cells(row, with_user=has_several_users) for row in found]
    columns = _columns_with_content(rows)
    table = [columns]
    for row in rows:
        table.append([row[name] for name in columns])
    right = [n for n, name in enumerate(columns) if name in RIGHT]
    return align(table, right)


def _columns_with_content(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the columns of the table without the empty columns of `SOMETIMES`."""
    columns = []
    for name in COLUMNS:
        if name not in SOMETIMES or any(row[name] for row in rows):
            columns.append(name)
    return columns


def _cells(row: Status, *, with_user: bool) -> dict[str, str]:
    """Return the table cells of a run."""
    seconds = overview(row)["seconds"]
    duration = span(seconds) if seconds is not None else ""
    cost = f"${row.cost:.2f}" if row.cost else ""
    user = safe_line(row.user) if with_user else ""
    return {
        "RUN": row.id,
        "BEGAN": format_moment(row.created),
        "STATE": _state_of(row),
        "RAN": str(row.counts.ran),
        "FRESH": str(row.counts.fresh),
        "FAILED": str(row.counts.failed),
        "TIME": duration,
        "COST": cost,
        "RECIPE": safe_line(row.recipe),
        "INPUTS": safe_line(" ".join(_given_words(row))),
        "USER": user,
        "LABEL": safe_line(" ".join(_label_words(row))),
    }


def _given_words(row: Status) -> list[str]:
    """Return the preset and the input values of a run as words of a command line."""
    words = [f"--preset {row.preset}"] if row.preset else []
    words += [f"{name}={value}" for name, value in row.given.items()]
    return words + [_axis(name, values) for name, values in row.tried.items()]


def _label_words(row: Status) -> list[str]:
    """Return the name of a run, its tags as `#TAG`, and its note in brackets."""
    words = [row.name] if row.name else []
    words += [f"#{tag}" for tag in row.tags]
    if row.note:
        words.append(f"({row.note})")
    return words


def _axis(name: str, values: Sequence[str]) -> str:
    """Format the values of a swept input, shortened after the first few."""
    more = ",…" if len(values) > TRIED else ""
    return f"{name}={','.join(values[:TRIED])}{more}"


def _state_of(row: Status) -> str:
    """Return the state and progress of a run."""
    percent = row.progress.percent
    if percent and not row.ended:
        return f"{row.word} {percent:.0f}%"
    return row.word


# -- logs ------------------------------------------------------------------------------------------


def _logs(transport: Transport, args: argparse.Namespace) -> int:
    run, step = _run_and_step(transport, args.run)
    writer = for_stdout()
    if args.follow and args.attempt is None:
        return _follow(transport, run, step, writer, args.node)
    chosen = _choose_attempts(transport, run, step, args)
    if step and not chosen:
        return _show_producer_logs(transport, args, run, step, writer)
    any_shown = show(transport, run, chosen, writer, _say, heads=not step or len(chosen) > 1)
    if not any_shown and not args.quiet:
        _say("no output")
    return 0


def _choose_attempts(
    transport: Transport, run: str, step: str, args: argparse.Namespace
) -> list[LogPart]:
    """Return the last attempt of each step, or attempt `--attempt`.  Raises NotFound if missing."""
    attempts = _list_attempts(transport, run, step)
    if args.attempt is None:
        chosen = list({each.step: each for each in attempts}.values())
    else:
        chosen = [each for each in attempts if each.number == args.attempt]
        if attempts and not chosen:
            of = step or "any step"
            raise NotFound(f"there is no attempt {args.attempt} of {of} in {run}")
    return [LogPart(each.step, each.number, 0, False, args.node) for each in chosen]


def _list_attempts(transport: Transport, run: str, step: str) -> list[LogPosition]:
    """Return the attempts of a step and its matrix instances in a run; of all steps for ""."""
    attempts = core.Attempts(lambda id, _number: not step or step in names(id))
    attempts.take(drive(transport, core.events(run, 0, False)))
    return attempts.found


def _show_producer_logs(
    transport: Transport, args: argparse.Namespace, run: str, step: str, writer: Writer
) -> int:
    """Print the logs of the earlier attempts that produced the step's cached result.

    Raises NotFound if the step is not part of the run and never ran here.
    """
    steps = transport.run(run).steps
    state = next((each.state for each in steps if step in names(each.id)), "")
    producers = []
    if state in ("", "FRESH"):
        producers = _find_producers(transport, run, step, args)
    if not producers and state:
        _say(f"{readable(step)} did not start (state: {state})")
        return 0
    if not producers:
        fix = suggest_step(step, [each.id for each in steps])
        raise NotFound(f'"{step}" did not run in {run}', fix=fix)
    any_shown = _show_logs_by_run(transport, producers, writer, args.node)
    if not any_shown and not args.quiet:
        _say("no output, or the log is no longer stored")
    return 0


def _show_logs_by_run(
    transport: Transport, attempts: Sequence[AttemptRow], writer: Writer, node: int
) -> bool:
    """Print the logs of attempts of several runs; return False if all are empty."""
    by_run: dict[str, list[AttemptRow]] = {}
    for attempt in attempts:
        by_run.setdefault(attempt.run, []).append(attempt)
    any_shown = False
    for run, own in by_run.items():
        _say(describe_producer(max(each.ended or 0.0 for each in own), run))
        parts = [LogPart(each.step, each.n, 0, False, node) for each in own]
        any_shown |= show(transport, run, parts, writer, _say, heads=len(attempts) > 1)
    return any_shown


def _find_producers(
    transport: Transport, run: str, step: str, args: argparse.Namespace
) -> list[AttemptRow]:
    """Return the attempts that produced a step's cached result; empty for a server's runs."""
    if not isinstance(transport, LocalTransport):
        return []
    attempts = find_producers(transport.ws, transport.ws.store.runs.get(run), step)
    if args.attempt is None:
        return attempts
    return [each for each in attempts if each.n == args.attempt]


def describe_producer(ended: float, run: str) -> str:
    """Format the run that created a cached result, and its age: `from run RUN, 3m ago`."""
    return f"from run {run}, {span(max(0.0, time.time() - ended))} ago"


def _run_and_step(transport: Transport, word: str) -> tuple[str, str]:
    """Return the run and the step of STEP (in the last run), RUN or RUN/STEP.

    The step is empty for RUN, which means all steps. Raises NotFound.
    """
    word = stored_form(word)
    name, slash, step = word.partition("/")
    names_last_run = name.partition("~")[0] == "last"
    last = None if names_last_run else _last_run(transport)
    if last is None:
        return transport.find(name), step
    known = [each.id for each in transport.run(last.id).steps]
    # The step may have run only in an earlier run of the same recipe.
    if any(word in names(id) for id in known) or _has_run(transport, word, last.recipe):
        return last.id, word
    try:
        return transport.find(name), step
    except NotFound as error:
        if not slash and _has_run(transport, word, None):
            return last.id, word  # a step of another recipe
        near = did_you_mean(word, [id.partition("[")[0] for id in known] + known)
        raise NotFound(str(error), fix=near or error.fix) from error


def _last_run(transport: Transport) -> Status | None:
    newest = transport.list_runs(Listing(1)).runs
    return newest[0] if newest else None


def _has_run(transport: Transport, word: str, recipe: str | None) -> bool:
    """Return True if a recent local run has a step named `word`; always False for a server's runs."""
    return isinstance(transport, LocalTransport) and has_recent_step(transport.ws, word, recipe)


def _follow(transport: Transport, run: str, step: str, writer: Writer, node: int) -> int:
    def is_wanted(id: str) -> bool:
        return not step or step in names(id)

    now = transport.run(run)
    known = [each.id for each in now.steps]
    # No worker takes over a run of `recipe run` that died, so that no more steps start.
    has_died = now.waits is not None and now.waits.kind == WaitKind.SUBMITTER
    is_missing = step and not any(map(is_wanted, known))
    if is_missing and (now.over or has_died):
        raise _did_not_run(transport, now, step, known)
    follower = LogFollower(transport, run, is_wanted, writer, _say, heads=not step, node=node)
    ended = follower.follow(step)
    if ended.state == "PAUSED":
        _say(f"run {run} is paused; continue it with `recipe resume {run}`")
    elif not ended.over and ended.waits is not None:
        _say(f"run {run} died: lost its worker; resume it with `recipe run`")
    return 0


def _did_not_run(transport: Transport, run: Status, step: str, known: list[str]) -> NotFound:
    fix = suggest_step(step, known)
    if isinstance(transport, LocalTransport):
        before = transport.ws.store.runs.latest_attempts(run.recipe, [step]).get(step)
        if before is not None:
            fix = f"show its last log with `recipe logs {before.run}/{step}`"
    return NotFound(f'"{step}" did not run in {run.id}', fix=fix)


def _say(text: str) -> None:
    print(safe_line(text), file=sys.stderr)


# -- diff ------------------------------------------------------------------------------------------


def _diff(transport: Transport, args: argparse.Namespace) -> int:
    first, second = _runs_to_compare(transport, args.a, args.b)
    print_differences(
        transport.run(first), transport.run(second), transport.differences(first, second), args
    )
    return 0


def _runs_to_compare(transport: Transport, a: str | None, b: str | None) -> tuple[str, str]:
    """Return the two runs to compare, by default the last run and the previous run of its recipe.

    Raises NotFound.
    """
    second = transport.find(b or "last")
    first = transport.find(a) if a else second
    if b is not None or first != second:
        return first, second
    recipe = transport.run(second).recipe
    before = [*runs_of(transport, Listing(1, recipe=recipe, after=second))]
    if not before:
        raise NotFound(
            f"{second} is the only run of {recipe} {describe_transport(transport)}",
            fix="name two runs; `recipe runs` lists them",
        )
    return before[0].id, second


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("must be 0 or greater")
    return int(text)
