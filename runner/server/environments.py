"""Routes for the inputs and the environment of a run."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.environments import read_environment, read_inputs
from .answers import hide_paths_in_value
from .room import READ_RUN, InRoom, run_of

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])


class CodeView(BaseModel):
    """The git state of the workspace when the run started."""

    commit: str
    branch: str
    changed: list[str] = Field(description="Files that differ from the commit, at most 100.")
    changed_count: int
    untracked: list[str] = Field(
        description="Untracked files and directories, at most 100. Their contents are not recorded."
    )
    untracked_count: int
    diff: str = Field(description="Diff against the commit, at most 256 KiB.")
    diff_cut: bool


class MachineView(BaseModel):
    """The worker's machine."""

    system: str
    cpus: int
    gpu_driver: str
    gpus: list[str]


class RentedView(BaseModel):
    provider: str
    key: str
    gpus: int
    gpu: str


class PythonView(BaseModel):
    """A Python interpreter that ran steps."""

    path: str
    version: str
    steps: list[str]
    packages: list[str] = Field(description="Packages as NAME==VERSION.")
    words: str = Field(description="When the packages were recorded, or why they are unknown.")


class LockView(BaseModel):
    kind: Literal["lock", "code"]
    name: str
    content: str = Field(description="Digest in the cache keys of steps.")


class EnvironmentView(BaseModel):
    at: str | None
    recipe: str = Field(description="Version of the recipe program.")
    code: CodeView | None
    machine: MachineView
    rented: list[RentedView]
    pythons: list[PythonView]
    locks: list[LockView]
    words: list[str] = Field(description="Missing information, with reasons.")


class InputView(BaseModel):
    name: str
    value: Any
    default: Any
    has_default: bool
    set_by: Literal["caller", "preset", ""]
    doc: str


class InputList(BaseModel):
    inputs: list[InputView]
    words: str = Field(description="Why defaults are unknown or may have changed, otherwise empty.")


@router.get(
    "/environment",
    dependencies=READ_RUN,
    summary="Show the commit, diff, packages, system and GPUs of a run",
)
def environment(run: str, room: InRoom) -> EnvironmentView:
    with room.borrow_workspace() as ws:
        found = read_environment(ws, run_of(ws, run))
        return EnvironmentView.model_validate(hide_paths_in_value(found, ws.root))


@router.get(
    "/inputs", dependencies=READ_RUN, summary="Show the inputs of a run, with the recipe's defaults"
)
def inputs(run: str, room: InRoom) -> InputList:
    with room.borrow_workspace() as ws:
        found = read_inputs(ws, run_of(ws, run))
        return InputList.model_validate(hide_paths_in_value(found, ws.root))
