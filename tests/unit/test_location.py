"""Which folder is the workspace, and what a typed path means in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.paths import CallerLocation, location


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: project/src/pkg."""
    folder = tmp_path / "project" / "src" / "pkg"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("marker", ["recipe.toml", ".recipe", ".git"])
def test_the_nearest_folder_upwards_with_a_marker_is_the_workspace(
    inside: Path, marker: str
) -> None:
    (inside.parents[1] / marker).touch()
    (inside.parents[2] / ".git").mkdir(exist_ok=True)
    assert location(os.environ) == (inside.parents[1], "src/pkg")


def test_the_current_folder_is_the_workspace_where_none_is_found(inside: Path) -> None:
    assert location(os.environ) == (inside, "")


def test_the_current_folder_comes_first(inside: Path) -> None:
    (inside / ".recipe").mkdir()
    (inside.parent / ".git").mkdir()
    assert location(os.environ) == (inside, "")


def test_home_is_no_workspace_by_its_marker_alone(inside: Path) -> None:
    (inside.parents[1] / ".git").mkdir()
    assert location({"HOME": str(inside.parents[1])}) == (inside, "")


def test_a_folder_in_which_all_users_may_write_is_no_workspace(inside: Path) -> None:
    """Another user's /tmp/recipe.toml must not decide where our runs go."""
    shared = inside.parents[1]
    (shared / "recipe.toml").touch()
    shared.chmod(0o1777)
    assert location(os.environ) == (inside, "")


def test_a_recipe_that_is_named_from_outside_brings_its_workspace(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its results, and a second `.recipe`, would lie wherever somebody happened to stand."""
    project = inside.parents[1]
    (project / ".git").mkdir()
    (inside / "t.yaml").touch()
    monkeypatch.chdir(project.parent)
    found = location(os.environ, ["run", "project/src/pkg/t.yaml", "data=project/a.txt"])
    assert found == (project, "..") and found.typed("project/src/pkg/t.yaml") == "src/pkg/t.yaml"
    assert location(os.environ, ["run", "project/none.yaml"]) == (project.parent, "")


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("a.yaml", "src/pkg/a.yaml"),
        ("../b/", "src/b/"),
        ("../../c", "c"),
        ("../../../d", "../d"),
        ("/abs/e", "/abs/e"),
        ("~/f", "~/f"),
        ("s3://bucket/g", "s3://bucket/g"),
    ],
)
def test_a_typed_path_begins_where_the_caller_stands(typed: str, means: str) -> None:
    assert CallerLocation(Path("/root"), "src/pkg").typed(typed) == means
    assert CallerLocation(Path("/root")).typed(typed) == typed
