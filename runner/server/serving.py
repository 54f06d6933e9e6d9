"""The server process: listening socket, TLS certificate, client timeouts and an optional worker."""

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
"""Seconds before an exited worker is restarted."""
END_WITHIN: Final = 31.0
"""Seconds for the worker to hand over its run on shutdown."""
SOON: Final = 15.0
"""Seconds within which a started server must be ready."""
A_DAY: Final = 86400.0
PAGE: Final = "page"
"""Name of tokens for the web page."""
LOCK: Final = "server"
_NEAR: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class ServerAddress(NamedTuple):
    """Address and TLS settings of the server."""

    host: str
    port: int
    certificate: str = ""
    key: str = ""
    insecure: bool = False


class Patient(H11Protocol):
    """HTTP/1.1 protocol that closes connections whose request head does not arrive in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.app_state = {
            **self.app_state,
            "transport": transport,
        }  # lets a stream close the connection
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


class QuietWebSocket(WebSocketsSansIOProtocol):
    """WebSocket protocol. A rejected handshake is not logged as an error, unlike in uvicorn."""

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True


class Server(uvicorn.Server):
    """A uvicorn server that notifies followers of its shutdown."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._feed.stop()
        await super().shutdown(sockets)


def serve(
    root: Path,
    where: ServerAddress,
    ready: Callable[[str, str], None],
    *,
    with_worker: bool,
    new_token: bool = False,
    for_owner: bool = False,
) -> None:
    """Serve the workspace at `root` over HTTP until SIGINT or SIGTERM.

    `ready` receives the URL, and the token if one was created. A token is created with `new_token`,
    or if no admin token exists. `for_owner` is as in ServedWorkspace; no token is created
    automatically.

    Raises Invalid if traffic would be unencrypted, and Infrastructure if the port is unavailable.
    """
    _demand_encryption(where)
    with (
        Workspace.open(root) as ws,
        ws.locks.try_hold(LOCK) or nullcontext() as held,
        _run_worker(root) if with_worker else nullcontext(),
    ):
        if held is not None:
            _address_file(ws).unlink(missing_ok=True)  # left by a killed server
        tokens = Tokens(ws.home / "server", ws.locks)
        secret = ""
        if new_token:
            secret = tokens.create("admin", "by --new-token")[1]
        elif not for_owner:
            secret = tokens.first()
        room = Room(ws.root, ws.environ, tokens, for_owner=for_owner)
        with _open_listener(where) as listener:
            port = listener.getsockname()[1]
            hosts = _accepted_hosts(where, port)
            configured = load(ws.root, ws.environ).lists.get("server.hosts", ())
            hosts.update(name.lower() for name in configured)
            address = _address(where, where.host, port)
            if held is not None:
                _address_file(ws).write_text(
                    _address(where, _NEAR.get(where.host, where.host), port), "utf-8"
                )
            ready(address, secret)
            # Only the first server of a workspace saves its stream position.
            feed = Feed(room, ws.home / "server" / "followed.json" if held is not None else None)
            config = uvicorn.Config(
                application(room, hosts, feed), http=Patient, lifespan="on", log_level="error", access_log=False, server_header=False,
                limit_concurrency=CONNECTIONS, h11_max_incomplete_event_size=LONGEST_HEAD, timeout_graceful_shutdown=3, proxy_headers=False,
                ws=QuietWebSocket, ws_max_size=LONGEST_HEAD, ws_per_message_deflate=False,
                ssl_certfile=where.certificate or None, ssl_keyfile=where.key or None,
            )  # fmt: skip
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Each connection may also have an open file.
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            delivery = Delivery(ws.root, ws.environ)
            delivery.start()
            try:
                Server(config, feed).run(sockets=[listener])
            finally:
                delivery.end(LAST_WORDS)
                if held is not None:
                    _address_file(ws).unlink(missing_ok=True)


def _demand_encryption(where: ServerAddress) -> None:
    """Raise Invalid if tokens would travel unencrypted."""
    if where.host in _LOOPBACK or where.certificate or where.insecure:
        return
    words = f"{where.host} is not loopback: tokens would travel unencrypted"
    fix = (
        "pass `--certificate` and `--key`, or `--insecure` if a proxy or a private network encrypts"
    )
    raise Invalid([Problem("bad-request", words, None, fix)])


def _open_listener(where: ServerAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        listener = socket.create_server((where.host, where.port), family=family, backlog=1024)
        # The head and body of a response are two writes.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise Infrastructure(
            f"cannot listen on {where.host}:{where.port}: {error}",
            fix="choose another `--port`; 0 picks a free one",
        ) from error


def _address(where: ServerAddress, host: str, port: int) -> str:
    scheme = "https" if where.certificate else "http"
    return f"{scheme}://{_in_url(host)}:{port}"


def _in_url(host: str) -> str:
    """Return a host as URLs write it: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def _accepted_hosts(where: ServerAddress, port: int) -> set[str]:
    """Return the `Host` headers of requests to the address that the server listens on."""
    names = {where.host}
    if where.host in (*_LOOPBACK, "0.0.0.0", "::"):  # noqa: S104
        names.update(_LOOPBACK)
    return {f"{_in_url(name)}:{port}" for name in names}


def _address_file(ws: Workspace) -> Path:
    folder = ws.home / "server"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "address"


def find_server(root: Path) -> tuple[str, str] | None:
    """Return the URL of the workspace's running server, and a new web page token.

    None without a server.

    Raises Infrastructure if a starting server is not ready within `SOON` seconds.
    """
    with Workspace.open(root) as ws:
        deadline = time.monotonic() + SOON
        while ws.locks.is_held(LOCK):
            with suppress(FileNotFoundError):
                return _address_file(ws).read_text("utf-8"), page_token(
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
    """Create an access token for the web page, valid for a day, and remove expired page tokens.

    It has the scope `operate`.
    """
    now = time.time()
    for token in tokens.all():
        if token.name == PAGE and token.expires is not None and token.expires < now:
            tokens.remove(token.id)
    return tokens.create("operate", PAGE, expires=now + A_DAY)[1]


@contextmanager
def _run_worker(root: Path) -> Iterator[None]:
    """Run a worker process for the workspace, restarted on exit, until the context ends."""
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
