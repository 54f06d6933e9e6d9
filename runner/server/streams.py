"""What a run does while it does it: events, logs and metrics, at once or followed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from .feed import LOOK, Beat, Feed, Follower
from .messages import event_by_subject, log_text
from .page import squeezed
from .room import READ_RUN, Caller, InRoom, Room, run_of
from .runs import EventView, shown
from .sending import EVENTS, Stream

router = APIRouter(prefix="/v1/runs/{run}", tags=["runs"])

PAGE: Final = 500
"""Events of one answer."""
_TEXT: Final = "text/plain; charset=utf-8"
_LINES: Final = "application/x-ndjson"
StepName: TypeAlias = Annotated[
    str, Query(max_length=400, description="A step; without it the one that began last.")
]


class EventList(BaseModel):
    events: list[EventView]
    next: int = Field(description="The value of `after` for what comes next.")


def feed_of(request: HTTPConnection) -> Feed:
    """What all who follow are given."""
    found: Feed = request.app.state.feed
    return found


# -- events ---------------------------------------------------------------------------------------------------------------------------------------


@router.get(
    "/events", dependencies=READ_RUN, summary="What happened; with `Accept: text/event-stream` also what will", response_model=EventList,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def events(
    run: str,
    room: InRoom,
    caller: Caller,
    request: Request,
    after: Annotated[
        int, Query(ge=0, le=2**53, description="Only events with a greater number.")
    ] = 0,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last: Annotated[
        int,
        Header(alias="Last-Event-ID", ge=0, le=2**53, description="The same as `after`, and wins."),
    ] = 0,
) -> Response:
    after = last or after

    if EVENTS in accept:
        feed = feed_of(request)
        await feed.channel(run)
        kinds = frozenset({"move"})
        return Stream(feed, caller, event_by_subject, kinds, partial(feed.run, run, after))

    def found() -> list[EventView]:
        with room.reading() as ws:
            events = read_events(ws, run_of(ws, run).id, after)
            return [shown(ws, event) for event in events]

    some = await run_in_threadpool(found)
    text = EventList(events=some, next=some[-1].seq if some else after).model_dump_json()
    return Response(text, media_type="application/json")


# -- logs -----------------------------------------------------------------------------------------------------------------------------------------


class Elsewhere:
    """A log that another machine writes, from its beginning: rows of the database, which are read by whichever thread has a workspace just then."""

    def __init__(self, room: Room, run: str, part: AttemptLog) -> None:
        self._room, self._run, self._part, self._offset = room, run, part, 0

    def read(self) -> bytes:
        """What is new, at most a part of it.  Raises Infrastructure where the store does not give it."""
        with self._room.reading() as ws:
            rows = StoredStream(
                ws, self._run, stored_log_path(ws, self._run, self._part).stem, "log"
            )
            rows.offset = self._offset
            data = rows.read()
            self._offset = rows.offset
            return data

    def rest(self, write: Callable[[bytes], object]) -> None:
        """Everything to the end."""
        while data := self.read():
            write(data)

    def close(self) -> None:
        """There is nothing to let go of."""


def opened(room: Room, run: str, part: AttemptLog) -> Tail | Elsewhere | None:
    """The log of an attempt from its beginning, masked; None where there is none yet, or no more.

    Raises Refused where it cannot be masked before its step is over.
    """
    with room.reading() as ws:
        try:
            hidden = bool(find_missing_secrets(ws, run, part))
            tail = None if hidden else open_tail(ws, run, part)
        except CannotRun:
            hidden = True
        if hidden:
            words = "the log is hidden until the step finishes: it may contain secrets that are not set for the server"
            raise Refused(409, "not-masked", words, "try again when the step has finished")
    return Elsewhere(room, run, part) if isinstance(tail, StoredStream) else tail


def chosen(beat: Beat, step: str, attempt: int) -> AttemptLog | None:
    """The attempt whose log was asked for, if it has begun."""
    found = [
        part
        for part in beat.parts
        if (not step or step in names(part.step)) and attempt in (0, part.number)
    ]
    return found[-1] if found else None


@router.get(
    "/logs", dependencies=READ_RUN, summary="What a step printed, as text", response_class=Response,
    responses={200: {"content": {_TEXT: {"schema": {"type": "string"}}}}, 206: {"content": {_TEXT: {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def logs(
    run: str,
    room: InRoom,
    caller: Caller,
    request: Request,
    step: StepName = "",
    attempt: Annotated[int, Query(ge=0, le=10**9, description="0: the last.")] = 0,
    offset: Annotated[int, Query(ge=0, le=2**53, description="Bytes to pass over.")] = 0,
    follow: Annotated[
        bool, Query(description="Stay, and send what comes, until the attempt is over.")
    ] = False,
    range: Annotated[str, Header(max_length=100)] = "",
    node: Annotated[int, Query(ge=0, le=10**4, description="Of a step on several nodes.")] = 0,
) -> Response:
    feed = feed_of(request)
    beat = await feed.now(run)
    part = on_node(chosen(beat, step, attempt), node)
    if part is None and (not follow or beat.over):
        raise Refused(
            404,
            "no-log",
            "no such step of the run has begun",
            f"list its steps with GET /v1/runs/{run}",
        )

    def whole(found: AttemptLog) -> Response | None:
        with room.reading() as ws:
            path = stored_log_path(ws, run, found)
            try:
                if found.ended:
                    fetch_file(ws, run, path)
                file = path.open("rb")
            except FileNotFoundError:
                return (
                    Response(b"", media_type=_TEXT) if found.ended else None
                )  # it printed nothing, and nothing is kept
            return ranged.sent(file, range, f"{run}-{found.step}.log", _TEXT, offset=offset)

    if part is not None and (answer := await run_in_threadpool(whole, part)) is not None:
        return answer
    if follow:
        number = part.number if part is not None else attempt
        source = partial(
            _followed,
            feed,
            room,
            run,
            offset,
            lambda found: on_node(chosen(found, step, number), node),
        )
        return Stream(feed, caller, log_text, frozenset(), source, _TEXT)
    tail = await run_in_threadpool(opened, room, run, part) if part is not None else None
    return StreamingResponse(_so_far(tail, offset) if tail is not None else (), media_type=_TEXT)


def _so_far(tail: Tail | Elsewhere, offset: int) -> Iterator[bytes]:
    """What a log that is being written has by now, from an offset."""
    passed = 0
    with closing(tail):
        for data in read_available(tail, False):
            yield data[max(0, offset - passed) :]
            passed += len(data)


async def _followed(
    feed: Feed,
    room: Room,
    run: str,
    offset: int,
    which: Callable[[Beat], AttemptLog | None],
    follower: Follower,
) -> AsyncIterator[list[bytes]]:
    """A log as it grows, until its attempt is over."""
    tail: Tail | Elsewhere | None = None
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
                with suppress(Refused):  # it can be read when it is over
                    tail = await run_in_threadpool(opened, room, run, part)
            async for data in _new(tail, over):
                yield [data[max(0, offset - passed) :]]
                passed += len(data)
            if over:
                return
            await follower.rest(LOOK)
    finally:
        if tail is not None:
            tail.close()


async def _new(tail: Tail | Elsewhere | None, over: bool) -> AsyncIterator[bytes]:
    if isinstance(tail, Tail):
        for data in read_available(tail, over):
            yield data
    elif tail is not None:  # a database is asked
        async for data in iterate_in_threadpool(read_available(tail, over)):
            yield data


# -- metrics --------------------------------------------------------------------------------------------------------------------------------------


@router.get(
    "/metrics", dependencies=READ_RUN, summary="What the steps reported, or their machines, a JSON object a line", response_class=Response,
    responses={200: {"content": {_LINES: {"schema": {"type": "string"}}}}},
)  # fmt: skip
def measured(
    run: str,
    room: InRoom,
    request: Request,
    step: StepName = "",
    attempt: Annotated[int, Query(ge=0, le=10**9, description="Only this one; 0: all.")] = 0,
    after: Annotated[
        int, Query(ge=0, le=2**53, description="Pass over so many points of each attempt.")
    ] = 0,
    every: Annotated[int, Query(ge=1, le=10**6, description="Of the others, one in so many.")] = 1,
    of: Annotated[
        Literal["step", "machine"],
        Query(description="machine: GPUs, processors, memory, disk and net, every 5 seconds."),
    ] = "step",
    bins: Annotated[
        int,
        Query(
            ge=0,
            le=5000,
            description="A line for each step and metric with `x` and `y`: the least and the greatest of so many parts. 0: points.",
        ),
    ] = 0,
    x: Annotated[
        Axis,
        Query(
            description="With `bins`, the axis; seconds: the sum of `time_step`; at: when it was reported, in seconds since the epoch;"
            " elapsed: since the step's first attempt started. Times are known every 5 seconds."
        ),
    ] = "step",
    low: Annotated[
        float | None, Query(allow_inf_nan=False, description="With `bins`: from this x.")
    ] = None,
    high: Annotated[
        float | None, Query(allow_inf_nan=False, description="With `bins`: to this x.")
    ] = None,
    metric: Annotated[str, Query(max_length=400, description="With `bins`: only this one.")] = "",
) -> Response:
    if bins:
        with room.reading() as ws:
            steps = read_curves(ws, run_of(ws, run), x, of)
        named = [each for each in steps if not step or step in names(each.step)]
        return squeezed(request, "".join(_curve_lines(named, bins, metric, low, high)), _LINES)
    with room.reading() as ws:
        found = [
            line
            for line in read_points(ws, run_of(ws, run).id, step, attempt, of)
            if line.n > after and (line.n - after - 1) % every == 0
        ]
        return squeezed(request, "".join(map(_line, found)), _LINES)


def _curve_lines(
    steps: Sequence[StepCurves], bins: int, metric: str, low: float | None, high: float | None
) -> Iterator[str]:
    """Curves in bins as lines of JSON."""
    for each in steps:
        source = {"from": each.source} if each.source else {}
        for name, curve in each.curves.items():
            if metric in ("", name):
                few = bin_curve(curve, bins, low, high)
                head = {"step": each.step, "metric": name, "n": len(curve.x), **source}
                yield f"{json.dumps({**head, 'x': few.x, 'y': few.y}, separators=(',', ':'))}\n"


def _line(point: Point) -> str:
    """A point as a line of JSON."""
    found = point._asdict()
    source = found.pop("source")
    return f"{json.dumps({**found, 'from': source} if source else found)}\n"
