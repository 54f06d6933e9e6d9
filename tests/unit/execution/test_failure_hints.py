"""Which hint a failed attempt has: of its cause, of its inputs, or of its exit."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from runner.planning import causes
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
