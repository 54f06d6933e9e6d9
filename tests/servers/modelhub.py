"""A Hub of models with one that is open and one that is gated, and repositories that are made there.  Knows the answers of the real one.

`GET /_commits` tells what was committed: the repository, the summary, and the paths of the files.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, cast

ACCEPTED = "hf_good"
"""The token of an account that has accepted the licence of the gated model."""
EXPIRED = "hf_expired"
"""A token that is one no longer."""


@contextmanager
def modelhub() -> Iterator[str]:
    """The address of a running Hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"commits": []})) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Hub(BaseHTTPRequestHandler):
    commits: ClassVar[list[dict[str, object]]]

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name == "/_commits":
            return self._say(200, self.commits)
        told = self.headers.get("authorization", "")
        if told.endswith(EXPIRED):
            self._say(401, {}, **{"X-Error-Message": "Invalid credentials in Authorization header"})
        elif name == "/api/models/open/model":
            weights = {"rfilename": "model.safetensors", "size": 2_000_000_000}
            self._say(
                200, {"id": "open/model", "sha": "0" * 40, "gated": False, "siblings": [weights]}
            )
        elif name == "/api/models/gated/model":
            self._say(
                200, {"id": "gated/model", "sha": "0" * 40, "gated": "manual", "siblings": []}
            )
        elif name == "/api/models/gated/model/auth-check":
            if told.endswith(ACCEPTED):
                self._say(200, {})
            else:
                self._say(403 if told else 401, {}, **{"X-Error-Code": "GatedRepo"})
        elif name == "/api/whoami-v2":
            self._say(200, {"name": "me", "type": "user"}) if told.endswith(
                ACCEPTED
            ) else self._say(401, {"error": "Invalid credentials"})
        else:
            self._say(404, {}, **{"X-Error-Code": "RepoNotFound"})
        return None

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.partition("?")[0].removeprefix("/api/")
        if not self.headers.get("authorization", "").endswith(ACCEPTED):
            self._say(401, {"error": "Invalid credentials"})
        elif name == "repos/create":
            asked = json.loads(data)
            whole = "/".join(filter(None, [asked.get("organization"), asked["name"]]))
            self._say(200, {"url": f"http://{self.headers['host']}/{whole}"})
        elif "/preupload/" in name:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(data)["files"]
            ]
            self._say(200, {"files": files})
        elif "/commit/" in name:
            rows = [json.loads(line) for line in data.splitlines()]
            repo, files = (
                name.partition("/commit/")[0],
                [row["value"]["path"] for row in rows if row["key"] == "file"],
            )
            self.commits.append(
                {"repo": repo, "summary": rows[0]["value"]["summary"], "files": files}
            )
            self._say(
                200,
                {
                    "commitUrl": f"http://{self.headers['host']}/{repo.removeprefix('models/')}/commit/{'1' * 40}",
                    "commitOid": "1" * 40,
                },
            )
        else:
            self._say(404, {})

    def do_HEAD(self) -> None:
        repo, _, name = self.path.strip("/").partition("/resolve/main/")
        if any(
            each["repo"] == f"models/{repo}" and name in cast("list[str]", each["files"])
            for each in self.commits
        ):
            return self._say(200, {}, ETag='"1"', **{"X-Repo-Commit": "1" * 40})
        return self._say(404, {}, **{"X-Error-Code": "EntryNotFound"})

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
