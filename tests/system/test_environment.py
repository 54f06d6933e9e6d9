"""What a step finds in its environment: what it inherits, what it asked for, and which Python it runs."""

from __future__ import annotations

import platform
import sys

import pytest

from runner.errors import CannotRun
from runner.execution.terms import Choice, Settings
from tests.support import Space

SHOW = "steps: {s: {run: 'env > o', outputs: {o: o}%s}}\n"
LOOPBACK = Settings(driver="loopback")


def seen(space: Space) -> dict[str, str]:
    return dict(line.split("=", 1) for line in space.read("o").splitlines() if "=" in line)


def test_a_step_inherits_what_tools_need_and_no_more(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "HF_HOME": "/data/hf",
        "https_proxy": "http://proxy:1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_PROJECT": "p",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_TOKEN", "hf_abcdefghijklmnop")
    space.recipe(SHOW % "")
    space.run()
    env = seen(space)
    assert (env["HF_HOME"], env["https_proxy"], env["HF_HUB_OFFLINE"]) == (
        "/data/hf",
        "http://proxy:1",
        "1",
    ) and "HOME" in env
    assert (env["LANG"], env["LC_ALL"], env["TZ"]) == ("C.UTF-8", "C.UTF-8", "UTC")
    assert not env.keys() & {"WANDB_PROJECT", "HF_HUB_TOKEN", "PYTEST_CURRENT_TEST"}
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert space.run() == [], "no part of the key"


def test_a_step_with_a_locale_of_its_own_keeps_it(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    space.recipe(SHOW % ", env: {LANG: C}, pass_env: [TZ]")
    space.run()
    env = seen(space)
    assert (env["LANG"], env["TZ"]) == ("C", "Europe/Berlin") and "LC_ALL" not in env


def test_on_another_host_a_step_inherits_from_that_hosts_login(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/data/hf")
    space.recipe(SHOW % "")
    space.run(settings=LOOPBACK)
    env = seen(space)
    assert env["HOME"].endswith("/loopback/host-1") and "HF_HOME" not in env and env["TZ"] == "UTC"


def test_an_env_file_is_given_to_the_step_and_its_tokens_are_masked(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHO", "shell")
    space.write(
        ".env",
        "export WANDB_PROJECT='my project' # mine\nWANDB_API_KEY=0123456789abcdef\nWHO=file\nSET=file\n",
    )
    space.recipe(
        "env_file: .env\nsteps: {s: {run: 'echo $WANDB_PROJECT $WHO $SET > o; test -n \"$WANDB_API_KEY\"; echo key $WANDB_API_KEY',"
        " pass_env: [WHO], env: {SET: recipe}, outputs: {o: o}}}\n"
    )
    space.run()
    assert space.read("o") == "my project shell recipe\n"
    log = next((space.root / ".recipe/runs").glob("*/s.1.log")).read_text()
    assert log == "key ***\n"
    space.write(".env", "WANDB_PROJECT=other\n")
    assert space.run() == [], "no part of the key"


def test_an_env_file_that_is_missing_is_named_before_anything_starts(space: Space) -> None:
    space.recipe(
        "steps:\n  a: {run: 'echo > o', outputs: {o: o}}\n  b: {run: 'echo > p', env_file: [.env], outputs: {p: p}}\n"
    )
    with pytest.raises(CannotRun, match=r"the env_file \.env does not exist") as caught:
        space.run()
    assert "NAME=value" in caught.value.fix and not (space.root / "o").exists()


def test_an_env_file_stays_in_the_workspace(space: Space) -> None:
    space.recipe("env_file: ../.env\nsteps: {s: {run: 'echo > o', outputs: {o: o}}}\n")
    (problem,) = space.problems()
    assert (
        problem.message == 'the env_file "../.env" leaves the workspace'
        and space.pointed(problem) == "../.env"
    )


def python(space: Space, name: str) -> str:
    """A Python of its own in the workspace."""
    path = space.write(f"{name}/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    (path.parent / "python3").symlink_to("python")
    space.write(f"{name}/pyvenv.cfg", "version = 3.99.1\n")
    return str(path)


def test_the_roots_environment_runs_a_step_and_why_and_diff_say_so(space: Space) -> None:
    first, second = python(space, ".venv"), python(space, "other")
    space.recipe("steps: {s: {run: 'command -v python python3 > o', outputs: {o: o}}}\n")
    space.run()
    assert space.read("o").splitlines()[0] == first
    code, said, _ = space.command("why", "s")
    assert code == 0 and f"python {first} (3.99.1)" in said
    other = str(space.root / "other")
    assert space.run(python=other) == [], "no part of the key"
    space.run(python=other, choice=Choice(all=True))
    assert space.read("o").splitlines()[0] == second
    code, said, _ = space.command("diff", "last~1", "last")
    assert code == 0 and f"python: {first} (3.99.1) -> {second} (3.99.1)" in said


def test_a_shim_is_asked_for_its_version_only_by_a_step_that_names_python(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = space.write(
        "bin/python3", f'#!/bin/sh\necho >> {space.root}/asked\nexec {sys.executable} "$@"\n'
    )
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:/usr/bin:/bin")
    monkeypatch.delenv("VIRTUAL_ENV")
    space.recipe("steps: {s: {run: 'echo > o', outputs: {o: o}}}\n")
    space.run()
    assert not (space.root / "asked").exists()
    code, said, _ = space.command("why", "s")
    assert code == 0 and f"python {shim}" in said and f"{shim} (" not in said
    space.recipe("steps: {s: {run: 'python -c \"open(chr(111), chr(119))\"', outputs: {o: o}}}\n")
    space.run()
    code, said, _ = space.command("why", "s")
    assert code == 0 and f"python {sys.executable} ({platform.python_version()})" in said


def test_a_module_that_is_missing_is_reported_with_the_python_that_has_not_got_it(
    space: Space,
) -> None:
    used = python(space, ".venv")
    space.recipe("steps: {s: {run: 'python -c \"import no_such_thing\"', outputs: {o: o}}}\n")
    space.attempt()
    assert space.summary is not None
    (failure,) = space.summary.failed
    assert failure.hint.startswith(f"{used} (3.99.1) has no module no_such_thing")
