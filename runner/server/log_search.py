"""Route for lines of a log by number or text. The server searches the whole log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ..api.log_lines import LogPage, page_of
from ..api.logs import AttemptLog, list_attempt_logs, on_node, read_available, stored_log_path
from ..storage.workspace import Workspace
from ..survey.rows import fetch_file
from .answers import Refused
from .room import READ_RUN, InRoom, Room, run_of
from .streams import StepName, find_attempt, open_log

router = APIRouter(prefix="/v1/runs/{run}/logs", tags=["runs"])

MOST: Final = 2000
"""Maximum number of lines in one response."""
NODES: Final = 64
"""Maximum number of nodes whose logs are searched for."""
_PIECE: Final = 1 << 20


class LineView(BaseModel):
    number: int = Field(description="Line number, from 1.")
    text: str = Field(description="Text as shown by a terminal, with escape sequences.")
    cut: bool = Field(description="True if the line is longer than `text`.")


class LineList(BaseModel):
    step: str
    attempt: int
    node: int
    nodes: int = Field(description="Number of nodes with a log of this attempt.")
    ended: bool = Field(description="True if the attempt has ended.")
    total: int = Field(description="Number of lines in the log.")
    matches: int = Field(description="Number of lines that contain `find`, or of all lines.")
    size: int = Field(
        description="Size of all complete lines in bytes. `GET …/logs?follow=true&offset=` continues there."
    )
    is_open: bool = Field(description="True if the last line is incomplete.")
    lines: list[LineView]


@router.get(
    "/lines",
    dependencies=READ_RUN,
    summary="Show log lines by number, or search the log",
)
def lines(
    run: str,
    room: InRoom,
    step: StepName = "",
    attempt: Annotated[
        int, Query(ge=0, le=10**9, description="Number of the attempt. 0: the last one.")
    ] = 0,
    node: Annotated[
        int, Query(ge=0, lt=NODES, description="Node of a multi-node step, from 0.")
    ] = 0,
    find: Annotated[
        str, Query(max_length=400, description="Return only lines with this text, ignoring case.")
    ] = "",
    first: Annotated[
        int, Query(ge=0, le=2**53, description="First line to return. 0: return the last lines.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 500,
) -> LineList:
    with room.borrow_workspace() as ws:
        of_run = list_attempt_logs(ws.store.runs.events(run_of(ws, run).id))
        found = find_attempt(of_run, step, attempt)
        if found is None:
            words = "no such step of the run has started"
            raise Refused(404, "no-log", words, f"list its steps with GET /v1/runs/{run}")
        part = on_node(found, node)
        nodes = _count_nodes(ws, run, found)
    page = page_of(_read_log(room, run, part), find=find, first=first, limit=limit)
    return _line_list(part, nodes, page)


def _line_list(part: AttemptLog, nodes: int, page: LogPage) -> LineList:
    return LineList(
        step=part.step,
        attempt=part.number,
        node=part.node,
        nodes=nodes,
        ended=part.ended,
        total=page.total,
        matches=page.matches,
        size=page.size,
        is_open=page.is_open,
        lines=[LineView(**line._asdict()) for line in page.lines],
    )


def _count_nodes(ws: Workspace, run: str, part: AttemptLog) -> int:
    """Return the number of nodes with a local log of this attempt."""
    for node in range(1, NODES):
        other = on_node(part, node)
        if not stored_log_path(ws, run, other).exists() and not Path(other.raw).exists():
            return node
    return NODES


def _read_log(room: Room, run: str, part: AttemptLog) -> Iterator[bytes]:
    """Yield an attempt's log with secrets masked.

    Raises Refused if a growing log cannot be masked.
    """
    with room.borrow_workspace() as ws:
        path = stored_log_path(ws, run, part)
        if part.ended:
            fetch_file(ws, run, path)
    if path.exists():
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
        return
    tail = open_log(room, run, part)
    if tail is not None:
        with closing(tail):
            yield from read_available(tail, part.ended)
