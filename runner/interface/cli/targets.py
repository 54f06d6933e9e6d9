"""Open the workspace of a command, and resolve its words to recipes, runs and steps."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CannotRun, NotFound, RecipeError, did_you_mean
from ...execution.session import preview
from ...execution.terms import request_of_run
from ...language import library
from ...paths import CallerLocation, is_path
from ...planning.ids import bare, names
from ...storage.records.store import home
from ...storage.workspace import Workspace, local_folder
from ...survey.recipes import read_recipe
from ...survey.request import Request
from .flags import REQUEST, add_values, published_below, section, split_words, values_of

if TYPE_CHECKING:
    from ...storage.records.index import Trace
    from ...storage.records.runs import AttemptRow, RunRow
    from ...survey.survey import Survey

_NEAR, _ALL = 1000, 1_000_000
"""Number of runs in the first search for a name, and in the second, complete search."""


def add_request_words(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for recipes and input values; without them, commands use the last run."""
    request = section(parser, REQUEST)
    request.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE|INPUT=VALUE",
        help="Recipes and input values (default: the recipe and values of the last run)",
    )
    request.add_argument(
        "-f", "--file", metavar="FILE", help="Path of the recipe file, instead of RECIPE"
    )
    add_values(parser)
    request.add_argument(
        "--out", type=local_folder, metavar="DIR", help="Directory of the published outputs"
    )
    request.add_argument(
        "--python", default="", metavar="PYTHON", help="Python of the steps, as in `recipe run`"
    )


def open_for_reading(root: Path) -> Workspace:
    """Open the workspace for reading, without creating files in a workspace that has no runs.

    A writable database is opened for writing, because only a writer can roll back the
    incomplete transaction of a killed process.
    """
    folder = home(Path(os.path.abspath(root)), os.environ)
    writable = os.access(folder / "recipe.db", os.W_OK) and os.access(folder, os.W_OK)
    return Workspace.open(root, read_only=not writable)


def open_for_changes(root: Path) -> Workspace:
    """Open the workspace for changes; read-only if it has no database, so that none is created."""
    return Workspace.open(root, read_only=not _has_store(root))


def _has_store(root: Path) -> bool:
    return (home(Path(os.path.abspath(root)), os.environ) / "recipe.db").exists()


def open_for_run(root: Path, request: Request, *, secrets: bool = True) -> Workspace:
    """Open the workspace for a run, and create its `.recipe` directory if missing.

    The recipe is read before the directory is created, so that an invalid recipe leaves no
    `.recipe` behind. With `secrets`, this first reading requires the recipe's secrets to be set.

    Raises Invalid, NotFound.
    """
    if not _has_store(root):
        with Workspace.open(
            root, read_only=True, environ={**os.environ, "RECIPE_RUNS": ""}
        ) as ws:  # reading the recipe needs no run database
            ws.asks_secrets = secrets
            read_recipe(ws, request)
    return Workspace.open(root)


def resolve_requests(ws: Workspace, args: argparse.Namespace) -> list[Request]:
    """Return the requests of the command line, one per recipe.

    Without a recipe, the request is that of the last run with the given values, or ./recipe.yaml.
    """
    words, typed = split_words(args.words)
    given, origins = values_of(args, typed)
    names = [library.resolve(args.location, word) for word in words]
    if args.file is not None:
        names.insert(0, library.resolve_path(args.location, args.file))
    out = published_below(args)
    current_python = args.python == "current"
    folders = args.location.folders(given)
    if names:
        return [
            Request(
                name, given, args.preset, out, current_python, typed_in=folders, origins=origins
            )
            for name in dict.fromkeys(names)
        ]
    last = _last_request(ws) or Request(library.resolve(args.location, None))
    request = Request(
        last.recipe,
        {**last.inputs, **given},
        args.preset or last.preset,
        out or last.out,
        last.current_python or current_python,
        typed_in=folders,
        origins=origins,
        nodes=last.nodes,
    )
    return [request]


def _last_request(ws: Workspace) -> Request | None:
    """Return the request of the last run; None if no run is stored or its request is unknown."""
    newest = ws.store.runs.latest(last=1)
    if not newest:
        return None
    return request_of_run(newest[0])


def resolve_request(ws: Workspace, args: argparse.Namespace) -> Request:
    """Return the only request of the command line.

    Raises NotFound if several recipes are named.
    """
    found = resolve_requests(ws, args)
    if len(found) > 1:
        raise NotFound(
            f"more than one recipe: {', '.join(request.recipe for request in found)}",
            fix="name one recipe; write inputs as INPUT=VALUE",
        )
    return found[0]


def find_recipe(ws: Workspace, location: CallerLocation, word: str | None) -> str:
    """Return the id of a recipe that has runs, given its id, name or file; for None, of the last
    run.

    Raises NotFound, Invalid.
    """
    newest = ws.store.runs.latest(last=1)
    if not newest:
        raise NotFound(
            "no runs in this workspace",
            fix="start a run with `recipe run`, or select another workspace with `-C`",
        )
    if word is None:
        return newest[0].recipe
    versions: list[str] = []
    for last in (_NEAR, _ALL):
        known = list(dict.fromkeys(row.recipe for row in ws.store.runs.latest(last=last)))
        if word in known:
            return word
        versions = _versions(known, word)
        if versions:
            break
    if not versions or is_path(word):
        with suppress(NotFound):
            from ...language import parse

            recipe = parse.load(library.find(library.resolve(location, word), location.root)).id
            versions = [id for id in (recipe, sweep_name(recipe)) if id in known]
    if not versions:
        near = did_you_mean(word, known)
        fix = near or f"recipes with runs: {', '.join(known[:10])}"
        raise NotFound(f"no runs of {word} in this workspace", fix=fix)
    return versions[0]


