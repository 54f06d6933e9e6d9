"""Routes to create, list, read and control runs.

The worker of a run carries out a request. If a run has no worker, the server changes its state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from fastapi import APIRouter, Header, Query, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from ..api import requests, starting
from ..api.differences import compare_runs, difference_facts
from ..api.events import event_facts, read_events
from ..api.outcomes import Outcome
from ..api.runs import list_facts, list_runs, read_run
from ..api.submitting import PRIORITY, QueueSettings, submit
from ..api.values import Facts
from ..execution.terms import (
    Choice,
    Settings,
    new_id,
)
from ..planning.waiting import WaitKind
from ..reports.addresses import public_endpoint
from ..reports.receivers import SECRET
from ..reports.sealing import seal
from ..storage.records.runs import Event, RunRow
from ..storage.records.runs import RunFilter as RunsWanted
from ..storage.workspace import Workspace
from . import recipes
from .answers import hide_local_paths, hide_paths_in_value
from .asking import InRequests
from .page import compressed_response
from .planner import InPlanner
from .recipes import AskedPlan, CheckedRequest
from .room import (
    OPERATE,
    OPERATE_RUN,
    READ,
    READ_RUN,
    InRoom,
    Moment,
    Nothing,
    RequestBody,
    Room,
    ServedWorkspace,
    Whole,
    run_of,
)

router = APIRouter(prefix="/v1", tags=["runs"])

State: TypeAlias = Literal["QUEUED", "ACTIVE", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]
MOST: Final = 200
"""Maximum number of runs in one page."""
PAGE_END: Final = (
    r"^(([0-9]{1,12}(\.[0-9]{1,9})?~)?[12][0-9]{3}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])"
    r"-([01][0-9]|2[0-3])[0-5][0-9][0-5][0-9]-[0-9a-f]{6})?$"
)
"""Page cursor: creation time and ID of a run."""
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._@+-]*$"
_BLANKS: Final = r"\x00-\x20\x7f-\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space and control characters. The meaning of `\\s` depends on the regex dialect."""
_Tag: TypeAlias = Annotated[str, Field(max_length=60, pattern=f"^[^{_BLANKS}#,][^{_BLANKS},]*$")]
_Label: TypeAlias = Annotated[str, Field(max_length=100, pattern=NAME)]


class Hook(RequestBody):
    """A webhook endpoint for reports of the run, signed according to Standard Webhooks."""

    url: str = Field(
        max_length=2000, description="Endpoint URL, https://HOST/PATH on a public host."
    )
    secret: str = Field(
        default="",
        max_length=200,
        pattern=r"^(whsec_[A-Za-z0-9+/]{24,}={0,2})?$",
        description="Signing secret.",
    )
    events: list[Annotated[str, Field(max_length=60, pattern=r"^[a-z_*?]+(\.[a-z_*?]+)?$")]] = (
        Field(
            default=["*"],
            min_length=1,
            max_length=32,
            description="Event types, such as run.failed, run.* or alert.*.",
        )
    )


class NewRun(AskedPlan):
    """A run to queue."""

    priority: Whole = Field(
        default=0,
        ge=-PRIORITY,
        le=PRIORITY,
        description="Workers claim runs with a higher priority first.",
    )
    not_before: Moment | None = Field(default=None, description="Earliest start time in RFC 3339.")
    user: str = Field(
        default="",
        max_length=100,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]*)?$",
        description="Owner of the run.",
    )
    labels: dict[_Label, _Label] = Field(
        default={}, max_length=32, description="Labels that a worker must have to claim the run."
    )
    webhooks: list[Hook] = Field(
        default=[],
        max_length=8,
        description="Webhooks of this run, in addition to the webhooks of the server's settings.",
    )


class Progress(BaseModel):
    step: int = Field(description="Number of finished recipe steps.")
    total: int | None
    percent: float | None = Field(
        description="Progress by training steps while a step trains, otherwise by earlier durations. 100 only for a COMPLETED run."
    )
    eta: float | None = Field(
        description="Remaining seconds by the pace of the training, otherwise by earlier durations. Null if unknown."
    )


class StepProgress(BaseModel):
    """Progress last reported by a step."""

    step: float | None = Field(description="Training step.")
    total: float | None
    percent: float | None
    eta: float | None = Field(description="Remaining time in seconds.")


class TrainingView(StepProgress):
    """Metrics last reported by the training step."""

    of: str = Field(description="ID of the training step.")
    at: str | None
    values: dict[str, float] = Field(description="Other metrics, such as loss.")


