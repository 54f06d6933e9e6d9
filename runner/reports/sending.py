"""A single HTTP request with a timeout of `PATIENCE` seconds, without redirects.

Reads only the status and Retry-After.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from .addresses import Endpoint

PATIENCE: Final = 10.0
"""Total timeout of a request in seconds."""


class ReceiverResponse(NamedTuple):
    """The response of a receiver. `status` is 0 without a response; `retry_after` is in seconds."""

    status: int
    words: str = ""
    retry_after: float | None = None


def send(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    endpoint: Endpoint | None = None,
    patience: float = PATIENCE,
) -> ReceiverResponse:
    """Send a request, to the IP address of `endpoint` if given."""
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    deadline = time.monotonic() + patience
    try:
        wire = socket.create_connection(
            (endpoint.address if endpoint else host, port), timeout=patience
        )
    except OSError as error:
        return ReceiverResponse(0, f"cannot connect: {error.strerror or error}")
    wires: list[socket.socket] = [wire]
    # A socket timeout restarts with each byte.
    late = threading.Timer(max(0.0, deadline - time.monotonic()), _cut, [wires])
    late.start()
    try:
        if secure:
            wire = ssl.create_default_context().wrap_socket(
                wire, server_hostname=host, do_handshake_on_connect=False
            )
            wires.append(wire)
            wire.do_handshake()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = wire
        connection.request(method, path, body, {**headers, "Connection": "close"})
        answer = connection.getresponse()
        return ReceiverResponse(
            answer.status, answer.reason[:80], _retry_after(answer.getheader("Retry-After", ""))
        )
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() >= deadline - 0.01:
            return ReceiverResponse(0, f"no response within {patience:g} s")
        words = f"connection lost: {str(error) or type(error).__name__}"
        return ReceiverResponse(0, words[:200])
    finally:
        late.cancel()
        wire.close()


def _cut(wires: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        wires[-1].shutdown(socket.SHUT_RDWR)


def _retry_after(text: str) -> float | None:
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
