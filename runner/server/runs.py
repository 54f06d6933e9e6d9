"""Runs: stored, listed, looked at, and asked to cancel, pause and resume.  What is asked of a run, its worker does; one that waits is moved here."""

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
from ..api.submitting import PRIORITY, Ticket, submit
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
from ..storage.records.runs import Wanted as RunsWanted
from ..storage.workspace import Workspace
from . import recipes
from .answers import plain, plain_value
from .asking import InAsking
from .page import squeezed
from .planner import InPlanner
from .recipes import AskedPlan, Wanted
from .room import (
    OPERATE,
    OPERATE_RUN,
    READ,
    READ_RUN,
    Given,
    InRoom,
    Moment,
    Nothing,
    Room,
    ServedWorkspace,
    Whole,
    run_of,
)

router = APIRouter(prefix="/v1", tags=["runs"])

State: TypeAlias = Literal["QUEUED", "ACTIVE", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"]
MOST: Final = 200
"""Runs of one page."""
PAGE_END: Final = (
    r"^(([0-9]{1,12}(\.[0-9]{1,9})?~)?[12][0-9]{3}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])"
    r"-([01][0-9]|2[0-3])[0-5][0-9][0-5][0-9]-[0-9a-f]{6})?$"
)
"""Where a page of runs ends: the time of a run, and its id."""
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._@+-]*$"
_Tag: TypeAlias = Annotated[str, Field(max_length=60, pattern=r"^[^\s#,][^\s,]*$")]
_Label: TypeAlias = Annotated[str, Field(max_length=100, pattern=NAME)]


class Hook(Given):
    """An address that gets reports of the run, by Standard Webhooks."""

    url: str = Field(max_length=2000, description="https://HOST/PATH of a public host.")
    secret: str = Field(
        default="",
        max_length=200,
        pattern=r"^(whsec_[A-Za-z0-9+/]{24,}={0,2})?$",
        description="What messages are signed with.",
    )
    events: list[Annotated[str, Field(max_length=60, pattern=r"^[a-z_*?]+(\.[a-z_*?]+)?$")]] = (
        Field(
            default=["*"],
            min_length=1,
            max_length=32,
            description="Types, such as run.failed, run.* or alert.*.",
        )
    )


class NewRun(AskedPlan):
    """What is to be run, when, and by whom."""

    priority: Whole = Field(
        default=0, ge=-PRIORITY, le=PRIORITY, description="A higher one is taken first."
    )
    not_before: Moment | None = Field(
        default=None, description="No worker takes it before, as RFC 3339 has it."
    )
    user: str = Field(
        default="",
        max_length=100,
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]*)?$",
        description="For whom it is.",
    )
    labels: dict[_Label, _Label] = Field(
        default={}, max_length=32, description="Only a worker with all of these takes it."
    )
    webhooks: list[Hook] = Field(
        default=[],
        max_length=8,
        description="Receivers of its reports, beside the receivers of the server's settings.",
    )


class Progress(BaseModel):
    step: int = Field(description="Steps of the recipe that are over.")
    total: int | None
    percent: float | None = Field(
        description="By the numbers of the training while it runs, else by what the steps took before; 100 only of a run that is COMPLETED."
    )
    eta: float | None = Field(
        description="Seconds, at the pace of the training, else by what the open steps took before; null where that is not known."
    )


class StepProgress(BaseModel):
    """How far a step is, by what it reported last."""

    step: float | None = Field(description="Its own step, as a training counts them.")
    total: float | None
    percent: float | None
    eta: float | None = Field(description="Seconds.")


class TrainingView(StepProgress):
    """What the step that trains reported last."""

    of: str = Field(description="The id of that step.")
    at: str | None
    values: dict[str, float] = Field(description="Its other numbers, such as loss.")


class FailureView(BaseModel):
    """Why a run failed."""

    kind: str
    words: str
    step: str = Field(description="The step that failed; empty where none did.")
    exit: int | None = Field(description="The exit code of its command.")
    signal: int | None = Field(description="The signal that ended it.")
    lines: list[str] = Field(description="The last lines that it printed.")
    fix: str


