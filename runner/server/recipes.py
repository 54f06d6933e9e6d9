"""Routes for recipes, plans and offers.

The server provides the recipes of the library, of packages and of `recipes.allow`. Under `recipe
ui`, it also provides the recipes in the workspace directory. Requests name recipes, never paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from .. import extensions
from ..api import forecasts, starting
from ..api.plans import plan_run
from ..api.recipes import (
    ADDRESSES,
    AvailableRecipe,
    find_recipe,
    input_schema,
    last_used,
    list_recipes,
    read_recipe,
    summary_facts,
)
from ..api.starting import Start
from ..api.values import Facts
from ..errors import CannotRun, Invalid, NotFound, Problem, did_you_mean
from ..hosts.renting.any_driver import alternatives, driver_names
from ..interface import datasheet, shelves
from ..language import library, units, unread
from ..language.inputs import BadValue, convert, kind_of
from ..language.recipe import Recipe
from ..settings import load
from ..storage.reach import Reach
from ..storage.workspace import Workspace
from ..survey import bundles
from ..survey.request import Request
from ..survey.summaries import selected_directions
from .answers import Refused, hide_local_paths, hide_paths_in_value
from .market import Ask, CachedOffers, InMarket, look_up
from .planner import InPlanner
from .room import READ, InRoom, RequestBody, ServedWorkspace, Whole, integer, run_of

if TYPE_CHECKING:
    from ..survey.survey import Survey

router = APIRouter(prefix="/v1", tags=["recipes"])

ROOTS: Final = ("DATA_DIR", "DATASETS_DIR", "MODELS_DIR", "CHECKPOINTS_DIR")
"""Environment variables with data directories, in addition to `roots` under [data]."""


class RecipeSummary(BaseModel):
    id: str
    summary: str
    package: str = Field(
        description="Python package of the recipe. Empty for recipes of the library and the workspace."
    )
    file: str = Field(description="File of a workspace recipe, otherwise empty.")
    used: str | None = Field(
        description="Time of the last run or sweep among the latest 500 runs, or null."
    )


class RecipeList(BaseModel):
    recipes: list[RecipeSummary]


class Direction(BaseModel):
    better: Literal["min", "max"]


class RecipeView(RecipeSummary):
    doc: str
    inputs: dict[str, Any] = Field(description="JSON Schema of the inputs.")
    presets: dict[str, dict[str, Any]] = Field(description="Input values of each preset.")
    resources: dict[str, dict[str, Any]] = Field(
        description="Resources of the most demanding step, by preset. The empty name is no preset."
    )
    outputs: list[str]
    secrets: dict[str, str] = Field(
        description="Environment variable on the worker for each secret."
    )
    metrics: dict[str, Direction] = Field(
        description="Direction of each metric that the recipe declares."
    )


_Bytes = Annotated[
    str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})? ?([kKMGTP]|[KMGTP]i)?B$", max_length=40)
]


class Need(RequestBody):
    """Resources of each step's machine, which override the recipe and its preset."""

    gpus: Annotated[int, Field(ge=0, le=1024), BeforeValidator(integer)] | None = Field(
        default=None,
        description="Number of GPUs. 0: run steps without a GPU even if they request one.",
    )
    gpu: str | None = Field(default=None, min_length=1, max_length=80)
    gpu_memory: _Bytes | None = Field(
        default=None, description="Memory of each GPU, for example 24GB."
    )
    memory: _Bytes | None = None
    cpus: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    disk: _Bytes | None = None

    @property
    def resources(self) -> dict[str, Any]:
        """Return the fields that are set, with sizes in bytes."""
        fields = self.model_dump(exclude_none=True)
        for name, value in fields.items():
            if name in _SIZES:
                fields[name] = units.size(value)
        return fields


_SIZES: Final = ("gpu_memory", "memory", "disk")


def _named_by(one: str, other: str) -> dict[str, Any]:
    """Return the JSON Schema of a request with field `one` and without field `other`."""
    return {
        "required": [one],
        "properties": {one: {"minLength": 1}, other: {"maxLength": 0}},
    }


