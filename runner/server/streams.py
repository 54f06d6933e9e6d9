"""Routes for events, logs and metrics of a run, complete or followed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Annotated, Final, Literal, TypeAlias

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import HTTPConnection

from ..api.events import read_events
from ..api.logs import (
    AttemptLog,
    Tail,
    find_missing_secrets,
    on_node,
    open_tail,
    read_available,
    stored_log_path,
)
from ..api.metrics import StepCurves, read_curves, read_points
from ..api.values import Point
from ..errors import CannotRun
from ..planning.ids import names
from ..survey.binned import Axis, bin_curve
from ..survey.rows import StoredStream, fetch_file
from . import ranged
from .answers import Refused
from .feed import LOOK, Feed, Follower, RunSnapshot
from .messages import event_by_subject, log_text
from .page import compressed_response
from .room import READ_RUN, Caller, InRoom, Room, run_of
from .runs import EventView, event_view
from .sending import EVENTS, StreamResponse

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])

PAGE: Final = 500
"""Maximum number of events in one response."""
_TEXT: Final = "text/plain; charset=utf-8"
_LINES: Final = "application/x-ndjson"
StepName: TypeAlias = Annotated[
    str, Query(max_length=400, description="Name of a step. Default: the step that started last.")
]


class EventList(BaseModel):
    events: list[EventView]
    next: int = Field(description="Value of `after` for the next page.")


def feed_of(request: HTTPConnection) -> Feed:
    """Return the live updates (Feed) of the server."""
    found: Feed = request.app.state.feed
    return found


# -- events ----------------------------------------------------------------------------------------


@router.get(
    "/events", dependencies=READ_RUN, summary="List the events of a run, or stream them with `Accept: text/event-stream`", response_model=EventList,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def events(
    run: str,
    room: InRoom,
    caller: Caller,
    request: Request,
    after: Annotated[int, Query(ge=0, le=2**53, description="Skip events up to this number.")] = 0,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last: Annotated[
        int,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=2**53,
            description="Same as `after`, and takes precedence.",
        ),
    ] = 0,
) -> Response:
    after = last or after

    if EVENTS in accept:
        feed = feed_of(request)
        await feed.channel(run)
        kinds = frozenset({"move"})
        return StreamResponse(
            feed, caller, event_by_subject, kinds, partial(feed.stream_run, run, after)
        )

    def read_page() -> list[EventView]:
        with room.borrow_workspace() as ws:
            events = read_events(ws, run_of(ws, run).id, after)
            return [event_view(ws, event) for event in events]

    some = await run_in_threadpool(read_page)
    last = some[-1].seq if some else after
    text = EventList(events=some, next=last).model_dump_json()
    return Response(text, media_type="application/json")


# -- logs ------------------------------------------------------------------------------------------


class DatabaseLog:
    """A log in the run database, written by another machine.

    Any workspace connection can read the log.
    """

    def __init__(self, room: Room, run: str, part: AttemptLog) -> None:
        self._room, self._run, self._part, self._offset = room, run, part, 0

    def read(self) -> bytes:
        """Return new log data, at most one chunk. Raises Infrastructure if the store fails."""
        with self._room.borrow_workspace() as ws:
            rows = StoredStream(
                ws, self._run, stored_log_path(ws, self._run, self._part).stem, "log"
            )
            rows.offset = self._offset
            data = rows.read()
            self._offset = rows.offset
            return data

    def rest(self, write: Callable[[bytes], object]) -> None:
        """Write the remaining log data to `write`."""
        while data := self.read():
            write(data)

    def close(self) -> None:
        """Do nothing. The log has no open file."""


def open_log(room: Room, run: str, part: AttemptLog) -> Tail | DatabaseLog | None:
    """Open an attempt's log with secrets masked. None if the log does not exist yet, or no longer.

    Raises Refused if a growing log cannot be masked.
    """
    with room.borrow_workspace() as ws:
        try:
            hidden = bool(find_missing_secrets(ws, run, part))
            tail = None if hidden else open_tail(ws, run, part)
        except CannotRun:
            hidden = True
        if hidden:
            words = "the log is hidden until the step finishes: it may contain secrets that are not set for the server"
            raise Refused(409, "not-masked", words, "try again when the step has finished")
    return DatabaseLog(room, run, part) if isinstance(tail, StoredStream) else tail


def find_attempt(parts: Iterable[AttemptLog], step: str, attempt: int) -> AttemptLog | None:
    """Return the last requested attempt among a run's attempts, or None if it has not started.

    An empty `step` or `attempt` matches every attempt.
    """
    found = None
    for part in parts:
        if _is_of_step(part.step, step) and attempt in (0, part.number):
            found = part
    return found


def _is_of_step(id: str, step: str) -> bool:
    """Return True if `step` names this id, its step or its group; an empty `step` names all."""
    return not step or step in names(id)


@router.get(
    "/logs", dependencies=READ_RUN, summary="Show or follow the log of a step", response_class=Response,
    responses={200: {"content": {_TEXT: {"schema": {"type": "string"}}}}, 206: {"content": {_TEXT: {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def logs(
    run: str,
    room: InRoom,
    caller: Caller,
    request: Request,
    step: StepName = "",
    attempt: Annotated[
        int, Query(ge=0, le=10**9, description="Number of the attempt. 0: the last one.")
    ] = 0,
    offset: Annotated[int, Query(ge=0, le=2**53, description="Number of bytes to skip.")] = 0,
    follow: Annotated[
        bool, Query(description="Keep sending new output until the attempt ends.")
    ] = False,
    range: Annotated[str, Header(max_length=100)] = "",
    node: Annotated[
        int, Query(ge=0, le=10**4, description="Node of a multi-node step, from 0.")
    ] = 0,
) -> Response:
    feed = feed_of(request)
    beat = await feed.read_snapshot(run)
    part = on_node(find_attempt(beat.parts, step, attempt), node)
    if part is None and (not follow or beat.over):
        raise Refused(
            404,
            "no-log",
            "no such step of the run has started",
            f"list its steps with GET /v1/runs/{run}",
        )

    def whole(found: AttemptLog) -> Response | None:
        with room.borrow_workspace() as ws:
            path = stored_log_path(ws, run, found)
            try:
                if found.ended:
                    fetch_file(ws, run, path)
                file = path.open("rb")
            except FileNotFoundError:
                # Attempts without output have no log file.
                return Response(b"", media_type=_TEXT) if found.ended else None
            return ranged.file_response(
                file, range, f"{run}-{found.step}.log", _TEXT, offset=offset
            )

    if part is not None:
        answer = await run_in_threadpool(whole, part)
        if answer is not None:
            return answer
    if follow:
        number = part.number if part is not None else attempt
        source = partial(
            _follow_log,
            feed,
            room,
            run,
            offset,
            lambda found: on_node(find_attempt(found.parts, step, number), node),
        )
        return StreamResponse(feed, caller, log_text, frozenset(), source, _TEXT)
    tail = await run_in_threadpool(open_log, room, run, part) if part is not None else None
    if tail is None:
        return StreamingResponse((), media_type=_TEXT)
    return StreamingResponse(_read_so_far(tail, offset), media_type=_TEXT)


def _read_so_far(tail: Tail | DatabaseLog, offset: int) -> Iterator[bytes]:
    """Yield the current content of a growing log from an offset."""
    passed = 0
    with closing(tail):
        for data in read_available(tail, False):
            yield data[max(0, offset - passed) :]
            passed += len(data)


async def _follow_log(
    feed: Feed,
    room: Room,
    run: str,
    offset: int,
    which: Callable[[RunSnapshot], AttemptLog | None],
    follower: Follower,
) -> AsyncIterator[list[bytes]]:
    """Yield batches of a growing log until its attempt ends."""
    tail: Tail | DatabaseLog | None = None
    passed = 0
    channel = await feed.channel(run)
    channel.join(follower)
    try:
        while True:
            beat = channel.beat
            assert beat is not None, "a channel that is ready has been looked at"
            part = which(beat)
            over = beat.over or (part is not None and part.ended)
            if follower.ended and not over:
                return
            if tail is None and part is not None:
                with suppress(Refused):  # the log can be read after the attempt ends
                    tail = await run_in_threadpool(open_log, room, run, part)
            async for data in _read_new(tail, over):
                yield [data[max(0, offset - passed) :]]
                passed += len(data)
            if over:
                return
            await follower.wait(LOOK)
    finally:
        if tail is not None:
            tail.close()


async def _read_new(tail: Tail | DatabaseLog | None, over: bool) -> AsyncIterator[bytes]:
    if isinstance(tail, Tail):
        for data in read_available(tail, over):
            yield data
    elif tail is not None:  # reads from a database block
        async for data in iterate_in_threadpool(read_available(tail, over)):
            yield data


# -- metrics ---------------------------------------------------------------------------------------


@router.get(
    "/metrics", dependencies=READ_RUN, summary="List metrics of steps or machines as JSON lines", response_class=Response,
    responses={200: {"content": {_LINES: {"schema": {"type": "string"}}}}},
)  # fmt: skip
def measured(
    run: str,
    room: InRoom,
    request: Request,
    step: StepName = "",
    attempt: Annotated[
        int, Query(ge=0, le=10**9, description="Number of the attempt. 0: all attempts.")
    ] = 0,
    after: Annotated[
        int, Query(ge=0, le=2**53, description="Number of points to skip in each attempt.")
    ] = 0,
    every: Annotated[int, Query(ge=1, le=10**6, description="Return only every Nth point.")] = 1,
    of: Annotated[
        Literal["step", "machine"],
        Query(
            description="machine: usage of GPUs, CPUs, memory, disk and network, every 5 seconds."
        ),
    ] = "step",
    bins: Annotated[
        int,
        Query(
            ge=0,
            le=5000,
            description="Number of bins. Return a line with `x` and `y` per step and metric: minimum and maximum of each bin. 0: return points.",
        ),
    ] = 0,
    x: Annotated[
        Axis,
        Query(
            description="With `bins`: the x-axis. seconds: sum of `time_step`; at: time of the report, in seconds since the epoch;"
            " elapsed: seconds since the step's first attempt started. Times have a resolution of 5 seconds."
        ),
    ] = "step",
    low: Annotated[
        float | None, Query(allow_inf_nan=False, description="With `bins`: minimum of x.")
    ] = None,
    high: Annotated[
        float | None, Query(allow_inf_nan=False, description="With `bins`: maximum of x.")
    ] = None,
    metric: Annotated[
        str, Query(max_length=400, description="With `bins`: return only this metric.")
    ] = "",
) -> Response:
    if bins:
        with room.borrow_workspace() as ws:
            steps = read_curves(ws, run_of(ws, run), x, of)
        named = [each for each in steps if _is_of_step(each.step, step)]
        lines_of_curves = "".join(_curve_lines(named, bins, metric, low, high))
        return compressed_response(request, lines_of_curves, _LINES)
    with room.borrow_workspace() as ws:
        lines = read_points(ws, run_of(ws, run).id, step, attempt, of)
        found = [line for line in lines if line.n > after and (line.n - after - 1) % every == 0]
        return compressed_response(request, "".join(map(_line, found)), _LINES)


def _curve_lines(
    steps: Sequence[StepCurves], bins: int, metric: str, low: float | None, high: float | None
) -> Iterator[str]:
    """Yield binned curves as JSON lines."""
    for each in steps:
        source = {"from": each.source} if each.source else {}
        for name, curve in each.curves.items():
            if metric in ("", name):
                few = bin_curve(curve, bins, low, high)
                head = {"step": each.step, "metric": name, "n": len(curve.x), **source}
                yield f"{json.dumps({**head, 'x': few.x, 'y': few.y}, separators=(',', ':'))}\n"


def _line(point: Point) -> str:
    """Encode a metric point as a JSON line."""
    found = point._asdict()
    source = found.pop("source")
    if source:
        found["from"] = source
    return f"{json.dumps(found)}\n"
