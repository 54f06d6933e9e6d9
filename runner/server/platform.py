"""The addresses that training platforms call, over the same functions as /v1: a job is a run whose idempotency key is `job:ID`.

A job is asked for in a platform's own words: unknown fields are ignored and said, and `config` may have the names of Hugging Face (`hugging_face`).
Examples of the bodies are in fixtures/server.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from ..api.recipes import read_recipe
from ..api.submitting import PRIORITY
from ..errors import Invalid, Problem
from ..execution.terms import new_id
from ..interface import pod
from ..language import presets
from ..language.recipe import Preset, Recipe
from ..logs import Log
from ..reports.receivers import TOKEN
from ..reports.sealing import seal
from ..settings import load
from ..storage.records.letters import STATUS
from ..storage.records.runs import RunRow, Wanted
from ..storage.workspace import Workspace
from . import hugging_face, recipes, runs, streams
from .answers import Refused, plain
from .asking import InAsking
from .planner import InPlanner
from .room import OPERATE, READ, Caller, Given, InRoom, Nothing, Room, ServedWorkspace, Whole
from .runs import NewRun

_log = Log("server")
router = APIRouter(prefix="/api/training", tags=["platforms"])

Status: TypeAlias = Literal["queued", "running", "paused", "completed", "failed", "cancelled"]
_STATUS: Final = cast("dict[str, Status]", STATUS)
_KEY: Final = "job:"
_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._@+-]*"
_LISTED: Final = 1000
_NO: Final = ("0", "false", "no", "off")
_FULL: Final = "no"
"""The `precision` of the library's trainers that is no mixed one."""


class Job(BaseModel):
    """A job, as a platform has it.  `job_token` is stored only where reports are sent, under the key of RECIPE_KEY_FILE."""

    model_config = ConfigDict(extra="allow", strict=True)

    job_id: str = Field(
        default="",
        max_length=100,
        pattern=rf"^({_ID})?$",
        validation_alias=AliasChoices("job_id", "jobId"),
        description="Without one the answer has a new one, and each request is another job.",
    )
    user_id: str = Field(
        default="",
        max_length=100,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]*)?$",
        validation_alias=AliasChoices("user_id", "userId"),
    )
    recipe: str = Field(
        min_length=1, max_length=80, validation_alias=AliasChoices("recipe", "method")
    )
    model_name: str = Field(
        default="", max_length=400, validation_alias=AliasChoices("model_name", "modelName")
    )
    dataset_url: str = Field(
        default="", max_length=4000, validation_alias=AliasChoices("dataset_url", "datasetUrl")
    )
    config: dict[str, Any] = Field(
        default={}, description="Values of the recipe's inputs, also by Hugging Face's names."
    )
    preset: str | None = Field(default=None, max_length=400)
    resources: recipes.Need = recipes.Need()
    priority: Whole = Field(
        default=0, ge=-PRIORITY, le=PRIORITY, description="A higher one is taken first."
    )
    job_token: str = Field(
        default="", max_length=4000, validation_alias=AliasChoices("job_token", "jobToken")
    )


class Execute(Job):
    """A job for the driver that it names."""

    driver: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description="Where it runs: a driver of `recipe doctor`.",
    )


class Deploy(Job):
    """A job for a pod of RunPod."""

    driver: Literal["runpod"] = "runpod"


class Resume(Given):
    """Where a job goes on: without a path from its newest checkpoint."""

    checkpoint_path: str = Field(
        default="",
        max_length=4000,
        validation_alias=AliasChoices("checkpoint_path", "checkpointPath"),
        description="One of the job's own checkpoints.",
    )


class Accepted(BaseModel):
    job_id: str
    status: Status


class Executed(Accepted):
    ignored: list[str] = Field(
        description="Fields of the request, and names in its `config`, that say nothing here, with the reason."
    )


class JobView(Accepted):
    run: str
    recipe: str
    word: str
    progress: float | None = Field(description="Percent of the run.")
    current_step: int = Field(
        description="Of the training, as its reports have it; else steps of the recipe that are over."
    )
    total_steps: int | None
    error_message: str


class JobList(BaseModel):
    jobs: list[Accepted]


class Gpu(BaseModel):
    available: bool
    name: str | None
    cuda_version: str | None
    device_count: int
    memory: int | None = Field(description="Bytes of the first.")


@router.post(
    "/execute",
    status_code=202,
    dependencies=OPERATE,
    summary="Store a job; the same one again is the same job",
)
async def execute(asked: Execute, room: InRoom, planner: InPlanner) -> Executed:
    return _said(await planner.call(store_job, room, asked, asked.driver))


@router.post(
    "/deploy/runpod",
    status_code=202,
    dependencies=OPERATE,
    summary="Store a job for a pod of RunPod",
)
async def deploy(asked: Deploy, room: InRoom, planner: InPlanner) -> Executed:
    return _said(await planner.call(store_job, room, asked, asked.driver))


