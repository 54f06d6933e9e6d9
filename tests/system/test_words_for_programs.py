"""A word of a recipe that is handed to a program is never an option of that program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.errors import CannotRun
from runner.hosts import containers
from runner.storage import git_checkout
from runner.storage.workspace import Workspace
from tests.support import Space

COMMIT = "a1" * 20


@pytest.mark.parametrize(
    "address", ["--upload-pack=touch ../../pwned;:x", "-oProxyCommand=x:y", "-u:x"]
)
def test_a_git_address_is_no_option(space: Space, tmp_path: Path, address: str) -> None:
    space.recipe(
        {"steps": {"s": {"run": "true", "code": [{"git": address, "commit": COMMIT, "at": "v"}]}}}
    )
    code, out, _ = space.command("validate")
    assert code == 3 and "an address, which does not begin with -" in out
    with (
        Workspace.open(tmp_path) as ws,
        pytest.raises(CannotRun, match="git fetch failed") as caught,
    ):
        git_checkout.checkout(ws, address, COMMIT, tmp_path / "v")
    assert "usage" not in str(caught.value) and "unknown option" not in str(caught.value)
    assert not list(tmp_path.rglob("pwned"))


def test_an_image_is_no_option(space: Space) -> None:
    space.recipe({"steps": {"s": {"run": "true", "image": "--privileged"}}})
    code, out, _ = space.command("validate")
    assert code == 3 and "a container image" in out


@pytest.mark.parametrize("script", ["_LOOK", "_PULL"])
def test_an_engine_gets_the_name_of_an_image_as_a_name(script: str) -> None:
    called = subprocess.run(
        ["sh", "-c", getattr(containers, script), "x", "--privileged", "echo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "image inspect -- --privileged" in called.stdout
