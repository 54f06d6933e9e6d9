"""What `python: {lock: …}` takes: files that are locks, and files that are locked first; and `recipe lock`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.packages import Index
from tests.support import Space

STEP = "steps: {one: {run: 'python -c \"import tinyword; print(tinyword.word)\" > o.txt', outputs: {o: o.txt}}}\n"
PROJECT = '[project]\nname = "mine"\nversion = "0.1"\nrequires-python = ">=3.9"\ndependencies = ["tinyword"]\n'


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path) as index:
        index.wheel("tinyword", "word = 'said'\n")
        yield index


@pytest.mark.parametrize(
    ("name", "text"), [("requirements.txt", "tinyword\n"), ("pyproject.toml", PROJECT)]
)
def test_what_pins_nothing_is_locked_first_and_again_when_it_changes(
    space: Space, index: Index, name: str, text: str
) -> None:
    space.write(name, text)
    space.recipe(f"python: {{lock: {name}}}\n{STEP}")
    code, _, said = space.command("run", env=index.environ)
    assert code == 0 and space.read("o.txt") == "said\n", said
    lock = name.rpartition(".")[0] + ".lock"
    assert re.match(
        rf"# Made by recipe lock from {name} .*\ntinyword==1.0 \\\n    --hash=sha256:",
        space.read(lock),
    )
    asked = len(index.asked)
    assert "fresh" in space.command("run", env=index.environ)[2] and len(index.asked) == asked
    index.wheel("newer", "")
    space.write(
        name, text.replace("tinyword", "newer") if name.endswith("toml") else f"{text}newer\n"
    )
    assert "1 to run" in space.command("plan", env=index.environ)[1] and "newer==1.0" in space.read(
        lock
    )


def test_the_lock_of_somebody_else_is_taken_as_it_is(space: Space, index: Index) -> None:
    space.write("requirements.txt", "nosuch\n")
    space.write("requirements.lock", index.wheel("tinyword", "word = 'theirs'\n"))
    space.recipe(f"python: {{lock: requirements.txt}}\n{STEP}")
    assert space.command("run", env=index.environ)[0] == 0 and space.read("o.txt") == "theirs\n"


def test_a_lock_of_uv_is_taken_without_the_project_itself(space: Space, index: Index) -> None:
    pin = index.wheel("tinyword", "word = 'said'\n").split("sha256:")[1].strip()
    url = f"{index.environ['PIP_INDEX_URL'].removesuffix('/simple')}/wheels/tinyword-1.0-py3-none-any.whl"
    space.write("pyproject.toml", PROJECT)
    source = f'source = {{ registry = "{index.environ["PIP_INDEX_URL"].replace("someone:secret@", "")}" }}'
    mine = '[[package]]\nname = "mine"\nversion = "0.1"\nsource = { virtual = "." }\ndependencies = [{ name = "tinyword" }]\n'
    mine += '[package.metadata]\nrequires-dist = [{ name = "tinyword" }]\n'
    tiny = f'[[package]]\nname = "tinyword"\nversion = "1.0"\n{source}\nwheels = [{{ url = "{url}", hash = "sha256:{pin}" }}]\n'
    space.write("uv.lock", f'version = 1\nrevision = 3\nrequires-python = ">=3.9"\n{mine}{tiny}')
    for lock in ("uv.lock", "pyproject.toml"):
        space.recipe(f"python: {{lock: {lock}}}\n{STEP}")
        code, _, said = space.command("run", "-B", env=index.environ)
        assert code == 0 and space.read("o.txt") == "said\n", said
    assert "uv.lock already locks" in space.command("lock", env=index.environ)[2]


def test_recipe_lock_writes_the_lock_and_keeps_its_pins(space: Space, index: Index) -> None:
    space.write("src/requirements.txt", "tinyword\n")
    assert "found none of" in space.command("lock", env=index.environ)[2]
    code, out, said = space.command("lock", "src/requirements.txt", env=index.environ)
    assert code == 0 and out == "src/requirements.lock: 1 package\n", said
    index.wheel("tinyword", version="2.0")
    cached = {**index.environ, "UV_CACHE_DIR": str(space.root / "other")}
    assert space.command("lock", "src/requirements.txt", env=cached)[
        0
    ] == 0 and "==1.0" in space.read("src/requirements.lock")
    assert space.command("lock", "src/requirements.txt", "--upgrade", env=cached)[
        0
    ] == 0 and "==2.0" in space.read("src/requirements.lock")
    assert "is already a lock file" in space.command("lock", "src/requirements.lock", env=cached)[2]


def test_what_cannot_be_locked_is_reported_before_anything_starts(
    space: Space, index: Index
) -> None:
    space.write("requirements.txt", "nosuch\n")
    space.recipe(f"python: {{lock: requirements.txt}}\n{STEP}")
    code, _, said = space.command("run", env=index.environ)
    assert code == 2 and "cannot lock requirements.txt: " in said and "nosuch was not found" in said


@pytest.mark.parametrize("name", ["environment.yml", "conda-lock.yml", "poetry.lock", "Pipfile"])
def test_the_lock_of_another_tool_is_refused_with_what_to_do(space: Space, name: str) -> None:
    space.recipe(f"python: {{lock: {name}}}\n{STEP}")
    code, out, said = space.command("validate")
    assert code == 3 and f"unsupported lock file: {name}" in out + said and "fix: " in out + said
