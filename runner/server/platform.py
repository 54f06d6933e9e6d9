"""Routes called by training platforms. A job is a run with the idempotency key `job:ID`.

Jobs use the field names of platforms. Unknown fields are ignored and reported. `config` may contain
Hugging Face argument names (see `hugging_face`). fixtures/server contains example bodies.
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
from ..execution.session import preview
from ..execution.terms import new_id, request_of_run
from ..interface import pod
from ..language import presets
from ..language.recipe import Preset, Recipe
from ..logs import Log
from ..reports.receivers import TOKEN
from ..reports.sealing import seal
from ..settings import load
from ..storage.records.letters import STATUS
from ..storage.records.runs import RunFilter, RunRow
from ..storage.workspace import Workspace
from ..survey import kept_state
from . import hugging_face, recipes, runs, streams
from .answers import Refused, hide_local_paths
from .asking import InRequests
from .planner import InPlanner
from .room import OPERATE, READ, Caller, InRoom, Nothing, RequestBody, Room, ServedWorkspace, Whole
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
"""The value of the library recipes' `precision` input for full precision."""


class Job(BaseModel):
    """A job of a platform. `job_token` is stored encrypted, and only if a report URL is set."""

    model_config = ConfigDict(extra="allow", strict=True)

    job_id: str = Field(
        default="",
        max_length=100,
        pattern=rf"^({_ID})?$",
        validation_alias=AliasChoices("job_id", "jobId"),
        description="ID of the job. If empty, each request creates a new job with a generated ID.",
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
        default={},
        description="Input values, with names of the recipe's inputs or Hugging Face arguments.",
    )
    preset: str | None = Field(default=None, max_length=400)
    resources: recipes.Need = recipes.Need()
    priority: Whole = Field(
        default=0,
        ge=-PRIORITY,
        le=PRIORITY,
        description="Workers claim jobs with a higher priority first.",
    )
    job_token: str = Field(
        default="", max_length=4000, validation_alias=AliasChoices("job_token", "jobToken")
    )


class Execute(Job):
    """A job for any driver."""

    driver: str = Field(
        default="local",
        min_length=1,
        max_length=64,
        description="Driver that executes the job. `recipe doctor` lists the drivers.",
    )


class Deploy(Job):
    """A job for a RunPod pod."""

    driver: Literal["runpod"] = "runpod"


class Resume(RequestBody):
    """The checkpoint from which a job resumes. Without a path, the newest checkpoint."""

    checkpoint_path: str = Field(
        default="",
        max_length=4000,
        validation_alias=AliasChoices("checkpoint_path", "checkpointPath"),
        description="Path of one of the job's checkpoints.",
    )


class Accepted(BaseModel):
    job_id: str
    status: Status


class Executed(Accepted):
    ignored: list[str] = Field(
        description="Ignored fields of the request and of its `config`, with reasons."
    )


