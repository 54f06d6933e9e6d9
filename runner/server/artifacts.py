"""What a run made: listed, and given out as it is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, BinaryIO, Final

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Field

from ..api.artifacts import FILES, NotStored, find_file, list_artifacts
from ..api.values import whole
from . import ranged
from .room import READ_RUN, InRoom, run_of
from .runs import OutputView

router = APIRouter(prefix="/v1/runs/{run}/artifacts", tags=["runs"])

_BYTES: Final = "application/octet-stream"


_Name = Annotated[str, BeforeValidator(whole)]


class FileView(BaseModel):
    path: _Name
    bytes: int
    content: _Name = Field(
        description="f: or, of a program, x: and the digest of its bytes; l: and where a link leads; d: of an empty folder."
    )


class ArtifactView(OutputView):
    stored: bool = Field(description="Whether its bytes are here.")
    files: list[FileView] = Field(
        description=f"Of a folder: what is in it, the first {FILES} after `after`, sorted."
    )


class ArtifactList(BaseModel):
    artifacts: list[ArtifactView]


@router.get("", dependencies=READ_RUN, summary="The outputs of the steps of a run")
def artifacts(
    run: str,
    room: InRoom,
    name: Annotated[str, Query(max_length=400, description="Only this output.")] = "",
    after: Annotated[
        str,
        Query(
            max_length=4096,
            description="Only files whose paths are greater: the next page of a folder.",
        ),
    ] = "",
) -> ArtifactList:
    with room.reading() as ws:
        found = list_artifacts(ws, run_of(ws, run), name, after)
        return ArtifactList(artifacts=[ArtifactView.model_validate(each) for each in found])


@router.get(
    "/{name:path}", dependencies=READ_RUN, summary="The bytes of an output, or of a file in one that is a folder", response_class=Response,
    responses={200: {"content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}}}, 206: {"content": {_BYTES: {}}}},
)  # fmt: skip
def artifact(
    run: str,
    name: str,
    room: InRoom,
    path: Annotated[
        str, Query(max_length=4096, description="Of a folder: which of its files.")
    ] = "",
    range: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    with room.reading() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        shown = (path or name).rpartition("/")[2]
        return ranged.sent(_open(found.place), range, shown, _BYTES, tag=found.digest)


def _open(place: Path) -> BinaryIO:
    """Raises NotStored."""
    try:
        return open(place, "rb")
    except OSError:
        raise NotStored from None