def _said(done: Executed) -> Executed:
    """A job that was stored; what its request said in vain is in the server's log, too."""
    if done.ignored:
        _log.warning("job %s: ignored: %s", done.job_id, "; ".join(done.ignored))
    return done


def store_job(room: ServedWorkspace, asked: Job, driver: str) -> Executed:
    """Store a job of the platform as a run.  Raises Refused, or a RecipeError, with every problem."""
    recipe = read_recipe(recipes.meant(room, asked.recipe))
    chosen = presets.chosen(recipe, asked.preset)
    said = hugging_face.translated(
        recipe, asked.config, _gpus(recipe, chosen, asked), chosen.inputs if chosen else {}
    )
    ignored = {name: "unknown field" for name in asked.model_extra or ()}
    ignored |= {f"config.{name}": why for name, why in said.ignored.items()}
    problems = list(said.problems)
    if ignored and load(room.root, room.environ).flags.get("server.strict_jobs"):
        problems += [
            Problem("unknown-field", f"{_printable(name)}: {why}") for name, why in ignored.items()
        ]
    if problems:
        raise Invalid(problems)
    inputs = dict(said.inputs)
    for value, kinds, field in (
        (asked.model_name, pod.MODEL, "model_name"),
        (asked.dataset_url, pod.DATASET, "dataset_url"),
    ):
        if value:
            name = _input(recipe, kinds, field)
            if inputs.setdefault(name, value) != value:
                words = f'"{field}" and `config` both say {name}, and not the same'
                raise Refused(422, "clash", words, "remove one of the two")
    spec = recipe.inputs.get("precision")
    choices = spec.limits.get("choices") if spec is not None else None
    if (
        room.environ.get("ENABLE_MIXED_PRECISION", "").lower() in _NO
        and isinstance(choices, list)
        and _FULL in choices
    ):
        inputs.setdefault("precision", _FULL)
    new = NewRun(
        recipe=asked.recipe,
        inputs=inputs,
        preset=asked.preset,
        resources=asked.resources,
        priority=asked.priority,
        user=asked.user_id,
        driver=driver,
    )
    job_id = asked.job_id or new_id()
    job: dict[str, object] = {"id": job_id, "user": asked.user_id, "model": asked.model_name}
    if said.every > 1:
        job["every"] = said.every
    if asked.job_token and any(
        room.environ.get(name) for name in ("METRICS_API_URL", "BACKEND_URL")
    ):
        job["token"] = seal(asked.job_token, TOKEN, room.environ)
    folder = room.environ.get("OUTPUT_DIR", "")
    out = room.root / Path(folder).expanduser() / job_id if folder else None
    wanted = recipes.checked(room, new)
    view = runs.store(room, wanted, new, f"{_KEY}{job_id}", job, out).view
    shown = [f"{_printable(name)}: {why}" for name, why in ignored.items()]
    return Executed(job_id=job_id, status=_STATUS[view.state], ignored=shown)


def _printable(name: str) -> str:
    """The beginning of a name that somebody sent, on one line of a log."""
    return "".join(each if each.isprintable() else "?" for each in name[:200])


def _gpus(recipe: Recipe, chosen: Preset | None, asked: Job) -> int:
    """How many GPUs a training of a job has, 0 for none."""
    if asked.resources.gpus is not None:
        return asked.resources.gpus
    shared = recipe.resources
    if chosen is not None and chosen.resources is not None:
        shared = chosen.resources.over(shared)
    return max((step.resources.over(shared).gpus or 0 for step in recipe.steps.values()), default=0)


def _input(recipe: Recipe, kinds: tuple[str, ...], field: str) -> str:
    """The first input of a recipe that takes what a field names.  Raises Refused."""
    found = pod.first_input(recipe, kinds)
    if found is None:
        raise Refused(
            422,
            "invalid",
            f"the recipe {recipe.id} has no input for {field}",
            "remove the field, or pass the recipe's inputs as `config`",
        )
    return found


@router.get(
    "/jobs", dependencies=READ, summary=f"Jobs, the newest first, among the last {_LISTED} runs"
)
def jobs(room: InRoom) -> JobList:
    with room.reading() as ws:
        rows = ws.store.runs.page(Wanted(), _LISTED)
        found = [
            Accepted(job_id=row.idempotency.removeprefix(_KEY), status=_STATUS[row.state])
            for row in rows
            if row.idempotency.startswith(_KEY)
        ]
        return JobList(jobs=found)


