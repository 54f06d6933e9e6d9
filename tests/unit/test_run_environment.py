"""What is noted of the environment of a run: code without what git would execute, within bounds, and without secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.api.runs import _steps
from runner.planning.run_view import StepView
from runner.survey import run_environment
from runner.survey.run_environment import looked_at, packages_of, recall


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def repository(root: Path) -> Path:
    git(root, "init", "-q", "-b", "main")
    (root / "a.txt").write_text("one\n")
    git(root, "add", "a.txt")
    git(root, "commit", "-q", "-m", "begin")
    return root


def masked(text: str) -> str:
    return text.replace("s3cret", "***")


def test_a_diff_has_no_secrets_and_nothing_is_executed(tmp_path: Path) -> None:
    root = repository(tmp_path)
    for name in ("core.fsmonitor", "diff.external", "diff.x.textconv"):
        git(root, "config", name, f"touch {tmp_path}/ran; false")
    (root / ".gitattributes").write_text("*.txt diff=x\n")
    (root / "a.txt").write_text("one\ntoken = s3cret\n")
    code = looked_at(root, sys.executable, masked)["code"]
    assert "+token = ***" in code["diff"] and "s3cret" not in str(code)
    assert (code["branch"], code["changed"], code["untracked"]) == (
        "main",
        ["a.txt"],
        [".gitattributes"],
    )
    assert not (tmp_path / "ran").exists()


def test_a_long_diff_is_cut_and_says_so(tmp_path: Path) -> None:
    root = repository(tmp_path)
    (root / "a.txt").write_text("word\n" * 200_000)
    code = looked_at(root, sys.executable, masked)["code"]
    assert code["diff_cut"] and len(code["diff"]) <= run_environment.LONGEST_DIFF


def test_a_folder_below_the_repository_has_its_own_changes_alone(tmp_path: Path) -> None:
    root = repository(tmp_path)
    (root / "a.txt").write_text("two\n")
    below = root / "below"
    below.mkdir()
    code = looked_at(below, sys.executable, masked)["code"]
    assert len(code["commit"]) == 40 and code["changed"] == [] and code["diff"] == ""


def test_an_unchanged_checkout_is_asked_twice_and_has_an_empty_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, asked = repository(tmp_path), list[str]()
    ask = run_environment._git

    def counted(root: Path, *words: str) -> bytes:
        asked.append(words[0])
        return ask(root, *words)

    monkeypatch.setattr(run_environment, "_git", counted)
    code = looked_at(root, sys.executable, masked)["code"]
    assert asked == ["rev-parse", "status"]
    assert (len(code["commit"]), code["branch"], code["diff"]) == (40, "main", "")


def test_a_folder_outside_of_git_has_no_code(tmp_path: Path) -> None:
    assert looked_at(tmp_path, sys.executable, masked)["code"] is None
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert looked_at(tmp_path, sys.executable, masked)["code"] is None
    assert recall(tmp_path, "none") is None


def test_a_repository_without_a_commit_has_no_code(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "a.txt").write_text("one\n")
    assert looked_at(tmp_path, sys.executable, masked)["code"] is None
    repository(tmp_path)
    assert looked_at(tmp_path, sys.executable, masked)["code"]["branch"] == "main"


def test_packages_are_those_beside_the_interpreter(tmp_path: Path) -> None:
    assert any(each.startswith("pytest==") for each in packages_of(sys.executable))
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("A_b-1.0.dist-info", "c-2.dev1-py3.egg-info", "no.dist-info", "d-x.dist-info"):
        (site / name).mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    assert packages_of(str(tmp_path / "bin" / "python")) == ["a-b==1.0", "c==2.dev1"]
    assert packages_of("/nowhere/bin/python") == []


def test_a_step_has_its_share_of_the_cost_by_its_seconds_on_rented_machines() -> None:
    steps = {
        "here": StepView("here", spent={"": 50.0}),
        "a": StepView("a", spent={"": 1.0, "gpu 1": 30.0}),
        "b": StepView("b", spent={"gpu 1": 10.0}),
    }
    found = _steps(steps, {"a": "k"}, 2.0, {})
    assert [(each["key"], each["cost"]) for each in found] == [("", 0.0), ("k", 1.5), ("", 0.5)]
