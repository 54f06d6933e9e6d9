"""`recipe`: Make for ML training.

    import runner

    recipe = runner.load("sft@1")
    survey = runner.plan("./pipeline.yaml", {"epochs": 3})       # what a run would do, and why; survey.plan.graph is a networkx.DiGraph
    summary = runner.run("./pipeline.yaml", {"epochs": 3}, on_event=print)
    results = runner.results("./pipeline.yaml")                          # a row for each instance and run: inputs, metrics, time

Errors are `runner.errors.RecipeError`s: `Invalid` has every problem of a recipe or its inputs, each with its place; a failed step is in the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .paths import VERSION as __version__

if TYPE_CHECKING:
    from .execution.terms import Choice, Settings, Summary
    from .language.recipe import Recipe
    from .paths import Standing
    from .storage.runs import Event
    from .storage.workspace import Workspace
    from .survey.survey import Request, Survey

__all__ = ["__version__", "load", "plan", "results", "run"]


def load(recipe: str | Path, *, workspace: str | Path | None = None) -> Recipe:
    """Read and check a recipe: a path, or `NAME@VERSION` of the library.  Raises errors.NotFound, errors.Invalid with every problem."""
    from .language import parse
    from .language.library import find, meant

    standing = _standing(workspace, recipe)
    return parse.load(find(meant(standing, str(recipe)), standing.root))


def plan(
    recipe: str | Path,
    inputs: Mapping[str, Any] | None = None,
    *,
    workspace: str | Path | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    python: str | None = None,
    choice: Choice | None = None,
    store: str | None = None,
    nodes: int = 0,
) -> Survey:
    """What a run would do, at most: `survey.verdicts` has one answer with reasons for each of `survey.plan.nodes`.

    `inputs` are typed values, or text as on the command line.  `python` is the interpreter of steps without a lock; `"current"` is the caller's, with
    its packages, for all steps.  `store` names a shared store, as on the command line; without it the one that recipe.toml says.
    `nodes` is on how many nodes `accelerate` steps run that do not say it.  Raises errors.RecipeError.
    """
    from .execution.session import look
    from .execution.terms import Choice
    from .storage.workspace import Workspace

    standing = _standing(workspace, recipe)
    with Workspace.open(standing.root) as ws:
        ws.share(store)
        found = look(ws, _request(standing, recipe, inputs, preset, out, python, nodes), choice or Choice())
        found.plan.specs()  # read while the workspace is open
        return found


def run(
    recipe: str | Path,
    inputs: Mapping[str, Any] | None = None,
    *,
    workspace: str | Path | None = None,
    preset: str | None = None,
    out: str | Path | None = None,
    python: str | None = None,
    choice: Choice | None = None,
    settings: Settings | None = None,
    store: str | None = None,
    on_event: Callable[[Event], object] | None = None,
    nodes: int = 0,
) -> Summary:
    """Run what is not fresh, and say how it ended: `summary.state` is COMPLETED, FAILED or CANCELLED, `summary.failed` has each failure with its log.

    `out` is a folder, or an address (`s3://`, `gs://`, `hf://`) that the results are uploaded to.  `on_event` is called with every stored event, in
    order.  Raises errors.RecipeError when nothing could be started, or the results are not uploaded.
    """
    from dataclasses import replace

    from .execution.session import run as run_session
    from .execution.terms import Choice, Settings
    from .storage.workspace import Workspace, results_place

    standing = _standing(workspace, recipe)
    with Workspace.open(standing.root) as ws:
        ws.share(store)
        request = _request(standing, recipe, inputs, preset, out, python, nodes)
        how = settings or Settings()
        if python and not request.current_python:
            how = replace(how, python=python)
        if isinstance(place := results_place(out or ""), str):
            how = replace(how, upload=place)
        return run_session(ws, request, choice or Choice(), how, _Calls(on_event))


def results(recipe: str | Path | None = None, *, workspace: str | Path | None = None, frame: bool | None = None) -> Any:
    """What the runs of a recipe gave: a row for each instance and run with inputs, metrics and time in seconds, as `recipe results --csv` prints it.

    A pandas.DataFrame where pandas is installed, else a list of mappings; `frame` asks for one of the two.  Without a recipe that of the last run.
    Raises errors.NotFound, ImportError if a frame is asked for without pandas.
    """
    from importlib import import_module
    from importlib.util import find_spec

    from .interface.cli.chosen import opened, recipe_of
    from .survey import comparison

    standing = _standing(workspace, recipe or "")
    with opened(standing.root) as ws:
        named = recipe_of(ws, standing, None if recipe is None else str(recipe))
        tables = comparison.compared(comparison.results(ws, named), comparison.selects(ws, named))
    rows = [row for table in tables for row in table.flat()]
    if frame or (frame is None and find_spec("pandas") is not None):
        return import_module("pandas").DataFrame(rows)
    return rows


def _standing(workspace: str | Path | None, recipe: str | Path) -> Standing:
    import os

    from .paths import Standing, standing

    return standing(os.environ, [str(recipe)]) if workspace is None else Standing(Path(workspace))


def _request(
    standing: Standing,
    recipe: str | Path,
    inputs: Mapping[str, Any] | None,
    preset: str | None,
    out: str | Path | None,
    python: str | None,
    nodes: int,
) -> Request:
    from .language.library import meant
    from .storage.workspace import results_place
    from .survey.survey import Request

    place = None if out is None else results_place(out)
    below = Path(standing.typed(str(place))) if isinstance(place, Path) else None
    given = dict(inputs or {})
    return Request(meant(standing, str(recipe)), given, preset, below, python == "current", typed_in=standing.folders(given), nodes=nodes)


class _Calls:
    """A listener that hands every event to a function."""

    def __init__(self, call: Callable[[Event], object] | None) -> None:
        self._call = call

    def begin(self, overview: object) -> None: ...

    def events(self, batch: Sequence[Event]) -> None:
        if self._call is not None:
            for event in batch:
                self._call(event)

    def tick(self) -> None: ...

    def say(self, text: str) -> None: ...

    def end(self, summary: object) -> None: ...

    def page(self, ws: Workspace, run: str) -> str:
        from .interface.page import of_run

        return of_run(ws, run)
