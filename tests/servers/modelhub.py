"""A Hub of models with one that is open, one that is gated, and no other.  Knows the answers of the real one, and none of its state."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCEPTED = "hf_good"
"""The token of an account that has accepted the licence of the gated model."""
EXPIRED = "hf_expired"
"""A token that is one no longer."""


@contextmanager
def modelhub() -> Iterator[str]:
    """The address of a running Hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        told = self.headers.get("authorization", "")
        if told.endswith(EXPIRED):
            self._say(401, {}, **{"X-Error-Message": "Invalid credentials in Authorization header"})
        elif name == "/api/models/open/model":
            weights = {"rfilename": "model.safetensors", "size": 2_000_000_000}
            self._say(200, {"id": "open/model", "sha": "0" * 40, "gated": False, "siblings": [weights]})
        elif name == "/api/models/gated/model":
            self._say(200, {"id": "gated/model", "sha": "0" * 40, "gated": "manual", "siblings": []})
        elif name == "/api/models/gated/model/auth-check":
            if told.endswith(ACCEPTED):
                self._say(200, {})
            else:
                self._say(403 if told else 401, {}, **{"X-Error-Code": "GatedRepo"})
        else:
            self._say(404, {}, **{"X-Error-Code": "RepoNotFound"})

    def do_HEAD(self) -> None:
        self._say(404, {}, **{"X-Error-Code": "EntryNotFound"})

    def _say(self, code: int, body: object, **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass
