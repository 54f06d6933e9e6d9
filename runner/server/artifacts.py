"""What a run made: listed, and given out as it is stored."""

from __future__ import annotations

from typing import Annotated, BinaryIO, Final

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Field

from ..interface import views
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from . import ranged
from .answers import Refused, whole
from .room import READ_RUN, InRoom, run_of
from .runs import OutputView, outputs

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
        description=f"Of a folder: what is in it, the first {views.FILES} after `after`, sorted."
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
        found = views.artifacts(ws, run_of(ws, run), name, after)
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
        found = next((each for each in outputs(ws, run_of(ws, run)) if each.name == name), None)
        if found is None:
            raise Refused(
                404,
                "not-found",
                "the run has no such output",
                f"GET /v1/runs/{run}/artifacts lists them",
            )
        place, tag = _place(ws, found, path)
        return ranged.sent(_file(place), range, (path or name).rpartition("/")[2], _BYTES, tag=tag)


def _place(ws: Workspace, found: OutputView, path: str) -> tuple[str, str]:
    """Where the bytes lie, and what they are called by their content.  Raises Refused."""
    content = Content(found.content)
    if not ws.objects.has(content):
        raise _gone()
    if not found.folder:
        if path:
            raise Refused(
                404, "not-found", "the output is a file, not a folder", "ask for it without `path`"
            )
        return str(ws.objects.path(content)), found.content
    for entry in ws.objects.manifests.entries(content):
        if whole(entry.path) == path and entry.kind in "fx":
            return f"{ws.objects.path(content)}/{entry.path}", entry.value
    raise Refused(
        404,
        "not-found",
        "the output is a folder and has no such file",
        "its `files` are listed; give one as `path`",
    )


def _file(place: str) -> BinaryIO:
    try:
        return open(place, "rb")
    except OSError:
        raise _gone() from None


def _gone() -> Refused:
    return Refused(404, "not-stored", "the output is not stored here any more", "run it again")