class FailureView(BaseModel):
    """The failure of a run."""

    kind: str
    words: str
    step: str = Field(description="The failed step, or empty.")
    exit: int | None = Field(description="Exit code of the command.")
    signal: int | None = Field(description="Signal that ended the command.")
    lines: list[str] = Field(description="Last output lines of the step.")
    fix: str


class RunView(BaseModel):
    """A run. Times are RFC 3339."""

    id: str
    recipe: str
    state: State
    word: str = Field(
        description="Displayed state, such as EXECUTING, TRANSFERRING_DATA, PROVISIONING or NEEDS_RECOVERY."
    )
    failure: str = Field(
        description="Kind of failure of a FAILED run, such as oom, exit or provisioning. Otherwise empty."
    )
    reason: str = Field(description="Message for the failure or the current state.")
    request: str = Field(description="Pending request: cancel, pause or resume.")
    user: str
    labels: dict[str, str]
    priority: int
    driver: str
    preset: str | None
    inputs: dict[str, Any]
    created: str
    not_before: str | None
    ended: str | None
    progress: Progress


class MetricView(BaseModel):
    """A metric of a run, over all its steps."""

    last: float | str | bool
    min: float | None
    max: float | None
    better: Literal["min", "max"] = Field(
        description="Direction from a `select` in the recipe, otherwise from the name of the metric."
    )
    step_of_best: float | None = Field(
        description="`step` or `epoch` of the best value, otherwise the index of its point."
    )
    n: int | None = Field(description="Number of numeric values.")


class TrialView(BaseModel):
    """An instance of a matrix, such as a sweep's."""

    id: str
    inputs: dict[str, Any]
    state: str = Field(description="Worst state among the instance's steps.")
    metrics: dict[str, MetricView]


class CurveView(BaseModel):
    metric: str
    values: list[float] = Field(description="Mean values of at most 24 equal parts, in order.")


class StepCounts(BaseModel):
    ran: int
    fresh: int
    failed: int
    other: int


class ListedRun(RunView):
    """A run with its description and metrics."""

    given: dict[str, Any] = Field(
        description="Inputs set by the caller. `inputs` holds all inputs."
    )
    tried: dict[str, list[str]] = Field(description="First values of each swept input.")
    counts: StepCounts = Field(description="Number of steps by final state.")
    cost: float = Field(description="Cost so far in US dollars.")

    name: str
    tags: list[str]
    note: str
    archived: bool
    metrics: dict[str, MetricView] = Field(
        description="Metrics of all steps, including cached steps."
    )
    trials: list[TrialView]
    curve: CurveView | None = Field(description="Small curve of the most relevant metric.")


class RunList(BaseModel):
    runs: list[ListedRun]
    next: str | None = Field(
        description="Value of `after` for the next page. Null on the last page."
    )


class StepView(BaseModel):
    id: str
    state: str
    reason: str = Field(description="Kind of failure of a FAILED step, or phase of a RUNNING step.")
    detail: str = Field(description="Error message of a FAILED step.")
    attempts: int = Field(description="Number of started attempts, including a running attempt.")
    host: str = Field(description="Host of the last attempt. Empty for the worker's machine.")
    began: str | None = Field(description="Start time of the last attempt.")
    ended: str | None
    seconds: float | None = Field(description="Total run time of all attempts in seconds.")
    expected: float | None = Field(description="Duration of earlier runs of the step in seconds.")
    progress: StepProgress
    values: dict[str, float] = Field(description="Metrics reported last, such as loss.")
    exit: int | None = Field(description="Exit code of a FAILED step's command.")
    signal: int | None = Field(description="Signal that ended the command.")
    lines: list[str] = Field(description="Last output lines of a FAILED step.")
    fix: str = Field(description="Suggested fix.")
    warnings: list[str] = Field(description="Warnings reported by the step.")
    key: str = Field(
        description="Cache key of the last attempt or of the cached result. Empty if the step has not started."
    )
    cost: float = Field(
        description="Share of the run's cost in US dollars, by seconds on rented machines."
    )
    machine: dict[str, float] = Field(
        description="Last machine metrics of a RUNNING step, such as gpu_percent. Empty if unknown."
    )


class OutputView(BaseModel):
    name: str
    path: str = Field(description="Path of the output as declared by its step. Empty if unknown.")
    content: str = Field(description="Digest of the content.")
    bytes: int | None
    folder: bool


