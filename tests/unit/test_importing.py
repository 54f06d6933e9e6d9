"""The importers accept any YAML: a value of an unexpected type becomes a note, never a traceback."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest

from runner.interface.importing import (
    ImportedRecipe,
    from_dvc,
    from_sky,
    parameter_files,
    text_of,
)
from runner.interface.importing_snakemake import from_snakemake

PIPELINE: dict[str, Any] = {
    "vars": ["other.yaml", {"local": 1}],
    "stages": {
        "train": {
            "cmd": ["python train.py ${lr}", "echo done"],
            "wdir": "src",
            "deps": ["train.py", {"data": {"hash": "md5"}}],
            "params": ["lr", {"other.yaml": ["seed"]}, {"params.yaml": None}],
            "outs": [{"model": {"persist": True}}, "log.txt"],
            "metrics": [{"m.json": {"cache": False}}],
            "plots": ["p.csv"],
            "always_changed": True,
            "frozen": True,
        },
        "each": {
            "foreach": [{"lr": 1}, {"lr": 2}],
            "do": {"cmd": "echo ${item.lr}", "outs": ["${item.lr}.txt"]},
        },
        "grid": {"matrix": {"a": [1, 2], "b": "${seed}"}, "cmd": "echo ${item.a}"},
    },
    "plots": [{"p": {"x": "y"}}],
}
PARAMS: dict[str, Any] = {
    "params.yaml": {"lr": 0.1, "net": {"depth": [1, 2]}},
    "src/params.yaml": {"lr": 0.1, "net": {"depth": [1, 2]}},
    "src/other.yaml": {"seed": 1},
}
TASK: dict[str, Any] = {
    "name": "tune",
    "workdir": "src",
    "num_nodes": 2,
    "envs": {"A": "1", "B": None},
    "secrets": {"HF_TOKEN": None},
    "file_mounts": {"/data": "s3://bucket/data", "/code": "code", "/m": {"source": "s3://b/m"}},
    "resources": {
        "accelerators": [{"A100": 8}, "H100:1"],
        "cpus": "4+",
        "memory": 32,
        "disk_size": 100,
        "use_spot": True,
        "image_id": "docker:a",
        "any_of": [{"region": "x"}],
    },
    "setup": "pip install a",
    "run": "echo $SKYPILOT_NODE_RANK $SKYPILOT_TASK_ID",
}
STRANGE: tuple[Any, ...] = (
    None, True, -1, 10**400, float("inf"), float("nan"), "", "x", "${a.b", "\0", b"x", date(2026, 1, 2),
    [], [None], [[]], [{}], ["x", 5], {}, {5: None}, {None: []}, {"x": None}, {"x": {"y": []}}, {(1, 2): {5}},
)  # fmt: skip


def _dvc(pipeline: dict[str, Any], params: dict[str, Any] = PARAMS) -> ImportedRecipe:
    parameter_files(pipeline)
    return from_dvc("p", pipeline, "", params, lambda path: False, lambda path: "file")


def _sky(task: dict[str, Any]) -> ImportedRecipe:
    return from_sky("p", task, "", ["src/a.py"], ["A100", "H100"])


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a document with each of its keys or positions."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _mutants(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document with one value replaced, for each value and each strange value."""
    for n in range(len(list(_places(document)))):
        for strange in STRANGE:
            mutant = copy.deepcopy(document)
            container, key = list(_places(mutant))[n]
            container[key] = strange
            yield mutant


def test_a_dvc_file_with_a_value_of_any_type_becomes_a_draft() -> None:
    for mutant in _mutants(PIPELINE):
        text_of(_dvc(mutant), "dvc.yaml")
    for mutant in _mutants(PARAMS):
        usable = {path: read for path, read in mutant.items() if isinstance(read, dict)}
        text_of(_dvc(PIPELINE, usable), "dvc.yaml")


def test_a_task_of_skypilot_with_a_value_of_any_type_becomes_a_draft() -> None:
    for mutant in _mutants(TASK):
        text_of(_sky(mutant), "task.yaml")


