"""What would take minutes or gigabytes, or never end, is refused in a sentence: plans without bound, and files that are none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import runner
from runner.errors import NotFound
from runner.planning import axes
from runner.survey import validation
from tests.support import Space


def test_a_matrix_of_a_million_is_refused_before_it_is_expanded(space: Space) -> None:
    axes = {axis: [*range(1000)] for axis in "ab"}
    space.recipe(
        {
            "steps": {
                "sweep": {"matrix": axes, "run": "true"},
                "after": {"run": "true", "needs": ["sweep"]},
            }
        }
    )
    begun = time.process_time()
    (found,) = validation.check_file(space.root / "recipe.yaml", space.root, {})
    assert time.process_time() - begun < 2
    assert (
        found.code == "too-many-steps"
        and "1,000 × 1,000" in found.message
        and found.fix
        and space.pointed(found) == '"matrix"'
    )


def test_all_steps_count_also_those_of_recipes_that_are_used(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(axes, "MOST_STEPS", 6)
    space.recipe(
        "recipe: inner@1\nsummary: x\nsteps: {a: {run: 'true'}, b: {run: 'true'}}",
        name="inner.yaml",
    )
    space.recipe({"steps": {"u": {"uses": "./inner.yaml", "matrix": {"n": [1, 2, 3]}}}})
    assert len(space.answers()) == 6
    space.recipe({"steps": {"u": {"uses": "./inner.yaml", "matrix": {"n": [1, 2, 3, 4]}}}})
    (found,) = space.problems()
    assert found.code == "too-many-steps" and "more than 6 steps" in found.message


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte without a block


KINDS = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a file of a terabyte": huge,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_recipe_file_is_refused_at_once(space: Space, kind: str) -> None:
    KINDS[kind](space.root / "odd.yaml")
    space.recipe("steps: {u: {uses: ./odd.yaml}}")
    (found,) = space.problems()
    assert found.code == "unknown-recipe" and "cannot read odd.yaml: it is " in found.message
    assert validation.check_file(space.root / "recipe.yaml", space.root, {}) == [found]
    with pytest.raises(
        NotFound,
        match=r"odd\.yaml.* (is not a regular file|is a directory|it is larger than 24 MB)",
    ):
        runner.plan("./odd.yaml", workspace=space.root)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("recipe.toml", "a pipe"),
        ("recipe.lock", "a file of a terabyte"),
        ("gotchas.yaml", "a pipe"),
        ("req.txt", "a device"),
    ],
)
def test_what_is_read_whole_is_a_file_of_some_size(space: Space, name: str, kind: str) -> None:
    KINDS[kind](space.root / name)
    step: dict[str, object] = {"run": ["cat", "{{ inputs.d }}"]}
    if name == "req.txt":
        step["python"] = {"lock": "req.txt"}
    address = "hf://datasets/none/none" if name == "recipe.lock" else "recipe.yaml"
    space.recipe({"inputs": {"d": {"type": "dataset", "default": address}}, "steps": {"a": step}})
    process = space.start("check", "./recipe.yaml", env={"HF_HUB_OFFLINE": "1"})
    out, err = process.communicate(timeout=60)
    assert process.returncode in (2, 3) and name in out + err and "Traceback" not in err, out + err
