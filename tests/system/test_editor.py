"""An editor with the real yaml-language-server reports a wrong key, and says what a key means, by the modeline alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from runner.interface.cli.main import main
from runner.language import library, schema
from runner.paths import shipped
from tests.tools import needs

SERVER = "yaml-language-server@2.0.0"
CACHE = shipped() / ".cache" / "editor"
PROGRAM = CACHE / "node_modules" / ".bin" / "yaml-language-server"


class Editor:
    """The client's half of the protocol: as much of it as an editor needs to show a file."""

    def __init__(self, process: subprocess.Popen[bytes], root: Path) -> None:
        self.process, self.root, self.number = process, root, 0
        self.diagnostics: dict[str, list[dict[str, Any]]] = {}
        self.call(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": root.as_uri(),
                "capabilities": {"textDocument": {"hover": {"contentFormat": ["markdown"]}}},
            },
        )
        self.tell("initialized", {})

    def tell(self, method: str, params: object) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def call(self, method: str, params: object) -> Any:
        self.number += 1
        mine = self.number
        self._send({"jsonrpc": "2.0", "id": mine, "method": method, "params": params})
        return self._until(lambda message: message.get("id") == mine and "method" not in message)[
            "result"
        ]

    def open(self, name: str, text: str) -> str:
        path = self.root / name
        path.write_text(text)
        self.tell(
            "textDocument/didOpen",
            {
                "textDocument": {
                    "uri": path.as_uri(),
                    "languageId": "yaml",
                    "version": 1,
                    "text": text,
                }
            },
        )
        return path.as_uri()

    def problems(self, uri: str) -> list[dict[str, Any]]:
        while uri not in self.diagnostics:
            self._until(lambda message: message.get("method") == "textDocument/publishDiagnostics")
        return self.diagnostics[uri]

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        body = json.dumps(message).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            message = self._receive()
            if message.get("method") == "textDocument/publishDiagnostics":
                self.diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]
            elif (
                "method" in message and "id" in message
            ):  # it asks us, for instance for its configuration
                asked = (
                    message["params"].get("items", [])
                    if isinstance(message.get("params"), dict)
                    else []
                )
                self._send(
                    {
                        "jsonrpc": "2.0",
                        "id": message["id"],
                        "result": [SETTINGS.get(item.get("section")) for item in asked],
                    }
                )
            if wanted(message):
                return message

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout
        length = 0
        while line := self.process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        assert length, "the server ended"
        found: dict[str, Any] = json.loads(self.process.stdout.read(length))
        return found


# No catalogue of schemas from the network: the modeline has to be enough.
SETTINGS = {
    "yaml": {"schemaStore": {"enable": False}, "validate": True, "hover": True, "completion": True}
}


def install(workplace: Path) -> None:
    """Fetch the server once; two test processes may do so side by side."""
    subprocess.run(
        [
            "npm",
            "install",
            "--prefix",
            str(workplace),
            "--no-audit",
            "--no-fund",
            "--silent",
            SERVER,
        ],
        check=True,
        timeout=120,
    )
    CACHE.parent.mkdir(exist_ok=True)
    if not PROGRAM.exists():
        shutil.copytree(workplace, CACHE, symlinks=True, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    needs("node")
    if not PROGRAM.exists():
        needs("npm")
        install(tmp_path_factory.mktemp("npm"))
    root = tmp_path_factory.mktemp("editor")
    (root / "schemas").mkdir()
    (root / "recipes").mkdir()
    (root / "schemas" / "recipe.schema.json").write_text(library.schema_text())
    process = subprocess.Popen(
        [str(PROGRAM), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    )
    patience = Timer(60, process.kill)  # a silent server must not hold the tests for ever
    patience.start()
    try:
        yield Editor(process, root)
    finally:
        patience.cancel()
        process.kill()
        process.communicate()


MODELINE = "# yaml-language-server: $schema=../schemas/recipe.schema.json\n"


def test_a_right_file_is_right(editor: Editor) -> None:
    text = (shipped() / "recipes" / "sft@1.yaml").read_text("utf-8")
    assert text.startswith(MODELINE)
    assert editor.problems(editor.open("recipes/sft@1.yaml", text)) == []


def test_a_wrong_key_is_underlined(editor: Editor) -> None:
    uri = editor.open(
        "recipes/wrong.yaml",
        MODELINE + "recipe: a@1\nsteps:\n  train:\n    run: [echo]\n    timout: 5m\n",
    )
    [problem] = [problem for problem in editor.problems(uri) if "timout" in problem["message"]]
    assert problem["range"] == {
        "start": {"line": 5, "character": 4},
        "end": {"line": 5, "character": 10},
    }


def test_a_key_is_explained(editor: Editor) -> None:
    uri = editor.open(
        "recipes/hover.yaml",
        MODELINE + "recipe: a@1\nsteps:\n  train:\n    run: [echo]\n    retries: 2\n",
    )
    shown = editor.call(
        "textDocument/hover",
        {"textDocument": {"uri": uri}, "position": {"line": 5, "character": 6}},
    )
    described = schema.load()["$defs"]["step"]["properties"]["retries"]["description"]
    assert described.split(".")[0] in shown["contents"]["value"]


@pytest.mark.parametrize("name", ["mine", "below/mine"])
def test_a_new_recipe_leads_an_editor_to_the_schema(editor: Editor, name: str) -> None:
    (editor.root / "below").mkdir(exist_ok=True)
    assert main(["new", name, "-C", str(editor.root)]) == 0
    text = (editor.root / f"{name}.yaml").read_text()
    lines = text.splitlines()
    uri = editor.open(f"{name}.yaml", text)
    assert editor.problems(uri) == []
    at = next(n for n, line in enumerate(lines) if line.startswith("summary:"))
    shown = editor.call(
        "textDocument/hover",
        {"textDocument": {"uri": uri}, "position": {"line": at, "character": 2}},
    )
    assert (
        schema.load()["properties"]["summary"]["description"].split(",")[0]
        in shown["contents"]["value"]
    )


def test_a_key_is_offered_with_its_meaning(editor: Editor) -> None:
    uri = editor.open(
        "recipes/complete.yaml",
        MODELINE + "recipe: a@1\nsteps:\n  train:\n    run: [echo]\n    idle\n",
    )
    offered = editor.call(
        "textDocument/completion",
        {"textDocument": {"uri": uri}, "position": {"line": 5, "character": 8}},
    )
    [item] = [item for item in offered["items"] if item["label"] == "idle_timeout"]
    shown = item["documentation"]
    assert "counts as hung" in (shown if isinstance(shown, str) else shown["value"])
