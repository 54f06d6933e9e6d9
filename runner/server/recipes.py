"""The recipes that a server offers, what each takes, and what it would do: names of the library, of packages and of `recipes.allow`, never a path."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from ..errors import CannotRun, Infrastructure, Invalid, NotFound, Problem, did_you_mean
from ..language import library, units
from ..language.inputs import kind_of
from ..language.library import Entry
from ..language.recipe import Input, Recipe
from ..settings import load
from ..storage.reach import Reach
from ..storage.workspace import Workspace
from ..survey.summaries import selected_directions
from .answers import plain, plain_value
from .planner import InPlanner
from .room import READ, Given, InRoom, ServedWorkspace, Whole

if TYPE_CHECKING:
    from ..survey.request import Request
    from ..survey.survey import Survey

router = APIRouter(prefix="/v1", tags=["recipes"])

_NAMED: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}(?:@[1-9][0-9]{0,8})?")
ROOTS: Final = ("DATA_DIR", "DATASETS_DIR", "MODELS_DIR", "CHECKPOINTS_DIR")
"""Variables that name a folder as `roots` under [data] does."""
_ADDRESSES: Final = ("file", "dataset", "model")
_JSON_TYPES: Final[Mapping[str, str]] = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "list": "array",
    "object": "object",
}
"""The JSON Schema type of each type of input; every other one is given as a string."""


class Offered(NamedTuple):
    """A recipe that may be asked for: its first lines, and what the workspace calls it."""

    entry: Entry
    word: str


class RecipeSummary(BaseModel):
    id: str
    summary: str
    package: str = Field(
        description="The package that brings it; empty for the library and for recipes of the workspace."
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


class Asked(Given):
    """What is to be run."""

    recipe: str = Field(
        min_length=1, max_length=80, description="NAME@VERSION, or NAME for the newest version."
    )
    inputs: dict[str, Any] = Field(
        default={}, description="As GET /v1/recipes/NAME describes them."
    )
    preset: str | None = Field(
        default=None,
        max_length=400,
        description="A set of inputs that the recipe brings, or several: a,b.",
    )
    resources: Need = Need()

    def request(self, word: str, out: Path | None = None) -> Request:
        """The same for a recipe that the workspace calls `word`."""
        from ..survey.request import Request

        return Request(word, self.inputs, self.preset, out, resources=self.resources.resources)


class AskedWhere(Asked):
    """What is to be run, and where."""

    driver: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description="Where it runs: a driver of `recipe doctor`.",
    )


class StepPlan(BaseModel):
    id: str
    answer: str = Field(description="run, maybe, restore, fresh or skip.")
    reasons: list[str]
    needs: list[str]
    seconds: float | None = Field(description="What it is expected to take.")
    usd: float | None = Field(description="What it is expected to cost at most.")


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
    driver: str
    machines: list[RentedMachine] = Field(
        description="What the driver would rent; empty for one that rents nothing."
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


def offered(root: Path, environ: Mapping[str, str]) -> list[Offered]:
    """Every recipe that may be asked for.  Raises Invalid for a file of `recipes.allow` that is none, or has the name of another."""
    found = {entry.id: Offered(entry, entry.id) for entry in library.entries()}
    for word in load(root, environ).lists.get("recipes.allow", ()):
        path = root / word
        entry = next(
            (each for each in library.beside(path.parent) if each.path.name == path.name), None
        )
        if entry is None:
            fix = "`allow` under [recipes] in recipe.toml names files, such as ./recipe.yaml"
            raise Invalid([Problem("no-recipe", f"{word} is not a recipe file", None, fix)])
        if entry.id in found:
            raise Invalid(
                [
                    Problem(
                        "name-clash",
                        f"{word} is called {entry.id}, as another recipe is",
                        None,
                        "give it another name, or version",
                    )
                ]
            )
        found[entry.id] = Offered(entry, f"./{os.path.relpath(path, root)}")
    return sorted(found.values(), key=lambda each: (each.entry.name, -each.entry.version))


def meant(root: Path, environ: Mapping[str, str], name: str) -> Offered:
    """The recipe of that name.  Raises NotFound."""
    known = offered(root, environ)
    if _NAMED.fullmatch(name):
        for each in known:
            if name in (each.entry.id, each.entry.name):
                return each
    near = did_you_mean(
        name[:80], [*(each.entry.id for each in known), *(each.entry.name for each in known)]
    )
    raise NotFound("there is no such recipe", fix=near or "GET /v1/recipes lists them")


def read(each: Offered) -> Recipe:
    """Return a recipe as it is written, parsed once for each version of its file."""
    found = each.entry.path.stat()
    return _parsed(each.entry.path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _parsed(path: Path, _mtime_ns: int, _size: int) -> Recipe:
    from ..language import parse

    return parse.load(path)


def bound(room: ServedWorkspace, each: Offered, asked: Asked) -> None:
    """Check the inputs of a request.  Raises Invalid with every problem."""
    from ..language import inputs, unread

    recipe = read(each)
    values, problems = inputs.tried(recipe, asked.inputs, preset=asked.preset)
    problems += unread.refused(recipe, asked.inputs, asked.preset)
    if asked.resources.resources and (keyed := _keyed(recipe)):
        fix = "leave `resources` out"
        words = f"the results of {keyed} depend on the resources that the recipe says"
        problems.append(Problem("clash", words, None, fix))
    lists = load(room.root, room.environ).lists
    named = [
        *lists.get("data.roots", ()),
        *(room.environ[each] for each in ROOTS if room.environ.get(each)),
    ]
    roots = [os.path.realpath(room.root / Path(root).expanduser()) for root in named]
    reach = Reach(lists.get("data.allow", ()))
    for name, address in _addresses(
        recipe, {name: value for name, value in values.items() if name in asked.inputs}
    ):
        kind = kind_of(address)
        if address.startswith("pack:") and _packed(room, name, address, problems):
            continue
        if kind == "path" and not _below(
            os.path.realpath(room.root / Path(address).expanduser()), roots
        ):
            fix = "give an address: hf:// s3:// gs:// https://; `roots` under [data] in recipe.toml allows paths"
            problems.append(
                Problem(
                    "path-not-allowed",
                    f'"{name}" is a path, and not below a folder that this server reads',
                    None,
                    fix,
                )
            )
        elif kind in ("https", "s3", "gs") and not reach.allows(address):
            fix = "`allow` under [data] in recipe.toml names hosts and buckets, such as https://data.example or s3://bucket"
            problems.append(
                Problem(
                    "address-not-allowed",
                    f'"{name}" is an address of a host or bucket that this server does not read',
                    None,
                    fix,
                )
            )
    if problems:
        raise Invalid(problems)


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
            problems.append(Problem("no-such-pack", f'"{name}": {error}', None, error.fix))
            return True


def _addresses(recipe: Recipe, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The values of inputs that are read as addresses or paths, with the names of the inputs."""
    for name, value in values.items():
        spec = recipe.inputs[name]
        if {spec.type, spec.items} & set(_ADDRESSES):
            yield from (
                (name, spec.parted(item)[0])
                for item in (value if isinstance(value, list) else [value])
                if isinstance(item, str)
            )


