"""`recipe fake-provider`, begun and ended by tests, and the official clients run against it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Provider(NamedTuple):
    """One that listens.  `exports` is what a caller sets."""

    url: str
    exports: dict[str, str]

    def ask(self, path: str, body: str | None = None) -> str:
        with urllib.request.urlopen(
            self.url + path, None if body is None else body.encode(), timeout=20
        ) as reply:
            return str(reply.read().decode())

    def wait(self, seconds: float) -> None:
        self.ask("/_clock", json.dumps({"advance": seconds}))

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.ask("/_ledger").splitlines()]

    def events(self) -> list[str]:
        return [entry["event"] for entry in self.ledger() if entry["event"] != "billed"]


@contextmanager
def provider(name: str, *words: str) -> Iterator[Provider]:
    """A provider on a free port with a virtual clock, for as long as the block lasts."""
    command = [
        sys.executable,
        "-m",
        "runner.interface.cli.main",
        "fake-provider",
        name,
        "--clock",
        "virtual",
        *words,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        exports = {}
        try:
            while "FAKE_PROVIDER" not in exports:
                line = process.stdout.readline()
                found = re.fullmatch(r"export (\w+)=(.*)\n", line)
                assert found, line
                exports[found[1]] = found[2]
            yield Provider(exports["FAKE_PROVIDER"], exports)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


IN_TURN = """
import importlib, json, os, sys, tempfile
module, attribute, commands = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
main = getattr(importlib.import_module(module), attribute)
importlib.invalidate_caches()
for words in commands:
    with tempfile.TemporaryFile() as out:
        if not (child := os.fork()):
            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
            sys.argv = words
            sys.exit(main())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        print(json.dumps([code, out.read().decode()]), flush=True)
"""
"""A client's command line, imported once and run for each command in a process of its own."""


class Client:
    """An official client in its own environment, as a command line."""

    def __init__(
        self, python: Path, main: str, program: Sequence[str], home: Path, env: dict[str, str]
    ) -> None:
        self._command = [str(python), "-c", IN_TURN, *main.split(":")]
        self._program = list(program)
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "COLUMNS": "300",
            "LINES": "50",
            "NO_COLOR": "1",
            "CI": "1",
            **env,
        }

    def run(self, *commands: Sequence[str]) -> list[tuple[int, str]]:
        """The exit status and output of each command."""
        lines = json.dumps([[*self._program, *words] for words in commands])
        done = subprocess.run(
            [*self._command, lines], env=self._env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return [(code, text) for code, text in map(json.loads, done.stdout.splitlines())]