class RunView(BaseModel):
    """A run.  Times are RFC 3339."""

    id: str
    recipe: str
    state: State
    word: str = Field(
        description="The state as people see it: EXECUTING, TRANSFERRING_DATA, PROVISIONING, NEEDS_RECOVERY, …"
    )
    failure: str = Field(
        description="Of a run that FAILED the kind of its failure, such as oom, exit or provisioning; else empty."
    )
    reason: str = Field(description="The same in words, or why it is in its state.")
    request: str = Field(
        description="What was asked of it and is not done yet: cancel, pause, resume."
    )
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
    """One metric of a run, over all of its steps."""

    last: float | str | bool
    min: float | None
    max: float | None
    better: Literal["min", "max"] = Field(
        description="As a `select` of the recipe says, else by the name of the metric."
    )
    step_of_best: float | None = Field(
        description="The `step` or `epoch` that stood beside the best value, else its number from 0."
    )
    n: int | None = Field(description="How often it was reported as a number.")


class TrialView(BaseModel):
    """One instance of a matrix, as those of a sweep."""

    id: str
    inputs: dict[str, Any]
    state: str = Field(description="The worst of its steps.")
    metrics: dict[str, MetricView]


class CurveView(BaseModel):
    metric: str
    values: list[float] = Field(description="At most 24 means, from the first point to the last.")


class StepCounts(BaseModel):
    ran: int
    fresh: int
    failed: int
    other: int


class ListedRun(RunView):
    """A run with what people say of it, and what it reported."""

    given: dict[str, Any] = Field(description="The inputs that were given; `inputs` has all.")
    tried: dict[str, list[str]] = Field(
        description="Of a sweep the first values of each input that differs."
    )
    counts: StepCounts = Field(description="How many of its steps came to which end.")
    cost: float = Field(description="US dollars so far.")

    name: str
    tags: list[str]
    note: str
    archived: bool
    metrics: dict[str, MetricView] = Field(
        description="Those of steps whose results were there before the run are among them."
    )
    trials: list[TrialView]
    curve: CurveView | None = Field(description="The metric that says most, in small.")


class RunList(BaseModel):
    runs: list[ListedRun]
    next: str | None = Field(description="The value of `after` for the next page; null at the end.")


class StepView(BaseModel):
    id: str
    state: str
    reason: str = Field(
        description="Of a step that FAILED the kind of its failure, of one that is RUNNING its phase."
    )
    detail: str = Field(description="The error of a step that FAILED, in words.")
    attempts: int = Field(description="Those that began, with the one that runs.")
    host: str = Field(description="Where it was begun last; empty for the worker's own machine.")
    began: str | None = Field(description="When its last attempt did.")
    ended: str | None
    seconds: float | None = Field(description="For which its attempts have run.")
    expected: float | None = Field(description="Seconds that it took before.")
    progress: StepProgress
    values: dict[str, float] = Field(description="Numbers that it reported last, such as loss.")
    exit: int | None = Field(description="Of a step that FAILED the exit code of its command.")
    signal: int | None = Field(description="The signal that ended it.")
    lines: list[str] = Field(description="Of a step that FAILED the last lines that it printed.")
    fix: str = Field(description="What may help.")
    warnings: list[str] = Field(description="What it says that people have to know.")
    key: str = Field(
        description="The fingerprint of its last attempt, or of its result; empty before."
    )
    cost: float = Field(
        description="US dollars: its share of the run's cost, by the seconds that it ran on rented machines."
    )
    machine: dict[str, float] = Field(
        description="Of a step that is RUNNING what its machine had to do last, such as gpu_percent; empty where that is not known."
    )


class OutputView(BaseModel):
    name: str
    path: str = Field(description="Where its step makes it; empty where that is not known.")
    content: str = Field(description="The digest of its bytes.")
    bytes: int | None
    folder: bool