def _below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def schema_of(spec: Input) -> dict[str, Any]:
    """Return the JSON Schema of one input, in mappings that nothing else holds."""
    schema = _json_type(spec.type)
    if spec.type == "choice":
        schema = {"enum": spec.limits.get("choices")}
    if spec.doc:
        schema["description"] = spec.doc
    if spec.items:
        schema["items"] = _json_type(spec.items)
    if spec.type in _ADDRESSES:
        schema["format"] = f"recipe-{spec.type}"
    # Limits of a list are those of its items, but for minItems and its like.
    limited = schema["items"] if spec.type == "list" and spec.items else schema
    for name, limit in spec.limits.items():
        if name == "choices":
            continue
        if name.endswith("Items"):
            schema[name] = limit
        else:
            limited[name] = limit
    if spec.has_default:
        schema["default"] = spec.default
    return schema


def _json_type(kind: str) -> dict[str, Any]:
    return {"type": _JSON_TYPES.get(kind, "string")}


@router.get("/recipes", dependencies=READ, summary="The recipes that may be run")
def recipes(room: InRoom) -> RecipeList:
    return RecipeList(recipes=[_summary(each) for each in offered(room.root, room.environ)])


@router.get(
    "/recipes/{name}",
    dependencies=READ,
    summary="One recipe: what it takes, its presets, what it needs",
)
def recipe(name: str, room: InRoom) -> RecipeView:
    from ..interface import datasheet

    each = meant(room.root, room.environ, name)
    found = read(each)
    sheet = datasheet.described(datasheet.Sheet(found, {}))
    given = [spec for spec in found.inputs.values() if spec.type != "secret"]
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {spec.name: schema_of(spec) for spec in given},
        "required": [spec.name for spec in given if spec.required and not spec.has_default],
        "additionalProperties": False,
    }
    made = [name for name, _, _ in datasheet.results(found)]
    parts = {
        "doc": found.doc,
        "inputs": schema,
        "presets": sheet["presets"],
        "resources": sheet["machines"],
        "outputs": made,
        "metrics": {
            name: {"better": "min" if least else "max"}
            for name, least in selected_directions(found).items()
        },
    }
    return RecipeView.model_validate(_summary(each).model_dump() | parts)


@router.post(
    "/plan", dependencies=READ, summary="What a run would do, with the reasons; nothing is run"
)
async def plan(asked: AskedWhere, room: InRoom, planner: InPlanner) -> PlanView:
    each = await run_in_threadpool(checked, room, asked)
    return await planner.call(planned, room, each, asked)


