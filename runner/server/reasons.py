"""Route for the reasons why steps of a run were executed."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..survey.run_story import changes_of
from .answers import hide_local_paths
from .room import READ_RUN, InRoom, run_of

router = APIRouter(prefix="/v1", tags=["runs"])


class Reasons(BaseModel):
    steps: dict[str, list[str]] = Field(
        description="Changes since the last execution, by step. For a running step, they are known when its attempt ends."
    )


@router.get("/runs/{run}/why", dependencies=READ_RUN, summary="Show why each step was executed")
def why(run: str, room: InRoom) -> Reasons:
    with room.borrow_workspace() as ws:
        found = changes_of(ws, run_of(ws, run))
        steps = {}
        for step, reasons in found.items():
            steps[step] = [hide_local_paths(reason, ws.root) for reason in reasons]
        return Reasons(steps=steps)
