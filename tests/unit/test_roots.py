"""Where the paths of a recipe begin, as text."""

from __future__ import annotations

import pytest

from runner.language import document, parse
from runner.planning.roots import from_root, move_root

RECIPE = b"""\
recipe: t@1
summary: A test
code: [../src/*.py, lib.py, {glob: ./own/*.py, exclude: [./own/not.py]}]
python: {lock: ./packages.lock}
steps:
  a:
    run: [python, src/a.py]
    deps: [../data/x.txt, ./beside.txt, plain.txt]
    matrix: {f: {glob: "../data/*.csv"}}
    code: [./a.py, {git: ../lib.git, commit: "0123456789abcdef0123456789abcdef01234567", at: lib}]
    outputs: [a.txt]
"""


@pytest.mark.parametrize(
    ("path", "folder", "found"),
    [
        ("train.py", "configs", "train.py"),
        ("./train.py", "configs", "configs/train.py"),
        ("../src/train.py", "configs", "src/train.py"),
        ("../../src/a.py", "configs/big", "src/a.py"),
        ("./../src//a.py", "configs", "src//a.py"),
        ("../../a.py", "configs", "../../a.py"),
        ("./a.py", "", "a.py"),
        ("../a.py", "", "../a.py"),
        ("../data/{{ inputs.name }}.csv", "configs", "data/{{ inputs.name }}.csv"),
        (".hidden", "configs", ".hidden"),
    ],
)
def test_only_a_path_with_dots_in_front_begins_at_the_recipe(
    path: str, folder: str, found: str
) -> None:
    assert from_root(path, folder) == found


def test_every_path_of_a_recipe_below_the_root_begins_there() -> None:
    recipe = move_root(
        parse.recipe(document.parse(RECIPE, "t.yaml")), "/repo/configs/t.yaml", "/repo"
    )
    step = recipe.steps["a"]
    assert (
        recipe.home == "/repo"
        and recipe.python is not None
        and recipe.python.lock == "configs/packages.lock"
    )
    assert [getattr(each, "pattern", each) for each in recipe.code] == [
        "src/*.py",
        "lib.py",
        "configs/own/*.py",
    ]
    assert getattr(recipe.code[2], "exclude", ()) == ("configs/own/not.py",)
    assert step.deps == ("data/x.txt", "configs/beside.txt", "plain.txt")
    assert step.matrix == {"f": {"glob": "data/*.csv"}}
    assert (
        step.code is not None
        and step.code[0] == "configs/a.py"
        and getattr(step.code[1], "url", "") == "lib.git"
    )


@pytest.mark.parametrize("source", ["/elsewhere/t.yaml", "/repo-2/t.yaml"])
def test_a_recipe_from_outside_keeps_its_folder(source: str) -> None:
    recipe = parse.recipe(document.parse(RECIPE, source))
    assert move_root(recipe, source, "/repo") is recipe
