"""Which Python a step runs when no lock says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import CannotRun
from runner.hosts import interpreters
from runner.hosts.interpreters import ask_version, choose_python, command_path, find_version


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {path}\n")
    path.chmod(0o755)
    return str(path)


def test_the_roots_environment_comes_before_the_activated_one_and_that_before_path(
    tmp_path: Path,
) -> None:
    on_path, active = program(tmp_path / "bin/python3"), program(tmp_path / "active/bin/python")
    environ = {"PATH": str(tmp_path / "bin"), "VIRTUAL_ENV": str(tmp_path / "gone")}
    assert choose_python("", tmp_path, environ) == on_path, (
        "an activated environment that was removed is passed over"
    )
    environ["VIRTUAL_ENV"] = str(tmp_path / "active")
    assert choose_python("", tmp_path, environ) == active
    own = program(tmp_path / ".venv/bin/python")
    assert choose_python("", tmp_path, environ) == own
    assert choose_python("", tmp_path, {"PATH": "/nowhere"}) == own


def test_the_python_of_recipe_is_taken_only_when_it_is_asked_for(tmp_path: Path) -> None:
    assert choose_python("", tmp_path, {"PATH": "/nowhere"}) == "python3"
    assert choose_python("current", tmp_path, {"PATH": "/nowhere"}) == sys.executable


def test_a_python_is_named_by_path_folder_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = program(tmp_path / "env/bin/python")
    named = program(tmp_path / "bin/python3.99")
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": str(tmp_path / "bin")}
    assert (
        choose_python("env", tmp_path, environ)
        == choose_python("./env/bin/python", tmp_path, environ)
        == python
    )
    assert choose_python("python3.99", tmp_path, environ) == named
    with pytest.raises(CannotRun, match="no such Python"):
        choose_python("python3.98", tmp_path, environ)


def test_python_and_python3_are_both_the_one_that_was_chosen(tmp_path: Path) -> None:
    python = program(tmp_path / "bin/python3.99")
    program(tmp_path / "bin/python3")
    path = command_path(python, tmp_path / "home", {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    said = subprocess.run(
        ["sh", "-c", "python; python3"],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == [python, python]


def test_a_path_on_which_it_is_first_already_stays_as_it_is(tmp_path: Path) -> None:
    python = program(tmp_path / "bin/python3")
    (tmp_path / "bin/python").symlink_to("python3")
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    assert command_path(python, tmp_path / "home", {"PATH": path}) == path
    assert command_path(python, tmp_path / "home", {"PATH": "/usr/bin:/bin"}) == path


def test_the_version_of_an_environment_is_read_and_not_asked(tmp_path: Path) -> None:
    python = program(tmp_path / "bin/python")
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.12.3.final.0\n")
    assert find_version(python) == (python, "3.12.3")
    assert find_version(str(tmp_path / "none")) == (str(tmp_path / "none"), "")


def test_a_python_that_has_to_be_run_for_its_version_says_it_while_other_things_are_done(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "gate")
    shim = tmp_path / "shim"
    shim.write_text(f"#!/bin/sh\nread line < {tmp_path}/gate\necho /real/python\necho 3.99.1\n")
    shim.chmod(0o755)
    ask_version(str(shim))
    (tmp_path / "gate").write_text("go\n")  # it is running already
    assert find_version(str(shim)) == ("/real/python", "3.99.1")


def test_a_python_that_has_to_be_run_to_say_which_it_is_is_asked_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3"
    shim.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/count\necho /real/python\necho 3.12.1\n")
    shim.chmod(0o755)
    assert [interpreters.find_version(str(shim)) for _ in range(3)] == [
        ("/real/python", "3.12.1")
    ] * 3
    assert (tmp_path / "count").read_text().split() == ["asked"]
    monkeypatch.setattr(interpreters, "_HOLDS", 0.0)
    assert (
        interpreters.find_version(str(shim)) == ("/real/python", "3.12.1")
        and len((tmp_path / "count").read_text().split()) == 2
    )
