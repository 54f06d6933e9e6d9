"""What a run was given, and with what it was carried out, over HTTP."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ..api.environments import read_environment, read_inputs
from .answers import plain_value
from .room import READ_RUN, InRoom, run_of

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])


class CodeView(BaseModel):
    """The git repository that the workspace is in, as it was when the run began."""

    commit: str
    branch: str
    changed: list[str] = Field(description="Files that differ from the commit: the first 100.")
    changed_count: int
    untracked: list[str] = Field(
        description="Files and folders in no commit, whose contents are not kept: the first 100."
    )
    untracked_count: int
    diff: str = Field(description="Against the commit; the first 256 KiB.")
    diff_cut: bool


class MachineView(BaseModel):
    """The machine of the worker."""

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
    """An interpreter with which steps ran."""

    path: str
    version: str
    steps: list[str]
    packages: list[str] = Field(description="NAME==VERSION.")
    words: str = Field(description="When these were installed, or why none are known.")


class LockView(BaseModel):
    kind: Literal["lock", "code"]
    name: str
    content: str = Field(description="The digest that is in the keys of steps.")


class EnvironmentView(BaseModel):
    at: str | None
    recipe: str = Field(description="The version of recipe itself.")
    code: CodeView | None
    machine: MachineView
    rented: list[RentedView]
    pythons: list[PythonView]
    locks: list[LockView]
    words: list[str] = Field(description="What is not known, and why.")


class InputView(BaseModel):
    name: str
    value: Any
    default: Any
    has_default: bool
    set_by: Literal["caller", "preset", ""]
    doc: str


class InputList(BaseModel):
    inputs: list[InputView]
    words: str = Field(description="Why defaults are not known, or may be others; else empty.")


@router.get(
    "/environment",
    dependencies=READ_RUN,
    summary="Commit and diff of the code, packages, system and GPUs with which a run began",
)
def environment(run: str, room: InRoom) -> EnvironmentView:
    with room.reading() as ws:
        found = read_environment(ws, run_of(ws, run))
        return EnvironmentView.model_validate(plain_value(found, ws.root))


@router.get(
    "/inputs", dependencies=READ_RUN, summary="The inputs of a run beside the recipe's defaults"
)
def inputs(run: str, room: InRoom) -> InputList:
    with room.reading() as ws:
        found = read_inputs(ws, run_of(ws, run))
        return InputList.model_validate(plain_value(found, ws.root))
