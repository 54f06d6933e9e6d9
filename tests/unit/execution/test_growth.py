"""A matrix over files of another step becomes its instances when that step is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.base import Exit
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob, exits

RECIPE = """
steps:
  split: {run: "true", outputs: {parts: parts/}}
  each:
    matrix: {part: {glob: "{{ steps.split.parts }}/*.txt"}}
    run: "cat {{ matrix.part }} > {{ outputs.o }}"
    outputs: {o: "out/{{ matrix.part | name }}"}
  all: {run: "true", needs: [each]}
"""


def makes(*names: str) -> Program:
    async def program(job: StartedJob) -> Exit:
        folder = job.folder / "parts"
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / f"{name}.txt").write_text(name)
        return Exit(0)

    return program


async def copies(job: StartedJob) -> Exit:
    (job.folder / "out").mkdir(exist_ok=True)
    name = job.step.partition("=")[2].rstrip("]").rpartition("%2F")[2]
    (job.folder / "out" / name).write_text(job.step)
    return Exit(0)


def programs_for(*names: str) -> dict[str, Program]:
    each = {f"each[part=parts%2F{name}.txt]": copies for name in names}
    return {"split": makes(*names), "all": exits(0), **each}


@pytest.fixture
def grown(tmp_path: Path) -> SimulatedRun:
    run = SimulatedRun(tmp_path, RECIPE, programs_for("x", "y"))
    assert run.run().state == "COMPLETED", run.heard.words
    return run


def test_instances_run_between_the_step_that_makes_their_files_and_the_rest(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    assert grown.started[0] == "split" and grown.started[-1] == "all"
    assert len(grown.started) == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.txt", "y.txt"]


def test_the_expansion_is_stored_with_its_files_for_the_next_worker(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    (event,) = [each for each in grown.heard.moves if "globs" in each.data]
    (files,) = event.data["globs"].values()
    assert sorted(files) == ["x.txt", "y.txt"] and event.data["steps"] == 3


def test_only_instances_of_new_files_run_in_the_next_run(
    grown: SimulatedRun, tmp_path: Path
) -> None:
    changed = RECIPE.replace('split: {run: "true"', 'split: {run: "true more"')
    again = SimulatedRun(tmp_path, changed, programs_for("x", "y", "z"))
    assert again.run().state == "COMPLETED"
    instances = [step for step in again.started if step.startswith("each")]
    assert len(instances) == 1 and "z" in instances[0]


def test_a_matrix_without_files_has_no_instances(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, programs_for())
    report = run.run()
    assert not [step for step in run.started if step.startswith("each")], report
