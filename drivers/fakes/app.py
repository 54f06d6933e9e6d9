"""An ASGI application that serves a World over HTTP, and its server.

Only this part of the fakes uses a clock and a network.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import faults as words
from .account import EPOCH, lines
from .machines import GLANCE, Machines
from .world import MAX_BODY, Reply, Request, World, number, parse_body

PATIENCE = 20.0
"""Maximum seconds for which a reply is held back, in operations that wait for a change."""
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class Clock:
    """Clock of a fake provider, in real or virtual time.

    Requests advance both.  Virtual time advances in no other way.
    """

    def __init__(self, virtual: bool) -> None:
        self.virtual = virtual
        self._ahead = 0.0

    def now(self) -> float:
        """Return the Unix time in seconds."""
        now = EPOCH if self.virtual else time.time()
        return now + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Connections(H11Protocol):
    """HTTP/1.1 connections by client address, so that a `Cut` response can abort one."""

    open: ClassVar[dict[tuple[str, int], asyncio.Transport]] = {}

    def data_received(self, data: bytes) -> None:
        self.open[self.transport.get_extra_info("peername")] = self.transport
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open.pop(self.transport.get_extra_info("peername"), None)
        super().connection_lost(exc)


class Cut(Response):
    """A response that closes the connection without sending a byte."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = Connections.open.get(tuple(scope["client"]))
        if transport is not None:
            transport.abort()
            while (await receive())["type"] != "http.disconnect":
                pass


class Handlers:
    """Handlers of the HTTP requests to a fake provider: its API, and the controls of the fake."""

    def __init__(self, world: World[Any], clock: Clock) -> None:
        self._world = world
        self._clock = clock

    async def show_ledger(self, request: HttpRequest) -> Response:
        self._catch_up()
        found = lines(self._world.account.settle())
        return PlainTextResponse(found, media_type="application/x-ndjson")

    async def advance_clock(self, request: HttpRequest) -> Response:
        """Return the time, after a POST request advanced the clock."""
        if request.method == "POST":
            fields = parse_body(await request.body()) or {}
            seconds = number(fields.get("advance"), -1.0)
            if seconds < 0:
                return JSONResponse({"error": 'send {"advance": SECONDS}, at least 0'}, 400)
            self._clock.advance(seconds)
        self._catch_up()
        return JSONResponse({"now": self._clock.now()})

    async def replace_faults(self, request: HttpRequest) -> Response:
        """Return the faults, after a POST request replaced them."""
        operations = sorted({route.operation for route in self._world.routes})
        if request.method == "POST":
            text = (await request.body()).decode("utf-8", "replace")
            try:
                self._world.faults[:] = words.parse(text, operations)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)
        faults = ",".join(map(str, self._world.faults))
        return JSONResponse({"faults": faults, "operations": operations})

    async def preempt(self, request: HttpRequest) -> Response:
        self._catch_up()
        return JSONResponse({"preempted": self._world.account.preempt()})

    async def exit(self, request: HttpRequest) -> Response:
        self._catch_up()
        return JSONResponse({"exited": self._world.account.exit()})

    async def answer(self, request: HttpRequest) -> Response:
        """Answer a request to the provider's own API."""
        if int(request.headers.get("content-length", "0") or 0) > MAX_BODY:
            return JSONResponse({"error": "too large"}, 413)
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Request(
            request.method, request.url.path, request.url.query, headers, await request.body()
        )
        reply = self._world.handle(asked, self._clock.now())
        if reply.hold and not self._clock.virtual:
            await asyncio.sleep(min(reply.hold, PATIENCE))
            reply = self._world.handle(asked, self._clock.now())
        return _response(reply)

    @asynccontextmanager
    async def run_machines(self, app: Starlette) -> AsyncIterator[None]:
        """Run a local process for each machine while the application runs."""
        with TemporaryDirectory(prefix="recipe-fake-", ignore_cleanup_errors=True) as root:
            machines = Machines(self._world, Path(root))
            following = asyncio.create_task(self._keep_following(machines))
            try:
                yield
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await machines.end()

    async def _keep_following(self, machines: Machines) -> None:
        while True:
            self._catch_up()
            await machines.follow()
            await asyncio.sleep(GLANCE)

    def _catch_up(self) -> None:
        """Let everything happen in the account that is due by now."""
        self._world.account.advance(self._clock.now())


def application(world: World[Any], clock: Clock, real: bool = False) -> Starlette:
    """Return the ASGI application for a fake provider.

    It adds `/_ledger`, `/_clock`, `/_faults`, `/_preempt` and `/_exit` to the provider's API.
    If `real`, the machines are local processes while the application runs.
    """
    handlers = Handlers(world, clock)
    return Starlette(lifespan=handlers.run_machines if real else None, routes=[
        HttpRoute("/_ledger", handlers.show_ledger),
        HttpRoute("/_clock", handlers.advance_clock, methods=["GET", "POST"]),
        HttpRoute("/_faults", handlers.replace_faults, methods=["GET", "POST"]),
        HttpRoute("/_preempt", handlers.preempt, methods=["POST"]),
        HttpRoute("/_exit", handlers.exit, methods=["POST"]),
        HttpRoute("/{path:path}", handlers.answer, methods=METHODS),
    ])  # fmt: skip


def _response(reply: Reply) -> Response:
    if reply.lost:
        return Cut()
    headers = dict(reply.headers)
    headers.pop("content-type", None)
    found = Response(reply.encode(), reply.status, headers)
    if reply.status != 204:
        found.headers["content-type"] = reply.kind
    return found


def run(
    kind: type[World[Any]],
    port: int,
    faults: str,
    seed: int,
    virtual: bool,
    real: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve a fake provider on loopback until SIGINT or SIGTERM."""
    clock = Clock(virtual)
    world = kind(seed, words.parse(faults, [route.operation for route in kind.routes]), clock.now())
    if real:
        # Fail here if asyncssh is missing, not when the first machine starts.
        import_module("asyncssh")
        world.key = token_hex(16)  # a client can execute programs as this user
        with socket.create_server(("127.0.0.1", 0)) as free:
            world.port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", port)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        known = {"url": url, "key": world.key or "fake", "port": world.port or 22}
        exports = (*kind.exports, "FAKE_PROVIDER={url}")
        ready("".join(f"export {line.format(**known)}\n" for line in exports))
        config = uvicorn.Config(
            application(world, clock, real), http=Connections, log_level="error", access_log=False
        )
        uvicorn.Server(config).run(sockets=[listener])
