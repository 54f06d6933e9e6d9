"""Every path that a recipe names stays where it belongs: what is written, in its attempt; what is read, in the workspace or beside the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import Problem
from runner.survey import validation
from tests.support import Space

COMMIT = "0" * 40
OUTSIDE = ["../out", "/tmp/out", "~/out", "a/../../out"]


def validated(space: Space) -> list[Problem]:
    return validation.check_file(space.root / "recipe.yaml", space.root, {})


def literal(path: str) -> dict[str, dict[str, Any]]:
    """One step for each place in which a path stands as it is."""
    return {
        "output": {"outputs": {"o": path}},
        "listed": {"outputs": [path]},
        "files": {"files": {path: "x"}},
        "state": {"state": {"s": {"path": path}}},
        "git": {"code": [{"git": "https://example.org/x", "commit": COMMIT, "at": path}]},
        "metrics": {"metrics": {"file": path}},
        "code": {"code": [path]},
        "code glob": {"code": [{"glob": path}]},
        "dep": {"deps": [path]},
        "dep glob": {"deps": [{"glob": f"{path}/*"}]},
        "axis": {"matrix": {"f": {"glob": f"{path}/*.txt"}}},
    }


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("place", literal(""))
def test_a_path_that_leaves_is_a_problem_of_the_file(space: Space, place: str, path: str) -> None:
    space.recipe({"steps": {"a": {"run": "true", **literal(path)[place]}}})
    (found,) = validated(space)
    assert (
        found.code == "path-escape"
        and path in found.message
        and "leaves" in found.message
        and found.fix
        and path in space.pointed(found)
    )


@pytest.mark.parametrize("place", ["output", "files", "state"])
def test_nothing_is_written_into_our_own_folder(space: Space, place: str) -> None:
    space.recipe({"steps": {"a": {"run": "true", **literal(".recipe/recipe.db")[place]}}})
    (found,) = validated(space)
    assert found.code == "path-escape" and "is in .recipe" in found.message


def test_steps_that_wait_for_files_are_looked_at_too(space: Space) -> None:
    space.recipe(
        {
            "steps": {
                "make": {"run": "true", "outputs": {"d": "d/"}},
                "each": {"matrix": {"f": {"glob": "d/*"}}, "run": "true", "files": {"../x": "x"}},
            }
        }
    )
    assert [found.code for found in validated(space)] == ["path-escape"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"outputs": {"o": "{{ inputs.up }}/o"}}, "leaves the attempt directory"),
        ({"state": {"s": {"path": "{{ inputs.up }}/o"}}}, "leaves the attempt directory"),
        ({"state": {"s": {"path": "{{ inputs.own }}/o"}}}, "is in .recipe"),
        ({"deps": ["{{ inputs.up }}/o"]}, "leaves the workspace"),
        ({"matrix": {"f": {"glob": "{{ inputs.up }}/*.txt"}}}, "leaves the workspace"),
        (
            {"matrix": {"f": {"glob": "a/{{ inputs.up }}/{{ inputs.up }}/*.txt"}}},
            "leaves the workspace",
        ),
    ],
)
def test_a_path_that_leaves_when_it_is_rendered_starts_nothing(
    space: Space, given: dict[str, Any], says: str
) -> None:
    inputs = {
        "up": {"type": "string", "default": ".."},
        "own": {"type": "string", "default": ".recipe"},
    }
    space.recipe({"inputs": inputs, "steps": {"a": {"run": "true", **given}}})
    (found,) = space.problems()
    assert found.code == "path-escape" and says in found.message


def test_a_folder_is_no_file_to_write(space: Space) -> None:
    space.recipe({"steps": {"a": {"run": "true", "files": {"d/": "x"}}}})
    (found,) = validated(space)
    assert found.code == "path-escape" and "directory" in found.message


@pytest.mark.parametrize(
    "body",
    [
        {"deps": ["data"], "files": {"data/precious.txt": "x"}, "run": "true"},
        {"deps": ["data"], "state": {"s": {"path": "data/s"}}, "run": "true"},
        {"run": ["ls", "{{ inputs.set }}"], "files": {"inputs/set/data/precious.txt": "x"}},
        {
            "run": "echo x > {{ inputs.set }}/precious.txt",
            "outputs": {"o": "inputs/set/data/precious.txt"},
        },
    ],
    ids=["files", "state", "files in an input", "output in an input"],
)
def test_nothing_is_written_through_a_folder_that_a_step_was_given(
    space: Space, body: dict[str, Any]
) -> None:
    space.write("data/precious.txt", "precious")
    space.recipe({"inputs": {"set": {"type": "dataset", "default": "data"}}, "steps": {"a": body}})
    assert space.attempt() == ["a"] and space.summary is not None
    assert "the step gets this whole directory as an input" in space.summary.failed[0].reason, (
        space.summary.failed
    )
    assert space.read("data/precious.txt") == "precious" and sorted(
        p.name for p in (space.root / "data").iterdir()
    ) == ["precious.txt"]


@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_an_output_behind_a_link_that_leads_out_is_not_taken(space: Space, driver: str) -> None:
    from runner.execution.terms import Settings

    there = space.write("elsewhere/precious.txt", "precious").parent
    space.recipe(
        {"steps": {"a": {"run": f"rm -rf d; ln -s {there} d", "outputs": {"o": "d/precious.txt"}}}}
    )
    assert (
        space.attempt(settings=Settings(driver=driver)) == ["a"]
        and space.summary is not None
        and space.summary.state == "FAILED"
    )
    assert space.read("elsewhere/precious.txt") == "precious"


def test_a_folder_and_a_file_in_it_may_both_be_deps(space: Space) -> None:
    space.write("data/sub/a.txt", "a")
    space.recipe(
        {
            "steps": {
                "a": {
                    "run": "cat data/sub/a.txt > o",
                    "deps": ["data/sub/a.txt", "data/sub", "data/**"],
                    "outputs": ["o"],
                }
            }
        }
    )
    space.run()
    assert space.read("o") == "a" and space.run() == []


@pytest.mark.parametrize("address", ["..", ".", "sub/.."])
def test_an_input_called_by_dots_has_a_name_of_its_own(space: Space, address: str) -> None:
    space.write("inner/sub/x.txt", "x")
    inner = Space(space.root / "inner")
    inner.recipe(
        {
            "inputs": {"d": {"type": "dataset", "only": ["*.txt"]}},
            "steps": {
                "a": {
                    "run": [
                        "ls",
                        "{{ inputs.d }}/sub/x.txt"
                        if address != ".."
                        else "{{ inputs.d }}/inner/sub/x.txt",
                    ]
                }
            },
        }
    )
    assert inner.attempt({"d": address}) == ["a"]
    assert inner.summary is not None and inner.summary.state == "COMPLETED", inner.summary.failed