class Asked(RequestBody):
    """A recipe to run, or an earlier run to repeat with changes."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_named_by("recipe", "like"), _named_by("like", "recipe")]}
    )
    recipe: str = Field(
        default="",
        max_length=80,
        description="NAME@VERSION, or NAME for the newest version. Omit with `like`.",
    )
    like: str = Field(
        default="",
        max_length=40,
        description="ID of a run to repeat with changes. Its recipe, inputs and preset are reused. Paths stay unchanged.",
    )
    inputs: dict[str, Any] = Field(
        default={},
        description="Input values, as described by GET /v1/recipes/NAME. With `like`, only the changed inputs.",
    )
    sweep: dict[str, Annotated[list[Any], Field(min_length=1, max_length=1000)]] | None = Field(
        default=None,
        max_length=100,
        description="Inputs with several values. Each combination is one instance. With `like`, null keeps the sweep of that run, and {} removes it.",
    )
    preset: str | None = Field(
        default=None,
        max_length=400,
        description="Preset of the recipe, or several separated by commas: a,b.",
    )
    resources: Need = Need()

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if bool(self.recipe) == bool(self.like):
            raise ValueError("a request requires `recipe`, or `like` with the ID of a run")
        return self


class AskedWhere(Asked):
    """A recipe to run, with a driver."""

    driver: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description=(
            "Driver that executes the run (see `recipe doctor`). `any:vastai,runpod` chooses the cheapest "
            "of several drivers, and `any` the cheapest of the setting `any`."
        ),
    )


class MemoryView(BaseModel):
    """Estimated memory use per GPU of a training step."""

    bytes: int | None = Field(description="Null if unknown. `words` gives the reason.")
    usable: int | None = Field(description="Usable memory of the GPU in bytes.")
    gpu: str
    fits: Literal["FITS", "TIGHT", "NO"] | None
    words: str


class Limits(RequestBody):
    """Limits of a run, if its recipe has no lower limits."""

    time: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="Maximum execution time in seconds. Steps are stopped afterwards.",
    )
    cost: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="Maximum cost of rented machines in US dollars.",
    )


class AskedSearch(RequestBody):
    """A search over `sweep`. Numeric inputs may have one text, LOW..HIGH or LOW..HIGH:log."""

    trials: Whole = Field(ge=1, le=1000)
    metric: str = Field(min_length=1, max_length=200)
    better: Literal["min", "max"]


class AskedPlan(AskedWhere):
    """A request for a plan."""

    limits: Limits = Limits()
    search: AskedSearch | None = Field(
        default=None,
        description="Plan one trial of a search, and return its `recipe sweep --tpe` command. The server does not start searches.",
    )


class StepPlan(BaseModel):
    id: str
    answer: str = Field(description="run, maybe, restore, fresh or skip.")
    reasons: list[str]
    needs: list[str]
    seconds: float | None = Field(description="Expected duration in seconds.")
    usd: float | None = Field(description="Expected maximum cost in US dollars.")
    memory: MemoryView | None = Field(description="Null for a step that does not train on a GPU.")


class RentedMachine(BaseModel):
    """The machine to rent: currently the cheapest matching offer."""

    step: str = Field(description="First step that needs the machine, or `the run`.")
    driver: str
    offer: str | None = Field(description="Null if no offer matches. `failed` gives the reason.")
    gpu: str | None
    gpus: int | None
    region: str | None
    market: str | None = Field(description="on-demand or spot.")
    usd_an_hour: float | None
    hours: float | None = Field(description="Expected rental time in hours, or null if unknown.")
    usd: float | None = Field(
        description="Cost for these hours, including disk and egress. Null if unknown."
    )
    failed: str


class PlanView(BaseModel):
    recipe: str
    instances: int = Field(description="Number of combinations of a sweep, otherwise 1.")
    command: str | None = Field(
        description="Equivalent shell command in the workspace directory. Null if no command line can express the request."
    )
    driver: str
    machines: list[RentedMachine] = Field(
        description="Machines that the driver would rent. Empty for drivers that do not rent."
    )
    goes_to: list[str] = Field(
        description="Drivers whose machines may receive data and secrets of the run. With `any`, all candidates."
    )
    usd_of_machines: float | None = Field(
        description="Cost of all machines. Null unless known for each."
    )
    inputs: dict[str, Any]
    steps: list[StepPlan]
    seconds: float | None = Field(
        description="Total duration of all steps, one after another. Null unless known for each."
    )
    usd: float | None
    bytes: int = Field(description="Total size of the outputs to restore in bytes.")


def list_available(room: ServedWorkspace) -> list[AvailableRecipe]:
    """Return all recipes available by name. Raises Invalid as `list_recipes` does."""
    return list_recipes(room.root, room.environ, in_folder=room.for_owner)


def find_available(room: ServedWorkspace, name: str) -> AvailableRecipe:
    """Find an available recipe by name. Raises NotFound."""
    return find_recipe(list_available(room), name)


class CheckedRequest(NamedTuple):
    """A checked request, with the recipe and the run to start."""

    offered: AvailableRecipe
    start: Start


def check_request(
    room: ServedWorkspace, asked: AskedWhere, search: starting.Search | None = None
) -> CheckedRequest:
    """Check a run request. Raises NotFound, Refused, and Invalid with all input problems.

    The check is fast for any request, so it needs no separate process.
    """
    wanted = _read_request(room, asked)
    wanted = wanted._replace(start=wanted.start._replace(search=search))
    problems = _check_inputs(room, wanted, asked)
    given: list[tuple[str, object]] = [*asked.inputs.items()]
    for name, values in (asked.sweep or {}).items():
        given += [(name, value) for value in values]
    problems += _check_addresses(room, read_recipe(wanted.offered), given)
    if problems:
        raise Invalid(problems)
    driver = asked.driver
    with room.open_workspace() as ws:
        if alternatives(ws.config, driver):
            return wanted
    if driver != "local":
        require_driver(driver)
    return wanted


def require_driver(name: str) -> None:
    """Raise NotFound if no driver has this name."""
    known = extensions.drivers(name)
    if name not in known:
        raise NotFound("unknown driver", fix=did_you_mean(name, known))


def _read_request(room: ServedWorkspace, asked: Asked) -> CheckedRequest:
    """Read the recipe and inputs of a run request, without checking. Raises NotFound, Refused."""
    resources = asked.resources.resources
    if not asked.like:
        each = find_available(room, asked.recipe)
        request = Request(each.word, asked.inputs, asked.preset, resources=resources)
        return CheckedRequest(each, Start(request, asked.sweep or {}))
    with room.open_workspace() as ws:
        before = starting.read_start(ws.root, run_of(ws, asked.like))
    start = starting.change_inputs(before, asked.inputs, asked.sweep)
    request = start.request
    if asked.preset is not None:
        request = replace(request, preset=asked.preset or None)
    request = replace(request, resources={**request.resources, **resources})
    each = _find_recipe_of_run(room, request.recipe)
    return CheckedRequest(each, Start(replace(request, recipe=each.word), start.axes))


def _find_recipe_of_run(room: ServedWorkspace, word: str) -> AvailableRecipe:
    """Return the recipe of an earlier run, if available on this server. Raises Refused."""
    with suppress(NotFound, Invalid):
        path = os.path.realpath(library.find(word, room.root))
        for each in list_available(room):
            if os.path.realpath(each.entry.path) == path:
                return each
    words = "the server does not offer the recipe of this run"
    fix = "add the recipe to `allow` under [recipes] in recipe.toml; to retry without changes, use POST /v1/runs/RUN/retry"
    raise Refused(409, "not-offered", words, fix)


def _check_inputs(room: ServedWorkspace, wanted: CheckedRequest, asked: Asked) -> list[Problem]:
    """Return the problems of unknown inputs and invalid values."""
    from ..language import inputs

    recipe, (request, axes, search) = read_recipe(wanted.offered), wanted.start
    problems = []
    for name in asked.inputs:
        if name in (asked.sweep or {}):
            words = f'"{name}" has both one value and several values'
            problems.append(Problem("clash", words, None, "remove one of the two", input=name))
    if axes or search:
        try:
            if search:
                starting.first_trial(room.root, wanted.start, search)
            else:
                starting.draft_sweep(room.root, wanted.start)
        except Invalid as error:
            problems += error.problems
    else:
        problems += inputs.try_bind(recipe, request.inputs, preset=request.preset)[1]
        problems += unread.find_refused(recipe, request.inputs, request.preset)
    if asked.resources.resources:
        keyed = _find_keyed_resources(recipe)
        if keyed:
            words = f"the resources of {keyed} are part of its cache key and cannot be changed"
            problems.append(Problem("clash", words, None, "remove `resources`"))
    return problems


def _check_addresses(
    room: ServedWorkspace, recipe: Recipe, given: Iterable[tuple[str, object]]
) -> list[Problem]:
    """Return the problems of paths and addresses that this server may not read."""
    lists = load(room.root, room.environ).lists
    named = list(lists.get("data.roots", ()))
    named += [room.environ[each] for each in ROOTS if room.environ.get(each)]
    if room.for_owner:
        named.append(str(room.root))
    roots = [os.path.realpath(room.root / Path(root).expanduser()) for root in named]
    reach = Reach(lists.get("data.allow", ()))
    problems: list[Problem] = []
    for name, address in _addresses(recipe, given):
        kind = kind_of(address)
        if address.startswith("pack:") and _is_packed(room, name, address, problems):
            continue
        if kind == "path":
            path = os.path.realpath(room.root / Path(address).expanduser())
            if not _is_below(path, roots):
                fix = "use an address with hf://, s3://, gs:// or https://; to allow paths, set `roots` under [data] in recipe.toml"
                words = f'the path "{name}" is outside the directories that this server may read'
                problems.append(Problem("path-not-allowed", words, None, fix, input=name))
        elif kind in ("https", "s3", "gs") and not reach.allows(address):
            fix = "add the host or bucket to `allow` under [data] in recipe.toml, for example https://data.example or s3://bucket"
            words = f'the host or bucket of "{name}" is not allowed on this server'
            problems.append(Problem("address-not-allowed", words, None, fix, input=name))
    return problems


def _find_keyed_resources(recipe: Recipe) -> str:
    """Return the name of a step or recipe whose resources are part of the cache key, or ""."""
    if recipe.resources.key:
        return recipe.id
    return next((f"step {each.id}" for each in recipe.steps.values() if each.resources.key), "")


def _is_packed(room: ServedWorkspace, name: str, address: str, problems: list[Problem]) -> bool:
    """Return True if an input's address is a dataset archive.

    If the store lacks the archive, add a problem.
    """
    with room.open_workspace() as ws:
        try:
            ws.share(None)
            return bundles.find_packed(ws, address) is not None
        except CannotRun as error:
            problems.append(
                Problem("no-such-pack", f'"{name}": {error}', None, error.fix, input=name)
            )
            return True


def _addresses(recipe: Recipe, given: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each input that is an address or path."""
    for name, value in given:
        spec = recipe.inputs.get(name)
        if spec is None or not {spec.type, spec.items} & set(ADDRESSES):
            continue
        with suppress(BadValue):  # reported by another check
            read_as = convert(spec, value)
            items = read_as if isinstance(read_as, list) else [read_as]
            for item in items:
                if isinstance(item, str):
                    yield name, spec.split_member(item)[0]


