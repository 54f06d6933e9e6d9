"""`recipe serve` in a process of its own, and plain `requests` that ask it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import requests

from tests.support import RECIPE


class Sent(NamedTuple):
    """One event of a stream."""

    event: str
    id: str
    data: Any


class Stream:
    """A stream of events, read one after the other."""

    def __init__(self, url: str, token: str, headers: Mapping[str, str]) -> None:
        given = {"Authorization": f"Bearer {token}", "Accept": "text/event-stream", **headers}
        self.answer = requests.get(url, headers=given, stream=True, timeout=30)
        self._lines = self.answer.iter_lines(chunk_size=None)

    def __iter__(self) -> Iterator[Sent]:
        found: dict[str, str] = {}
        for line in self._lines:
            if line:
                name, _, value = line.decode().partition(": ")
                found[name] = value
            elif found:
                yield Sent(found["event"], found.get("id", ""), json.loads(found["data"]))
                found = {}

    def until(self, *events: str) -> list[Sent]:
        """What comes up to the first of these events, which is the last."""
        found: list[Sent] = []
        for each in self:
            found.append(each)
            if each.event in events:
                return found
        raise AssertionError(f"the stream ended: {found}")

    def close(self) -> None:
        self.answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rest:
    """A server of the workspace at `root` on a free port; it was ready after `seconds`.  `token` is that of its first start, if this is it."""

    def __init__(self, root: Path, *words: str) -> None:
        self.root, self.http = root, requests.Session()
        begun = time.monotonic()
        self._err = root.with_suffix(".err")
        with self._err.open("ab") as err:
            self.process = subprocess.Popen(
                [*RECIPE, "serve", "--port", "0", *words], cwd=root, env=os.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True
            )  # fmt: skip
        assert self.process.stdout is not None
        told: dict[str, str] = {}
        while "serving" not in told:
            name, _, value = self.process.stdout.readline().strip().partition(": ")
            assert name, self.said()
            told[name] = value
        self.token, self.url = told.get("token", ""), told["serving"]
        assert self.ask("GET", "/health", token="").status_code == 200
        self.seconds = time.monotonic() - begun

    def said(self) -> str:
        """What the server wrote to its standard error."""
        return self._err.read_text()

    def ask(
        self, method: str, path: str, body: object = None, *, token: str | None = None, **more: Any
    ) -> requests.Response:
        """One request; the headers of `more` are added to the usual ones.  No answer may tell a folder of the server, a traceback or its token."""
        secret = self.token if token is None else token
        headers = {
            **({"Authorization": f"Bearer {secret}"} if secret else {}),
            **more.pop("headers", {}),
        }
        found = self.http.request(
            method, self.url + path, json=body, headers=headers, timeout=30, **more
        )
        for what in (str(self.root), "Traceback (most", *([self.token] if self.token else [])):
            assert what.encode() not in found.content and what not in str(found.headers), (
                f"{method} {path} tells {what}"
            )
        return found

    def get(self, path: str, **more: Any) -> Any:
        """What a path answers, which is well."""
        found = self.ask("GET", path, **more)
        assert found.status_code == 200, found.text
        return found.json()

    def follow(self, path: str, *, token: str = "", **headers: str) -> Stream:
        """A stream of events, opened."""
        return Stream(self.url + path, token or self.token, headers)

    def submit(self, recipe: str = "hello", *, key: str = "", **body: object) -> str:
        """The id of a new run."""
        found = self.ask(
            "POST",
            "/v1/runs",
            {"recipe": recipe, **body},
            headers={"Idempotency-Key": key} if key else {},
        )
        assert found.status_code == 201, found.text
        return str(found.json()["id"])

    def until(self, run: str, *states: str) -> Any:
        """The run, once it is in one of these states."""
        deadline = time.monotonic() + 60
        while (found := self.get(f"/v1/runs/{run}"))["state"] not in states:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found

    def end(self) -> int:
        """Ask the server to end, and its exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