class LinkView(BaseModel):
    step: str
    name: str = Field(description="W&B, TensorBoard, trackio, or a name chosen by the step.")
    to: str = Field(
        description="A URL, an output with a path, or a command that shows the metrics."
    )


class Instance(BaseModel):
    provider: str
    key: str
    state: str
    usd_an_hour: float


class Estimate(BaseModel):
    cost: float | None
    seconds: float | None


class GraphStep(BaseModel):
    """A step of the recipe, with all its instances."""

    step: str
    needs: list[str]
    instances: int
    fresh: int = Field(description="Number of instances that were up to date.")


class SweepView(BaseModel):
    recipe: str = Field(description="The swept recipe.")
    axes: dict[str, list[Any]] = Field(description="Values of each swept input.")


class WaitView(BaseModel):
    """The reason why a run waits."""

    kind: WaitKind
    words: str
    fix: str = Field(description="Suggested fix. Empty if no action is needed.")


class RunDetail(ListedRun):
    sweep: SweepView | None = Field(
        description="Recipe and swept inputs of a sweep. `inputs` holds the other inputs. Null for other runs and for searches."
    )
    seq: int = Field(description="Number of the last event, for `events?after=`.")
    provider: str
    instances: list[Instance]
    estimate: Estimate
    failed: FailureView | None = Field(
        description="The failure that ended the run, or the first failure of a run that continues."
    )
    warnings: list[str] = Field(description="Warnings of all steps, as STEP: WARNING.")
    training: TrainingView | None = Field(
        description="Metrics of the training step. Null if no step reports training metrics."
    )
    waits: WaitView | None = Field(
        description="Why no worker has claimed the run yet. Null if the run does not wait."
    )
    position: int | None = Field(
        description="Position in the workspace's queue. Null if the run does not wait."
    )
    steps: list[StepView]
    graph: list[GraphStep] = Field(
        description="All steps of the recipe, including steps that have not started. Empty before the run starts."
    )
    outputs: list[OutputView]
    links: list[LinkView] = Field(description="Links to external views of the metrics.")


class DifferenceView(BaseModel):
    part: str
    before: Any = Field(description="Value in the first run, or null.")
    after: Any = Field(description="Value in the second run, or null.")
    files: dict[str, str] | None = Field(
        description="Changed files of two directories: + added, - removed, ~ modified. Null if unknown."
    )


class StepDifferenceView(BaseModel):
    id: str
    states: list[str] = Field(description="State in the first and in the second run, or empty.")
    only: Literal["A", "B"] | None = Field(
        description="A if only the first run has the step, B if only the second."
    )
    changes: dict[str, list[DifferenceView]] = Field(
        description="Changes by aspect: inputs, data, code, command, env, outputs, metrics, time."
    )


class DifferencesView(BaseModel):
    """The differences between two recorded runs."""

    inputs: list[DifferenceView]
    steps: list[StepDifferenceView] = Field(
        description="Steps executed by either run. Steps without changes are equal."
    )


class EventView(BaseModel):
    run: str
    seq: int
    at: str
    subject: str
    id: str
    before: str
    after: str
    reason: str
    data: dict[str, Any]


class Done(BaseModel):
    """The result of a request."""

    run: str = Field(description="The run that continues. A retry creates a new run.")
    state: State
    done: bool = Field(
        description="False if the worker has not handled the request yet, or jobs are still being stopped."
    )
    said: list[str] = Field(
        description="Warnings about jobs that may still run or are being stopped."
    )
    event: EventView = Field(description="The latest event of the run.")


class Retry(RequestBody):
    begin: str | None = Field(
        default=None,
        alias="from",
        max_length=400,
        description="First step to rerun regardless of the cache, with all downstream steps.",
    )


class Description(RequestBody):
    """Name, tags and note of a run. Omitted fields are unchanged, and null removes a value."""

    name: Annotated[str, Field(max_length=100)] | None = None
    tags: Annotated[list[_Tag], Field(max_length=50)] | None = None
    note: Annotated[str, Field(max_length=4000)] | None = None
    archived: bool | None = Field(
        default=None, description="Archive the run. Lists then show it only on request."
    )
    priority: Whole = Field(
        default=0,
        ge=-PRIORITY,
        le=PRIORITY,
        description="Workers claim runs with a higher priority first. Null is rejected.",
    )


# -- storing, listing ------------------------------------------------------------------------------