def _is_below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


@router.get("/recipes", dependencies=READ, summary="List the available recipes")
def recipes(room: InRoom) -> RecipeList:
    with room.borrow_workspace() as ws:
        used = last_used(ws)
    known = [summary_facts(each, used.get(each.entry.id)) for each in list_available(room)]
    return RecipeList(recipes=[RecipeSummary.model_validate(each) for each in known])


@router.get(
    "/recipes/{name}",
    dependencies=READ,
    summary="Show a recipe's inputs, presets and resources",
)
def recipe(name: str, room: InRoom) -> RecipeView:
    each = find_available(room, name)
    found = read_recipe(each)
    sheet = datasheet.describe_sheet(datasheet.Sheet(found, {}))
    made = [name for name, _, _ in datasheet.results(found)]
    secrets = {spec.name: spec.env or "" for spec in found.inputs.values() if spec.type == "secret"}
    metrics = {}
    for metric, least in selected_directions(found).items():
        metrics[metric] = {"better": "min" if least else "max"}
    parts = {
        "doc": found.doc,
        "inputs": input_schema(found),
        "presets": sheet["presets"],
        "resources": sheet["machines"],
        "outputs": made,
        "secrets": secrets,
        "metrics": metrics,
    }
    return RecipeView.model_validate({**summary_facts(each), **parts})


