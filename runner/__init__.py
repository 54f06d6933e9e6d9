"""`recipe`: Make for ML training.

    import runner

    recipe = runner.load("sft@1")
    # What would a run do, and why? survey.plan.graph is a networkx.DiGraph.
    survey = runner.plan("./pipeline.yaml", {"epochs": 3})
    summary = runner.run("./pipeline.yaml", {"epochs": 3}, on_event=print)
    # One row for each instance and run: inputs, metrics, time.
    results = runner.results("./pipeline.yaml")
    # A worker of the server executes the run.
    inputs = {"dataset": "hf://me/photos"}
    run = runner.submit("flux-lora@1", inputs, to="https://recipes.example")
    run.wait()

Errors are `runner.errors.RecipeError`s. `Invalid` has all problems of a recipe or its inputs with
their locations. A failed step is in the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .errors import RecipeError
from .paths import VERSION as __version__

if TYPE_CHECKING:
    from .api.values import Forecast, RecipeEntry
    from .execution.terms import Choice, Overview, Settings, Summary
    from .interface.handle.opening import RunOptions
    from .interface.handle.shells import AsyncRun, Run
    from .interface.handle.transport import New
    from .language.recipe import Recipe
    from .paths import CallerLocation
    from .storage.records.runs import Event
    from .storage.workspace import Workspace
    from .survey.request import Request
    from .survey.survey import Survey

__all__ = [
    "__version__",
    "forecast",
    "forecast_async",
    "load",
    "plan",
    "recipes",
    "recipes_async",
    "results",
    "run",
    "run_of",
    "run_of_async",
    "submit",
    "submit_async",
]


def load(recipe: str | Path, *, workspace: str | Path | None = None) -> Recipe:
    """Load and validate a recipe: a path, or `NAME@VERSION` of the library.

    Raises errors.NotFound, and errors.Invalid with all problems.
    """
    from .language import parse
    from .language.library import find, resolve

    location = _standing(workspace, recipe)
    return parse.load(find(resolve(location, str(recipe)), location.root))


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
    """Plan a run: `survey.verdicts` has an answer with reasons for each of `survey.plan.nodes`.

    `inputs` are typed values, or text as on the command line. `python` is the interpreter for steps
    without a lock; `"current"` uses the caller's interpreter and packages for all steps. `store`
    names a shared store (default: the one in recipe.toml). `nodes` is the node count of
    `accelerate` steps that do not set one. Raises errors.RecipeError.
    """
    from .api.plans import plan_run
    from .execution.terms import Choice
    from .storage.workspace import Workspace

    location = _standing(workspace, recipe)
    with Workspace.open(location.root) as ws:
        ws.share(store)
        request = _request(location, recipe, inputs, preset, out, python, nodes)
        found = plan_run(ws, request, choice or Choice())
        found.plan.specs()  # loaded while the workspace is open
        return found


def recipes(*, to: str | None = None, workspace: str | Path | None = None) -> list[RecipeEntry]:
    """List the recipes available by name: `id`, `summary`, `package`, `file`, and the last use
    (`used`). `to` as in `submit`.

    Raises errors.RecipeError.
    """
    from .interface.handle.opening import recipes_of

    return recipes_of(to, _standing(workspace, "").root)


async def recipes_async(
    *, to: str | None = None, workspace: str | Path | None = None
) -> list[RecipeEntry]:
    """Async version of `recipes`."""
    from .interface.handle.opening import recipes_of_async

    return await recipes_of_async(to, _standing(workspace, "").root)


def forecast(
    recipe: str | Path, inputs: Mapping[str, Any] | None = None, **how: Unpack[RunOptions]
) -> Forecast:
    """Forecast a submitted run: its steps, time and cost, in the same form for a workspace, a
    database and a server.

    `steps` have an answer with reasons, `seconds`, `usd` and GPU `memory`. `machines` are the
    machines that the `driver` would rent. Nothing is stored, run or rented. Takes the arguments of
    `submit`. Raises errors.RecipeError, and Invalid with all problems.
    """
    from .interface.handle import opening

    root = _standing(how.get("workspace"), recipe).root
    return opening.forecast(_new(recipe, inputs, how), how.get("to"), root)


async def forecast_async(
    recipe: str | Path, inputs: Mapping[str, Any] | None = None, **how: Unpack[RunOptions]
) -> Forecast:
    """Async version of `forecast`."""
    from .interface.handle import opening

    root = _standing(how.get("workspace"), recipe).root
    return await opening.forecast_async(_new(recipe, inputs, how), how.get("to"), root)


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
    """Run the steps that are out of date, and return a summary: `summary.state` is COMPLETED,
    FAILED or CANCELLED, and `summary.failed` has each failure with its log.

    `out` is a directory, or an address (`s3://`, `gs://`, `hf://`) to upload the results to.
    `on_event` is called with every stored event, in order. In a notebook, or another program with
    an event loop, it is called from another thread. Raises errors.RecipeError if nothing could be
    started, or the upload failed.
    """
    from dataclasses import replace

    from .execution.session import run as run_session
    from .execution.signals import call_beside_loop
    from .execution.terms import Choice, Settings
    from .storage.workspace import Workspace, results_place

    location = _standing(workspace, recipe)
    with Workspace.open(location.root) as ws:
        how = settings or Settings()
        stack = ws.config.stack(how.stack) if how.stack else None
        stack_store, stack_nodes = (stack.store, stack.nodes) if stack else ("", 0)
        ws.share(store or stack_store or None)
        request = _request(location, recipe, inputs, preset, out, python, nodes or stack_nodes)
        if python and not request.current_python:
            how = replace(how, python=python)
        place = results_place(out or "")
        if isinstance(place, str):
            how = replace(how, upload=place)
        calls = _Calls(on_event, location.root)
        return call_beside_loop(
            lambda: run_session(ws, request, choice or Choice(), how, calls), calls.cancel
        )


def submit(
    recipe: str | Path, inputs: Mapping[str, Any] | None = None, **how: Unpack[RunOptions]
) -> Run:
    """Queue a run for a worker, and return its handle: `wait`, `status`, `events`, `logs`,
    `metrics`, `download`, `cancel`, `pause`, `resume`.

    `to` selects the queue: the workspace by default (or the database in `RECIPE_RUNS`),
    `postgresql://USER@HOST/DATABASE`, or the URL of a `recipe serve`, which runs recipes of its own
    catalog and requires the token `RECIPE_TOKEN`. The other arguments are `driver workspace preset
    out python choice settings store nodes priority not_before key labels user limits webhooks
    here`, see docs/python.md. Raises errors.RecipeError, and Invalid with all problems.
    """
    from .interface.handle.opening import submit_run

    return submit_run(
        _new(recipe, inputs, how), how.get("to"), _standing(how.get("workspace"), recipe).root
    )


async def submit_async(
    recipe: str | Path, inputs: Mapping[str, Any] | None = None, **how: Unpack[RunOptions]
) -> AsyncRun:
    """Async version of `submit`.

    The handle's methods are awaited, and its events and logs are async iterators.
    """
    from .interface.handle.opening import submit_run_async

    return await submit_run_async(
        _new(recipe, inputs, how), how.get("to"), _standing(how.get("workspace"), recipe).root
    )


def run_of(id: str, *, to: str | None = None, workspace: str | Path | None = None) -> Run:
    """Return the handle of an existing run, including runs of `recipe run`.

    `to` as in `submit`. Raises errors.NotFound.
    """
    from .interface.handle import opening

    return opening.run_of(id, to, _standing(workspace, "").root)


async def run_of_async(
    id: str, *, to: str | None = None, workspace: str | Path | None = None
) -> AsyncRun:
    """Async version of `run_of`."""
    from .interface.handle import opening

    return await opening.run_of_async(id, to, _standing(workspace, "").root)


def results(
    recipe: str | Path | None = None,
    *,
    workspace: str | Path | None = None,
    frame: bool | None = None,
) -> Any:
    """Return the results of a recipe: a row for each instance and run with inputs, metrics and time
    in seconds, as in `recipe results --csv`.

    Returns a pandas.DataFrame if pandas is installed, else a list of mappings; `frame` selects one
    of the two. Without `recipe`, uses the last run's recipe. Raises errors.NotFound, and
    ImportError if a frame is requested without pandas.
    """
    from importlib import import_module
    from importlib.util import find_spec

    from .interface.cli.targets import find_recipe, open_for_reading
    from .survey import comparison

    location = _standing(workspace, recipe or "")
    with open_for_reading(location.root) as ws:
        named = find_recipe(ws, location, None if recipe is None else str(recipe))
        tables = comparison.compare(
            comparison.collect_results(ws, named), comparison.read_criteria(ws, named)
        )
    rows: list[dict[str, Any]] = []
    for table in tables:
        rows.extend(table.flat())
    if frame or (frame is None and find_spec("pandas") is not None):
        return import_module("pandas").DataFrame(rows)
    return rows


def _standing(workspace: str | Path | None, recipe: str | Path) -> CallerLocation:
    import os

    from .paths import CallerLocation, location

    if workspace is None:
        return location(os.environ, [str(recipe)])
    return CallerLocation(Path(workspace))


def _request(
    location: CallerLocation,
    recipe: str | Path,
    inputs: Mapping[str, Any] | None,
    preset: str | None,
    out: str | Path | None,
    python: str | None,
    nodes: int,
) -> Request:
    from .language.library import resolve
    from .storage.workspace import results_place
    from .survey.request import Request

    place = None if out is None else results_place(out)
    below = Path(location.typed(str(place))) if isinstance(place, Path) else None
    given = dict(inputs or {})
    return Request(
        resolve(location, str(recipe)),
        given,
        preset,
        below,
        python == "current",
        typed_in=location.folders(given),
        nodes=nodes,
    )


def _new(recipe: str | Path, inputs: Mapping[str, Any] | None, how: RunOptions) -> New:
    """Build the run to store from the arguments of `submit`."""
    from dataclasses import replace

    from .api.submitting import QueueSettings
    from .execution.terms import Choice, Settings
    from .interface.handle.http_transport import is_server
    from .interface.handle.opening import check_options
    from .interface.handle.transport import New
    from .storage.workspace import results_place

    check_options(how)
    out, python, due = how.get("out"), how.get("python"), how.get("not_before")
    request = _request(
        _standing(how.get("workspace"), recipe),
        recipe,
        inputs,
        how.get("preset"),
        out,
        python,
        how.get("nodes", 0),
    )
    if is_server(how.get("to") or ""):
        request = replace(
            request, recipe=str(recipe)
        )  # the name refers to the server's catalog, regardless of local recipes
    settings = how.get("settings") or Settings(
        how.get("driver", "local"), store=how.get("store", ""), limits=dict(how.get("limits", {}))
    )
    if python and not request.current_python:
        settings = replace(settings, python=python)
    place = results_place(out or "")
    if isinstance(place, str):
        settings = replace(settings, upload=place)
    ticket = QueueSettings(
        how.get("priority", 0),
        due.timestamp() if due is not None else None,
        how.get("key", ""),
        dict(how.get("labels", {})),
    )
    ticket = ticket._replace(user=how.get("user", ""), here=how.get("here", False))
    return New(request, how.get("choice") or Choice(), settings, ticket, how.get("webhooks", ()))


class _Calls:
    """Listener that passes every event to a function."""

    def __init__(self, call: Callable[[Event], object] | None, root: Path) -> None:
        self._call, self._root = call, root
        self._run = ""
        self._cancelled = False

    def begin(self, overview: Overview) -> None:
        self._run = overview.run
        if self._cancelled:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the run, now or when it starts."""
        self._cancelled = True
        if self._run:
            with suppress(RecipeError):  # the run has finished
                run_of(self._run, workspace=self._root).cancel()

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
