"""Firefox without a window, spoken to by WebDriver BiDi, which it has built in: playwright knows only a Firefox of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.sync.client import ClientConnection, connect

from tests.tools import needs

EVENTS: Final = ["log.entryAdded", "network.beforeRequestSent"]
WAIT: Final = 60.0
"""Seconds for an answer."""
SCHEMES: Final = {"dark": 0, "light": 1}
"""What Firefox calls them in its preferences."""


class Firefox:
    """The one tab of a Firefox, and what it complained of and asked for."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._asked = 0
        self.said: list[str] = []
        self.asked: list[str] = []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=EVENTS)
        (tab,) = self.call("browsingContext.getTree")["contexts"]
        self._tab = str(tab["context"])

    def call(self, method: str, **parameters: object) -> Any:
        """The result of a command; events that come before it are kept.  Raises RuntimeError for what Firefox refuses."""
        self._asked += 1
        asked = {"id": self._asked, "method": method, "params": parameters}
        self._connection.send(json.dumps(asked))
        while (answer := json.loads(self._connection.recv(WAIT))).get("id") != self._asked:
            self._hear(answer)
        if answer["type"] == "error":
            raise RuntimeError(answer["message"])
        return answer["result"]

    def _hear(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "log.entryAdded" and told["level"] in ("warn", "error"):
            self.said.append(str(told["text"]))
        if event.get("method") == "network.beforeRequestSent":
            self.asked.append(str(told["request"]["url"]))

    def open(self, url: str, width: int) -> None:
        """Load a page in a window of that width."""
        size = {"width": width, "height": 900}
        self.call("browsingContext.setViewport", context=self._tab, viewport=size)
        self.call("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    def look(self, expression: str) -> Any:
        """What an expression of JavaScript has come to, by way of JSON.  A promise is waited for; raises RuntimeError for what it throws."""
        found = self.call(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression}) ?? null))()",
            target={"context": self._tab},
            awaitPromise=True,
        )
        if found["type"] == "exception":
            raise RuntimeError(found["exceptionDetails"]["text"])
        return json.loads(found["result"]["value"])

    def until(self, condition: str) -> None:
        """Wait until an expression is true; half a minute at most."""
        wait = (
            "new Promise((done, fail) => { const end = Date.now() + 30000; const look = () =>"
            f" ({condition}) ? done(true) : Date.now() > end ? fail(Error('never true')) : setTimeout(look, 50); look(); }})"
        )
        try:
            self.look(wait)
        except RuntimeError as error:
            raise AssertionError((condition, self.said)) from error


@contextmanager
def firefox(scheme: str) -> Iterator[Firefox]:
    """Firefox of this machine, in light or dark, with a profile of its own."""
    path = needs("firefox-esr")
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "user.js").write_text(
            f'user_pref("layout.css.prefers-color-scheme.content-override", {SCHEMES[scheme]});\n'
        )
        words = ["--headless", "--no-remote", "--profile", home, "--remote-debugging-port", "0"]
        process = subprocess.Popen(
            [path, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"HOME": home, "PATH": os.environ["PATH"], "TMPDIR": home},
        )
        try:
            with connect(f"{_address(process)}/session", max_size=None) as connection:
                yield Firefox(connection)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _address(process: subprocess.Popen[str]) -> str:
    """Where a Firefox listens, as it says itself."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        if found := re.search(r"ws://[\w.:]+", line):
            return found[0]
        said.append(line)
    raise AssertionError("Firefox does not listen: " + "".join(said))
