"""An HTTP proxy of our own that spoils what passes.  Knows requests and answers, not what they are about.

    with HttpFaults(moto.endpoint) as proxy:
        proxy.endpoint                                    # talk to this instead
        proxy.spoil = lambda request: Fault(status=503) if request.number < 3 else None
        proxy.requests                                    # every request that came, in order

`spoil` is asked once for each request (`method`, `path`, `number`: how many like it came before, `headers`) and answers a Fault or None:

    Fault(status=503, code="SlowDown")    not passed on; an error in S3's words
    Fault(cut=100)                        the answer breaks off after so many bytes of its body
    Fault(flip=100)                       one bit of that byte of the answer's body is another
    Fault(flip_request=100)               one bit of that byte of the request's body is another
    Fault(lost=True)                      passed on, but the answer never arrives: the connection ends
    Fault(reset=True)                     the connection ends before anything is passed on
    Fault(slow=0.2)                       the answer waits so many seconds
    Fault(hold=event)                     ... or until the event is set
    Fault(headers={"ETag": '"0"'})        headers of the answer are others
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Fault:
    status: int = 0
    code: str = "SlowDown"
    cut: int | None = None
    flip: int | None = None
    flip_request: int | None = None
    lost: bool = False
    reset: bool = False
    slow: float = 0.0
    hold: threading.Event | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    number: int
    headers: Mapping[str, str]
    size: int


class HttpFaults:
    def __init__(self, upstream: str) -> None:
        where = urlsplit(upstream)
        self._upstream = str(where.hostname), int(where.port or 80)
        self.spoil: Callable[[Request], Fault | None] = lambda _request: None
        self.requests: list[Request] = []
        self._turn = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer._pass(self)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, format: str, *words: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def calm(self) -> None:
        """Spoil nothing, and forget what came."""
        self.spoil = lambda _request: None
        self.requests = []

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path = handler.path.partition("?")[0]
        with self._turn:
            number = sum(
                1
                for other in self.requests
                if (other.method, other.path) == (handler.command, path)
            )
            request = Request(handler.command, path, number, dict(handler.headers), len(body))
            self.requests.append(request)
        fault = self.spoil(request) or Fault()
        if fault.reset:
            return self._end(handler)
        if fault.hold is not None:
            fault.hold.wait(30)
        time.sleep(fault.slow)
        if fault.status:
            text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>{fault.code}, says the proxy</Message></Error>".encode()
            return self._answer(
                handler,
                fault.status,
                {"Content-Type": "application/xml", "Content-Length": str(len(text))},
                text,
                fault,
            )
        if fault.flip_request is not None and fault.flip_request < len(body):
            body = _flipped(body, fault.flip_request)
        upstream = http.client.HTTPConnection(*self._upstream, timeout=30)
        try:
            upstream.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault.lost:
            return self._end(handler)
        head = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding")
        }
        if handler.command != "HEAD":
            head["Content-Length"] = str(len(data))
        self._answer(handler, answer.status, {**head, **fault.headers}, data, fault)

    def _answer(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: Mapping[str, str],
        data: bytes,
        fault: Fault,
    ) -> None:
        handler.send_response_only(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if fault.flip is not None and fault.flip < len(data):
            data = _flipped(data, fault.flip)
        if fault.cut is not None and fault.cut < len(data):
            handler.wfile.write(data[: fault.cut])
            handler.wfile.flush()
            handler.close_connection = True  # in good order, so that what was sent arrives
            return None
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def _end(self, handler: BaseHTTPRequestHandler) -> None:
        """Reset the connection, not close it in good order."""
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
