"""Which hint a failed attempt has: of its cause, of its inputs, or of its exit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.errors import Infrastructure
from runner.execution.steps import failure_hints
from runner.execution.steps.failing import Cause
from runner.execution.steps.failure_hints import FailureHints
from runner.planning import causes
from runner.planning.step import StepSpec
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob, exits

FROZEN = """\
  File "<frozen os>", line 679, in __getitem__
KeyError: 'WANDB_PROJECT'
"""
FULL_GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
RECIPE = "steps: {a: {run: 'python train.py', code: [train.py], outputs: {o: a.txt}}}"


def hint_of(root: Path, program: Program, recipe: str = RECIPE) -> str:
    (root / "train.py").write_text("import helper\n")
    (failure,) = SimulatedRun(root, recipe, {"a": program}).run().failures
    return failure.hint


def test_a_module_of_the_workspace_that_is_not_declared_is_named(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    log = "ModuleNotFoundError: No module named 'helper'\n"
    assert hint_of(tmp_path, exits(1, log)).startswith(
        "helper is helper.py, which is not in `code` of a"
    )


def test_a_file_of_the_workspace_that_is_not_declared_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("1")
    log = "FileNotFoundError: [Errno 2] No such file or directory: 'rows.csv'\n"
    expected = "rows.csv is in the workspace but not declared: add it to `deps` of a"
    assert hint_of(tmp_path, exits(1, log)) == expected
    declared = RECIPE.replace("outputs", "deps: [rows.csv], outputs")
    assert hint_of(tmp_path, exits(1, log), declared) != expected


def test_a_file_that_is_not_declared_is_named_if_an_output_is_missing_for_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.csv").write_text("1")
    log = "cannot find rows.csv, nothing to do\n"
    assert hint_of(tmp_path, exits(0, log)).startswith("rows.csv is in the workspace")


def test_an_output_of_the_step_is_no_undeclared_file(tmp_path: Path) -> None:
    async def program(job: StartedJob) -> Exit:
        (tmp_path / "a.txt").write_text("of an earlier run")
        return await exits(1, "cannot write a.txt\n")(job)

    assert hint_of(tmp_path, program) == ""


def test_the_hint_of_an_input_comes_before_that_of_the_exit(tmp_path: Path) -> None:
    log = "KeyError: 'WANDB_PROJECT' in rows.csv\n" + FROZEN
    assert "WANDB_PROJECT" in hint_of(tmp_path, exits(1, log))
    (tmp_path / "rows.csv").write_text("1")
    assert hint_of(tmp_path, exits(1, log)).startswith("rows.csv is in the workspace")


@pytest.mark.parametrize(
    ("log", "reason"), [("OSError: No space left on device\n", "disk"), (FULL_GPU, "oom")]
)
def test_a_cause_with_a_remedy_has_a_hint(tmp_path: Path, log: str, reason: str) -> None:
    found = hint_of(tmp_path, exits(1, log))
    assert (found == causes.REMEDIES[reason]) is (reason == "disk") and found


def test_a_step_that_killed_its_supervisor_is_told_what_to_kill(tmp_path: Path) -> None:
    assert hint_of(tmp_path, exits(1, reason="unwatched")).startswith("in the step, kill only")


def test_the_fix_of_an_error_is_the_hint(tmp_path: Path) -> None:
    async def refuse(run: SimulatedRun) -> None:
        run.agents[""].fails["a"] = Infrastructure("the host refuses", fix="ask its owner")

    (tmp_path / "train.py").write_text("")
    run = SimulatedRun(tmp_path, RECIPE, {})
    run.before = refuse
    (failure,) = run.run().failures
    assert failure.hint == "ask its owner"


def test_a_refused_write_is_explained_by_read_only_inputs(tmp_path: Path) -> None:
    log = "PermissionError: [Errno 13] Permission denied: 'copy/rows.csv'\n"
    assert hint_of(tmp_path, exits(1, log)).startswith("the files of an input are read-only")
    alone = RECIPE.replace("python train.py", "tool").replace("code: [train.py], ", "")
    assert hint_of(tmp_path, exits(1, log), alone) == ""


@pytest.mark.parametrize(
    ("is_current", "where"), [(False, "the environment of gpu.lock"), (True, "python 3.12")]
)
def test_a_module_is_missing_in_the_lock_unless_the_current_python_ran_the_step(
    tmp_path: Path, is_current: bool, where: str
) -> None:
    ws: Any = Of(root=tmp_path, own=tmp_path, environ={})
    steps: Any = Of(survey=Of(request=Of(current_python=is_current)))
    environments: Any = Of(
        container_image=lambda *_words: "",
        interpreter=lambda *_words: "python 3.12",
        sandbox=lambda _spec: "",
    )
    attempt: Any = Of(
        node=Of(lock="gpu.lock"),
        spec=StepSpec("r@1", "a", {}),
        place=Of(elsewhere=""),
        directory=Of(staged=[], objects=[], links=[]),
    )
    finder = FailureHints(ws, steps, environments)
    log = "ModuleNotFoundError: No module named 'trl'\n"
    hint = finder.hint_for("a", attempt, Cause("signal", "killed"), log, Exit(1))
    assert hint.startswith(f"{where} has no module trl")


@pytest.mark.parametrize(
    ("path", "host", "image", "hidden"),
    [
        ("{}/rows.csv", "", "", True),
        ("{}/gone.csv", "", "", True),
        ("{}/gone/rows.csv", "", "", False),
        ("{}/gone/rows.csv", "gpu-1", "", True),
        ("{}/attempt/rows.csv", "gpu-1", "", False),
        ("{}/rows.csv", "", "an/image", False),
    ],
)
def test_a_sandbox_may_hide_what_is_outside_of_the_attempt(
    tmp_path: Path, path: str, host: str, image: str, hidden: bool
) -> None:
    (tmp_path / "rows.csv").write_text("1")
    paths = Of(cwd=f"{tmp_path}/attempt")
    attempt: Any = Of(place=Of(elsewhere=host, paths=lambda _folder: paths), directory=None)
    assert failure_hints._may_be_hidden(attempt, image, path.format(tmp_path)) is hidden