def _versions(recipes: Sequence[str], name: str) -> list[str]:
    """Return the ids of a recipe name, otherwise of its sweep."""
    for wanted in (name, f"{name.partition('@')[0]}-sweep"):
        found = [id for id in recipes if id.partition("@")[0] == wanted]
        if found:
            return found
    return []


def sweep_name(recipe: str) -> str:
    """Return the id of the sweep recipe generated for a recipe id."""
    name, _, version = recipe.partition("@")
    return f"{name}-sweep@{version}"


def has_recent_step(ws: Workspace, word: str, recipe: str | None) -> bool:
    """Return True if one of the last 50 runs of `recipe` (None: any recipe) has a step `word`."""
    newest = ws.store.runs.latest(recipe=recipe, last=50)
    return any(_steps_named(ws, row.id, word) for row in newest)


def _steps_named(ws: Workspace, run: str, word: str) -> list[str]:
    """Return the started steps of a run that have the name `word`."""
    return [step for step in ws.store.runs.steps(run) if word in names(step)]


def find_producers(ws: Workspace, row: RunRow, word: str) -> list[AttemptRow]:
    """Return the attempts that produced a step's cached results, one per matrix instance.

    Without a cached result, return the step's latest attempts: in this run's recipe, otherwise in
    the last run of any recipe with this step. Empty if the step never ran in this workspace.
    """
    producers = {}
    for trace in _cached_results(ws, row, word):
        for attempt in ws.store.runs.attempts(trace.run, trace.step):
            if attempt.outcome == "done":
                producers[attempt.step] = attempt
    if producers:
        return list(producers.values())
    same_recipe = ws.store.runs.latest(recipe=row.recipe, last=_NEAR)
    for each in [row, *same_recipe, *ws.store.runs.latest(last=_NEAR)]:
        steps = _steps_named(ws, each.id, word)
        latest = ws.store.runs.latest_attempts(each.recipe, [*steps, word])
        if latest:
            return list(latest.values())
    return []


def _cached_results(ws: Workspace, row: RunRow, word: str) -> list[Trace]:
    """Return the cached results of a step with the inputs of a run.

    Empty if the request of the run is unknown or its recipe is no longer valid.
    """
    request = request_of_run(row)
    if request is None:
        return []
    with suppress(RecipeError, OSError):
        found = preview(ws, request)
        keys = []
        for node, verdict in zip(found.plan.nodes, found.verdicts, strict=True):
            if verdict.key and word in names(node.id):
                keys.append(verdict.key)
        known = ws.store.index.traces(keys)
        return [known[key] for key in keys if key in known]
    return []


def find_nodes(found: Survey, word: str) -> list[int]:
    """Return the node numbers of a step, including matrix instances and steps of a nested recipe.

    Raises NotFound, and CannotRun for a step that is not expanded yet.
    """
    nodes = found.plan.nodes
    chosen = found.plan.nodes_named(word)
    if chosen:
        return sorted(chosen)
    for pending in found.plan.pending:
        if word == pending.step or word.startswith(f"{pending.step}["):
            raise CannotRun(
                f"the instances of {pending.step} are not known yet: one for each {pending.pattern} from {pending.producer}"
            )
    for later in found.later:
        if word in names(later.id) or bare(word) == later.id:
            raise CannotRun(f"{later.id} is not known yet: it {later.why}")
    raise NotFound(
        f'{found.plan.recipe} has no step "{word}"',
        fix=suggest_step(word, [*(node.id for node in nodes), *found.plan.waiting]),
    )


def suggest_step(word: str, ids: list[str]) -> str:
    """Return a spelling suggestion for an unknown step name, or the list of steps."""
    steps = list(dict.fromkeys(map(bare, ids)))
    near = did_you_mean(word, steps + ids)
    more = ", …" if len(steps) > 10 else ""
    return near or f"its steps: {', '.join(steps[:10])}{more}"


def format_time(at: float) -> str:
    """Format a time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def describe_request(found: Survey) -> str:
    """Format a recipe id with its file, preset and inputs."""
    request, recipe = found.request, found.plan.recipe
    words = []
    if request.recipe != recipe:
        words.append(request.recipe)
    if request.preset:
        words.append(f"preset {request.preset}")
    words += [f"{name}={value}" for name, value in request.inputs.items()]
    if not words:
        return recipe
    return f"{recipe} ({', '.join(words)})"


def count_verdicts(found: Survey) -> dict[str, int]:
    """Count the steps by verdict."""
    return dict(Counter(verdict.answer for verdict in found.verdicts))


def pending_as_json(found: Survey) -> list[dict[str, str]]:
    """Return the matrices that are not expanded yet, for JSON output."""
    return [
        {"step": p.step, "producer": p.producer, "output": p.output, "pattern": p.pattern}
        for p in found.plan.pending
    ]


def describe_counts(counts: Mapping[str, int]) -> str:
    """Format verdict counts, for example `3 to run, 9 fresh`."""
    words = {
        "run": "to run",
        "maybe": "perhaps",
        "restore": "to restore",
        "fresh": "fresh",
        "skip": "skipped",
    }
    parts = []
    for answer, word in words.items():
        if answer in counts:
            parts.append(f"{counts[answer]} {word}")
    return ", ".join(parts)
