"""`runs`, `status`, `logs`, `diff` and `fetch` of a server: what its API says of its runs.  Of a workspace more is known."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import NotFound
from ...language.units import about
from ...paths import beside
from ...planning.ids import stored
from ...storage.records.runs import FINAL
from ..handle.shells import Run, runs_of
from ..handle.there import LISTED, There
from ..handle.transport import Listing
from ..logs import for_stdout, head
from ..tables import aligned
from ..tail import shown
from .one_run import given, moment_of, plain, took_of

if TYPE_CHECKING:
    from ...api.values import Status


def run(args: argparse.Namespace) -> int:
    """Do a verb at the server `args.server`.  Raises RecipeError."""
    there = There(args.server)
    try:
        return _VERBS[args.verb](there, args)
    finally:
        there.close()


def _run(there: There, word: str) -> Run:
    return Run(there, there.find(word))


def _runs(there: There, args: argparse.Namespace) -> int:
    listing = Listing(LISTED if args.failed else args.last, recipe=args.recipe or "")
    rows = [row for row in runs_of(there, listing) if not args.failed or row.state == "FAILED"][
        : args.last
    ]
    if args.json:
        print(json.dumps([plain(row) for row in rows], indent=2))
    elif not rows:
        print(f"no matching run at {there.name}", file=sys.stderr)
    else:
        table = [("RUN", "BEGAN", "STATE", "TIME", "RECIPE", "INPUTS", "USER")]
        table += [
            (
                row.id,
                moment_of(row.created),
                row.word,
                took_of(row),
                shown(row.recipe),
                shown(given(row)),
                shown(row.user),
            )
            for row in rows
        ]
        print("\n".join(aligned(table, range(3, 4))))
    return 0


def _status(there: There, args: argparse.Namespace) -> int:
    """What is under way, and what waits."""
    states = ("ACTIVE", "QUEUED", "PAUSED")
    rows = [row for state in states for row in runs_of(there, Listing(LISTED, [state]))]
    if args.json:
        print(json.dumps([plain(row) for row in rows], indent=2))
    elif not args.quiet:
        for row in rows:
            print(
                shown(f"{row.word.lower()}: {row.id} {row.recipe}, since {moment_of(row.created)}")
            )
        if not rows:
            print("no running or queued runs")
    return 0


def _logs(there: There, args: argparse.Namespace) -> int:
    name, _, step = stored(args.run).partition("/")
    run = _run(there, name)
    writer, last = for_stdout(), ""
    for line in run.logs(follow=args.follow, step=step, attempt=args.attempt or 0):
        if not step and (now := head(line.step, line.attempt)) != last:
            writer.head(now)
            last = now
        writer.write(f"{line.text}\n".encode())
    writer.end()
    return 0


def _diff(there: There, args: argparse.Namespace) -> int:
    from ..differences import Ran
    from .compared import Compared, tell

    second = _run(there, args.b or "last").status()
    if args.a is None or (args.b is None and _run(there, args.a).id == second.id):
        before = [
            row
            for row in runs_of(there, Listing(LISTED, recipe=second.recipe))
            if row.id < second.id
        ]
        if not before:
            raise NotFound(
                f"{second.id} is the only run of {second.recipe} at {there.name}",
                fix="name two runs from the list of `recipe runs`",
            )
        first = Run(there, before[0].id).status()
    else:
        first = _run(there, args.a).status()

    def ran(found: Status) -> dict[str, Ran]:
        outputs: dict[str, dict[str, str]] = {}
        for each in found.outputs:
            step, _, output = each.name.rpartition(".")
            outputs.setdefault(step, {})[output] = each.content
        metrics: dict[str, dict[str, Any]] = {}
        for point in Run(there, found.id).metrics():
            metrics.setdefault(point.step, {}).update(point.values)
        return {
            each.id: Ran(each.state, None, outputs.get(each.id), metrics.get(each.id, {}))
            for each in found.steps
        }

    def compared(found: Status) -> Compared:
        counts = {
            state: sum(each.state == state for each in found.steps)
            for state in ("DONE", "FRESH", "FAILED")
        }
        head = f"{found.id}  {shown(found.recipe)}  {moment_of(found.created)}  {found.word}{f' in {took_of(found)}' if took_of(found) else ''}"
        tally = f"{counts['DONE']} ran, {counts['FRESH']} fresh, {counts['FAILED']} failed"
        return Compared(f"{head}: {tally}", found.inputs, ran(found), plain(found))

    tell(compared(first), compared(second), lambda _content: None, args)
    return 0


def _fetch(there: There, args: argparse.Namespace) -> int:
    run = _run(there, args.run)
    now = run.status()
    folder = (
        Path(args.location.typed(str(args.out)))
        if args.out is not None
        else Path("out") / now.recipe / run.id
    )
    folder = args.workspace / folder
    paths = run.download(folder, overwrite=args.overwrite)
    names = {path: path.relative_to(os.path.abspath(folder)).as_posix() for path in paths}
    if args.json:
        files = [
            {"name": names[path], "path": beside(str(path)), "bytes": path.lstat().st_size}
            for path in paths
        ]
        print(
            json.dumps(
                {"run": run.id, "server": there.name, "state": now.state, "files": files},
                indent=2,
            )
        )
    elif not args.quiet:
        for path in paths:
            print(shown(f"{names[path]}  {beside(str(path))}  {about(path.lstat().st_size)}"))
    if now.state not in FINAL and not args.quiet:
        print(f"recipe: run {run.id} is still running; more output may follow", file=sys.stderr)
    return 0


_VERBS: Final[Mapping[str, Callable[[There, argparse.Namespace], int]]] = {
    "runs": _runs,
    "status": _status,
    "logs": _logs,
    "diff": _diff,
    "fetch": _fetch,
}
