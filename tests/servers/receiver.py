"""A receiver of reports on loopback: keeps what it gets, and answers as it is told to."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple


class Got(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class Receiver:
    """`answer` gets each request and gives a status, with headers if there are any; None: it drops the connection after it has taken the request."""

    def __init__(
        self,
        answer: Callable[[Got], int | tuple[int, Mapping[str, str]] | None] = lambda got: 200,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.got: list[Got] = []
        self.answer = answer
        self._more = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got = Got(
                    self.command,
                    self.path,
                    {k.lower(): v for k, v in self.headers.items()},
                    self.rfile.read(int(self.headers["content-length"])),
                )
                answer = receiver.answer(got)
                with receiver._more:
                    receiver.got.append(got)
                    receiver._more.notify_all()
                if answer is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_PUT = do_PATCH = do_POST

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' if tls is not None else ''}://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def wait(self, count: int, seconds: float = 20.0) -> list[Got]:
        """The requests, once there are so many."""
        deadline = time.monotonic() + seconds
        with self._more:
            while len(self.got) < count:
                assert self._more.wait(max(0.0, deadline - time.monotonic())), (
                    f"{len(self.got)} of {count} came"
                )
            return list(self.got)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
