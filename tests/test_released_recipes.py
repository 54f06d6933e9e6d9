"""A released recipe never changes, nor does what its steps run: `fixtures/recipes.lock` has the SHA-256 of every file of every released recipe.

make release        add the recipes that are new; one that is listed is never listed anew
sha256sum --check --quiet fixtures/recipes.lock
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from runner.language import parse
from runner.paths import shipped

HOME = shipped()
LOCK = HOME / "fixtures" / "recipes.lock"


def files_of(recipe: Path) -> list[Path]:
    """The recipe file, and every file of its folder that its code and locks name."""
    found = parse.load(recipe)
    patterns = {
        pattern
        for part in (found, *found.steps.values())
        for pattern in part.code or ()
        if isinstance(pattern, str)
    }
    patterns |= {
        part.python.lock
        for part in (found, *found.steps.values(), *found.presets.values())
        if part.python is not None
    }
    return sorted(
        {recipe}
        | {path for pattern in patterns for path in recipe.parent.glob(pattern) if path.is_file()}
    )


def locked(text: str) -> dict[str, str]:
    """path -> digest."""
    return {path: digest for digest, path in (line.split("  ", 1) for line in text.splitlines())}


def complaints(home: Path, text: str) -> list[str]:
    """What is wrong with the released recipes below `home`."""
    lock, found = locked(text), []
    for recipe in sorted(home.glob("recipes/*@*.yaml")):
        name = recipe.relative_to(home).as_posix()
        if name not in lock:
            found.append(f"{name} is not in fixtures/recipes.lock: run `make release`")
            continue
        for path in files_of(recipe):
            if path.relative_to(home).as_posix() not in lock:
                found.append(
                    f"{path.relative_to(home)} is new in {name}, which is released: give the recipe a new version"
                )
    for name, digest in lock.items():
        if not (home / name).is_file():
            found.append(f"{name} is gone, and a released recipe needs it")
        elif hashlib.sha256((home / name).read_bytes()).hexdigest() != digest:
            found.append(
                f"{name} has changed since it was released: put it back, and give what is new a new version or name"
            )
    return found


def release(home: Path, text: str) -> str:
    """The lock with the recipes that it does not have yet."""
    lock = locked(text)
    for recipe in home.glob("recipes/*@*.yaml"):
        if recipe.relative_to(home).as_posix() not in lock:
            for path in files_of(recipe):
                lock.setdefault(
                    path.relative_to(home).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()
                )
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(lock.items()))


def test_released_recipes_are_as_they_were() -> None:
    assert complaints(HOME, LOCK.read_text("utf-8")) == []


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A library of one recipe."""
    (tmp_path / "recipes" / "trainers").mkdir(parents=True)
    (tmp_path / "recipes" / "trainers" / "t.py").write_text("print()\n")
    (tmp_path / "recipes" / "a@1.yaml").write_text(
        "recipe: a@1\nsummary: A\nsteps: {s: {run: [python, trainers/t.py], code: [trainers/*.py]}}\n"
    )
    return tmp_path


def test_what_is_not_released_is_asked_for(shelf: Path) -> None:
    assert complaints(shelf, "") == [
        "recipes/a@1.yaml is not in fixtures/recipes.lock: run `make release`"
    ]
    assert complaints(shelf, release(shelf, "")) == []


@pytest.mark.parametrize("name", ["recipes/a@1.yaml", "recipes/trainers/t.py"])
def test_a_change_of_a_released_file_is_found_and_not_accepted(shelf: Path, name: str) -> None:
    lock = release(shelf, "")
    (shelf / name).write_text((shelf / name).read_text() + "\n")
    assert complaints(shelf, lock) == [
        f"{name} has changed since it was released: put it back, and give what is new a new version or name"
    ]
    assert release(shelf, lock) == lock


def test_a_file_that_joins_or_leaves_a_released_recipe_is_found(shelf: Path) -> None:
    lock = release(shelf, "")
    (shelf / "recipes" / "trainers" / "u.py").write_text("")
    assert complaints(shelf, lock) == [
        "recipes/trainers/u.py is new in recipes/a@1.yaml, which is released: give the recipe a new version"
    ]
    (shelf / "recipes" / "trainers" / "u.py").unlink()
    (shelf / "recipes" / "trainers" / "t.py").unlink()
    assert complaints(shelf, lock) == [
        "recipes/trainers/t.py is gone, and a released recipe needs it"
    ]


if __name__ == "__main__":
    before = LOCK.read_text("utf-8") if LOCK.exists() else ""
    LOCK.write_text(release(HOME, before), "utf-8")
    sys.exit("\n".join(complaints(HOME, LOCK.read_text("utf-8"))) or None)


@pytest.mark.parametrize(
    "path", sorted((HOME / "recipes").glob("*@*.yaml")), ids=lambda each: each.stem
)
def test_steps_that_compute_nothing_on_a_gpu_ask_for_none(path: Path) -> None:
    """What is decided before a machine is rented, and what follows its work, must not rent one."""
    recipe = parse.load(path)
    for id in {"data", "guard", "sheet", "plot", "export", "publish", "compare", "merge"} & {
        *recipe.steps
    }:
        asked = recipe.steps[id].resources.over(recipe.resources)
        assert asked.gpus == 0, id