class JobView(Accepted):
    run: str
    recipe: str
    word: str
    progress: float | None = Field(description="Progress of the run in percent.")
    current_step: int = Field(
        description="Training step, or if no training reports steps, number of finished recipe steps."
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
    memory: int | None = Field(description="Memory of the first GPU in bytes.")


@router.post(
    "/execute",
    status_code=202,
    dependencies=OPERATE,
    summary="Queue a job; repeating a job ID returns the existing job",
)
async def execute(asked: Execute, room: InRoom, planner: InPlanner) -> Executed:
    return _log_ignored(await planner.call(store_job, room, asked, asked.driver))


@router.post(
    "/deploy/runpod",
    status_code=202,
    dependencies=OPERATE,
    summary="Queue a job for a RunPod pod",
)
async def deploy(asked: Deploy, room: InRoom, planner: InPlanner) -> Executed:
    return _log_ignored(await planner.call(store_job, room, asked, asked.driver))


def _log_ignored(done: Executed) -> Executed:
    """Log the ignored fields of a stored platform job, and return the job."""
    if done.ignored:
        _log.warning("job %s: ignored: %s", done.job_id, "; ".join(done.ignored))
    return done


def store_job(room: ServedWorkspace, asked: Job, driver: str) -> Executed:
    """Queue a platform's job as a run. Raises Refused, or a RecipeError with all problems."""
    recipe = read_recipe(recipes.find_available(room, asked.recipe))
    chosen = presets.combine(recipe, asked.preset)
    preset_inputs = chosen.inputs if chosen else {}
    gpus = _training_gpus(recipe, chosen, asked)
    said = hugging_face.translate(recipe, asked.config, gpus, preset_inputs)
    ignored = {name: "unknown field" for name in asked.model_extra or ()}
    ignored |= {f"config.{name}": why for name, why in said.ignored.items()}
    problems = list(said.problems)
    shown = [f"{_printable(name)}: {why}" for name, why in ignored.items()]
    if ignored and load(room.root, room.environ).flags.get("server.strict_jobs"):
        problems += [Problem("unknown-field", words) for words in shown]
    if problems:
        raise Invalid(problems)
    inputs = dict(said.inputs)
    _set_addresses(inputs, recipe, asked)
    if room.environ.get("ENABLE_MIXED_PRECISION", "").lower() in _NO:
        _set_full_precision(inputs, recipe)
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
    job = _stored_facts(room, asked, job_id, said.every)
    folder = room.environ.get("OUTPUT_DIR", "")
    out = room.root / Path(folder).expanduser() / job_id if folder else None
    wanted = recipes.check_request(room, new)
    view = runs.store_run(room, wanted, new, f"{_KEY}{job_id}", job, out).view
    return Executed(job_id=job_id, status=_STATUS[view.state], ignored=shown)


def _stored_facts(room: ServedWorkspace, asked: Job, job_id: str, every: int) -> dict[str, object]:
    """Return what a run stores about its job; metrics are sent every `every` steps."""
    job: dict[str, object] = {"id": job_id, "user": asked.user_id, "model": asked.model_name}
    if every > 1:
        job["every"] = every
    # Only the reports to these addresses need the token.
    is_used = any(room.environ.get(name) for name in ("METRICS_API_URL", "BACKEND_URL"))
    if asked.job_token and is_used:
        job["token"] = seal(asked.job_token, TOKEN, room.environ)
    return job


def _set_addresses(inputs: dict[str, Any], recipe: Recipe, asked: Job) -> None:
    """Add a job's model and dataset to the recipe inputs.

    Raises Refused if an input has another value.
    """
    for value, kinds, field in (
        (asked.model_name, pod.MODEL, "model_name"),
        (asked.dataset_url, pod.DATASET, "dataset_url"),
    ):
        if value:
            name = _input_for(recipe, kinds, field)
            if inputs.setdefault(name, value) != value:
                words = f'"{field}" and `config` set different values for {name}'
                raise Refused(422, "clash", words, "remove one of the two")


def _set_full_precision(inputs: dict[str, Any], recipe: Recipe) -> None:
    """Turn off mixed precision, if the recipe has the choice and the job does not set it."""
    spec = recipe.inputs.get("precision")
    choices = spec.limits.get("choices") if spec is not None else None
    if isinstance(choices, list) and _FULL in choices:
        inputs.setdefault("precision", _FULL)


def _printable(name: str) -> str:
    """Return the start of a received name, with unprintable characters replaced."""
    return "".join(each if each.isprintable() else "?" for each in name[:200])


def _training_gpus(recipe: Recipe, chosen: Preset | None, asked: Job) -> int:
    """Return the GPU count of a platform job's training step."""
    if asked.resources.gpus is not None:
        return asked.resources.gpus
    shared = recipe.resources
    if chosen is not None and chosen.resources is not None:
        shared = chosen.resources.over(shared)
    return max((step.resources.over(shared).gpus or 0 for step in recipe.steps.values()), default=0)


def _input_for(recipe: Recipe, kinds: tuple[str, ...], field: str) -> str:
    """Return the first recipe input suitable for a job field. Raises Refused."""
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
    "/jobs", dependencies=READ, summary=f"List jobs, newest first, among the last {_LISTED} runs"
)
def jobs(room: InRoom) -> JobList:
    with room.borrow_workspace() as ws:
        rows = ws.store.runs.page(RunFilter(), _LISTED)
        found = []
        for row in rows:
            if row.idempotency.startswith(_KEY):
                job = row.idempotency.removeprefix(_KEY)
                found.append(Accepted(job_id=job, status=_STATUS[row.state]))
        return JobList(jobs=found)


