"""Routes of live streams of one run or all runs, as server-sent events or WebSocket frames."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Final, TypeAlias

from fastapi import APIRouter, Header, Query, Request, WebSocket
from fastapi.responses import Response
from pydantic import BaseModel, Field

from . import messages
from .answers import Refused
from .messages import KINDS, Kind
from .room import READ_ANY, READ_RUN, Caller, Nothing, RequiresScope, caller_of
from .runs import EventView
from .sending import EVENTS, StreamResponse, send_frames
from .streams import feed_of
from .tickets import LIFE, Tickets

router = APIRouter(prefix="/v1", tags=["streams"])

PLACE: Final = r"^([0-9a-f]{8}-[0-9]{1,15}-[0-9]{1,15})?$"
Kinds: TypeAlias = Annotated[
    list[Kind] | None, Query(description="Kinds of events to receive. Default: all.")
]
After: TypeAlias = Annotated[
    int, Query(ge=0, le=2**53, description="Skip `move` events up to this number.")
]
LastMove: TypeAlias = Annotated[
    int,
    Header(
        alias="Last-Event-ID", ge=0, le=2**53, description="Same as `after`, and takes precedence."
    ),
]
AfterPlace: TypeAlias = Annotated[
    str, Query(max_length=40, pattern=PLACE, description="ID of the last received `move` event.")
]
LastPlace: TypeAlias = Annotated[
    str,
    Header(
        alias="Last-Event-ID",
        max_length=40,
        pattern=PLACE,
        description="Same as `after`, and takes precedence.",
    ),
]
_FRAMES: Final = (
    "With `Upgrade: websocket`, events are sent as text frames, `{event, id, data}`. Browsers connect"
    " with a ticket from POST /v1/tickets."
)


DATA: Final[Mapping[str, type[BaseModel]]] = {
    "move": EventView,
    "progress": messages.ProgressNow,
    "metrics": messages.LastMetrics,
    "log": messages.LogLines,
    "warning": messages.Warned,
    "begin": messages.Begin,
    "alive": messages.Alive,
    "gap": messages.Gap,
    "end": messages.Ended,
}
"""The model of `data` for each event name."""


def _schema(name: str, model: type[BaseModel]) -> Mapping[str, object]:
    """Return the OpenAPI schema of an event, whose `data` is JSON text."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": model.model_json_schema(),
    }
    fields = {"event": {"const": name}, "id": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["event", "data"], "properties": fields}


class Ticket(BaseModel):
    ticket: str = Field(description="Value of the query parameter `ticket` for one WebSocket.")
    seconds: float = Field(description="Lifetime of the ticket in seconds.")


_EVENTS: Final = {"oneOf": [_schema(name, model) for name, model in DATA.items()]}
_ANSWERS: Final[dict[int | str, dict[str, object]]] = {
    200: {"description": "A stream of these events.", "content": {EVENTS: {"schema": _EVENTS}}}
}


@router.get(
    "/runs/{run}/stream",
    dependencies=READ_RUN,
    summary="Stream a run's events from the start, progress, metrics, log lines and warnings",
    description=_FRAMES,
    response_class=Response,
    responses=_ANSWERS,
)
async def of_run(
    run: str,
    caller: Caller,
    request: Request,
    kind: Kinds = None,
    after: After = 0,
    last: LastMove = 0,
) -> Response:
    feed = feed_of(request)
    kinds = frozenset(kind or KINDS)
    await feed.channel(run, kinds)
    source = partial(feed.stream_run, run, last or after)
    return StreamResponse(feed, caller, messages.event_of_run, kinds, source)


@router.get(
    "/stream",
    dependencies=READ_ANY,
    summary="Stream all runs visible to the token, from now on or after Last-Event-ID",
    description=_FRAMES,
    response_class=Response,
    responses=_ANSWERS,
)
async def of_all(
    caller: Caller,
    request: Request,
    kind: Kinds = None,
    after: AfterPlace = "",
    last: LastPlace = "",
) -> Response:
    feed = feed_of(request)
    source = partial(feed.stream_all, last or after)
    return StreamResponse(feed, caller, messages.event_of_all, frozenset(kind or KINDS), source)


@router.websocket("/runs/{run}/stream")
async def frames_of_run(
    websocket: WebSocket, run: str, kind: Kinds = None, after: After = 0, last: LastMove = 0
) -> None:
    await RequiresScope("read", run=True)(websocket)
    feed = feed_of(websocket)
    kinds = frozenset(kind or KINDS)
    await feed.channel(run, kinds)
    source = partial(feed.stream_run, run, last or after)
    await send_frames(websocket, feed, caller_of(websocket), messages.frame_of_run, kinds, source)


@router.websocket("/stream")
async def frames_of_all(
    websocket: WebSocket, kind: Kinds = None, after: AfterPlace = "", last: LastPlace = ""
) -> None:
    await RequiresScope("read", any_run=True)(websocket)
    feed = feed_of(websocket)
    source = partial(feed.stream_all, last or after)
    kinds = frozenset(kind or KINDS)
    await send_frames(websocket, feed, caller_of(websocket), messages.frame_of_all, kinds, source)


@router.post(
    "/tickets",
    status_code=201,
    dependencies=READ_ANY,
    summary="Create a one-time ticket for a WebSocket",
)
async def ticket(caller: Caller, request: Request, _body: Nothing | None = None) -> Ticket:
    tickets: Tickets = request.app.state.tickets
    return Ticket(ticket=tickets.create(caller), seconds=LIFE)


@router.websocket("/{_path:path}")
async def no_stream(websocket: WebSocket) -> None:
    words = "there is no stream at this address"
    fix = "open /v1/stream, or /v1/runs/RUN/stream"
    caller_of(websocket)
    raise Refused(404, "not-found", words, fix)
