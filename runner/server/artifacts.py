"""What a run made: listed, given out as it is stored, and seen without its program."""

from __future__ import annotations

import os
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Field
from starlette.concurrency import run_in_threadpool

from ..api.artifacts import FILES, find_file, list_artifacts, open_stored
from ..api.media import type_of
from ..api.previews import READ, WIDEST, CannotDraw, Preview, draw, read_preview
from ..api.values import whole
from . import ranged
from .answers import Refused
from .planner import InPreviewer
from .room import READ_RUN, InRoom, Room, ServedWorkspace, run_of
from .runs import OutputView

router = APIRouter(prefix="/v1/runs/{run}/artifacts", tags=["runs"])
previews = APIRouter(prefix="/v1/runs/{run}/preview", tags=["runs"])

_BYTES: Final = "application/octet-stream"


_Name = Annotated[str, BeforeValidator(whole)]


class FileView(BaseModel):
    path: _Name
    bytes: int
    content: _Name = Field(
        description="f: or, of a program, x: and the digest of its bytes; l: and where a link leads; d: of an empty folder."
    )

    type: str = Field(description="Its media type, by its name; of a picture by its first bytes.")
    step: int | None = Field(
        description="The step of a training that its path tells, as samples/step-000250/cat.png does."
    )


class ArtifactView(OutputView):
    type: str = Field(
        description="Its media type, by its first bytes where these tell; inode/directory of a folder."
    )
    step: int | None = Field(description="The step of a training that its path tells.")
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


_Path = Annotated[str, Query(max_length=4096, description="Of a folder: which of its files.")]


@router.get(
    "/{name:path}", dependencies=READ_RUN, summary="The bytes of an output, or of a file in one that is a folder", response_class=Response,
    responses={200: {"content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}, "image/webp": {}}}, 206: {"content": {_BYTES: {}}}},
)  # fmt: skip
async def artifact(
    run: str,
    name: str,
    room: InRoom,
    previewer: InPreviewer,
    path: _Path = "",
    width: Annotated[
        int,
        Query(
            ge=0,
            le=WIDEST,
            description="Of a picture: draw it anew as WebP, at most so many pixels wide and high.",
        ),
    ] = 0,
    range: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    if width:
        data = await previewer.call(drawn, room, run, name, path, width)
        return Response(data, media_type="image/webp")
    return await run_in_threadpool(_whole, room, run, name, path, range)


def _whole(room: Room, run: str, name: str, path: str, range: str) -> Response:
    with room.reading() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        shown = (path or name).rpartition("/")[2]
        return ranged.sent(open_stored(ws, found.place), range, shown, _BYTES, tag=found.digest)


def drawn(room: ServedWorkspace, run: str, name: str, path: str, width: int) -> bytes:
    """A picture of a run, drawn anew.  Raises Refused, or a RecipeError."""
    with room.working() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            try:
                return draw(file, os.fstat(file.fileno()).st_size, width)
            except CannotDraw as error:
                raise Refused(
                    422, "no-picture", str(error), "repeat the request without `width`"
                ) from None


class PreviewView(BaseModel):
    """What can be seen of a file without its program."""

    kind: Literal["picture", "audio", "text", "table", "tensors", "none"] = Field(
        description="A picture is fetched with `?width=`, audio as the bytes of the file."
    )
    type: str = Field(description="Its media type, by its first bytes where these tell.")
    bytes: int
    words: str = Field(description="What is missing, or why nothing is shown; else empty.")
    text: str
    columns: list[str]
    rows: list[list[str]]
    facts: dict[str, str] = Field(description="Such as the number of rows, or of parameters.")


@previews.get(
    "",
    dependencies=READ_RUN,
    summary="The first of a file's text, rows or tensors",
    description=f"At most {READ} bytes are read, in a process with limits of time and memory. SVG and HTML are not shown.",
)
async def preview(
    run: str,
    room: InRoom,
    previewer: InPreviewer,
    name: Annotated[str, Query(max_length=400, description="Of the output.")],
    path: _Path = "",
) -> PreviewView:
    size, kind = await run_in_threadpool(_named, room, run, name, path)
    try:
        found = await previewer.call(previewed, room, run, name, path)
    except Refused as refused:
        if refused.code != "preview-too-large":
            raise
        found = Preview("none", kind, f"{refused.message}; {refused.fix}")
    return PreviewView.model_validate({**found._asdict(), "bytes": size})


def _named(room: Room, run: str, name: str, path: str) -> tuple[int, str]:
    """The bytes of a file, and its type by its name."""
    with room.reading() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            return os.fstat(file.fileno()).st_size, type_of(path or found.path)


def previewed(room: ServedWorkspace, run: str, name: str, path: str) -> Preview:
    """What can be seen of a file.  Raises Refused, or a RecipeError."""
    with room.working() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            return read_preview(file, path or found.path, os.fstat(file.fileno()).st_size)
