"""Promise: every block of docs/operations.md can be typed, one after another, in one shell."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.paths import shipped
from tests.test_tutorial import BLOCK, commands, matches

PAGE = shipped() / "docs" / "operations.md"
STANDIN = """\
recipe: quick@1
summary: What stands in for a training.
steps: {train: {run: 'echo begun; while [ -e ROOT/gate ]; do sleep 0.05; done; echo x > {{ outputs.o }}', outputs: {o: o.txt}}}
"""


@pytest.mark.proof
def test_every_block_of_the_runbook_works(tmp_path: Path, url: str) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed")
    root = tmp_path / "space"
    root.mkdir()
    (root / "gate").touch()
    (root / "quick.yaml").write_text(STANDIN.replace("ROOT", str(root)))
    (root / "recipe.toml").write_text('[recipes]\nallow = ["quick.yaml"]\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    asked: list[tuple[str, str]] = []
    lines = ["export PS1="]
    for kind, name, text in BLOCK.findall(PAGE.read_text("utf-8").replace("8765", port)):
        assert kind == "console"
        for command, expected in commands(text):
            if command.startswith("pip install"):
                continue
            if name == "PostgreSQL":
                command = f"RECIPE_RUNS='{url}' bash -c '{command}'"
            command = command.replace("sft --preset smoke", "quick").replace(
                "recipe serve", f"recipe serve --port {port}"
            )
            lines += [f"echo @@{len(asked)}", f"{command}", "echo @rc=$?"]
            asked.append((command, expected))
    lines += [f"rm {root}/gate", "kill $(jobs -p)"]
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
    }
    for each in (
        "RECIPE_TOKEN",
        "RECIPE_SERVER",
        "RECIPE_RUNS",
        "RECIPE_HOME",
        "XDG_DATA_HOME",
        "XDG_CONFIG_HOME",
    ):
        environ.pop(each, None)
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=root,
            env=environ,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            timeout=500,
            check=False,
        )
    said = (tmp_path / "out").read_text()
    parts = re.split(r"^@@\d+\n", said, flags=re.MULTILINE)[1:]
    assert len(parts) == len(asked) > 25, said
    for (command, expected), part in zip(asked, parts, strict=True):
        text, _, code = part.rpartition("@rc=")
        assert code.split()[0] == "0", f"$ {command}\n{part}"
        assert not expected or matches(expected, text if text.endswith("\n") else f"{text}\n"), (
            f"$ {command}\n{text}"
        )
    assert "PAUSED" in said and "begun" in said
