"""`recipe adopt`, `clean`, `gc` and `rm`: accept edited outputs; delete outputs, data or runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...api.finding import find_run
from ...errors import CannotRun
from ...execution.session import preview
from ...language.library import find
from ...language.units import about, count_text
from ...paths import from_here
from ...planning.ids import stored_form
from ...storage.garbage import Garbage, collect, find_garbage
from ...survey.upkeep import (
    Leftover,
    PublishedPath,
    adopt_outputs,
    delete_leftovers,
    demand_over,
    demand_quiet,
    examine_published,
    find_leftovers,
    find_leftovers_of,
    find_stale,
    remove_runs,
    unpublish,
)
from ..differences import brief
from ..tail import safe_ids, safe_line
from .flags import JSON_HELP, RUN_HELP, ask_consent
from .stores import open_store
from .targets import (
    add_request_words,
    find_nodes,
    format_time,
    open_for_changes,
    open_for_run,
    resolve_request,
    resolve_requests,
)

if TYPE_CHECKING:
    from ...storage.records.index import PublishedFile
    from ...storage.workspace import Workspace
    from ...survey.request import Request

KEEP_DAYS, KEEP_RUNS = 30.0, 20


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "adopt":
        parser.add_argument(
            "step",
            type=stored_form,
            metavar="STEP",
            help="Step whose outputs the edited files become",
        )
        add_request_words(parser)
        parser.epilog = (
            "Examples:\n  recipe adopt clean_data\n  recipe adopt train ./pipeline.yaml lr=0.2"
        )
        return
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="List the items to remove, without removing them",
    )
    if verb == "rm":
        parser.add_argument(
            "runs",
            nargs="+",
            metavar="RUN",
            help=f"{RUN_HELP}; repeatable",
        )
        parser.add_argument("--yes", action="store_true", help="Skip the confirmation prompt")
        parser.epilog = (
            "Results are kept. `recipe clean` removes published files, `recipe gc` cached "
            "data.\n\n"
            "Examples:\n  recipe rm last\n  recipe rm 7bde57 53d542 --yes"
        )
        return
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    if verb == "clean":
        add_request_words(parser)
        parser.add_argument(
            "--stale",
            action="store_true",
            help="Remove only stale outputs, which earlier runs left and no step produces now",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Also remove files that were edited since they were published",
        )
        parser.epilog = (
            "Removed files stay in the cache until `recipe gc`, and `recipe run` restores "
            "them.\n\n"
            "Examples:\n  recipe clean -n\n  recipe clean --stale ./pipeline.yaml"
        )
        return
    parser.add_argument(
        "--keep-days",
        type=_days,
        default=KEEP_DAYS,
        metavar="N",
        help="Keep data from the last N days (default: 30)",
    )
    parser.add_argument(
        "--keep-runs",
        type=_count,
        default=KEEP_RUNS,
        metavar="N",
        help="Keep at least N runs (default: 20)",
    )
    parser.add_argument(
        "--store",
        metavar="NAME",
        help=(
            "Delete results older than --keep-days from this shared store instead of the "
            "local cache"
        ),
    )
    parser.epilog = (
        "Published outputs, the newest result of every step, and data of running or "
        "resumable runs are always kept.\n\n"
        "Examples:\n  recipe gc -n\n  recipe gc --keep-days 7 --keep-runs 5"
    )


def run(args: argparse.Namespace) -> int:
    if args.verb == "rm":
        with open_for_changes(args.workspace) as ws:
            return _rm(ws, args)
    if args.verb != "adopt":
        with open_for_changes(args.workspace) as ws:
            return _clean(ws, args) if args.verb == "clean" else _gc(ws, args)
    with open_for_changes(args.workspace) as ws:
        request = resolve_request(ws, args)
    with open_for_run(args.workspace, request) as ws:
        return _adopt(ws, args, request)


# -- adopt -----------------------------------------------------------------------------------------


def _adopt(ws: Workspace, args: argparse.Namespace, request: Request) -> int:
    found = preview(ws, request)
    for n in find_nodes(found, args.step):
        id = found.plan.nodes[n].id
        trace = adopt_outputs(ws, found, n)
        if args.quiet:
            continue
        if trace is None:
            print(f"{safe_ids(id)} is already up to date")
        else:
            outputs = []
            for _, path, content in trace.outputs:
                outputs.append(f"{safe_line(from_here(ws.root, path))} ({brief(content)})")
            made = f": {', '.join(outputs)}" if outputs else ""
            print(f"{safe_ids(id)} is now up to date{made}")
    return 0


# -- clean -----------------------------------------------------------------------------------------


def _clean(ws: Workspace, args: argparse.Namespace) -> int:
    removed: list[PublishedFile] = []
    kept: list[str] = []
    missing: list[str] = []
    for item in _examine_outputs(ws, args):
        is_forced = item.now == "edited" and args.force
        if item.now == "ours" or is_forced:
            removed.append(item.row)
        elif item.now == "edited":
            kept.append(item.row.path)
        elif item.now == "gone":
            missing.append(item.row.path)
    if not args.dry_run:
        unpublish(ws, removed)
        ws.store.index.unpublish(missing)
    paths = [row.path for row in removed]
    if args.json:
        print(json.dumps({"removed": paths, "kept": kept, "dry_run": args.dry_run}, indent=2))
    else:
        _print_cleaned(ws, paths, kept, args)
    return 0


def _examine_outputs(ws: Workspace, args: argparse.Namespace) -> list[PublishedPath]:
    """Return the published paths of the recipes to clean; with `--stale`, only stale paths."""
    examined: list[PublishedPath] = []
    for request in resolve_requests(ws, args):
        if args.stale:
            found = preview(ws, request)
            recipe, rows = found.plan.recipe, find_stale(ws, found)
        else:
            recipe = _recipe_id(ws, request)
            rows = [row for _, row in sorted(ws.store.index.list_published(recipe).items())]
        demand_quiet(ws, recipe)
        examined += examine_published(ws, rows)
    return examined


def _print_cleaned(
    ws: Workspace, removed: Sequence[str], kept: Sequence[str], args: argparse.Namespace
) -> None:
    verb = "would remove" if args.dry_run else "removed"
    if not args.quiet:
        for path in removed:
            print(f"{verb} {safe_line(from_here(ws.root, path))}")
    for path in kept:
        print(
            f"kept {safe_line(from_here(ws.root, path))}: it was edited (--force removes it)",
            file=sys.stderr,
        )


def _recipe_id(ws: Workspace, request: Request) -> str:
    from ...language import parse

    return parse.load(find(request.recipe, ws.root)).id


# -- gc --------------------------------------------------------------------------------------------


_CALLED = {"input": "stored input"}
"""Names of kinds in the output of `gc`, if the kind alone would be misread."""


def _gc(ws: Workspace, args: argparse.Namespace) -> int:
    if args.store is not None:
        return _gc_store(ws, args)
    garbage = find_garbage(ws.store, ws.objects, keep_days=args.keep_days, keep_runs=args.keep_runs)
    leftovers = find_leftovers(ws, garbage, keep_days=args.keep_days)
    freed = garbage.size + sum(item.size for item in leftovers)
    if not args.dry_run and not ws.read_only:
        freed = collect(ws.store, ws.objects, garbage, ws.root) + delete_leftovers(ws, leftovers)
    counts = _count_garbage(garbage, leftovers)
    if args.json:
        facts = {
            "bytes": freed,
            "counts": counts,
            "runs": list(garbage.runs),
            "objects": list(garbage.objects),
            "inputs": list(garbage.inputs),
            "paths": [str(item.path.relative_to(ws.home)) for item in leftovers],
            "dry_run": args.dry_run,
        }
        print(json.dumps(facts, indent=2))
        return 0
    if args.verbose:
        for line in _list_garbage(ws, garbage, leftovers, is_dry_run=args.dry_run):
            print(line)
    if not args.quiet:
        what = _describe_counts_of_garbage(counts)
        verb = "would free" if args.dry_run else "freed"
        rest = f": {what}" if what else "; nothing to remove"
        print(f"{verb} {about(freed)}{rest}")
    return 0


def _count_garbage(garbage: Garbage, leftovers: Sequence[Leftover]) -> dict[str, int]:
    """Return the number of unneeded entries by kind."""
    counts = {
        "run": len(garbage.runs),
        "trace": len(garbage.traces),
        "object": len(garbage.objects),
        "input": len(garbage.inputs),
    }
    for item in leftovers:
        counts[item.kind] = counts.get(item.kind, 0) + 1
    return counts


def _list_garbage(
    ws: Workspace, garbage: Garbage, leftovers: Sequence[Leftover], *, is_dry_run: bool
) -> Iterator[str]:
    """Yield a line per object, stored input and leftover, with the size of each existing one."""
    for content in (*garbage.objects, *garbage.inputs):
        size = about(ws.objects.size(content)) if is_dry_run else ""
        yield f"{content}  {size}".rstrip()
    for item in leftovers:
        yield f"{item.path.relative_to(ws.home)}  {about(item.size)}"


def _describe_counts_of_garbage(counts: Mapping[str, int]) -> str:
    words = []
    for kind, count in counts.items():
        if not count or kind == "agent":  # every agent leaves an empty directory
            continue
        plural = "logs" if kind == "logs" else ""
        words.append(count_text(count, _CALLED.get(kind, kind), plural))
    return ", ".join(words)


def _rm(ws: Workspace, args: argparse.Namespace) -> int:
    """Delete runs from the history.  Raises Busy for a running run, NotFound, CannotRun."""
    rows = {}
    for word in args.runs:
        row = find_run(ws.store, word)
        rows[row.id] = row  # two words may name the same run
    beside = []
    for row in rows.values():
        demand_over(ws, row)
        left = find_leftovers_of(ws, row.id)
        beside += left
        if not args.quiet:
            size = about(sum(item.size for item in left))
            print(
                f"{row.id}  {safe_line(row.recipe)}  {format_time(row.created)}  {row.state}  {size} of logs and failed attempts"
            )
    if args.dry_run:
        return 0
    which = "this run" if len(rows) == 1 else f"these {len(rows)} runs"
    unasked = CannotRun("cannot ask for confirmation: not a terminal", fix="pass `--yes`")
    if not args.yes and not ask_consent(f"forget {which}?", unasked):
        print("removed nothing", file=sys.stderr)
        return 3
    freed = remove_runs(ws, list(rows), beside)
    if not args.quiet:
        print(f"freed {about(freed)}; results are kept; delete unused ones with `recipe gc`")
    return 0


def _gc_store(ws: Workspace, args: argparse.Namespace) -> int:
    remote_cache = open_store(ws, args.store)
    remote = remote_cache.remote
    done = remote.collect(keep_days=args.keep_days, dry=args.dry_run)
    counts = {"trace": len(done.traces), "object": len(done.objects), "upload": done.uploads}
    if args.json:
        facts = {
            "store": remote_cache.name,
            "bytes": done.size,
            "counts": counts,
            "waiting": done.waiting,
            "objects": list(done.objects),
        }
        print(json.dumps({**facts, "dry_run": args.dry_run}, indent=2))
        return 0
    if args.verbose:
        for name in done.objects:
            print(safe_line(name))
    if not args.quiet:
        verb = "would free" if args.dry_run else "freed"
        what = _describe_counts_of_garbage(counts)
        rest = f": {what}" if what else ""
        print(f"{verb} {about(done.size)} in {remote_cache.name}{rest}")
        if done.waiting:
            print(
                f"{done.waiting} more objects are unreferenced; another `recipe gc --store` a day later deletes them"
            )
    return 0


def _days(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError("must be 0 or greater")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be 0 or greater")
    return value
