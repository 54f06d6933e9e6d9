"""Routes for the checkpoints of a run."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.checkpoints import NotHere, find_checkpoints, resume_from
from .answers import Refused, hide_paths_in_value
from .planner import InPlanner
from .room import OPERATE_RUN, READ_RUN, InRoom, RequestBody, ServedWorkspace, Whole, run_of

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["runs"])


class CheckpointView(BaseModel):
    """A checkpoint of a step."""

    step: str
    state: str = Field(description="Name of the step's checkpoint directory (`state`).")
    name: str
    number: int | None = Field(description="The last number in the checkpoint's name.")
    at_step: int | None = Field(description="Training step of the checkpoint.")
    bytes: int
    made: str
    whole: bool = Field(
        description="True if training can resume from the checkpoint. Otherwise, `why` gives the reason."
    )
    why: str
    aside: bool = Field(
        description="True if the checkpoint was set aside in favor of an earlier one."
    )
    newest: bool = Field(description="True for the checkpoint from which a run resumes.")
    best: bool = Field(description="True for the best checkpoint according to the trainer.")


class CheckpointList(BaseModel):
    checkpoints: list[CheckpointView]
    unknown: list[str] = Field(
        description="Steps whose checkpoints are unknown until their dependencies finish."
    )


class Chosen(RequestBody):
    """The checkpoint from which the next run resumes."""

    step: str = Field(max_length=400)
    state: str = Field(max_length=200)
    number: Whole = Field(ge=0, le=10**15)


class ChosenView(BaseModel):
    name: str = Field(
        description="The newest remaining checkpoint. A `retry` from its step resumes from this checkpoint."
    )


@router.get(
    "",
    dependencies=READ_RUN,
    summary="List the checkpoints of a run, newest first",
)
async def checkpoints(run: str, room: InRoom, planner: InPlanner) -> CheckpointList:
    return await planner.call(read_checkpoints, room, run)


def read_checkpoints(room: ServedWorkspace, run: str) -> CheckpointList:
    """Return the checkpoints of a run. Raises Refused, or a RecipeError."""
    with room.open_workspace() as ws:
        try:
            found = find_checkpoints(ws, run_of(ws, run)).facts()
        except NotHere as error:
            raise _not_here(error) from None
        return CheckpointList.model_validate(hide_paths_in_value(found, ws.root))


@router.post(
    "/resume",
    dependencies=OPERATE_RUN,
    summary="Set newer checkpoints aside, so that the next run resumes from this one",
)
async def resume(run: str, room: InRoom, planner: InPlanner, chosen: Chosen) -> ChosenView:
    return await planner.call(set_checkpoint, room, run, chosen)


def set_checkpoint(room: ServedWorkspace, run: str, chosen: Chosen) -> ChosenView:
    """Set aside checkpoints newer than the chosen checkpoint. Raises Refused, or a RecipeError."""
    with room.open_workspace() as ws:
        row = run_of(ws, run)
        try:
            name = resume_from(ws, row, chosen.step, chosen.state, chosen.number)
        except NotHere as error:
            raise _not_here(error) from None
    return ChosenView(name=name)


def _not_here(error: NotHere) -> Refused:
    return Refused(409, "not-here", str(error), error.fix)