@router.get("/status/{job_id}", dependencies=READ, summary="Show the status and progress of a job")
def status(job_id: str, room: InRoom) -> JobView:
    with room.borrow_workspace() as ws:
        row = _find_job(ws, job_id)
        view = runs.run_detail(ws, row)
        progress, training = view.progress, view.training
        # Report training steps, or recipe steps if no training reports steps.
        if training is not None and training.step is not None:
            current, total = int(training.step), training.total
        else:
            current, total = progress.step, progress.total
        message = ""
        if row.state in ("FAILED", "CANCELLED"):
            message = hide_local_paths(row.reason, ws.root)
        return JobView(
            job_id=job_id,
            status=_STATUS[row.state],
            run=row.id,
            recipe=row.recipe,
            word=view.word,
            progress=progress.percent,
            current_step=current,
            total_steps=int(total) if total is not None else None,
            error_message=message,
        )


@router.post("/pause/{job_id}", status_code=202, dependencies=OPERATE, summary="Pause a job")
async def pause(
    job_id: str, room: InRoom, asking: InRequests, _body: Nothing | None = None
) -> Accepted:
    run = await run_in_threadpool(_run_of_job, room, job_id)
    await runs.pause(run, room, asking)
    return await run_in_threadpool(_read_status, room, job_id)


@router.post("/cancel/{job_id}", status_code=202, dependencies=OPERATE, summary="Cancel a job")
async def cancel(
    job_id: str, room: InRoom, asking: InRequests, _body: Nothing | None = None
) -> Accepted:
    run = await run_in_threadpool(_run_of_job, room, job_id)
    await runs.cancel(run, room, asking)
    return await run_in_threadpool(_read_status, room, job_id)


@router.post(
    "/resume/{job_id}",
    status_code=202,
    dependencies=OPERATE,
    summary="Resume a job from its newest checkpoint, or from a chosen checkpoint",
)
async def resume(
    job_id: str, room: InRoom, planner: InPlanner, asked: Resume | None = None
) -> Accepted:
    run = await run_in_threadpool(_run_of_job, room, job_id)
    if asked is not None and asked.checkpoint_path:
        await planner.call(go_back, room, run, asked.checkpoint_path)
    await run_in_threadpool(runs.resume, run, room)
    return await run_in_threadpool(_read_status, room, job_id)


def go_back(room: ServedWorkspace, run: str, path: str) -> None:
    """Set aside a paused run's checkpoints that are newer than the checkpoint at `path`.

    `path` may be the end of a path. Raises Refused.
    """
    with room.open_workspace() as ws:
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
        checkpoints = []
        for state in states:
            checkpoints += [(state, each) for each in state.checkpoints]
        end, whole = f"/{path.strip('/')}", os.path.realpath(room.root / path)
        named = []
        for state, each in checkpoints:
            if f"{each.path}".endswith(end) or os.path.realpath(each.path) == whole:
                named.append((state, each))
        if len(named) != 1:
            there = ", ".join(each.path.name for _, each in checkpoints)
            raise Refused(
                422,
                "no-such-checkpoint",
                "checkpoint_path is not a checkpoint of this job",
                there and f"available checkpoints: {there}",
            )
        state, chosen = named[0]
        kept_state.go_back(ws, state, chosen.number)


@router.get(
    "/logs/{job_id}", dependencies=READ, summary="Show the log of the job's latest step", response_class=Response,
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
    run = await run_in_threadpool(_run_of_job, room, job_id)
    return await streams.logs(run, room, caller, request, "", 0, offset, follow, "")


def _find_job(ws: Workspace, job_id: str) -> RunRow:
    found = ws.store.runs.page(RunFilter(key=f"{_KEY}{job_id}"), 1)
    if not found:
        raise Refused(404, "not-found", "unknown job", "list the jobs with GET /api/training/jobs")
    return found[0]


def _run_of_job(room: Room, job_id: str) -> str:
    with room.borrow_workspace() as ws:
        return _find_job(ws, job_id).id


def _read_status(room: Room, job_id: str) -> Accepted:
    with room.borrow_workspace() as ws:
        return Accepted(job_id=job_id, status=_STATUS[_find_job(ws, job_id).state])


@cache
def gpu() -> Gpu:
    """Return the GPUs of this machine, according to nvidia-smi. The result is cached."""
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
    bytes_ = int(memory) << 20 if memory.isdecimal() else None
    return Gpu(
        available=True,
        name=name,
        cuda_version=version[1] if version else None,
        device_count=len(cards),
        memory=bytes_,
    )