class LinkView(BaseModel):
    step: str
    name: str = Field(description="W&B, TensorBoard, trackio, or what the step called it.")
    to: str = Field(
        description="An http(s) address; else an output with a path in it, or the command that shows it."
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
    fresh: int = Field(description="Instances whose results were there before the run.")


class SweepView(BaseModel):
    recipe: str = Field(description="The recipe that it tries.")
    axes: dict[str, list[Any]] = Field(description="The values of each input that differs.")


class WaitView(BaseModel):
    """Why a run waits."""

    kind: WaitKind
    words: str
    fix: str = Field(description="What may help; empty where nothing needs to be done.")


class RunDetail(ListedRun):
    sweep: SweepView | None = Field(
        description="Of a sweep what it tries, beside `inputs`, which are the same in all; null of other runs, and of a search."
    )
    seq: int = Field(
        description="The number of its last event: what follows is `events?after=` it."
    )
    provider: str
    instances: list[Instance]
    estimate: Estimate
    failed: FailureView | None = Field(
        description="The failure that ended the run; of one that goes on, the first."
    )
    warnings: list[str] = Field(description="Those of its steps, STEP: WARNING.")
    training: TrainingView | None = Field(
        description="The numbers of the step that trains; null where none reports any."
    )
    waits: WaitView | None = Field(
        description="Why no worker has it yet; null where it does not wait for one."
    )
    position: int | None = Field(
        description="Its place among the runs of this workspace that wait; null where it does not."
    )
    steps: list[StepView]
    graph: list[GraphStep] = Field(
        description="Every step of the recipe, also those of which nothing has happened; empty before the run begins."
    )
    outputs: list[OutputView]
    links: list[LinkView] = Field(
        description="Where else the numbers of its steps can be looked at."
    )


class DifferenceView(BaseModel):
    part: str
    before: Any = Field(description="Null where the first run does not have it.")
    after: Any = Field(description="Null where the second run does not have it.")
    files: dict[str, str] | None = Field(
        description="Of two folders the files that differ: + new, - gone, ~ changed; null where that is not known."
    )


class StepDifferenceView(BaseModel):
    id: str
    states: list[str] = Field(description="In the first run and in the second; empty for none.")
    only: Literal["A", "B"] | None = Field(description="A or B: only the first or second has it.")
    changes: dict[str, list[DifferenceView]] = Field(
        description="By inputs, data, code, command, env, outputs, metrics, time."
    )


class DifferencesView(BaseModel):
    """What differs between two runs, by what each remembers."""

    inputs: list[DifferenceView]
    steps: list[StepDifferenceView] = Field(
        description="Those that one of them ran; a step without changes is the same in both."
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
    """What came of a request."""

    run: str = Field(description="The run that continues: a new one after a retry.")
    state: State
    done: bool = Field(
        description="False: the worker of the run was asked, or its jobs are being stopped."
    )
    said: list[str] = Field(
        description="What may still run on other machines, or is being stopped."
    )
    event: EventView = Field(description="The latest event of the run.")


class Retry(Given):
    begin: str | None = Field(
        default=None,
        alias="from",
        max_length=400,
        description="This step and everything after it, whatever is remembered.",
    )


class Description(Given):
    """What people say of a run; what is left out stays as it is, and null takes it away."""

    name: Annotated[str, Field(max_length=100)] | None = None
    tags: Annotated[list[_Tag], Field(max_length=50)] | None = None
    note: Annotated[str, Field(max_length=4000)] | None = None
    archived: bool | None = Field(
        default=None, description="Put away: lists show it where it is asked for."
    )
    priority: Whole = Field(
        default=0,
        ge=-PRIORITY,
        le=PRIORITY,
        description="A run with a higher one is taken first; null is no priority.",
    )


# -- storing, listing -----------------------------------------------------------------------------------------------------------------------------


@router.post(
    "/runs",
    status_code=201,
    dependencies=OPERATE,
    summary="Store a run for a worker",
    responses={200: {"model": RunView}},
)
async def create(
    asked: NewRun,
    room: InRoom,
    planner: InPlanner,
    response: Response,
    key: Annotated[str, Header(alias="Idempotency-Key", max_length=200, pattern=r"^[!-~]*$")] = "",
) -> RunView:
    wanted = await run_in_threadpool(recipes.checked, room, asked)
    stored_run = await planner.call(store, room, wanted, asked, key)
    response.status_code = 201 if stored_run.is_new else 200
    return stored_run.view


class StoredRun(NamedTuple):
    """A run as it is stored, and whether this request stored it, not an earlier one of its key."""

    view: RunView
    is_new: bool


def _hook(room: ServedWorkspace, hook: Hook) -> Mapping[str, object]:
    """A webhook as it is stored.  Raises Invalid for an address that is not public, CannotRun where its secret cannot be sealed."""
    public_endpoint(hook.url)
    sealed = {"secret": seal(hook.secret, SECRET, room.environ)} if hook.secret else {}
    return {"url": hook.url, "events": hook.events, **sealed}


def store(
    room: ServedWorkspace,
    wanted: Wanted,
    asked: NewRun,
    key: str,
    job: Mapping[str, object] | None = None,
    out: Path | None = None,
) -> StoredRun:
    """Store the run of a checked request; `job` is a platform's, which hears of it beside the receivers of the settings.  `out`: where results go."""
    reports_to: dict[str, object] = {"job": job} if job is not None else {}
    if asked.webhooks:
        reports_to["webhooks"] = [_hook(room, hook) for hook in asked.webhooks]
    due = asked.not_before.timestamp() if asked.not_before is not None else None
    with room.working() as ws:
        # Without a shared store only a worker of this folder can have what the run needs.
        reach = ws.config.lists.get("data.allow", ())
        ticket = Ticket(
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
        return StoredRun(viewed(ws, [ws.store.runs.get(run)])[0], is_new=run == ticket.run)


@router.get("/runs", dependencies=READ, summary="Runs, the newest first", response_model=RunList)
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
        str, Query(max_length=80, pattern=PAGE_END, description="`next` of the page before.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=MOST)] = 50,
    tag: Annotated[str, Query(max_length=60)] = "",
    archived: Annotated[
        bool | None, Query(description="false: none that is put away; true: only these.")
    ] = None,
    metrics: Annotated[
        bool, Query(description="false: without `metrics`, `trials` and `curve`.")
    ] = True,
) -> Response:
    name, equals, value = label.partition("=")
    wanted = RunsWanted(state or (), recipe, user, (name, value) if equals else None)
    wanted = wanted._replace(tag=tag, archived={None: "", True: "yes", False: "no"}[archived])
    with room.reading() as ws:
        page = list_runs(ws, wanted, limit, after, numbers=metrics)
        shown = [_without_folders(ws, each) for each in page.runs]
    # What was read of the database is of these types: checking 200 runs once more would take longer than all else.
    text = json.dumps({"runs": shown, "next": page.next}, ensure_ascii=False, separators=(",", ":"))
    return squeezed(request, text, "application/json")


@router.get("/runs/{run}", dependencies=READ_RUN, summary="One run with its steps and outputs")
def one(run: str, room: InRoom) -> RunDetail:
    with room.reading() as ws:
        return detailed(ws, run_of(ws, run))


@router.get(
    "/runs/{run}/differences",
    dependencies=READ,
    summary="What differs between another run and this one",
)
def differences(
    run: str,
    room: InRoom,
    first: Annotated[
        str, Query(alias="from", min_length=1, max_length=40, description="The other run.")
    ],
) -> DifferencesView:
    with room.reading() as ws:
        found = difference_facts(compare_runs(ws, run_of(ws, first), run_of(ws, run)))
        return DifferencesView.model_validate(plain_value(found, ws.root))


def viewed(ws: Workspace, rows: Sequence[RunRow]) -> list[RunView]:
    """Runs as the API shows them."""
    found = list_facts(ws, rows, numbers=False)
    return [RunView.model_validate(_without_folders(ws, each)) for each in found]


def detailed(ws: Workspace, row: RunRow) -> RunDetail:
    """A run with all that is known of it."""
    found = read_run(ws, row)
    told = {name: plain_value(found[name], ws.root) for name in ("failed", "warnings", "sweep")}
    for step in found["steps"]:
        step |= {
            name: plain_value(step[name], ws.root)
            for name in ("reason", "detail", "lines", "fix", "warnings")
            if step[name]
        }
    return RunDetail.model_validate({**_without_folders(ws, found), **told})


def _without_folders(ws: Workspace, found: Facts) -> Mapping[str, object]:
    typed = {
        name: plain_value(found[name], ws.root) for name in ("inputs", "given", "tried", "labels")
    }
    return {**found, "reason": plain(found["reason"], ws.root), **typed}


def shown(ws: Workspace, event: Event) -> EventView:
    """An event as the API shows it."""
    found = event_facts(event)
    return EventView.model_validate(
        {
            **found,
            "reason": plain(event.reason, ws.root),
            "data": plain_value(found["data"], ws.root),
        }
    )


@router.patch(
    "/runs/{run}",
    dependencies=OPERATE_RUN,
    summary="Name, tags, note and priority of a run; and whether it is put away",
)
def describe(run: str, room: InRoom, said: Description) -> RunDetail:
    changes = said.model_dump(exclude_unset=True)
    with room.reading() as ws:
        row = run_of(ws, run)
        if "priority" in changes:
            requests.prioritize(ws, row.id, changes.pop("priority"))
        requests.describe(ws, row.id, changes)
        return detailed(ws, run_of(ws, run))


# -- asking ---------------------------------------------------------------------------------------------------------------------------------------


def _answered(ws: Workspace, outcome: Outcome) -> Done:
    """An outcome with the latest event of its run."""
    last = ws.store.runs.get(outcome.run).next_event - 2
    event = shown(ws, read_events(ws, outcome.run, last)[-1])
    said = [plain(text, ws.root) for text in outcome.said]
    return Done.model_validate({**outcome._asdict(), "said": said, "event": event})


def _answer(room: Room, outcome: Outcome) -> Done:
    with room.reading() as ws:
        return _answered(ws, outcome)


@router.post(
    "/runs/{run}/cancel",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="End a run; results and checkpoints stay",
)
async def cancel(run: str, room: InRoom, asking: InAsking, _body: Nothing | None = None) -> Done:
    outcome = await asking.ask(room, run, "cancel", requests.cancel)
    return await run_in_threadpool(_answer, room, outcome)


@router.post(
    "/runs/{run}/pause",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="Stop a run so that it can be resumed",
)
async def pause(run: str, room: InRoom, asking: InAsking, _body: Nothing | None = None) -> Done:
    outcome = await asking.ask(room, run, "pause", requests.pause)
    return await run_in_threadpool(_answer, room, outcome)


@router.post(
    "/runs/{run}/resume",
    status_code=202,
    dependencies=OPERATE_RUN,
    summary="Resume a run that is paused, or that has lost its worker",
)
def resume(run: str, room: InRoom, _body: Nothing | None = None) -> Done:
    with room.reading() as ws:
        return _answered(ws, requests.resume(ws, run_of(ws, run).id))


@router.post(
    "/runs/{run}/retry",
    status_code=202,
    dependencies=OPERATE,
    summary="Run what an ended run was asked for once more, as a new run",
)
async def retry(run: str, room: InRoom, planner: InPlanner, asked: Retry | None = None) -> Done:
    return await planner.call(store_again, room, run, asked)


def store_again(room: ServedWorkspace, run: str, asked: Retry | None) -> Done:
    """Store a new run of the request of a run that is over.  Raises Refused, or a RecipeError."""
    with room.working() as ws:
        begin = asked.begin if asked else None
        reach = ws.config.lists.get("data.allow", ())
        return _answered(ws, requests.retry(ws, run_of(ws, run).id, begin, reach=reach))