@router.get("/status/{job_id}", dependencies=READ, summary="How far a job is")
def status(job_id: str, room: InRoom) -> JobView:
    with room.reading() as ws:
        row = _row(ws, job_id)
        view = runs.detailed(ws, row)
        progress, training = view.progress, view.training
        # A platform counts the steps of the training; those of the recipe where none reports any.
        if training is not None and training.step is not None:
            current, total = int(training.step), training.total
        else:
            current, total = progress.step, progress.total
        failed = row.state in ("FAILED", "CANCELLED")
        return JobView(
            job_id=job_id,
            status=_STATUS[row.state],
            run=row.id,
            recipe=row.recipe,
            word=view.word,
            progress=progress.percent,
            current_step=current,
            total_steps=int(total) if total is not None else None,
            error_message=plain(row.reason, ws.root) if failed else "",
        )


@router.post("/pause/{job_id}", status_code=202, dependencies=OPERATE, summary="Pause a job")
async def pause(
    job_id: str, room: InRoom, asking: InAsking, _body: Nothing | None = None
) -> Accepted:
    run = await run_in_threadpool(_run, room, job_id)
    await runs.pause(run, room, asking)
    return await run_in_threadpool(_now, room, job_id)


@router.post("/cancel/{job_id}", status_code=202, dependencies=OPERATE, summary="Cancel a job")
async def cancel(
    job_id: str, room: InRoom, asking: InAsking, _body: Nothing | None = None
) -> Accepted:
    run = await run_in_threadpool(_run, room, job_id)
    await runs.cancel(run, room, asking)
    return await run_in_threadpool(_now, room, job_id)


@router.post(
    "/resume/{job_id}",
    status_code=202,
    dependencies=OPERATE,
    summary="Resume a job from its newest checkpoint, or from one of its own",
)
async def resume(
    job_id: str, room: InRoom, planner: InPlanner, asked: Resume | None = None
) -> Accepted:
    run = await run_in_threadpool(_run, room, job_id)
    if asked is not None and asked.checkpoint_path:
        await planner.call(go_back, room, run, asked.checkpoint_path)
    await run_in_threadpool(runs.resume, run, room)
    return await run_in_threadpool(_now, room, job_id)


def go_back(room: ServedWorkspace, run: str, path: str) -> None:
    """Have a paused run resume from this checkpoint of its own, given by its path or the end of it.  Raises Refused."""
    from ..execution.session import preview
    from ..execution.terms import request_of_run
    from ..survey import kept_state

    with room.working() as ws:
        row = ws.store.runs.get(run)
        request = request_of_run(row)
        if row.state != "PAUSED" or request is None or row.bundle:
            raise Refused(
                409,
                "not-paused",
                "only a PAUSED job in the server's own workspace can return to a checkpoint",
                "pause the job first",
            )
        found = preview(ws, request)
        states = kept_state.find_states(ws, found, found.todo)
        named = [
            (state, each)
            for state in states
            for each in state.checkpoints
            if f"{each.path}".endswith(f"/{path.strip('/')}")
            or os.path.realpath(room.root / path) == os.path.realpath(each.path)
        ]
        if len(named) != 1:
            there = ", ".join(each.path.name for state in states for each in state.checkpoints)
            raise Refused(
                422,
                "no-such-checkpoint",
                "checkpoint_path is not a checkpoint of this job",
                there and f"available checkpoints: {there}",
            )
        kept_state.go_back(ws, named[0][0], named[0][1].number)


@router.get(
    "/logs/{job_id}", dependencies=READ, summary="What the step of a job that began last printed", response_class=Response,
    responses={200: {"content": {"text/plain; charset=utf-8": {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def logs(
    job_id: str,
    room: InRoom,
    caller: Caller,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    follow: bool = False,
) -> Response:
    run = await run_in_threadpool(_run, room, job_id)
    return await streams.logs(run, room, caller, request, "", 0, offset, follow, "")


def _row(ws: Workspace, job_id: str) -> RunRow:
    found = ws.store.runs.page(Wanted(key=f"{_KEY}{job_id}"), 1)
    if not found:
        raise Refused(404, "not-found", "unknown job", "list the jobs with GET /api/training/jobs")
    return found[0]


def _run(room: Room, job_id: str) -> str:
    with room.reading() as ws:
        return _row(ws, job_id).id


def _now(room: Room, job_id: str) -> Accepted:
    with room.reading() as ws:
        return Accepted(job_id=job_id, status=_STATUS[_row(ws, job_id).state])


@cache
def gpu() -> Gpu:
    """The GPUs of this machine, by nvidia-smi; asked once."""
    try:
        head = subprocess.run(
            ("nvidia-smi",), capture_output=True, text=True, timeout=10, check=True
        ).stdout
        query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
        cards = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
        name, _, memory = cards[0].rpartition(", ")
    except (OSError, subprocess.SubprocessError, IndexError):
        return Gpu(available=False, name=None, cuda_version=None, device_count=0, memory=None)
    version = re.search(r"CUDA Version: ([0-9.]+)", head)
    bytes_ = int(memory) << 20 if memory.isdigit() else None
    return Gpu(
        available=True,
        name=name,
        cuda_version=version[1] if version else None,
        device_count=len(cards),
        memory=bytes_,
    )
