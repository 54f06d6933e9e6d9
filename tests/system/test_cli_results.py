"""`recipe results` puts the instances and runs of a recipe into one table; `runner.results` gives the same rows to programs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

import runner
from tests.support import Space
from tests.system.test_cli_why import Recipe, recipe

__all__ = ["recipe"]

SWEEP = """
inputs:
  scale: {type: integer, default: 1}
  rates: {type: list, items: number, default: [1, 2, 4]}
steps:
  fit:
    matrix: {lr: "{{ inputs.rates }}"}
    run: |
      for n in 3 1 2; do echo loss=$n.{{ matrix.lr }} eval=$(( {{ inputs.scale }} * (10 - {{ matrix.lr }}) )); done
      test {{ matrix.lr }} -lt 8 && touch {{ outputs.o }}
    outputs: {o: "o{{ matrix.lr }}-{{ inputs.scale }}"}
    metrics: {pattern: 'loss=(?P<loss>[0-9.]+) eval=(?P<eval_loss>[0-9]+)'}
  best: {select: fit, min: loss}
  keep: {run: [cp, "{{ steps.best.o }}", "{{ outputs.o }}"], outputs: {o: best.txt}}
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """A sweep that was run three times: as it is, with another input, and with an instance that fails."""
    space = Space(tmp_path_factory.mktemp("swept"))
    space.recipe(SWEEP)
    space.run()
    space.run({"scale": 3})
    space.attempt({"rates": [1, 2, 4, 8]})
    return space


@pytest.fixture
def space(swept: Space) -> Space:
    """What `recipe` works in."""
    return swept


def test_a_sweep_ends_with_a_table_of_what_differs(space: Space, recipe: Recipe) -> None:
    said = recipe("results")
    lines = said.out.splitlines()
    assert said.code == 0 and said.err == "" and lines[0] == "fit of t@1: 7 results of 3 runs"
    assert lines[1].split() == [
        "scale",
        "lr",
        "loss",
        "min",
        "loss",
        "eval_loss",
        "STATE",
        "TIME",
        "RUN",
    ]
    assert [line.split()[0] for line in lines[2:]] == ["*", "3", "1", "3", "1", "3", "1", "*:"], (
        "the best first, then the older of two alike"
    )
    assert (
        lines[2].split()[1:6] == ["1", "1", "2.1", "1.1", "9"]
        and lines[8].split()[:2] == ["1", "8"]
        and "FAILED" in lines[8]
    )
    assert lines[-1].startswith("*: the lowest loss, fit[lr=1] of ")


def test_another_metric_can_be_compared_and_columns_chosen(space: Space, recipe: Recipe) -> None:
    lines = recipe(
        "results", "t@1", "--sort", "eval_loss", "--columns", "lr,eval_loss"
    ).out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["lr", "eval_loss"],
        ["*", "4", "6"],
        ["2", "8"],
    ]
    assert recipe(
        "results", "--sort", "eval_loss", "--best", "max", "--columns", "eval_loss"
    ).out.splitlines()[2].split() == ["*", "27"]
    assert recipe("results", "--sort", "lr", "--columns", "lr", "--csv").out.split() == [
        "lr",
        "1",
        "1",
        "2",
        "2",
        "4",
        "4",
        "8",
    ]
    said = recipe("results", "--columns", "evalloss")
    assert said.code == 3 and 'unknown column "evalloss"' in said.err and "eval_loss" in said.err
    said = recipe("results", "--sort", "los")
    assert said.code == 3 and 'did you mean "loss"' in said.err


def test_programs_get_every_number(space: Space, recipe: Recipe) -> None:
    rows = list(csv.DictReader(recipe("results", "--csv").out.splitlines()))
    assert (
        len(rows) == 7
        and rows[0]["loss"] == "2.1"
        and rows[0]["min loss"] == "1.1"
        and rows[0]["best"] == "True"
        and float(rows[0]["time"]) >= 0
    )
    told = json.loads(recipe("results", "./recipe.yaml", "--json").out)
    assert told["recipe"] == "t@1" and told["results"][0]["metrics"]["loss"] == {
        "last": 2.1,
        "min": 1.1,
        "max": 3.1,
    }
    assert (
        told["results"][0]["inputs"] == {"scale": 1, "lr": 1}
        and told["results"][0]["best"]
        and not told["results"][1]["best"]
    )
    table = recipe("results", "--md", "--columns", "lr,loss").out.splitlines()
    assert table[2:5] == ["| lr | loss |", "| ---: | ---: |", "| **1** | 2.1 |"]


def test_python_gets_a_data_frame_or_rows(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = runner.results("./recipe.yaml", workspace=space.root, frame=False)
    assert (
        [row["loss"] for row in rows][:2] == [2.1, 2.1]
        and rows[0]["best"] is True
        and rows[0]["step"] == "fit[lr=1]"
    )

    class Pandas:
        DataFrame = staticmethod(lambda rows: ("frame", len(rows)))

    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    assert runner.results(workspace=space.root, frame=True) == ("frame", 7)


def test_a_recipe_or_step_that_has_no_results_is_named(
    space: Space, recipe: Recipe, tmp_path: Path
) -> None:
    said = recipe("results", "u@1")
    assert said.code == 3 and "no runs of u@1 in this workspace" in said.err
    said = recipe("results", "--step", "keep")
    assert said.code == 3 and 'no result of "keep"' in said.err
    (tmp_path / "empty").mkdir()
    assert recipe("results", "-C", str(tmp_path / "empty")).code == 3


def test_a_matrix_run_says_how_to_compare_its_instances(space: Space, recipe: Recipe) -> None:
    said = recipe("run", str(space.root / "recipe.yaml"), "scale=5", "rates=1")
    assert said.code == 0 and said.err.splitlines()[-1] == "compare them: recipe results t@1"
    assert "compare" not in recipe("run", str(space.root / "recipe.yaml"), "scale=5", "rates=1").err


def test_a_sweep_lists_what_the_recipe_that_it_uses_had_made_alone(
    tmp_path: Path, recipe: Recipe
) -> None:
    space = Space(tmp_path / "uses")
    space.recipe(
        "recipe: inner@1\nsummary: x\ninputs: {lr: {type: integer, default: 1}}\nsteps:\n"
        "  fit: {run: 'echo loss={{ inputs.lr }}; touch {{ outputs.o }}', outputs: {o: o}, metrics: {pattern: 'loss=(?P<loss>[0-9]+)'}}\n",
        name="inner.yaml",
    )
    space.recipe(
        "steps: {t: {uses: ./inner.yaml, matrix: {lr: [1, 2]}, with: {lr: '{{ matrix.lr }}'}}}"
    )
    assert recipe("run", "-q", "./inner.yaml", "-C", str(space.root)).code == 0
    assert recipe("run", "-q", "-C", str(space.root)).code == 0
    rows = json.loads(recipe("results", "--json", "-C", str(space.root)).out)["results"]
    assert [(row["step"], row["inputs"]["lr"], row["metrics"]["loss"]["last"]) for row in rows] == [
        ("t[lr=1]/fit", 1, 1),
        ("t[lr=2]/fit", 2, 2),
    ]
    assert rows[0]["run"] != rows[1]["run"] and rows[0]["best"]
