"""Why the steps of a run were executed."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..survey.run_story import changes_of
from .answers import plain
from .room import READ_RUN, InRoom, run_of

router = APIRouter(prefix="/v1", tags=["runs"])


class Reasons(BaseModel):
    steps: dict[str, list[str]] = Field(
        description="By step what had changed since it ran last; of a step that runs it is known when its attempt ends."
    )


@router.get(
    "/runs/{run}/why", dependencies=READ_RUN, summary="What had changed for each step that ran"
)
def why(run: str, room: InRoom) -> Reasons:
    with room.reading() as ws:
        found = changes_of(ws, run_of(ws, run))
        return Reasons(
            steps={step: [plain(each, ws.root) for each in all_] for step, all_ in found.items()}
        )
