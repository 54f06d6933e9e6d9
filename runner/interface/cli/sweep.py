"""`recipe sweep`: a recipe once for each combination of values of its inputs, and the table of what came of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...digest import of_bytes
from ...errors import Invalid, NotFound, Problem, did_you_mean
from ...execution.session import look
from ...language import library
from ...paths import is_path
from ...storage.workspace import Workspace
from ...survey import comparison
from ...survey.survey import Request
from . import run as running
from .parser import published_below, values_of
from .results import as_text

if TYPE_CHECKING:
    from ..sweeps import Sweep


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    running.arguments(parser, "run")
    best = parser.add_mutually_exclusive_group()
    best.add_argument("--min", metavar="METRIC", help="the instance with the least of this metric is the best")
    best.add_argument("--max", metavar="METRIC", help="the one with the most of it")
    parser.add_argument("--random", type=running.positive, metavar="N", help="only so many combinations, by chance")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which by chance (default: 0): a greater --random adds some")
    parser.description = (
        "Run a recipe once for each combination of the values of its inputs, and compare what came of it. An input with several values, separated by "
        "commas, is an axis; others are as for `recipe run`. What is the same in all instances runs once, and what an earlier sweep ran is fresh."
    )
    parser.epilog = "examples:\n  recipe sweep sft@1 learning_rate=1e-4,3e-4 rank=8,16 --min eval_loss\n  recipe sweep train lr=1e-4,1e-3 -n"


def run(args: argparse.Namespace) -> int:
    from ...language import parse
    from ..sweeps import drafted
    from .parser import check_driver

    check_driver(args.driver)
    words = list(args.inputs)
    if args.recipe is not None and (args.file is not None or ("=" in args.recipe and "/" not in args.recipe.partition("=")[0])):
        words.insert(0, args.recipe)
        args.recipe = None
    bad = [word for word in words if "=" not in word]
    if bad:
        raise Invalid([Problem("bad-input", f'"{word}" is not INPUT=VALUE', fix="write inputs as name=value") for word in bad])
    meant = library.path(args.standing, args.file) if args.file is not None else library.meant(args.standing, args.recipe)
    source = library.find(meant, args.workspace)
    recipe = parse.load(source)
    given, origins = values_of(args, dict(word.split("=", 1) for word in words))
    metric = args.min or args.max
    folder = Path(os.path.abspath(args.workspace)) / ".recipe/sweeps"
    uses = os.path.relpath(os.path.abspath(source), folder) if is_path(meant) else meant
    swept = drafted(recipe, uses, given, preset=args.preset, origins=origins, metric=metric, draws=args.random, seed=args.seed)
    with Workspace.open(args.workspace) as ws:
        ws.share(args.store)
        request = _request(ws, args, swept, folder, recipe.id.partition("@")[0])
        code = running.done(ws, request, args)
        if code not in (0, 1) or args.dry_run or args.json or args.quiet > 1:
            return code
        _print(ws, request, metric, least=args.min is not None)
    return code


def _request(ws: Workspace, args: argparse.Namespace, swept: Sweep, folder: Path, name: str) -> Request:
    """The recipe of the sweep, written down, and what is asked of it."""
    text = swept.text.encode()
    path = folder / f"{name}-{of_bytes(text)[:8]}.yaml"
    if not path.exists():
        ws.write(path, text)
    out, folders = published_below(args) or Path("sweeps"), args.standing.folders(swept.fixed)
    recipe = f"./{path.relative_to(os.path.abspath(args.workspace))}"
    return Request(recipe, swept.fixed, args.preset, out, args.python == "current", args.update, folders)


def _print(ws: Workspace, request: Request, metric: str | None, *, least: bool) -> None:
    """The instances of this sweep beside each other.  Raises NotFound when none has the metric."""
    found = look(ws, request)
    keys = {verdict.key for verdict in found.verdicts if verdict.key is not None}
    results = comparison.results(ws, found.plan.recipe, keys)
    tables = comparison.compared(results, {}, sort=metric, least=least if metric is not None else None)
    if metric is not None:
        tables = [table for table in tables if table.by is not None and table.by.metric == metric]
        if not tables and any(result.state == "DONE" for result in results):
            known = comparison.metric_names(results)
            fix = did_you_mean(metric, known) or f"they reported {', '.join(known)}: `recipe results --sort NAME`"
            raise NotFound(f'all ran, and no step reported "{metric}"', fix=fix)
    if found.plan.publish and tables:
        print()  # below the paths
    print("\n\n".join("\n".join(as_text(table, found.plan.recipe, None, in_markdown=False)) for table in tables))