@router.post("/plan", dependencies=READ, summary="Plan a run without executing it")
async def plan(asked: AskedPlan, room: InRoom, planner: InPlanner, market: InMarket) -> PlanView:
    wanted = await run_in_threadpool(check_request, room, asked, _search(asked))
    if asked.driver == "local":
        return (await planner.call(plan_request, room, CachedOffers(), wanted, asked))[0]
    return await market.call(planner, plan_request, room, wanted, asked)


def _search(asked: AskedPlan) -> starting.Search | None:
    search = asked.search
    if search is None:
        return None
    return starting.Search(search.trials, search.metric, search.better == "min")


class OfferShelf(BaseModel):
    """The offers of a driver for a step."""

    model_config = ConfigDict(extra="allow")

    driver: str
    step: str = Field(description="First step that needs the machine, or `the run`.")
    failed: str = Field(description="Why the driver could not be queried, or empty.")
    ends: str
    left_out: dict[str, int]
    offers: list[dict[str, Any]] = Field(
        description="Offers by total cost, cheapest first. `rank` is the rank among all drivers for the step."
    )


class OfferList(BaseModel):
    drivers: list[OfferShelf]


@router.post(
    "/offers",
    dependencies=READ,
    summary="List the offers of all drivers for a run, at most one minute old, without renting",
)
async def offers(asked: Asked, room: InRoom, planner: InPlanner, market: InMarket) -> OfferList:
    wanted = await run_in_threadpool(check_request, room, AskedWhere(**asked.model_dump()))
    return await market.call(planner, offers_for, room, wanted)


