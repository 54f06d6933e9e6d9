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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import Infrastructure, Invalid, Problem
from ..execution.reporting import LAST_WORDS
from ..reports.delivery import Delivery
from ..settings import load
from ..storage.workspace import Workspace
from .app import application
from .guard import PATIENCE
from .room import Room
from .tokens import Tokens

CONNECTIONS: Final = 1000
LONGEST_HEAD: Final = 32 << 10
"""Bytes of a request's first line and headers."""
AGAIN: Final = 1.0
"""Seconds before a worker that died is replaced."""
END_WITHIN: Final = 31.0
"""Seconds that the worker has to hand over its run."""
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
        self._wait()

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


def serve(root: Path, where: Listening, ready: Callable[[str, str], None], *, with_worker: bool, new_token: bool) -> None:
    """Serve the workspace at `root` until SIGINT or SIGTERM.  `ready` gets the address, and the token if one was made.

    Raises Invalid where others could read what is sent, Infrastructure where nothing can be listened on.
    """
    if where.host not in _LOOPBACK and not where.certificate and not where.insecure:
        fix = "give --certificate and --key, or --insecure if a proxy or a private network encrypts"
        raise Invalid([Problem("bad-request", f"{where.host} is not loopback: tokens would travel unencrypted", None, fix)])
    with Workspace.open(root) as ws, _worker(root) if with_worker else _nothing():
        tokens = Tokens(ws.home / "server", ws.locks)
        secret = tokens.make("admin", "by --new-token")[1] if new_token else tokens.first()
        room = Room(ws.root, ws.environ, tokens)
        with _listener(where) as listener:
            port = listener.getsockname()[1]
            names = {where.host, *_LOOPBACK} if where.host in (*_LOOPBACK, "0.0.0.0", "::") else {where.host}  # noqa: S104
            hosts = {f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names}
            hosts |= {name.lower() for name in load(ws.root, ws.environ).lists.get("server.hosts", ())}
            scheme = "https" if where.certificate else "http"
            ready(f"{scheme}://{f'[{where.host}]' if ':' in where.host else where.host}:{port}", secret)
            config = uvicorn.Config(
                application(room, hosts), http=Patient, ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
                limit_concurrency=CONNECTIONS, h11_max_incomplete_event_size=LONGEST_HEAD, timeout_graceful_shutdown=3, proxy_headers=False,
                ssl_certfile=where.certificate or None, ssl_keyfile=where.key or None,
            )  # fmt: skip
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection may have a file open besides
            delivery = Delivery(ws.root, ws.environ)
            delivery.start()
            try:
                uvicorn.Server(config).run(sockets=[listener])
            finally:
                delivery.end(LAST_WORDS)


def _listener(where: Listening) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        listener = socket.create_server((where.host, where.port), family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body of an answer are two writes
        return listener
    except (OSError, OverflowError) as error:
        raise Infrastructure(f"cannot listen on {where.host}:{where.port}: {error}", fix="give another --port; 0 takes a free one") from error


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _worker(root: Path) -> Iterator[None]:
    """A worker of the workspace, replaced when it dies, which ends with this process however that ends."""
    over = threading.Event()
    command = [sys.executable, "-m", "runner.interface.cli.main", "worker", "-C", os.path.abspath(root), "-q", "--tied"]
    running: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        running[:] = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)]

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
        process: subprocess.Popen[Any] = running[0]
        process.terminate()
        deadline = time.monotonic() + END_WITHIN
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
