"""What recipe logs about itself, as a person who runs it sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """\
recipe: one@1
inputs: {token: {type: secret, env: TOKEN}}
steps:
  a: {run: "true > {{ outputs.o }}", secrets: [token], outputs: {o: a.txt}}
"""
DRIVER = """
import logging, sys
from runner.execution.steps.ending import Ender
from runner.interface.cli.main import main
end = Ender.end
async def tells(ender, id, how):
    logging.getLogger("drivers.local").debug("the token is %s", "hunter2-hunter2")
    await end(ender, id, how)
Ender.end = tells
sys.exit(main(["run", "./one.yaml", "--python", "current"]))
"""


def recipe(root: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=root,
        env={**os.environ, "TOKEN": "hunter2-hunter2", **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(RECIPE)
    return tmp_path


def test_a_secret_that_is_logged_is_masked(space: Path) -> None:
    done = recipe(
        space,
        "-c",
        DRIVER,
        RECIPE_LOG=f"debug:{space}/log",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    text = (space / "log").read_text()
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in text + done.stderr
    said = {
        (line["logger"], line["message"].partition(" took")[0])
        for line in map(json.loads, text.splitlines())
    }
    assert {
        ("drivers.local", "the token is ***"),
        ("recipe.session", "survey of 1 steps"),
    } <= said
    assert any(
        each[0] == "recipe.loop" and each[1].startswith("a ended on local: exit 0") for each in said
    )


def test_an_unknown_level_is_a_sentence_and_exit_code_3(space: Path) -> None:
    done = recipe(
        space,
        "-m",
        "runner.interface.cli.main",
        "plan",
        "./one.yaml",
        RECIPE_LOG="loud",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    assert (
        done.returncode == 3
        and 'unknown level "loud"' in done.stderr
        and "Traceback" not in done.stderr
    )
