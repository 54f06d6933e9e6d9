"""Lines of a log by number, and those that contain a text: the whole log is searched here, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ..api.log_lines import LogPage, page_of
from ..api.logs import AttemptLog, list_attempt_logs, read_available, stored_log_path
from ..planning.ids import names
from ..storage.workspace import Workspace
from ..survey.rows import fetch_file
from .answers import Refused
from .room import READ_RUN, InRoom, Room, run_of
from .streams import StepName, opened

router = APIRouter(prefix="/v1/runs/{run}/logs", tags=["runs"])

MOST: Final = 2000
"""Lines of one answer."""
NODES: Final = 64
"""Nodes of one step that are looked for."""
_PIECE: Final = 1 << 20


class LineView(BaseModel):
    number: int = Field(description="From 1.")
    text: str = Field(description="As a terminal leaves it, with its escape sequences.")
    cut: bool = Field(description="Whether the line is longer than what is shown of it.")


class LineList(BaseModel):
    step: str
    attempt: int
    node: int
    nodes: int = Field(description="Nodes of the attempt that have a log.")
    ended: bool = Field(description="Whether the attempt is over.")
    total: int = Field(description="Lines of the whole log.")
    matches: int = Field(description="Lines that contain `find`; all if nothing is looked for.")
    size: int = Field(
        description="Bytes of the lines that have an end: `GET …/logs?follow=true&offset=` continues there."
    )
    is_open: bool = Field(description="Whether the last line has no end yet.")
    lines: list[LineView]


@router.get(
    "/lines",
    dependencies=READ_RUN,
    summary="Lines of a log by number, or those of the whole log that contain a text",
)
def lines(
    run: str,
    room: InRoom,
    step: StepName = "",
    attempt: Annotated[int, Query(ge=0, le=10**9, description="0: the last.")] = 0,
    node: Annotated[int, Query(ge=0, lt=NODES, description="Of a step on several nodes.")] = 0,
    find: Annotated[
        str, Query(max_length=400, description="Only lines that contain this, in any case.")
    ] = "",
    first: Annotated[
        int, Query(ge=0, le=2**53, description="From this line on; 0: the last ones.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 500,
) -> LineList:
    with room.reading() as ws:
        of_run = list_attempt_logs(ws.store.runs.events(run_of(ws, run).id))
        found = [
            part
            for part in of_run
            if (not step or step in names(part.step)) and attempt in (0, part.number)
        ]
        if not found:
            words = "no such step of the run has begun"
            raise Refused(404, "no-log", words, f"list its steps with GET /v1/runs/{run}")
        part = _on_node(found[-1], node)
        nodes = _nodes(ws, run, found[-1])
    page = page_of(_text(room, run, part), find=find, first=first, limit=limit)
    return _answer(part, nodes, page)


def _answer(part: AttemptLog, nodes: int, page: LogPage) -> LineList:
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


def _on_node(part: AttemptLog, node: int) -> AttemptLog:
    """The same attempt on another of its nodes."""
    return replace(part, node=node, raw=f"{part.raw[:-4]}.{node}.log") if node else part


def _nodes(ws: Workspace, run: str, part: AttemptLog) -> int:
    """How many nodes of an attempt have a log here."""
    for node in range(1, NODES):
        other = _on_node(part, node)
        if not stored_log_path(ws, run, other).exists() and not Path(other.raw).exists():
            return node
    return NODES


def _text(room: Room, run: str, part: AttemptLog) -> Iterator[bytes]:
    """The log of an attempt, masked; nothing if it printed nothing.  Raises Refused if it cannot be masked before its step is over."""
    with room.reading() as ws:
        path = stored_log_path(ws, run, part)
        if part.ended:
            fetch_file(ws, run, path)
    if path.exists():
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    elif (tail := opened(room, run, part)) is not None:
        with closing(tail):
            yield from read_available(tail, part.ended)
