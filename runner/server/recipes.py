"""The recipes that a server offers, what each takes, and what it would do.

They are those of the library, of packages and of `recipes.allow`, and for the owner of the
folder those in it.  They are asked for by their names, never by a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool

from ..api import forecasts, starting
from ..api.plans import plan_run
from ..api.recipes import (
    ADDRESSES,
    Offered,
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
from ..interface import shelves
from ..language import library, units
from ..language.inputs import BadValue, convert, kind_of
from ..language.recipe import Recipe
from ..settings import load
from ..storage.reach import Reach
from ..storage.workspace import Workspace
from ..survey.summaries import selected_directions
from .answers import Refused, plain, plain_value
from .market import Ask, InMarket, Known, look_up
from .planner import InPlanner
from .room import READ, Given, InRoom, ServedWorkspace, Whole, run_of

if TYPE_CHECKING:
    from ..survey.survey import Survey

router = APIRouter(prefix="/v1", tags=["recipes"])

LATEST: Final = 500
"""Runs that are looked at for when a recipe was used last."""
ROOTS: Final = ("DATA_DIR", "DATASETS_DIR", "MODELS_DIR", "CHECKPOINTS_DIR")
"""Variables that name a folder as `roots` under [data] does."""


class RecipeSummary(BaseModel):
    id: str
    summary: str
    package: str = Field(
        description="The package that brings it; empty for the library and for recipes of the workspace."
    )
    file: str = Field(description="Its file, of a recipe of the workspace; else empty.")
    used: str | None = Field(
        description="When a run of it, or a sweep, was stored last, of the latest 500; null where none was."
    )


class RecipeList(BaseModel):
    recipes: list[RecipeSummary]


class Direction(BaseModel):
    better: Literal["min", "max"]


class RecipeView(RecipeSummary):
    doc: str
    inputs: dict[str, Any] = Field(description="The JSON Schema of the inputs.")
    presets: dict[str, dict[str, Any]] = Field(description="By name, the inputs that each sets.")
    resources: dict[str, dict[str, Any]] = Field(
        description="By preset, empty for none: what the most demanding step needs of its machine."
    )
    outputs: list[str]
    secrets: dict[str, str] = Field(
        description="By the names of its secrets, the variables that have them where a worker runs."
    )
    metrics: dict[str, Direction] = Field(
        description="Which way a metric is better, as far as the recipe says."
    )


_Bytes = Annotated[
    str, Field(pattern=r"^[0-9]{1,15}(\.[0-9]{1,9})? ?([kKMGTP]|[KMGTP]i)?B$", max_length=40)
]


class Need(Given):
    """What each step's machine has to have, instead of what the recipe and its preset say; what is not said stays."""

    gpus: Whole | None = Field(
        default=None, ge=0, le=1024, description="0: a step that asks for a GPU runs without one."
    )
    gpu: str | None = Field(default=None, min_length=1, max_length=80)
    gpu_memory: _Bytes | None = Field(default=None, description="Of each GPU: 24GB.")
    memory: _Bytes | None = None
    cpus: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    disk: _Bytes | None = None

    @property
    def resources(self) -> dict[str, Any]:
        """What is said, sizes in bytes."""
        return {
            name: units.size(value) if name in _SIZES else value
            for name, value in self.model_dump(exclude_none=True).items()
        }


_SIZES: Final = ("gpu_memory", "memory", "disk")


def _named_by(one: str, other: str) -> dict[str, Any]:
    """The JSON Schema of a request that names a thing by one field, and not by another."""
    return {
        "required": [one],
        "properties": {one: {"minLength": 1}, other: {"maxLength": 0}},
    }


