"""What is run for a step: argv, scripts, files, environment."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
import yaml

from runner.errors import CannotRun
from runner.hosts.place.launch import render
from runner.planning.step import StepSpec

SCOPE: dict[str, Any] = {
    "inputs": {"n": 3, "name": "it's"},
    "host": {"gpus": 0, "cpus": 2},
    "nodes": {"count": 1, "addresses": ["127.0.0.1"]},
    "node": {"rank": 0},
}


def step(**parts: Any) -> StepSpec:
    return StepSpec("r@1", "s", {}, run=["true"])._replace(**parts)


def test_an_argument_is_one_word_whatever_it_holds() -> None:
    assert render(step(run=["echo", "{{ inputs.name }}"]), SCOPE, python="python").argv == (
        "echo",
        "it's",
    )


def test_a_nested_list_without_any_template_is_its_arguments() -> None:
    assert render(
        step(run=[["python", "t.py"], ["-n", 1, [True]]]), SCOPE, python="python"
    ).argv == ("python", "t.py", "-n", "1", "true")


def test_a_script_runs_from_a_file_by_a_strict_shell() -> None:
    made = render(step(run="echo {{ inputs.n }}"), SCOPE, python="python")
    assert made.argv == ("/bin/sh", "-eu") and made.script is not None and "3" in made.script
    assert render(step(run="true", shell="bash"), SCOPE, python="python").argv == (
        "bash",
        "-euo",
        "pipefail",
    )


def test_a_tree_is_written_in_the_form_of_its_suffix() -> None:
    tree = {"n": "{{ inputs.n }}", "inner": {"name": "{{ inputs.name }}"}}
    files = render(
        step(files={"a.json": tree, "a.yaml": tree, "a.toml": tree}), SCOPE, python="python"
    ).files
    wanted = {"n": 3, "inner": {"name": "it's"}}
    assert (
        json.loads(files["a.json"])
        == yaml.safe_load(files["a.yaml"])
        == tomllib.loads(files["a.toml"].decode())
        == wanted
    )
    with pytest.raises(CannotRun, match=r"\.json, \.yaml or \.toml"):
        render(step(files={"a.ini": tree}), SCOPE, python="python")


@pytest.mark.parametrize("kind", ["script", "module"])
def test_the_program_of_accelerate_is_never_none(kind: str) -> None:
    with pytest.raises(CannotRun, match="the program is null"):
        render(
            step(run=None, accelerate={kind: "{{ inputs.none }}"}),
            {**SCOPE, "inputs": {"none": None}},
            python="python",
        )


def test_accelerate_is_given_the_world_and_asserts_it() -> None:
    made = render(
        step(
            run=None,
            accelerate={
                "script": "t.py",
                "processes": 2,
                "args": {"n": "{{ inputs.n }}", "off": False},
            },
        ),
        SCOPE,
        python="python",
    )
    assert made.env["RECIPE_WORLD_SIZE"] == "2" and made.env["ACCELERATE_USE_CPU"] == "true"
    assert "--multi_gpu" in made.argv and made.argv[-3:] == ("t.py", "--n", "3")
