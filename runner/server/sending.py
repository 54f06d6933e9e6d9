"""Send live streams as endless HTTP responses or as WebSocket frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeAlias

from fastapi import WebSocket
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from ..errors import RecipeError
from .answers import Refused
from .feed import Feed, Follower
from .messages import OVER, STOPS, End, Form
from .tokens import Token

WIRE: Final = 128 << 10
"""Send buffer of the operating system per client, in bytes.

Small, so that slow clients are noticed.
"""
EVENTS: Final = "text/event-stream"
HEADERS: Final = {"x-accel-buffering": "no"}
CLOSED: Final = {OVER.code: 1000, STOPS.code: 1012, "failed": 1011}
"""WebSocket close code (RFC 6455) by reason. Other reasons use 1008, policy violation."""
REASON: Final = 120
"""Maximum number of characters of a close reason."""
Source: TypeAlias = Callable[[Follower], AsyncIterator[list[bytes]]]
"""A function that yields the messages for a follower in batches."""


class StreamResponse(Response):
    """An endless HTTP response for a live stream.

    It counts as a stream of its token until it is closed. No await separates checking and
    increasing the count, so concurrent requests cannot exceed the limit.
    """

    def __init__(
        self,
        feed: Feed,
        caller: Token,
        form: Form,
        kinds: frozenset[str],
        source: Source,
        media_type: str = EVENTS,
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        super().__init__(media_type=media_type, headers=dict(headers))
        del self.headers["content-length"]  # the length is unknown
        self._feed, self._caller, self._source = feed, caller, source
        self._form, self._kinds = form, kinds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cut = _limit_send_buffer(scope)
        with self._feed.follow(self._caller, self._form, self._kinds, cut) as follower:
            leaving = asyncio.create_task(_leave(receive, follower))
            try:
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                async for texts in _pieces(self._source, follower):
                    body = b"".join(texts)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                leaving.cancel()


async def _pieces(source: Source, follower: Follower) -> AsyncIterator[list[bytes]]:
    """Yield batches of encoded messages from `source`.

    If the store cannot be read, end the stream with the error.
    """
    try:
        async for texts in source(follower):
            yield texts
    except (RecipeError, Refused) as error:
        follower.end(End("failed", str(error), "connect again"))
        yield await follower.take()


async def _leave(receive: Receive, follower: Follower) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    follower.leave()


async def send_frames(
    websocket: WebSocket,
    feed: Feed,
    caller: Token,
    form: Form,
    kinds: frozenset[str],
    source: Source,
) -> None:
    """Send live stream messages as WebSocket text frames, one message per frame.

    Received frames are ignored.

    Raises Refused.
    """
    cut = _limit_send_buffer(websocket.scope)
    with feed.follow(caller, form, kinds, cut) as follower:
        await websocket.accept()
        leaving = asyncio.create_task(_leave_frames(websocket, follower))
        try:
            async for texts in _pieces(source, follower):
                for text in texts:
                    await websocket.send_text(text.decode())
            why = follower.why or OVER
            await websocket.close(CLOSED.get(why.code, 1008), why.message[:REASON])
        except (WebSocketDisconnect, RuntimeError):
            if not leaving.done() and not follower.ended:
                raise
        finally:
            leaving.cancel()


async def _leave_frames(websocket: WebSocket, follower: Follower) -> None:
    while (await websocket.receive())["type"] != "websocket.disconnect":
        pass
    follower.leave()


def _limit_send_buffer(scope: Mapping[str, Any]) -> Callable[[], None]:
    """Limit a connection's send buffer, and return a function that closes the connection."""
    transport: asyncio.Transport | None = scope.get("state", {}).get("transport")
    if transport is None:
        return lambda: None
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WIRE)
    return transport.abort
