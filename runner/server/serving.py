"""The server as a process: its socket, its certificate, how long a client may take, and the worker that is its child."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, NamedTuple, cast

import h11
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..errors import Infrastructure, Invalid, Problem
from ..execution.reporting import LAST_WORDS
from ..reports.delivery import Delivery
from ..settings import load
from ..storage.workspace import Workspace
from .app import application
from .feed import Feed
from .guard import LONGEST_HEAD, PATIENCE
from .room import Room
from .tokens import Tokens

CONNECTIONS: Final = 2000
AGAIN: Final = 1.0
"""Seconds before a worker that died is replaced."""
END_WITHIN: Final = 31.0
"""Seconds that the worker has to hand over its run."""
SOON: Final = 15.0
"""Seconds in which a server that has begun is ready."""
A_DAY: Final = 86400.0
PAGE: Final = "page"
"""The name of tokens for the page."""
LOCK: Final = "server"
_NEAR: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class Listening(NamedTuple):
    """Where and how the server listens."""

    host: str
    port: int
    certificate: str = ""
    key: str = ""
    insecure: bool = False


class Patient(H11Protocol):
    """HTTP/1.1 for clients that send the head of a request in time; a connection that does not is closed."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.app_state = {**self.app_state, "transport": transport}  # a stream may have to cut it
        self._wait()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        super().data_received(data)
        if self._late is not None and self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()
            self._late = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._late = self.loop.call_later(PATIENCE, self.transport.abort)


class Frames(WebSocketsSansIOProtocol):
    """A WebSocket.  One that was refused with an answer is no error of ours, as uvicorn would log it."""

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True


class Server(uvicorn.Server):
    """A server that tells those who follow runs when it stops."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._feed.stop()
        await super().shutdown(sockets)


def serve(
    root: Path,
    where: Listening,
    ready: Callable[[str, str], None],
    *,
    with_worker: bool,
    new_token: bool = False,
    for_owner: bool = False,
) -> None:
    """Serve the workspace at `root` until SIGINT or SIGTERM.  `ready` gets the address, and the token if one was made: with
    `new_token`, or where no token is for everything.  `for_owner`: as of a ServedWorkspace; then none is made.

    Raises Invalid where others could read what is sent, Infrastructure where nothing can be listened on.
    """
    if where.host not in _LOOPBACK and not where.certificate and not where.insecure:
        fix = "pass `--certificate` and `--key`, or `--insecure` if a proxy or a private network encrypts"
        raise Invalid(
            [
                Problem(
                    "bad-request",
                    f"{where.host} is not loopback: tokens would travel unencrypted",
                    None,
                    fix,
                )
            ]
        )
    with (
        Workspace.open(root) as ws,
        ws.locks.try_hold(LOCK) or nullcontext() as held,
        _worker(root) if with_worker else nullcontext(),
    ):
        if held is not None:
            _note(ws).unlink(missing_ok=True)  # of a server that was killed
        tokens = Tokens(ws.home / "server", ws.locks)
        secret = (
            tokens.make("admin", "by --new-token")[1]
            if new_token
            else tokens.first()
            if not for_owner
            else ""
        )
        room = Room(ws.root, ws.environ, tokens, for_owner=for_owner)
        with _listener(where) as listener:
            port = listener.getsockname()[1]
            names = (
                {where.host, *_LOOPBACK}
                if where.host in (*_LOOPBACK, "0.0.0.0", "::")  # noqa: S104
                else {where.host}
            )
            hosts = {f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names}
            hosts |= {
                name.lower() for name in load(ws.root, ws.environ).lists.get("server.hosts", ())
            }
            address = _address(where, where.host, port)
            if held is not None:
                _note(ws).write_text(
                    _address(where, _NEAR.get(where.host, where.host), port), "utf-8"
                )
            ready(address, secret)
            # Of several servers of a workspace, the first.
            feed = Feed(room, ws.home / "server" / "followed.json" if held is not None else None)
            config = uvicorn.Config(
                application(room, hosts, feed), http=Patient, lifespan="on", log_level="error", access_log=False, server_header=False,
                limit_concurrency=CONNECTIONS, h11_max_incomplete_event_size=LONGEST_HEAD, timeout_graceful_shutdown=3, proxy_headers=False,
                ws=Frames, ws_max_size=LONGEST_HEAD, ws_per_message_deflate=False,
                ssl_certfile=where.certificate or None, ssl_keyfile=where.key or None,
            )  # fmt: skip
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (most, most)
            )  # each connection may have a file open besides
            delivery = Delivery(ws.root, ws.environ)
            delivery.start()
            try:
                Server(config, feed).run(sockets=[listener])
            finally:
                delivery.end(LAST_WORDS)
                if held is not None:
                    _note(ws).unlink(missing_ok=True)


def _listener(where: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        listener = socket.create_server((where.host, where.port), family=family, backlog=1024)
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # head and body of an answer are two writes
        return listener
    except (OSError, OverflowError) as error:
        raise Infrastructure(
            f"cannot listen on {where.host}:{where.port}: {error}",
            fix="choose another `--port`; 0 picks a free one",
        ) from error


def _address(where: Listening, host: str, port: int) -> str:
    return f"{'https' if where.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _note(ws: Workspace) -> Path:
    folder = ws.home / "server"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "address"


def known(root: Path) -> tuple[str, str] | None:
    """The address of the server that serves the workspace at `root` now, and a new token for its page.  None: there is no server.

    Raises Infrastructure where a server has begun and is not ready within `SOON`.
    """
    with Workspace.open(root) as ws:
        deadline = time.monotonic() + SOON
        while ws.locks.is_held(LOCK):
            with suppress(FileNotFoundError):
                return _note(ws).read_text("utf-8"), page_token(
                    Tokens(ws.home / "server", ws.locks)
                )
            if time.monotonic() > deadline:
                raise Infrastructure(
                    "a server of this workspace is starting but not ready yet",
                    fix="check the output of `recipe serve`",
                )
            time.sleep(0.05)
    return None


def page_token(tokens: Tokens) -> str:
    """A token for one use of the page: it may store and stop runs, and expires after `A_DAY`.  Those that have expired are removed."""
    now = time.time()
    for token in tokens.all():
        if token.name == PAGE and token.expires is not None and token.expires < now:
            tokens.remove(token.id)
    return tokens.make("operate", PAGE, expires=now + A_DAY)[1]


@contextmanager
def _worker(root: Path) -> Iterator[None]:
    """A worker of the workspace, replaced when it dies, which ends with this process however that ends."""
    over = threading.Event()
    command = [
        sys.executable,
        "-m",
        "runner.interface.cli.main",
        "worker",
        "-C",
        os.path.abspath(root),
        "-q",
        "--tied",
    ]
    running: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        running[:] = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        ]

    def keep() -> None:
        while not over.is_set():
            running[0].wait()
            if not over.wait(AGAIN):
                begin()

    begin()
    threading.Thread(target=keep, name="worker", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        process = running[0]
        process.terminate()
        try:
            process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