@pytest.mark.parametrize(("document", "convert"), [(PIPELINE, _dvc), (TASK, _sky)])
def test_documents_with_several_values_of_any_type_become_drafts(
    document: dict[str, Any], convert: Any
) -> None:
    chance = random.Random(7)
    for _ in range(400):
        mutant = copy.deepcopy(document)
        for _ in range(chance.randint(2, 5)):
            container, key = chance.choice(list(_places(mutant)) or [(mutant, "x")])
            container[key] = copy.deepcopy(chance.choice(STRANGE))
        text_of(convert(mutant), "it")


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (None, "stage t is not a mapping and was not converted"),
        ({"cmd": "a", "foreach": None, "do": {"cmd": "a"}}, "`foreach` of t is not a list or a mapping and was not converted"),
        ({"cmd": "a", "matrix": ["x"]}, "`matrix` of t is not a mapping and was not converted"),
        ({"cmd": "a", "matrix": {"x": None}}, "`x` of the matrix of t is not a list and was not converted"),
        ({"foreach": ["a"], "do": None}, "t has no `cmd`: write the command into `run`"),
        ({"cmd": None}, "t has no `cmd`: write the command into `run`"),
        ({"cmd": {"a": 1}}, "`cmd` of t is not a text and was not converted"),
        ({"cmd": "a", "deps": [["x"]]}, "`deps` of t is not a list of paths and was not converted"),
        ({"cmd": "a", "outs": [None]}, "`outs` of t is not a list of paths and was not converted"),
        ({"cmd": "a", "params": [None]}, "`params` of t is not a list of names and was not converted"),
        ({"cmd": "a", "wdir": []}, "`wdir` of t is not a text and was not converted"),
    ],
)  # fmt: skip
def test_an_unexpected_value_of_a_stage_is_named_in_a_note(body: Any, note: str) -> None:
    made = _dvc({"stages": {"t": body}})
    assert note in made.look and not any("None" in str(step) for step in made.recipe["steps"])


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("run", ["a"], "`run` of the task is not a text and was not converted"),
        ("workdir", {"url": "x"}, "`workdir` of the task is not a text and was not converted"),
        ("num_nodes", "two", "`num_nodes` of the task is not a number and was not converted"),
        ("envs", ["A"], "`envs` of the task is not a mapping and was not converted"),
        ("envs", {"A": []}, "`A` of `envs` is not a text and was not converted"),
        ("secrets", 5, "`secrets` of the task is not a mapping and was not converted"),
        ("file_mounts", {"/a": None}, "`/a` of `file_mounts` has no source and was not converted"),
        ("resources", ["x"], "`resources` of the task is not a mapping and was not converted"),
        ("resources", {"cpus": []}, "`cpus` of `resources` is not a number and was not converted"),
        ("setup", ["a"], "`setup` of the task is not a text and was not converted"),
    ],
)
def test_an_unexpected_value_of_a_task_is_named_in_a_note(key: str, value: Any, note: str) -> None:
    assert note in _sky({"run": "a", key: value}).look


def _rule(name: str, **sections: Any) -> dict[str, Any]:
    empty = {"input": [], "output": [], "log": [], "params": [], "shell": None, "other": []}
    return {"name": name, **empty, **sections}


def _snake(target: str | None, *rules: dict[str, Any]) -> ImportedRecipe:
    return from_snakemake("p", {"target": target, "rules": list(rules)}, lambda path: "file")


def test_a_snakefile_without_rules_has_no_steps() -> None:
    made = _snake(None)
    assert made.recipe["steps"] == {} and made.look == ["the Snakefile has no rule as its target"]


def test_a_rule_that_is_needed_with_and_without_a_wildcard_keeps_the_matrix() -> None:
    made = _snake(
        "all",
        _rule("all", input=[["", "all.txt"], ["", "a.txt"], ["", "b.txt"]]),
        _rule("count", output=[["", "all.txt"], ["", "{s}.txt"]], shell="count {output}"),
    )
    assert made.recipe["steps"]["count"]["matrix"] == {"s": ["a", "b"]}
    note = "rule count is also required with no wildcards: add a step for it"
    assert note in made.look


def test_a_function_as_output_or_log_does_not_shift_the_other_templates() -> None:
    made = _snake(
        "t",
        _rule(
            "t",
            output=[["", None], ["b", "b.txt"]],
            log=[["", None], ["", "t.log"]],
            shell="run > {output.b} 2> {log[1]} {output[1]}",
        ),
    )
    step = made.recipe["steps"]["t"]
    assert step["outputs"] == {"b": "b.txt", "t": "t.log"}
    assert step["run"] == "run > {{ outputs.b }} 2> {{ outputs.t }} {{ outputs.b }}"
    assert "an output of rule t is a function: add its paths to `outputs`" in made.look


@pytest.mark.parametrize("shell", ["echo }", "echo {", "echo {input", "echo {0!}"])
def test_a_command_whose_braces_do_not_match_is_kept_with_a_note(shell: str) -> None:
    made = _snake("t", _rule("t", output=[["", "a"]], shell=shell))
    assert made.recipe["steps"]["t"]["run"] == shell
    assert "rule t: its command has unmatched braces: replace its fields by values" in made.look


def test_stages_and_rules_whose_names_become_the_same_word_keep_steps_of_their_own() -> None:
    made = _dvc({"stages": {"a-b": {"cmd": "x"}, "a_b": {"cmd": "y"}}})
    assert {name: step["run"] for name, step in made.recipe["steps"].items()} == {"a_b": "x", "a_b_2": "y"}  # fmt: skip
    first = _rule("A", output=[["", "first"]], shell="x")
    second = _rule("a", input=[["", "first"]], output=[["", "second"]], shell="y")
    assert list(_snake("a", first, second).recipe["steps"]) == ["a", "a_2"]
