"""Routes for outputs of a run: list, download and preview."""

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
        description="`f:` (file) or `x:` (executable) and the digest, `l:` and a link target, or `d:` for an empty directory."
    )

    type: str = Field(description="Media type, detected by name, or by content for images.")
    step: int | None = Field(
        description="Training step in the path, for example 250 in samples/step-000250/cat.png."
    )


class ArtifactView(OutputView):
    type: str = Field(
        description="Media type, detected by content if possible; inode/directory for a directory."
    )
    step: int | None = Field(description="Training step in the path.")
    stored: bool = Field(description="True if the content is stored in this workspace.")
    files: list[FileView] = Field(
        description=f"Sorted files of a directory, the first {FILES} after `after`."
    )


class ArtifactList(BaseModel):
    artifacts: list[ArtifactView]


@router.get("", dependencies=READ_RUN, summary="List the outputs of a run")
def artifacts(
    run: str,
    room: InRoom,
    name: Annotated[str, Query(max_length=400, description="Return only this output.")] = "",
    after: Annotated[
        str,
        Query(
            max_length=4096,
            description="Return only files whose paths sort after this one, to get the next page.",
        ),
    ] = "",
) -> ArtifactList:
    with room.borrow_workspace() as ws:
        found = list_artifacts(ws, run_of(ws, run), name, after)
        return ArtifactList(artifacts=[ArtifactView.model_validate(each) for each in found])


_Path = Annotated[str, Query(max_length=4096, description="Path of a file in an output directory.")]


@router.get(
    "/{name:path}", dependencies=READ_RUN, summary="Download an output, or a file in an output directory", response_class=Response,
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
            description="Re-encode an image as WebP, at most this many pixels wide and high.",
        ),
    ] = 0,
    range: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    if width:
        data = await previewer.call(draw_image, room, run, name, path, width)
        return Response(data, media_type="image/webp")
    return await run_in_threadpool(_send_file, room, run, name, path, range)


def _send_file(room: Room, run: str, name: str, path: str, range: str) -> Response:
    with room.borrow_workspace() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        shown = (path or name).rpartition("/")[2]
        return ranged.file_response(
            open_stored(ws, found.place), range, shown, _BYTES, tag=found.digest
        )


def draw_image(room: ServedWorkspace, run: str, name: str, path: str, width: int) -> bytes:
    """Re-encode an image output of a run as WebP. Raises Refused, or a RecipeError."""
    with room.open_workspace() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            try:
                return draw(file, os.fstat(file.fileno()).st_size, width)
            except CannotDraw as error:
                raise Refused(
                    422, "no-picture", str(error), "repeat the request without `width`"
                ) from None


class PreviewView(BaseModel):
    """A preview of a file's content."""

    kind: Literal["picture", "audio", "text", "table", "tensors", "none"] = Field(
        description="To show a picture, download the file with `?width=`; for audio, download the file."
    )
    type: str = Field(description="Media type, detected by content if possible.")
    bytes: int
    words: str = Field(description="Reason for a partial or missing preview, otherwise empty.")
    text: str
    columns: list[str]
    rows: list[list[str]]
    facts: dict[str, str] = Field(
        description="Properties such as the number of rows or parameters."
    )


@previews.get(
    "",
    dependencies=READ_RUN,
    summary="Preview a file's text, rows or tensors",
    description=f"Reads at most {READ} bytes, in a process with time and memory limits. SVG and HTML files have no preview.",
)
async def preview(
    run: str,
    room: InRoom,
    previewer: InPreviewer,
    name: Annotated[str, Query(max_length=400, description="Name of the output.")],
    path: _Path = "",
) -> PreviewView:
    size, kind = await run_in_threadpool(_size_and_type, room, run, name, path)
    try:
        found = await previewer.call(preview_file, room, run, name, path)
    except Refused as refused:
        if refused.code != "preview-too-large":
            raise
        found = Preview("none", kind, f"{refused.message}; {refused.fix}")
    return PreviewView.model_validate({**found._asdict(), "bytes": size})


def _size_and_type(room: Room, run: str, name: str, path: str) -> tuple[int, str]:
    """Return the size of an output file in bytes, and its media type by name."""
    with room.borrow_workspace() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            return os.fstat(file.fileno()).st_size, type_of(path or found.path)


def preview_file(room: ServedWorkspace, run: str, name: str, path: str) -> Preview:
    """Return the preview of an output file. Raises Refused, or a RecipeError."""
    with room.open_workspace() as ws:
        found = find_file(ws, run_of(ws, run), name, path)
        with open_stored(ws, found.place) as file:
            return read_preview(file, path or found.path, os.fstat(file.fileno()).st_size)
