"""A package index on loopback: wheels that tests write, handed out when the test lets them go.

with Index(tmp_path) as index:
    line = index.wheel("tinyword", "word = 'said'\\n")     # a line of a lock
    index.environ                                          # what makes uv and pip use it, and nothing else
    index.gate.clear()                                     # from now on a wheel stands still in its middle, until the gate is set
"""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


class Index:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._wheels: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []
        """The wheels that were asked for, in that order."""

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environ(self) -> dict[str, str]:
        url = f"http://someone:secret@127.0.0.1:{self._server.server_address[1]}/simple"
        cache = str(self._place / "cache")
        return {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": url,
            "PIP_FIND_LINKS": "",
            "PIP_CACHE_DIR": cache,
            "UV_CACHE_DIR": cache,
        }

    def wheel(
        self, name: str, text: str = "", *, bulk: int = 0, needs: str = "", version: str = "1.0"
    ) -> str:
        """Add a package of one module, and `bulk` bytes, that needs another; answers its line of a lock."""
        packed, more = io.BytesIO(), f"Requires-Dist: {needs}\n" if needs else ""
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(f"{name}.py", text)
            archive.writestr(f"{name}.bulk", bytes(bulk))
            archive.writestr(
                f"{name}-{version}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}",
            )
            archive.writestr(
                f"{name}-{version}.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(f"{name}-{version}.dist-info/RECORD", f"{name}.py,,\n")
        self._wheels[f"{name}-{version}-py3-none-any.whl"] = packed.getvalue()
        return f"{name}=={version} --hash=sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}\n"

    def save(self, folder: Path) -> None:
        """Write the wheels to a directory, for `find-links`."""
        folder.mkdir(exist_ok=True)
        for name, body in self._wheels.items():
            (folder / name).write_bytes(body)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.strip("/").rpartition("/")[2]
        if handler.path.startswith("/simple/"):
            links = "".join(
                f'<a href="/wheels/{wheel}">{wheel}</a>'
                for wheel in self._wheels
                if wheel.startswith(f"{name}-")
            )
            body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            self._send(handler, 200 if links else 404, "text/html", body, len(body))
            return
        self.asked.append(name)
        body = self._wheels[name]
        self._send(handler, 200, "application/octet-stream", body[:100], len(body))
        self.gate.wait()
        handler.wfile.write(body[100:])

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, kind: str, body: bytes, size: int
    ) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()


def _handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                index.answer(self)
            except ConnectionError:  # an installer that was killed
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