def checked(room: ServedWorkspace, asked: AskedWhere) -> Offered:
    """Return the recipe that is asked for.  Raises NotFound, and Invalid with every problem of its inputs.

    This is cheap whatever is asked, and refuses at once: only a plan needs a process of its own.
    """
    from .. import extensions

    each = meant(room.root, room.environ, asked.recipe)
    bound(room, each, asked)
    driver = asked.driver
    if driver != "local" and driver not in (known := extensions.drivers(driver)):
        raise NotFound("there is no such driver", fix=did_you_mean(driver, known))
    return each


def rented(ws: Workspace, found: Survey, name: str) -> list[RentedMachine]:
    """What the driver of that name would rent for a plan.  Raises RecipeError where it cannot be asked."""
    from ..hosts.renting import offering
    from ..interface import shelves

    driver = offering.renting(ws, name)
    if driver is None or not found.todo:
        return []
    asked = shelves.wishes(ws, found, name, cluster=driver.traits.allocates)
    machines = []
    try:
        found_shelves = asyncio.run(
            offering.shelves(
                {name: (driver, [each.wish for each in asked.values()])},
                shelves.pricing(ws, asked.values()),
            )
        )
    except Infrastructure as error:
        found_shelves = [
            offering.Shelf(name, each.wish, failed=str(error)) for each in asked.values()
        ]
    for step, shelf in zip(asked, found_shelves, strict=True):
        offer = shelf.offers[0] if shelf.offers else None
        none = "" if offer else shelf.failed or f"{name} offers no machine that does"
        machines.append(
            RentedMachine(
                step=step,
                driver=name,
                offer=offer.id if offer else None,
                gpu=offer.resources.gpu if offer else None,
                gpus=offer.resources.gpus if offer else None,
                region=offer.region if offer else None,
                market=offer.market if offer else None,
                usd_an_hour=offer.price if offer else None,
                hours=shelf.wish.hours,
                usd=shelf.total,
                failed=plain(none, ws.root),
            )
        )
    return machines


def planned(room: ServedWorkspace, each: Offered, asked: AskedWhere) -> PlanView:
    """Return what a run would do.  Raises Refused, or a RecipeError, with every problem."""
    from ..advice import estimates
    from ..execution.session import look
    from ..survey import bundles
    from ..survey.templates import refuse_unrenderable

    with room.working() as ws:
        ws.share(None)
        ws.reach = Reach(ws.config.lists.get("data.allow", ()))
        found = look(ws, bundles.fetch_packed_inputs(ws, asked.request(each.word)))
        refuse_unrenderable(ws, found)
        expected = ws.store.index.expected(
            found.plan.recipe, [node.id for node in found.plan.nodes]
        )
        estimated = estimates.of_plan(ws, found.plan, found.todo)
        steps = []
        for n, (node, verdict) in enumerate(zip(found.plan.nodes, found.verdicts, strict=True)):
            runs = verdict.answer in ("run", "maybe")
            estimate = estimated.get(n)
            steps.append(
                StepPlan(
                    id=node.id,
                    answer=verdict.answer,
                    reasons=[plain(reason, ws.root) for reason in verdict.reasons],
                    needs=sorted(found.plan.nodes[need].id for need in found.plan.needs(n)),
                    seconds=(
                        estimate.seconds[1]
                        if estimate is not None and estimate.seconds
                        else expected.get(node.id)
                    )
                    if runs
                    else 0.0,
                    usd=(estimate.usd[1] if estimate is not None and estimate.usd else None)
                    if runs
                    else 0.0,
                )
            )
        restored = [
            found.made[n]
            for n, verdict in enumerate(found.verdicts)
            if verdict.answer == "restore" and n in found.made
        ]
        size = sum(_size(ws, content) for made in restored for content in made.outputs.values())
        given = plain_value(dict(found.plan.inputs), ws.root)
        machines = rented(ws, found, asked.driver) if asked.driver != "local" else []
    seconds, usd = [step.seconds for step in steps], [step.usd for step in steps]
    return PlanView.model_validate(
        {
            "recipe": found.plan.recipe,
            "driver": asked.driver,
            "machines": machines,
            "usd_of_machines": _sum([machine.usd for machine in machines]),
            "inputs": given,
            "steps": steps,
            "bytes": size,
            "seconds": _sum(seconds),
            "usd": _sum(usd),
        }
    )


def _sum(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _size(ws: Workspace, content: str) -> int:
    from ..storage.content.files import Content

    seal = ws.store.index.seal(Content(content))
    return seal.size if seal is not None and isinstance(seal.size, int) else 0


def _summary(each: Offered) -> RecipeSummary:
    return RecipeSummary(id=each.entry.id, summary=each.entry.summary, package=each.entry.origin)