@router.post(
    "/runs",
    status_code=201,
    dependencies=OPERATE,
    summary="Queue a run",
    responses={200: {"model": RunView}},
)
async def create(
    asked: NewRun,
    room: InRoom,
    planner: InPlanner,
    response: Response,
    key: Annotated[str, Header(alias="Idempotency-Key", max_length=200, pattern=r"^[!-~]*$")] = "",
) -> RunView:
    wanted = await run_in_threadpool(recipes.check_request, room, asked)
    stored_run = await planner.call(store_run, room, wanted, asked, key)
    response.status_code = 201 if stored_run.is_new else 200
    return stored_run.view


class StoredRun(NamedTuple):
    """A queued run. `is_new` is False if an earlier request with the same key created the run."""

    view: RunView
    is_new: bool


def _stored_hook(room: ServedWorkspace, hook: Hook) -> Mapping[str, object]:
    """Return a webhook in stored form.

    Raises Invalid if the URL is not public, and CannotRun if the secret cannot be encrypted.
    """
    public_endpoint(hook.url)
    sealed = {"secret": seal(hook.secret, SECRET, room.environ)} if hook.secret else {}
    return {"url": hook.url, "events": hook.events, **sealed}


def store_run(
    room: ServedWorkspace,
    wanted: CheckedRequest,
    asked: NewRun,
    key: str,
    job: Mapping[str, object] | None = None,
    out: Path | None = None,
) -> StoredRun:
    """Queue a run for a checked request.

    `job` is a platform's job, which receives reports in addition to the webhooks of the settings.
    `out` is the directory of results.
    """
    reports_to: dict[str, object] = {"job": job} if job is not None else {}
    if asked.webhooks:
        reports_to["webhooks"] = [_stored_hook(room, hook) for hook in asked.webhooks]
    due = asked.not_before.timestamp() if asked.not_before is not None else None
    with room.open_workspace() as ws:
        # Without a shared store, only workers of this workspace have the run's files.
        reach = ws.config.lists.get("data.allow", ())
        ticket = QueueSettings(
            asked.priority,
            due,
            key,
            dict(asked.labels),
            asked.user,
            new_id(),
            reports_to,
            reach,
            here=ws.share(None) is None,
        )
        request = starting.request_to_run(ws, wanted.start)
        request = replace(request, out=out) if out is not None else request
        run = submit(
            ws,
            request,
            Choice(),
            Settings(asked.driver, limits=asked.limits.model_dump(exclude_none=True)),
            ticket,
        ).id
        return StoredRun(run_views(ws, [ws.store.runs.get(run)])[0], is_new=run == ticket.run)


