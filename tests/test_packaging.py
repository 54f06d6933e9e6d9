"""What is installed is what is here: the built wheel, alone in an empty environment, lists, checks and runs recipes from anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runner.language import library

HOME = library.home()
# Nothing of this checkout may be found by accident: no PYTHONPATH, no cwd of ours, no caller's environment.
CLEAN = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR") or name.startswith(("PIP_", "SSL_"))}

TWO_STEPS = """\
recipe: two@1
summary: Count what was said
inputs: {words: {type: string, default: to be or not to be}}
steps:
  say:
    run: printf '%s\\n' {{ inputs.words }} > said.txt
    outputs: {said: said.txt}
  count:
    run: wc -w < {{ steps.say.said }} > count.txt
    outputs: {count: count.txt}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(HOME)]
    subprocess.run(pip, check=True, timeout=120)
    (found,) = folder.glob("recipe-*.whl")
    return found


@pytest.fixture(scope="module")
def bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of an environment are that has the wheel, what it needs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", str(wheel)], check=True, timeout=300, env=CLEAN)
    return folder / "bin"


def recipe(bin: Path, cwd: Path, *words: str) -> str:
    done = subprocess.run([bin / "recipe", *words], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shipped() -> set[str]:
    """Files of the checkout that a user of the program needs."""
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "recipes", "schemas", "fixtures"], cwd=HOME, capture_output=True, text=True)
        if listed.returncode == 0 and listed.stdout:
            return {name for name in listed.stdout.splitlines() if (HOME / name).is_file()}
    return {
        path.relative_to(HOME).as_posix() for part in ("recipes", "schemas") for path in (HOME / part).rglob("*.*") if "__pycache__" not in str(path)
    }


def test_the_wheel_has_every_recipe_trainer_schema_and_fixture(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {f"runner/shipped/{name}" for name in shipped()} <= names
    # The editable install finds the same ones in the checkout itself.
    assert all((library.home() / name).is_file() for name in shipped())


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        tops = {name.split("/")[0] for name in file.namelist()}
        assert not [name for name in file.namelist() if name.endswith(".pyc") or "__pycache__" in name]
    assert tops - {"runner", "drivers"} == {next(top for top in tops if top.endswith(".dist-info"))}


def test_an_installed_recipe_lists_the_library_and_prints_the_schema(bin: Path, tmp_path: Path) -> None:
    listed = recipe(bin, tmp_path, "list")
    assert [entry.id for entry in library.entries() if entry.id not in listed] == []
    assert json.loads(recipe(bin, tmp_path, "schema")) == json.loads(library.schema_text())


def test_an_installed_recipe_plans_a_recipe_of_the_library(bin: Path, tmp_path: Path) -> None:
    plan = json.loads(recipe(bin, tmp_path, "plan", "sft@1", "--preset", "smoke", "--json"))
    assert [step["answer"] for step in plan["steps"]].count("run") >= 1


def test_an_installed_recipe_runs_one_of_your_own(bin: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(TWO_STEPS)
    recipe(bin, tmp_path, "run")
    assert (tmp_path / "count.txt").read_text().strip() == "6"
    answers = json.loads(recipe(bin, tmp_path, "plan", "--json"))["steps"]
    assert {step["id"]: step["answer"] for step in answers} == {"say": "fresh", "count": "fresh"}
