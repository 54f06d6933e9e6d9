"""How far the runs are that somebody follows: each is asked for once, for all who follow it; and how many follow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from ..interface.logs import Part, parts
from ..storage.records.runs import FINAL, RunRow
from .answers import Refused
from .room import Room, run_of
from .tokens import Token

LOOK: Final = 0.2
"""Seconds between two looks at a run."""
CHECK: Final = 1.0
"""Seconds after which a stream of a token that was removed, or has expired, is ended."""
STREAMS: Final = 20
"""Streams that one token may have open."""


class Beat(NamedTuple):
    """A run as it stood a moment ago, and the attempts that it had begun."""

    at: float
    row: RunRow
    parts: Sequence[Part]

    @property
    def over(self) -> bool:
        return self.row.state in FINAL


class Pulse:
    """Of one server; used by its event loop alone."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._beats: dict[str, asyncio.Task[Beat]] = {}
        self._streams: Counter[str] = Counter()

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._streams.total()

    def begin_stream(self, caller: Token) -> None:
        """Count another stream of a token.  Raises Refused where it would be one too many."""
        if self._streams[caller.id] >= STREAMS:
            raise Refused(
                429,
                "too-many-streams",
                f"a token may follow {STREAMS} things at once",
                "close one of them",
            )
        self._streams[caller.id] += 1

    def end_stream(self, caller: Token) -> None:
        self._streams[caller.id] -= 1
        if not self.streams:
            self._streams.clear()
            self._beats.clear()

    @asynccontextmanager
    async def departure(self, caller: Token, request: Request) -> AsyncIterator[asyncio.Task[None]]:
        """A task that is done when the client has gone, or its token is none any more."""
        gone = asyncio.create_task(self._gone(caller, request))
        try:
            yield gone
        finally:
            gone.cancel()

    async def _gone(self, caller: Token, request: Request) -> None:
        left = asyncio.create_task(_left(request))
        try:
            while not left.done() and self._room.tokens.stands(caller.id):
                await asyncio.wait({left}, timeout=CHECK)
        finally:
            left.cancel()

    async def beat(self, run: str) -> Beat:
        """The run, not older than `LOOK`.  Raises Refused where it is none, or is no more."""
        known = self._beats.get(run)
        last: Beat | None = None
        if known is not None and known.done():
            last = known.result() if known.exception() is None else None
        if known is None or (known.done() and (last is None or last.at < time.monotonic() - LOOK)):
            known = self._beats[run] = asyncio.create_task(
                run_in_threadpool(self._looked, run, last)
            )
        return await asyncio.shield(known)

    async def now(self, run: str) -> Beat:
        """The run as it is: what an event of it says is already true."""
        return await run_in_threadpool(self._looked, run, None)

    def _looked(self, run: str, last: Beat | None) -> Beat:
        with self._room.reading() as ws:
            row = run_of(ws, run)
            same = last is not None and last.row.next_event == row.next_event
            found = last.parts if last is not None and same else parts(ws.store.runs.events(run))
            return Beat(time.monotonic(), row, found)


class CountedStream(StreamingResponse):
    """A stream that counts as one of its token's from before its first byte until it is closed.

    Nothing is awaited between the look at the count and its change, so of many requests at once
    no more are accepted than of as many one after the other.
    """

    def __init__(
        self,
        pulse: Pulse,
        caller: Token,
        content: AsyncIterator[bytes],
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(content, media_type=media_type, headers=headers)
        self._pulse, self._caller = pulse, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pulse.begin_stream(self._caller)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pulse.end_stream(self._caller)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