@router.get("/runs", dependencies=READ, summary="List runs, newest first", response_model=RunList)
def runs(
    room: InRoom,
    request: HttpRequest,
    state: Annotated[list[State] | None, Query()] = None,
    recipe: Annotated[str, Query(max_length=80)] = "",
    user: Annotated[str, Query(max_length=100)] = "",
    label: Annotated[
        str, Query(max_length=201, pattern=r"^([^=]+=[^=]+)?$", description="NAME=VALUE")
    ] = "",
    after: Annotated[
        str, Query(max_length=80, pattern=PAGE_END, description="`next` of the previous page.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MOST)] = 50,
    tag: Annotated[str, Query(max_length=60)] = "",
    archived: Annotated[
        bool | None, Query(description="true: only archived runs; false: no archived runs.")
    ] = None,
    metrics: Annotated[
        bool, Query(description="false: leave out `metrics`, `trials` and `curve`.")
    ] = True,
) -> Response:
    name, equals, value = label.partition("=")
    wanted = RunsWanted(state or (), recipe, user, (name, value) if equals else None)
    wanted = wanted._replace(tag=tag, archived={None: "", True: "yes", False: "no"}[archived])
    with room.borrow_workspace() as ws:
        page = list_runs(ws, wanted, limit, after, numbers=metrics)
        shown = [_without_folders(ws, each) for each in page.runs]
    # The data already has these types. Validating 200 runs again would take most of the time.
    text = json.dumps({"runs": shown, "next": page.next}, ensure_ascii=False, separators=(",", ":"))
    return compressed_response(request, text, "application/json")


@router.get("/runs/{run}", dependencies=READ_RUN, summary="Show a run with its steps and outputs")
def one(run: str, room: InRoom) -> RunDetail:
    with room.borrow_workspace() as ws:
        return run_detail(ws, run_of(ws, run))


@router.get(
    "/runs/{run}/differences",
    dependencies=READ,
    summary="Compare a run with another run",
)
def differences(
    run: str,
    room: InRoom,
    first: Annotated[
        str, Query(alias="from", min_length=1, max_length=40, description="The other run.")
    ],
) -> DifferencesView:
    with room.borrow_workspace() as ws:
        found = difference_facts(compare_runs(ws, run_of(ws, first), run_of(ws, run)))
        return DifferencesView.model_validate(hide_paths_in_value(found, ws.root))


def run_views(ws: Workspace, rows: Sequence[RunRow]) -> list[RunView]:
    """Convert runs to list entries of the API."""
    found = list_facts(ws, rows, numbers=False)
    return [RunView.model_validate(_without_folders(ws, each)) for each in found]


def run_detail(ws: Workspace, row: RunRow) -> RunDetail:
    """Return all details of a run in API form."""
    found = read_run(ws, row)
    told = {
        name: hide_paths_in_value(found[name], ws.root) for name in ("failed", "warnings", "sweep")
    }
    for step in found["steps"]:
        for name in ("reason", "detail", "lines", "fix", "warnings"):
            if step[name]:
                step[name] = hide_paths_in_value(step[name], ws.root)
    return RunDetail.model_validate({**_without_folders(ws, found), **told})


def _without_folders(ws: Workspace, found: Facts) -> Mapping[str, object]:
    typed = {
        name: hide_paths_in_value(found[name], ws.root)
        for name in ("inputs", "given", "tried", "labels")
    }
    return {**found, "reason": hide_local_paths(found["reason"], ws.root), **typed}


def event_view(ws: Workspace, event: Event) -> EventView:
    """Convert an event to its API form."""
    found = event_facts(event)
    return EventView.model_validate(
        {
            **found,
            "reason": hide_local_paths(event.reason, ws.root),
            "data": hide_paths_in_value(found["data"], ws.root),
        }
    )


@router.patch(
    "/runs/{run}",
    dependencies=OPERATE_RUN,
    summary="Change name, tags, note or priority of a run, or archive it",
)
def describe(run: str, room: InRoom, said: Description) -> RunDetail:
    changes = said.model_dump(exclude_unset=True)
    with room.borrow_workspace() as ws:
        row = run_of(ws, run)
        if "priority" in changes:
            requests.prioritize(ws, row.id, changes.pop("priority"))
        requests.describe(ws, row.id, changes)
        return run_detail(ws, run_of(ws, run))


# -- asking ----------------------------------------------------------------------------------------


def _done_of(ws: Workspace, outcome: Outcome) -> Done:
    """Return the outcome of a request, with the latest event of the run."""
    last = ws.store.runs.get(outcome.run).next_event - 2
    event = event_view(ws, read_events(ws, outcome.run, last)[-1])
    said = [hide_local_paths(text, ws.root) for text in outcome.said]
    return Done.model_validate({**outcome._asdict(), "said": said, "event": event})


def _read_done(room: Room, outcome: Outcome) -> Done:
    with room.borrow_workspace() as ws:
        return _done_of(ws, outcome)


@router.post(
    "/runs/{run}/cancel",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="Cancel a run and keep its results and checkpoints",
)
async def cancel(run: str, room: InRoom, asking: InRequests, _body: Nothing | None = None) -> Done:
    outcome = await asking.ask(room, run, "cancel", requests.cancel)
    return await run_in_threadpool(_read_done, room, outcome)


@router.post(
    "/runs/{run}/pause",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="Stop a run so that it can be resumed",
)
async def pause(run: str, room: InRoom, asking: InRequests, _body: Nothing | None = None) -> Done:
    outcome = await asking.ask(room, run, "pause", requests.pause)
    return await run_in_threadpool(_read_done, room, outcome)


@router.post(
    "/runs/{run}/resume",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="Resume a run that is paused or has lost its worker",
)
def resume(run: str, room: InRoom, _body: Nothing | None = None) -> Done:
    with room.borrow_workspace() as ws:
        return _done_of(ws, requests.resume(ws, run_of(ws, run).id))


@router.post(
    "/runs/{run}/retry",
    status_code=202,
    dependencies=OPERATE,
    summary="Rerun a finished run as a new run",
)
async def retry(run: str, room: InRoom, planner: InPlanner, asked: Retry | None = None) -> Done:
    return await planner.call(store_again, room, run, asked)


def store_again(room: ServedWorkspace, run: str, asked: Retry | None) -> Done:
    """Queue a new run that repeats a finished run. Raises Refused, or a RecipeError."""
    with room.open_workspace() as ws:
        begin = asked.begin if asked else None
        reach = ws.config.lists.get("data.allow", ())
        return _done_of(ws, requests.retry(ws, run_of(ws, run).id, begin, reach=reach))
