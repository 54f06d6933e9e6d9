"""Promise: the command that installs an extra works as typed, however this copy of recipe was installed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivers import install_line, installing
from runner.hosts import uv
from runner.paths import shipped

CHECKOUT = shipped()
GIT: dict[str, Any] = {
    "url": "https://git.example/team/recipe",
    "vcs_info": {"vcs": "git", "commit_id": "0a1b", "requested_revision": "v2"},
}


def command(direct: dict[str, Any] | None, here: Path, checkout: Path) -> str:
    return installing.requirement(installing._source(direct, here, checkout), ["ssh", "s3"])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory that pip would take."""
    found = tmp_path / "my recipe"
    found.mkdir()
    (found / "pyproject.toml").touch()
    return found


def test_a_copy_from_an_index_is_named(checkout: Path) -> None:
    assert command({}, checkout, checkout) == "'recipe-runner[ssh,s3]'"


def test_a_copy_from_a_checkout_names_its_directory(checkout: Path, tmp_path: Path) -> None:
    direct = {"url": checkout.as_uri(), "dir_info": {}}
    assert shlex.split(command(direct, tmp_path, tmp_path)) == [f"{checkout}[ssh,s3]"]
    assert command(direct, checkout, tmp_path) == "'.[ssh,s3]'", "typed in the checkout"


def test_an_editable_copy_stays_editable(checkout: Path, tmp_path: Path) -> None:
    direct = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    assert shlex.split(command(direct, tmp_path, tmp_path)) == ["-e", f"{checkout}[ssh,s3]"]


def test_a_copy_that_is_not_installed_names_the_checkout_it_runs_from(
    checkout: Path, tmp_path: Path
) -> None:
    assert shlex.split(command(None, tmp_path, checkout)) == [f"{checkout}[ssh,s3]"]


def test_a_deleted_source_is_not_named(tmp_path: Path) -> None:
    direct = {"url": (tmp_path / "gone").as_uri(), "dir_info": {"editable": True}}
    said = command(direct, tmp_path, tmp_path)
    assert "gone" not in said and shlex.split(said, comments=True) == [".[ssh,s3]"]
    assert said.endswith("# in a checkout of recipe")


def test_a_copy_from_git_keeps_its_revision(tmp_path: Path) -> None:
    assert shlex.split(command(GIT, tmp_path, tmp_path)) == [
        "recipe-runner[ssh,s3] @ git+https://git.example/team/recipe@v2"
    ]


@pytest.mark.parametrize("scheme", ["file", "https"])
def test_a_copy_from_a_wheel_names_its_address(scheme: str, tmp_path: Path) -> None:
    wheel = tmp_path / "recipe_runner-1-py3-none-any.whl"
    wheel.touch()
    url = wheel.as_uri() if scheme == "file" else f"https://files.example/{wheel.name}"
    said = command({"url": url, "archive_info": {}}, tmp_path, tmp_path)
    assert shlex.split(said) == [f"recipe-runner[ssh,s3] @ {url}"]


def test_uv_tool_keeps_the_extras_that_it_has() -> None:
    receipt = {"tool": {"requirements": [{"name": "recipe-runner", "extras": ["server"]}]}}
    assert installing._extras_of_tool(receipt) == ["server"]


def test_the_command_uses_the_installer_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert installing._program(False) == f"{sys.executable} -m pip install"
    monkeypatch.setattr(installing, "find_spec", lambda name: None)
    assert installing._program(False) == f"uv pip install --python {sys.executable}"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert installing._program(False) == "uv pip install"
    (tmp_path / "pipx_metadata.json").touch()
    assert installing._program(False) == "pipx runpip recipe-runner install"


@pytest.mark.slow
def test_pip_understands_the_command_of_this_copy() -> None:
    """`--dry-run` without dependencies: pip finds the source and the extra, and installs nothing."""
    words = shlex.split(install_line("ssh"), comments=True)
    flags = ["--dry-run", "--no-deps", "--report", "-", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install"]
    done = subprocess.run(
        [*pip, *flags, *words[words.index("install") + 1 :]],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["install"]
    assert found["metadata"]["name"] == "recipe-runner"
    assert found.get("requested_extras", ["ssh"]) == ["ssh"], "earlier versions of pip do not tell"


@pytest.mark.slow
def test_uv_tool_installs_an_extra_by_the_command_that_it_was_told(tmp_path: Path) -> None:
    """A real `uv tool install` of this checkout, then the command that the installed copy prints."""
    index = {name: at for name, at in os.environ.items() if name.startswith(("UV_", "SSL_"))}
    places = {
        **index,
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_PYTHON": sys.executable,
        "PATH": f"{Path(uv.find_uv()).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    python = tmp_path / "tools" / "recipe-runner" / "bin" / "python"
    install = [uv.find_uv(), "tool", "install", "--quiet", f"{CHECKOUT}[client]"]
    subprocess.run(install, check=True, timeout=300, env=places)
    said = subprocess.run(
        [python, "-c", "import drivers; print(drivers.install_line('notify'))"],
        capture_output=True,
        text=True,
        check=True,
        env=places,
        cwd=tmp_path,
    ).stdout
    assert "[client,notify]" in said
    subprocess.run(said, shell=True, check=True, timeout=300, env=places, cwd=tmp_path)
    subprocess.run([python, "-c", "import httpx, apprise"], check=True, env=places, cwd=tmp_path)