class Asked(Given):
    """What is to be run: a recipe, or what another run was asked for."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_named_by("recipe", "like"), _named_by("like", "recipe")]}
    )
    recipe: str = Field(
        default="",
        max_length=80,
        description="NAME@VERSION, or NAME for the newest version; left out with `like`.",
    )
    like: str = Field(
        default="",
        max_length=40,
        description="A run: its recipe, inputs and preset are taken, with the changes that this request says. A path among them stays what it was.",
    )
    inputs: dict[str, Any] = Field(
        default={},
        description="As GET /v1/recipes/NAME describes them; with `like` those that differ.",
    )
    sweep: dict[str, Annotated[list[Any], Field(min_length=1, max_length=1000)]] | None = Field(
        default=None,
        max_length=100,
        description="Inputs with several values: one instance for each combination. Null or left out with `like`: those of that run; {}: none.",
    )
    preset: str | None = Field(
        default=None,
        max_length=400,
        description="A set of inputs that the recipe brings, or several: a,b.",
    )
    resources: Need = Need()

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if bool(self.recipe) == bool(self.like):
            raise ValueError("a request names a recipe, or a run that it is like")
        return self


class AskedWhere(Asked):
    """What is to be run, and where."""

    driver: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description=(
            "Where it runs: a driver of `recipe doctor`, or the cheapest of several: "
            "`any:vastai,runpod`, or `any` for those of the setting `any`."
        ),
    )


class MemoryView(BaseModel):
    """What a step that trains takes of each GPU, as estimated."""

    bytes: int | None = Field(description="Null where it is not known: `words` say why.")
    usable: int | None = Field(description="What such a GPU has for it.")
    gpu: str
    fits: Literal["FITS", "TIGHT", "NO"] | None
    words: str


class Limits(Given):
    """What a run may take, where its recipe does not allow less."""

    time: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="Seconds of work, after which its steps are stopped.",
    )
    cost: float | None = Field(
        default=None, gt=0, le=1e9, allow_inf_nan=False, description="US dollars for what it rents."
    )


class AskedSearch(Given):
    """A search over `sweep`, in which a number may have one text LOW..HIGH or LOW..HIGH:log."""

    trials: int = Field(ge=1, le=1000)
    metric: str = Field(min_length=1, max_length=200)
    better: Literal["min", "max"]


class AskedPlan(AskedWhere):
    """What is to be planned."""

    limits: Limits = Limits()
    search: AskedSearch | None = Field(
        default=None,
        description="Plan one trial of `recipe sweep --tpe`, and answer its command; a server starts no search.",
    )


class StepPlan(BaseModel):
    id: str
    answer: str = Field(description="run, maybe, restore, fresh or skip.")
    reasons: list[str]
    needs: list[str]
    seconds: float | None = Field(description="What it is expected to take.")
    usd: float | None = Field(description="What it is expected to cost at most.")
    memory: MemoryView | None = Field(description="Null of a step that does not train on a GPU.")


class RentedMachine(BaseModel):
    """The machine that would be rented: the cheapest that does, as offered now."""

    step: str = Field(description="The first step that needs it, or `the run`.")
    driver: str
    offer: str | None = Field(description="Null where nothing is offered: `failed` says why.")
    gpu: str | None
    gpus: int | None
    region: str | None
    market: str | None = Field(description="on-demand or spot.")
    usd_an_hour: float | None
    hours: float | None = Field(description="How long it is needed, where that is known.")
    usd: float | None = Field(
        description="For these hours, with what the disk and egress cost; null where not known."
    )
    failed: str


class PlanView(BaseModel):
    recipe: str
    instances: int = Field(description="Of a sweep the combinations; else 1.")
    command: str | None = Field(
        description="What does the same in a terminal, in the folder of the workspace, quoted for a shell; null where no command line says it."
    )
    driver: str
    machines: list[RentedMachine] = Field(
        description="What the driver would rent; empty for one that rents nothing."
    )
    goes_to: list[str] = Field(
        description="Drivers to whose machines data and secrets of the run may go; with `any` all among which it chooses."
    )
    usd_of_machines: float | None = Field(
        description="Of all machines; null where that is not known of each."
    )
    inputs: dict[str, Any]
    steps: list[StepPlan]
    seconds: float | None = Field(
        description="Of all steps that would run, one after another; null where it is not known of each."
    )
    usd: float | None
    bytes: int = Field(description="The size of the outputs that would be restored.")


def offered(room: ServedWorkspace) -> list[Offered]:
    """Every recipe that may be asked for.  Raises Invalid as `list_recipes` does."""
    return list_recipes(room.root, room.environ, in_folder=room.for_owner)


def meant(room: ServedWorkspace, name: str) -> Offered:
    """The recipe of that name.  Raises NotFound."""
    return find_recipe(offered(room), name)


class Wanted(NamedTuple):
    """A request that was checked: the recipe that it asks for, and what of it is to be started."""

    offered: Offered
    start: Start


def checked(
    room: ServedWorkspace, asked: AskedWhere, search: starting.Search | None = None
) -> Wanted:
    """Return what is asked for.  Raises NotFound, Refused, and Invalid with every problem of its inputs.

    This is cheap whatever is asked, and refuses at once: only a plan needs a process of its own.
    """
    from .. import extensions
    from ..hosts.renting.several import alternatives

    wanted = _wanted(room, asked)
    wanted = wanted._replace(start=wanted.start._replace(search=search))
    problems = _misfits(room, wanted, asked)
    given = [*asked.inputs.items()]
    given += [(name, value) for name, values in (asked.sweep or {}).items() for value in values]
    problems += _out_of_reach(room, read_recipe(wanted.offered), given)
    if problems:
        raise Invalid(problems)
    driver = asked.driver
    with room.working() as ws:
        if alternatives(ws.config, driver):
            return wanted
    if driver != "local" and driver not in (known := extensions.drivers(driver)):
        raise NotFound("unknown driver", fix=did_you_mean(driver, known))
    return wanted


def _wanted(room: ServedWorkspace, asked: Asked) -> Wanted:
    """What a request is about, not checked yet.  Raises NotFound, Refused."""
    from ..survey.request import Request

    resources = asked.resources.resources
    if not asked.like:
        each = meant(room, asked.recipe)
        request = Request(each.word, asked.inputs, asked.preset, resources=resources)
        return Wanted(each, Start(request, asked.sweep or {}))
    with room.working() as ws:
        before = starting.read_start(ws.root, run_of(ws, asked.like))
    start = starting.change(before, asked.inputs, asked.sweep)
    request = start.request
    if asked.preset is not None:
        request = replace(request, preset=asked.preset or None)
    request = replace(request, resources={**request.resources, **resources})
    each = _offered_as(room, request.recipe)
    return Wanted(each, Start(replace(request, recipe=each.word), start.axes))


def _offered_as(room: ServedWorkspace, word: str) -> Offered:
    """The recipe that a run was asked for, where it is offered.  Raises Refused."""
    with suppress(NotFound, Invalid):
        path = os.path.realpath(library.find(word, room.root))
        for each in offered(room):
            if os.path.realpath(each.entry.path) == path:
                return each
    words = "the server does not offer the recipe of this run"
    fix = "add the recipe to `allow` under [recipes] in recipe.toml; to retry without changes, use POST /v1/runs/RUN/retry"
    raise Refused(409, "not-offered", words, fix)


def _misfits(room: ServedWorkspace, wanted: Wanted, asked: Asked) -> list[Problem]:
    """The values that inputs do not take, and names that are none."""
    from ..language import inputs, unread

    recipe, (request, axes, search) = read_recipe(wanted.offered), wanted.start
    fix = "remove one of the two"
    problems = [
        Problem("clash", f'"{name}" has both one value and several values', None, fix, input=name)
        for name in asked.inputs
        if name in (asked.sweep or {})
    ]
    if axes or search:
        try:
            if search:
                starting.first_trial(room.root, wanted.start, search)
            else:
                starting.draft(room.root, wanted.start)
        except Invalid as error:
            problems += error.problems
    else:
        problems += inputs.try_bind(recipe, request.inputs, preset=request.preset)[1]
        problems += unread.find_refused(recipe, request.inputs, request.preset)
    if asked.resources.resources and (keyed := _keyed(recipe)):
        fix = "remove `resources`"
        words = f"the resources of {keyed} are part of its cache key and cannot be changed"
        problems.append(Problem("clash", words, None, fix))
    return problems


def _out_of_reach(
    room: ServedWorkspace, recipe: Recipe, given: Iterable[tuple[str, object]]
) -> list[Problem]:
    """The paths and addresses among given values that this server does not read."""
    lists = load(room.root, room.environ).lists
    named = [
        *lists.get("data.roots", ()),
        *(room.environ[each] for each in ROOTS if room.environ.get(each)),
        *([str(room.root)] if room.for_owner else ()),
    ]
    roots = [os.path.realpath(room.root / Path(root).expanduser()) for root in named]
    reach = Reach(lists.get("data.allow", ()))
    problems: list[Problem] = []
    for name, address in _addresses(recipe, given):
        kind = kind_of(address)
        if address.startswith("pack:") and _packed(room, name, address, problems):
            continue
        if kind == "path" and not _below(
            os.path.realpath(room.root / Path(address).expanduser()), roots
        ):
            fix = "use an address with hf://, s3://, gs:// or https://; to allow paths, set `roots` under [data] in recipe.toml"
            words = f'the path "{name}" is outside the directories that this server may read'
            problems.append(Problem("path-not-allowed", words, None, fix, input=name))
        elif kind in ("https", "s3", "gs") and not reach.allows(address):
            fix = "add the host or bucket to `allow` under [data] in recipe.toml, for example https://data.example or s3://bucket"
            words = f'the host or bucket of "{name}" is not allowed on this server'
            problems.append(Problem("address-not-allowed", words, None, fix, input=name))
    return problems


def _keyed(recipe: Recipe) -> str:
    """What of a recipe has its resources in its key; empty where nothing has."""
    if recipe.resources.key:
        return recipe.id
    return next((f"step {each.id}" for each in recipe.steps.values() if each.resources.key), "")


def _packed(room: ServedWorkspace, name: str, address: str, problems: list[Problem]) -> bool:
    """Whether an input names what the shared store has; where the store does not have it, that is a problem."""
    from ..survey import bundles

    with room.working() as ws:
        try:
            ws.share(None)
            return bundles.find_packed(ws, address) is not None
        except CannotRun as error:
            problems.append(
                Problem("no-such-pack", f'"{name}": {error}', None, error.fix, input=name)
            )
            return True


def _addresses(recipe: Recipe, given: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str]]:
    """The values of inputs that are read as addresses or paths, with the names of the inputs."""
    for name, value in given:
        spec = recipe.inputs.get(name)
        if spec is None or not {spec.type, spec.items} & set(ADDRESSES):
            continue
        with suppress(BadValue):  # which is a problem of its own
            read_as = convert(spec, value)
            for item in read_as if isinstance(read_as, list) else [read_as]:
                if isinstance(item, str):
                    yield name, spec.split_member(item)[0]


def _below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


@router.get("/recipes", dependencies=READ, summary="The recipes that may be run")
def recipes(room: InRoom) -> RecipeList:
    with room.reading() as ws:
        used = last_used(ws)
    known = [summary_facts(each, used.get(each.entry.id)) for each in offered(room)]
    return RecipeList(recipes=[RecipeSummary.model_validate(each) for each in known])


@router.get(
    "/recipes/{name}",
    dependencies=READ,
    summary="One recipe: what it takes, its presets, what it needs",
)
def recipe(name: str, room: InRoom) -> RecipeView:
    from ..interface import datasheet

    each = meant(room, name)
    found = read_recipe(each)
    sheet = datasheet.describe_sheet(datasheet.Sheet(found, {}))
    made = [name for name, _, _ in datasheet.results(found)]
    parts = {
        "doc": found.doc,
        "inputs": input_schema(found),
        "presets": sheet["presets"],
        "resources": sheet["machines"],
        "outputs": made,
        "secrets": {
            spec.name: spec.env or "" for spec in found.inputs.values() if spec.type == "secret"
        },
        "metrics": {
            name: {"better": "min" if least else "max"}
            for name, least in selected_directions(found).items()
        },
    }
    return RecipeView.model_validate({**summary_facts(each), **parts})


@router.post(
    "/plan", dependencies=READ, summary="What a run would do, with the reasons; nothing is run"
)
async def plan(asked: AskedPlan, room: InRoom, planner: InPlanner, market: InMarket) -> PlanView:
    wanted = await run_in_threadpool(checked, room, asked, _search(asked))
    if asked.driver == "local":
        return (await planner.call(planned, room, Known(), wanted, asked))[0]
    return await market.call(planner, planned, room, wanted, asked)


def _search(asked: AskedPlan) -> starting.Search | None:
    if (said := asked.search) is None:
        return None
    return starting.Search(said.trials, said.metric, said.better == "min")


class OfferShelf(BaseModel):
    """What a driver offers for a step."""

    model_config = ConfigDict(extra="allow")

    driver: str
    step: str = Field(description="The first step that needs it, or `the run`.")
    failed: str = Field(description="Why it was not asked; empty where it was.")
    ends: str
    left_out: dict[str, int]
    offers: list[dict[str, Any]] = Field(
        description="The cheapest run first; `rank` is the place among those of all drivers for the step."
    )


class OfferList(BaseModel):
    drivers: list[OfferShelf]


@router.post(
    "/offers",
    dependencies=READ,
    summary="What all drivers offer for the steps that a run would have, the newest of the last minute; nothing is rented",
)
async def offers(asked: Asked, room: InRoom, planner: InPlanner, market: InMarket) -> OfferList:
    wanted = await run_in_threadpool(checked, room, AskedWhere(**asked.model_dump()))
    return await market.call(planner, offered_for, room, wanted)


def offered_for(room: ServedWorkspace, known: Known, wanted: Wanted) -> tuple[OfferList, list[Ask]]:
    """Return what drivers offer for a run, as far as it is known, and what they have to be asked."""
    with surveyed(room, wanted) as (ws, found):
        looked = look_up(ws, found, known.renting, known)
        shown = [
            shelf
            for step, each in looked.by_step.items()
            for shelf in shelves.rank_for_programs(step, each)
        ]
        return OfferList(
            drivers=[OfferShelf.model_validate(each) for each in shown]
        ), looked.missing


@contextmanager
def surveyed(room: ServedWorkspace, wanted: Wanted) -> Iterator[tuple[Workspace, Survey]]:
    """What a run would do.  Raises Refused, or a RecipeError, with every problem."""
    from ..survey import bundles

    with room.working() as ws, starting.tried(ws, wanted.start) as request:
        ws.share(None)
        ws.reach = Reach(ws.config.lists.get("data.allow", ()))
        yield ws, plan_run(ws, bundles.fetch_packed_inputs(ws, request))


def planned(
    room: ServedWorkspace, known: Known, wanted: Wanted, asked: AskedPlan
) -> tuple[PlanView, list[Ask]]:
    """Return what a run would do, and what drivers have to be asked for it.  Raises Refused, or a RecipeError, with every problem."""
    from ..hosts.renting.several import names_of

    with surveyed(room, wanted) as (ws, found):
        names = names_of(ws.config, asked.driver)
        looked = look_up(ws, found, names if found.todo else [], known)
        limits = asked.limits.model_dump(exclude_none=True)
        what = forecasts.Asked(read_recipe(wanted.offered), wanted.start, asked.driver, limits)
        facts = forecasts.forecast_run(ws, found, what, looked.by_step)
        view = PlanView.model_validate(_without_folders(ws, facts))
    return view, looked.missing


def _without_folders(ws: Workspace, facts: Facts) -> Facts:
    """A forecast without the folders of this machine."""
    steps = [
        {**each, "reasons": [plain(reason, ws.root) for reason in each["reasons"]]}
        for each in facts["steps"]
    ]
    machines = [{**each, "failed": plain(each["failed"], ws.root)} for each in facts["machines"]]
    inputs = {name: plain_value(value, ws.root) for name, value in facts["inputs"].items()}
    return {**facts, "steps": steps, "machines": machines, "inputs": inputs}
