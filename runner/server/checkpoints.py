"""The checkpoints of a run over HTTP."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.checkpoints import NotHere, find_checkpoints, resume_from
from .answers import Refused, plain_value
from .planner import InPlanner
from .room import OPERATE_RUN, READ_RUN, Given, InRoom, ServedWorkspace, run_of

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["runs"])


class CheckpointView(BaseModel):
    """A checkpoint that a step of a run has kept."""

    step: str
    state: str = Field(description="The state of the step that it belongs to.")
    name: str
    number: int | None = Field(description="The last number in its name.")
    at_step: int | None = Field(description="The step of the training that it was made at.")
    bytes: int
    made: str
    whole: bool = Field(description="Whether a training can resume from it; `why` says why not.")
    why: str
    aside: bool = Field(description="Put aside, so that an earlier one counts.")
    newest: bool = Field(description="The one that a run resumes from.")
    best: bool = Field(description="The one that the trainer says was the best so far.")


class CheckpointList(BaseModel):
    checkpoints: list[CheckpointView]
    unknown: list[str] = Field(
        description="Steps whose checkpoints cannot be found before the steps they need are done."
    )


class Chosen(Given):
    """The checkpoint from which the next run is to resume."""

    step: str = Field(max_length=400)
    state: str = Field(max_length=200)
    number: int = Field(ge=0, le=10**15)


class ChosenView(BaseModel):
    name: str = Field(
        description="The checkpoint that counts now; `retry` from its step resumes from it."
    )


@router.get(
    "",
    dependencies=READ_RUN,
    summary="The checkpoints of a run's steps, the newest first, and which one is the best",
)
async def checkpoints(run: str, room: InRoom, planner: InPlanner) -> CheckpointList:
    return await planner.call(listed, room, run)


def listed(room: ServedWorkspace, run: str) -> CheckpointList:
    """The checkpoints that a run's steps have here.  Raises Refused, or a RecipeError."""
    with room.working() as ws:
        try:
            found = find_checkpoints(ws, run_of(ws, run)).facts()
        except NotHere as error:
            raise _not_here(error) from None
        return CheckpointList.model_validate(plain_value(found, ws.root))


@router.post(
    "/resume",
    dependencies=OPERATE_RUN,
    summary="Put newer checkpoints aside, so that the next run resumes from this one",
)
async def resume(run: str, room: InRoom, planner: InPlanner, chosen: Chosen) -> ChosenView:
    return await planner.call(chose, room, run, chosen)


def chose(room: ServedWorkspace, run: str, chosen: Chosen) -> ChosenView:
    """Choose the checkpoint that counts.  Raises Refused, or a RecipeError."""
    with room.working() as ws:
        row = run_of(ws, run)
        try:
            name = resume_from(ws, row, chosen.step, chosen.state, chosen.number)
        except NotHere as error:
            raise _not_here(error) from None
    return ChosenView(name=name)


def _not_here(error: NotHere) -> Refused:
    return Refused(409, "not-here", str(error), error.fix)
