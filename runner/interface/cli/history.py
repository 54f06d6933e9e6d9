"""`recipe runs`, `logs` and `diff`: what was run here, what it printed, and how two runs differ, from what is stored.  Changes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from ...api.finding import find_run
from ...api.logs import parts
from ...errors import NotFound, did_you_mean
from ...planning.ids import names, readable, stored
from ...survey.comparison import matrix_values
from ...survey.input_manifests import load_manifest
from .. import costs
from ..differences import Ran
from ..logs import Follower, for_stdout, show
from ..tables import aligned
from ..tail import shown, span
from .chosen import has_run, makers, moment, near_step, opened, recipe_of
from .compared import Compared, tell
from .flags import JSON_HELP, positive

if TYPE_CHECKING:
    from ...planning.run_view import RunView
    from ...storage.records.runs import RunRow
    from ...storage.records.store import Store
    from ...storage.workspace import Workspace
    from ..logs import Writer

_NEAR, _ALL = 1000, 1_000_000
"""The latest runs are looked at first, then all."""
_TRIED = 6
"""Values of a sweep that are shown."""


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
                "Run (ID, part of it, `last`, `last~1`; default: last), a step of it, or a step "
                "of the last run"
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
    if args.server:
        from . import there

        return there.run(args)
    with opened(args.workspace) as ws:
        return {"runs": _runs, "logs": _logs, "diff": _diff}[args.verb](ws, args)


# -- runs --------------------------------------------------------------------------------------------------------------------------------------------


def _runs(ws: Workspace, args: argparse.Namespace) -> int:
    chosen = args.recipe is not None or args.failed or args.tag is not None
    recipe = recipe_of(ws, args.location, args.recipe) if args.recipe is not None else None
    overviews: list[RunOverview] = []
    for last in (max(_NEAR, args.last), _ALL) if chosen else (args.last,):
        rows = ws.store.runs.latest(recipe=recipe, last=last)
        overviews = _overviews(
            ws,
            [row for row in rows if args.tag is None or args.tag in tags(row)],
            failed=args.failed,
        )[: args.last]
        if len(overviews) == args.last or len(rows) < last:
            break
    if args.json:
        print(json.dumps(overviews, indent=2))
        return 0
    if not overviews:
        print(
            "no matching run in this workspace" if chosen else "no runs in this workspace yet",
            file=sys.stderr,
        )
        return 0
    table: list[tuple[str, ...]] = [
        (
            "RUN",
            "BEGAN",
            "STATE",
            "RAN",
            "FRESH",
            "FAILED",
            "TIME",
            "COST",
            "RECIPE",
            "INPUTS",
            "LABEL",
        )
    ]
    for item in overviews:
        counts = item["steps"]
        took = span(item["seconds"]) if item["seconds"] is not None else ""
        given = " ".join(
            [
                *([f"--preset {item['preset']}"] if item["preset"] else []),
                *(f"{k}={v}" for k, v in item["given"].items()),
                *(_axes(ws, item["id"]) if "-sweep@" in item["recipe"] else ()),
            ]
        )
        numbers = (str(counts["ran"]), str(counts["fresh"]), str(counts["failed"]))
        label = " ".join(
            filter(
                None,
                [
                    item["name"],
                    *(f"#{tag}" for tag in item["tags"]),
                    item["note"] and f"({item['note']})",
                ],
            )
        )
        cost = f"${item['usd']:.2f}" if item["usd"] else ""
        table.append(
            (
                item["id"],
                moment(item["created"]),
                _standing(item),
                *numbers,
                took,
                cost,
                item["recipe"],
                shown(given),
                shown(label),
            )
        )
    if not any(row[-1] for row in table[1:]):
        table = [row[:-1] for row in table]
    if not any(item["usd"] for item in overviews):
        table = [(*row[:7], *row[8:]) for row in table]
    print("\n".join(aligned(table, range(3, 8 if any(item["usd"] for item in overviews) else 7))))
    return 0


def _overviews(ws: Workspace, rows: Sequence[RunRow], *, failed: bool) -> list[RunOverview]:
    spent = costs.of_runs(row.id for row in rows)
    views = ws.run_views.summaries(rows)
    overviews = [overview(row, view, spent[row.id]) for row, view in zip(rows, views, strict=True)]
    return [
        item for item in overviews if not failed or item["state"] in ("FAILED", "NEEDS_RECOVERY")
    ]


def _standing(item: RunOverview) -> str:
    """The state of a run, and how far it is."""
    percent = item["progress"]["percent"]
    return f"{item['state']} {percent:.0f}%" if percent and item["ended"] is None else item["state"]


def tags(row: RunRow) -> list[str]:
    """The tags that a run was begun with."""
    found = row.data.get("tags")
    return [str(tag) for tag in found] if isinstance(found, list) else []


class StepCounts(TypedDict):
    """How many steps of a run came to which end."""

    ran: int
    fresh: int
    failed: int
    other: int


class ProgressOverview(TypedDict):
    """How far a run is, as `--json` prints it."""

    step: int
    total: int | None
    percent: float | None
    eta: float | None


class RunOverview(TypedDict):
    """A run as `--json` prints it.  Times are in seconds."""

    id: str
    name: str
    tags: list[str]
    note: str
    recipe: str
    created: float
    ended: float | None
    seconds: float | None
    state: str
    failure: str
    reason: str
    progress: ProgressOverview
    steps: StepCounts
    usd: float
    given: Mapping[str, object]
    preset: str | None
    inputs: Mapping[str, object]


def overview(row: RunRow, view: RunView, usd: float = 0.0) -> RunOverview:
    """A run for programs, which cost so many US dollars; the table shows a part of it."""
    asked = row.data.get("asked")
    asked = asked if isinstance(asked, dict) else {}
    ends = {"ran": "DONE", "fresh": "FRESH", "failed": "FAILED"}
    counts = {name: view.counts.get(state, 0) for name, state in ends.items()}
    step, total, percent, eta = view.progress
    return {
        "id": row.id,
        "name": str(row.data.get("name", "")),
        "tags": tags(row),
        "note": str(row.data.get("note", "")),
        "recipe": row.recipe,
        "created": row.created,
        "ended": row.ended,
        "seconds": row.ended - row.created if row.ended is not None else None,
        "state": view.word,
        "failure": row.failure,
        "reason": row.reason,
        "progress": {"step": step, "total": total, "percent": percent, "eta": eta},
        "steps": {
            "ran": counts["ran"],
            "fresh": counts["fresh"],
            "failed": counts["failed"],
            "other": sum(view.counts.values()) - sum(counts.values()),
        },
        "usd": usd,
        "given": asked.get("inputs", {}),
        "preset": asked.get("preset"),
        "inputs": dict(row.inputs),
    }


def _axes(ws: Workspace, run: str) -> list[str]:
    """The values that a sweep tried, by input."""
    found: dict[str, dict[str, None]] = {}
    for id in ws.store.runs.steps(run):
        for name, value in matrix_values(id.partition("/")[0]).items():
            found.setdefault(name, {})[value] = None
    more = ",…" if any(len(values) > _TRIED for values in found.values()) else ""
    return [f"{name}={','.join([*values][:_TRIED])}{more}" for name, values in found.items()]


# -- logs --------------------------------------------------------------------------------------------------------------------------------------------


def _logs(ws: Workspace, args: argparse.Namespace) -> int:
    row, step = _run_and_step(ws, args.run)
    writer = for_stdout()
    if args.follow and args.attempt is None:
        return _follow(ws, row, step, writer, args.node)
    found = parts(ws.store.runs.events(row.id), args.node)
    chosen = [part for part in found if step is None or step in names(part.step)]
    if step is not None and not chosen:
        return _logs_of_makers(ws, args, row, step, writer)
    if args.attempt is not None:
        chosen = [part for part in chosen if part.number == args.attempt]
        if not chosen:
            raise NotFound(
                f"no attempt {args.attempt} of {step if step is not None else 'any step'} in run {row.id}"
            )
    else:
        chosen = list({part.step: part for part in chosen}.values())
    any_shown = show(ws, row.id, chosen, writer, _say, heads=step is None or len(chosen) > 1)
    if not any_shown and not args.quiet:
        _say("no output")
    return 0


def _logs_of_makers(
    ws: Workspace, args: argparse.Namespace, row: RunRow, step: str, writer: Writer
) -> int:
    """What the attempts printed whose results a run found: it did not begin the step itself."""
    state = next(
        (each.state for id, each in ws.store.runs.steps(row.id).items() if step in names(id)), ""
    )
    made = (
        [attempt for attempt in makers(ws, row, step) if args.attempt in (None, attempt.n)]
        if state in ("", "FRESH")
        else []
    )
    if not made:
        if state:
            _say(f"{readable(step)} did not start (state: {state})")
            return 0
        raise NotFound(
            f'"{step}" did not run in {row.id}',
            fix=near_step(step, list(ws.store.runs.steps(row.id))),
        )
    any_shown = False
    for run in dict.fromkeys(attempt.run for attempt in made):
        mine = {
            (attempt.step, attempt.n): attempt.ended or 0.0
            for attempt in made
            if attempt.run == run
        }
        _say(earlier(max(mine.values()), run))
        begun = {
            (part.step, part.number): part for part in parts(ws.store.runs.events(run), args.node)
        }
        chosen = [begun[each] for each in mine if each in begun]  # in the plan's order
        any_shown |= show(ws, run, chosen, writer, _say, heads=len(made) > 1)
    if not any_shown and not args.quiet:
        _say("no output, or the log is no longer stored")
    return 0


def earlier(ended: float, run: str) -> str:
    """Which run made a result, and how long ago."""
    return f"from run {run}, {span(max(0.0, time.time() - ended))} ago"


def _run_and_step(ws: Workspace, word: str) -> tuple[RunRow, str | None]:
    """What is meant: a step of the last run by its own name, else a run, else a run and a step of it."""
    word = stored(word)
    rows = (
        ws.store.runs.latest(last=1) if word.partition("/")[0].partition("~")[0] != "last" else []
    )
    ids = list(ws.store.runs.steps(rows[0].id)) if rows else []
    if rows and (any(word in names(id) for id in ids) or has_run(ws, word, rows[0].recipe)):
        return rows[0], word  # or it did not run in that one
    name, slash, step = word.partition("/")
    try:
        return find_run(ws.store, name), step if slash else None
    except NotFound as error:
        if rows and not slash and has_run(ws, word, None):
            return rows[0], word  # it is one of another recipe
        near = did_you_mean(word, [id.partition("[")[0] for id in ids] + ids)
        raise NotFound(str(error), fix=near or error.fix) from error


def _follow(ws: Workspace, row: RunRow, step: str | None, writer: Writer, node: int) -> int:
    known = ws.store.runs.steps(row.id)
    if (
        step is not None
        and not any(step in names(id) for id in known)
        and not ws.store.runs.live(row.id)
    ):
        raise _did_not_run(ws, row, step, list(known))
    # Of a step by its whole name the end is known; of a matrix only that of the run, for more instances may follow.
    alone = step if step is not None and step in known else None
    follower = Follower(
        ws,
        row.id,
        lambda id: step is None or step in names(id),
        writer,
        _say,
        heads=step is None or alone is None,
        node=node,
    )
    if not follower.follow(step):
        _say(f"run {row.id} died: lost its worker; resume it with `recipe run`")
    return 0


def _did_not_run(ws: Workspace, row: RunRow, step: str, known: list[str]) -> NotFound:
    earlier = ws.store.runs.latest_attempts(row.recipe, [step]).get(step)
    fix = (
        f"show its last log with `recipe logs {earlier.run}/{step}`"
        if earlier is not None
        else near_step(step, known)
    )
    return NotFound(f'"{step}" did not run in {row.id}', fix=fix)


def _say(text: str) -> None:
    print(shown(text), file=sys.stderr)


# -- diff --------------------------------------------------------------------------------------------------------------------------------------------


def _diff(ws: Workspace, args: argparse.Namespace) -> int:
    rows = _compared(ws.store, args.a, args.b)

    def compared(row: RunRow) -> Compared:
        item = overview(row, ws.run_views.summaries([row])[0])
        took = f" in {span(item['seconds'])}" if item["seconds"] is not None else ""
        counts = item["steps"]
        tally = f"{counts['ran']} ran, {counts['fresh']} fresh, {counts['failed']} failed"
        head = f"{item['id']}  {item['recipe']}  {moment(item['created'])}  {item['state']}{took}: {tally}"
        return Compared(head, item["inputs"], _ran(ws, row.id), item)

    tell(compared(rows[0]), compared(rows[1]), lambda content: load_manifest(ws, content), args)
    return 0


def _compared(store: Store, a: str | None, b: str | None) -> list[RunRow]:
    """The two runs that were named; one that would be compared with itself is compared with the run of its recipe before it.  Raises NotFound."""
    second = find_run(store, b or "last")
    first = find_run(store, a) if a else second
    if b is None and first.id == second.id:
        for last in (_NEAR, _ALL):
            rows = store.runs.latest(recipe=second.recipe, last=last)
            place = next((n for n, row in enumerate(rows, 1) if row.id == second.id), len(rows))
            if place < len(rows):
                break
        else:
            raise NotFound(
                f"{second.id} is the only run of {second.recipe} in this workspace",
                fix="name two runs from the list of `recipe runs`",
            )
        first = rows[place]
    return [first, second]


def _ran(ws: Workspace, run: str) -> dict[str, Ran]:
    """The steps that had something to do in a run, as it remembers them."""
    attempts = {row.step: row for row in ws.store.runs.attempts(run)}
    traces = ws.store.index.traces([row.key for row in attempts.values() if row.key])
    moves = [event for event in ws.store.runs.events(run) if event.subject == "step"]
    ended = {event.id: event.data for event in moves if event.before == "RUNNING"}
    states = {
        event.id: event.after for event in moves
    }  # in the order in which the steps were first heard of
    found = {}
    for id, state in states.items():
        attempt, data = attempts.get(id), ended.get(id, {})
        if state == "FRESH":
            continue
        if attempt is None:
            found[id] = Ran(state)
            continue
        # Another run may have made the trace of this key first: its outputs need not be those of this run.
        trace = traces.get(attempt.key)
        outputs = (
            {made.path: str(made.content) for made in trace.outputs}
            if trace is not None and trace.run == run
            else None
        )
        image, metrics, seconds = attempt.preimage, data.get("metrics"), data.get("seconds")
        found[id] = Ran(
            state,
            image if isinstance(image, dict) and image else None,
            outputs,
            metrics if isinstance(metrics, dict) else {},
            float(seconds) if isinstance(seconds, (int, float)) else None,
            attempt.exit,
        )
    return found


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("must be 0 or greater")
    return int(text)