def offers_for(
    room: ServedWorkspace, known: CachedOffers, wanted: CheckedRequest
) -> tuple[OfferList, list[Ask]]:
    """Return the cached offers for a run, and the missing driver queries."""
    with survey_request(room, wanted) as (ws, found):
        looked = look_up(ws, found, known.renting, known)
        shown: list[OfferShelf] = []
        for step, each in looked.by_step.items():
            ranked = shelves.rank_for_programs(step, each)
            shown += [OfferShelf.model_validate(shelf) for shelf in ranked]
        return OfferList(drivers=shown), looked.missing


@contextmanager
def survey_request(
    room: ServedWorkspace, wanted: CheckedRequest
) -> Iterator[tuple[Workspace, Survey]]:
    """Provide the survey of a run request, in a separate workspace object.

    Raises Refused, or a RecipeError with all problems.
    """
    with room.open_workspace() as ws, starting.request_to_plan(ws, wanted.start) as request:
        ws.share(None)
        ws.reach = Reach(ws.config.lists.get("data.allow", ()))
        yield ws, plan_run(ws, bundles.fetch_packed_inputs(ws, request))


def plan_request(
    room: ServedWorkspace, known: CachedOffers, wanted: CheckedRequest, asked: AskedPlan
) -> tuple[PlanView, list[Ask]]:
    """Return the plan of a run, and the missing driver queries.

    Raises Refused, or a RecipeError with all problems.
    """
    with survey_request(room, wanted) as (ws, found):
        names = driver_names(ws.config, asked.driver)
        if not found.todo:
            names = ()
        looked = look_up(ws, found, names, known)
        limits = asked.limits.model_dump(exclude_none=True)
        what = forecasts.ForecastRequest(
            read_recipe(wanted.offered), wanted.start, asked.driver, limits
        )
        facts = forecasts.forecast_run(ws, found, what, looked.by_step)
        view = PlanView.model_validate(_without_folders(ws, facts))
    return view, looked.missing


def _without_folders(ws: Workspace, facts: Facts) -> Facts:
    """Return a forecast without local paths."""
    steps = []
    for each in facts["steps"]:
        reasons = [hide_local_paths(reason, ws.root) for reason in each["reasons"]]
        steps.append({**each, "reasons": reasons})
    machines = [
        {**each, "failed": hide_local_paths(each["failed"], ws.root)} for each in facts["machines"]
    ]
    inputs = {name: hide_paths_in_value(value, ws.root) for name, value in facts["inputs"].items()}
    return {**facts, "steps": steps, "machines": machines, "inputs": inputs}
