"""What is installed is what is here: the built wheel, alone in an empty environment, lists, checks and runs recipes from anywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from runner.hosts import uv
from runner.language import library
from runner.paths import shipped

HOME = shipped()
# Nothing of this checkout may be found by accident: no PYTHONPATH, no cwd of ours, no caller's environment.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name in ("PATH", "HOME", "LANG", "TMPDIR") or name.startswith(("PIP_", "UV_", "SSL_"))
}

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
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(HOME),
    ]
    subprocess.run(pip, check=True, timeout=120)
    (found,) = folder.glob("recipe_runner-*.whl")
    return found


@pytest.fixture(scope="module")
def bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `uv tool install` of the wheel puts the command: an environment of its own, with what it needs and nothing else."""
    folder = tmp_path_factory.mktemp("tools")
    places = {
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "UV_PYTHON": sys.executable,
    }
    subprocess.run(
        [uv.find_uv(), "tool", "install", "--quiet", str(wheel)],
        check=True,
        timeout=300,
        env=CLEAN | places,
    )
    return folder / "bin"


PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = [
    path
    for part in ("runner", "drivers", "recipes/trainers")
    for path in sorted((HOME / part).rglob("*.py"))
]
PAGES = [
    HOME / name
    for name in (
        "Makefile",
        "constraints.txt",
        ".ci",
        ".github",
        "benchmarks",
        "docs",
        "examples",
        "recipes",
        "schemas",
        "tests",
    )
]
TEXTS = [
    *SOURCES,
    *HOME.glob("*.md"),
    *HOME.glob("*.toml"),
    *(
        path
        for page in PAGES
        for path in [page, *page.rglob("*")]
        if path.is_file() and path.suffix != ".pyc"
    ),
]
BRACKETS = re.compile(r"\b([\w-]+)\[([a-z0-9]+(?:,[a-z0-9]+)*)\]")


def test_nothing_here_installs_the_other_project_called_recipe() -> None:
    """`recipe` on PyPI is somebody else's: ours is recipe-runner, wherever an extra is named."""
    wrong = []
    for path in TEXTS:
        for line in path.read_bytes().decode("utf-8", "replace").splitlines():
            named = (
                [
                    (name, extra)
                    for name, extras in BRACKETS.findall(line)
                    for extra in extras.split(",")
                ]
                if "recipe" in line
                else []
            )
            wrong += [
                f"{path.relative_to(HOME)}: {line.strip()}"
                for name, extra in named
                if name == "recipe" and extra in EXTRAS
            ]
            wrong += [
                f"{path.relative_to(HOME)}: {line.strip()}"
                for name, extra in named
                if name == "recipe-runner" and extra not in EXTRAS
            ]
            if re.search(r"pip install (-\S+ )*['\"]?recipe\b(?!-runner)", line) and path != Path(
                __file__
            ):
                wrong.append(f"{path.relative_to(HOME)}: {line.strip()}")
    assert wrong == []


def test_no_page_installs_from_an_index_that_does_not_have_it() -> None:
    """recipe-runner is on no index: a command names a checkout, or the address of a copy."""
    named = re.compile(r"\binstall\b[^|`]*\brecipe-runner\b(?!\[[\w,]+\] @ )")
    pages = [
        path
        for path in TEXTS
        if path.suffix in (".md", ".yml", ".yaml") and path.name != "CHANGELOG.md"
    ]
    assert len(pages) > 50
    assert [
        f"{path.relative_to(HOME)}: {line.strip()}"
        for path in pages
        for line in path.read_text("utf-8").splitlines()
        if named.search(line)
    ] == []


def test_what_a_message_says_to_install_exists() -> None:
    import drivers

    extras = {extra for _, extra in drivers.DRIVERS.values() if extra}
    asked = re.findall(
        r"install_line\(([^)]*)\)|module_of_extra\([^)]*, (\"\w+\")\)",
        "\n".join(path.read_text("utf-8") for path in SOURCES),
    )
    words = {word for call in asked for word in re.findall(r"[\"'](\w+)[\"']", "".join(call))}
    assert {"train", "s3", "gcs", "server", "client", "postgres"} <= words
    assert words | extras <= set(EXTRAS)


def test_an_extra_brings_what_code_here_uses() -> None:
    modules = {"pillow": "PIL"}
    text = "\n".join(path.read_text("utf-8") for path in SOURCES)
    names = [
        re.split(r"[\[>=]", line)[0]
        for extra, lines in EXTRAS.items()
        if extra != "dev"
        for line in lines
    ]
    assert [
        name
        for name in names
        if name != PROJECT["name"] and not re.search(rf"\b{modules.get(name, name)}\b", text)
    ] == []


def test_nothing_points_to_an_address_that_is_not_ours() -> None:
    assert "urls" not in PROJECT
    assert [path for path in TEXTS if b"github.com/recipe-" + b"runner" in path.read_bytes()] == []


def recipe(bin: Path, cwd: Path, *words: str) -> str:
    done = subprocess.run(
        [bin / "recipe", *words], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_that_ship() -> set[str]:
    """Files of the checkout that a user of the program needs."""
    if shutil.which("git"):
        listed = subprocess.run(
            ["git", "ls-files", "recipes", "schemas", "fixtures"],
            cwd=HOME,
            capture_output=True,
            text=True,
        )
        if listed.returncode == 0 and listed.stdout:
            return {name for name in listed.stdout.splitlines() if (HOME / name).is_file()}
    return {
        path.relative_to(HOME).as_posix()
        for part in ("recipes", "schemas")
        for path in (HOME / part).rglob("*.*")
        if "__pycache__" not in str(path)
    }


def test_the_wheel_has_every_recipe_trainer_schema_and_fixture(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {f"runner/shipped/{name}" for name in files_that_ship()} <= names
    # The editable install finds the same ones in the checkout itself.
    assert all((shipped() / name).is_file() for name in files_that_ship())


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        tops = {name.split("/")[0] for name in file.namelist()}
        assert not [
            name for name in file.namelist() if name.endswith(".pyc") or "__pycache__" in name
        ]
    assert tops - {"runner", "drivers"} == {next(top for top in tops if top.endswith(".dist-info"))}


def test_an_installed_recipe_lists_the_library_and_prints_the_schema(
    bin: Path, tmp_path: Path
) -> None:
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


def test_an_installed_recipe_runs_the_script_of_a_repository_in_its_own_environment(
    bin: Path, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")],
        check=True,
        timeout=120,
    )
    (tmp_path / "train.py").write_text(
        "import importlib.util, sys\nprint(sys.prefix, importlib.util.find_spec('runner'), file=open('out.txt', 'w'))\n"
    )
    (tmp_path / "recipe.yaml").write_text(
        "recipe: own@1\nsteps:\n  train: {run: [python, train.py], code: auto, outputs: {o: out.txt}}\n"
    )
    recipe(bin, tmp_path, "run")
    assert (tmp_path / "out.txt").read_text() == f"{tmp_path / '.venv'} None\n"
