"""What stays of an attempt's files, and when the rest is deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from drivers.base import Exit
from runner.execution.steps.tidying import AttemptCleanup
from runner.planning.step import StateSpec
from runner.secrets import Masker
from runner.storage.workspace import Workspace
from tests.unit.execution.fakes import SimulatedRun, StartedJob, exits, writes

RECIPE = "steps: {a: {run: 'true', deps: [in.txt], metrics: true, outputs: {o: a.txt}}}"


@pytest.fixture(autouse=True)
def _input(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("given")


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_failed_attempt_without_own_files_leaves_no_directory_to_look_at(tmp_path: Path) -> None:
    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": exits(1)}).run().failures
    assert failure.left == ""


def test_a_failed_attempt_with_own_files_leaves_them_with_its_inputs(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        await writes(half="1")(job)
        return await exits(1)(job)

    (failure,) = SimulatedRun(tmp_path, RECIPE, {"a": fails}).run().failures
    assert Path(failure.left).name.startswith("failed-")
    assert names_below(Path(failure.left)) == ["half.txt", "in.txt"]


def test_logs_and_metrics_of_all_attempts_are_kept_by_their_numbers(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        job.report('{"loss": 2}\n')
        return await exits(1, "first\n")(job)

    async def works(job: StartedJob) -> Exit:
        job.print("second\n")
        job.report('{"loss": 1}\n')
        return await writes(a="1")(job)

    recipe = RECIPE.replace("outputs", "retries: 1, outputs")
    run = SimulatedRun(tmp_path, recipe, {"a": [fails, works]})
    assert run.run().state == "COMPLETED"
    kept = tmp_path / ".recipe/runs" / run.run_id
    logs = [(kept / f"a.{number}.log").read_text() for number in (1, 2)]
    assert logs == ["first\n", "second\n"]
    metrics = [(kept / f"a.{number}.metrics").read_text() for number in (1, 2)]
    assert metrics == ['{"loss": 2}\n', '{"loss": 1}\n']


def test_after_a_success_nothing_is_left_among_the_attempts(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, RECIPE, {"a": writes(a="1", more="2")})
    assert run.run().state == "COMPLETED"
    assert names_below(tmp_path / ".recipe/attempts") == []


class Finished:
    """One finished attempt with files, and what its cleanup does to them."""

    def __init__(self, root: Path, *states: StateSpec, **continues: str) -> None:
        self.root, self.flushed = root, list[Callable[[], None]]()
        self.cleared, self.forgotten, self.records = list[Any](), list[str](), list[str]()
        commits: Any = Of(
            run="r1", tries=lambda _id: 2, masker=Masker(()), after_flush=self.flushed.append
        )
        scrap: Any = Of(add_script=self.forgotten.append, add_log=self.forgotten.append)
        ws: Any = Of(home=root)
        self.cleanup = AttemptCleanup(
            ws, commits, scrap, "t@1", self.cleared.append, failures_kept=False
        )
        self.folder, self.generation = root / "attempts/n1", root / "states/g1"
        for folder in (self.folder, self.generation):
            folder.mkdir(parents=True)
        (self.folder / "own.txt").write_text("1")
        directory = Of(path=str(self.folder), retire=self._retire)
        parts = [
            Of(attempt=Of(delete_record=lambda rank=rank: self.records.append(rank)))
            for rank in ("0", "1")
        ]
        logs = [f"{root}/attempts/n1.log", f"{root}/attempts/n1-1.log"]
        self.attempt: Any = Of(
            id="a", spec=Of(state=states, continues=continues, metrics=None),
            directory=directory, directory_of_end=directory,
            log=logs[0], logs=logs, last_log=logs[1],
            state=Of(path=self.generation, folder=lambda name: self.generation / name),
            task=Of(states=("ckpt",), parts=parts),
            place=Of(clear_after=lambda _task, states: states),
        )  # fmt: skip

    def _retire(self, _scrap: Any) -> None:
        self.forgotten.append("directory")

    def flush(self) -> None:
        for do in self.flushed:
            do()


def test_files_of_a_success_are_needed_until_its_trace_is_stored(tmp_path: Path) -> None:
    done = Finished(tmp_path)
    done.cleanup.tidy(done.attempt, success=True)
    assert done.forgotten == [f"{done.folder}.sh"] and not done.cleared
    done.flush()
    assert done.forgotten[1:] == ["directory"] and not done.generation.exists()
    assert done.cleared == [("ckpt",)] and not done.records


def test_checkpoints_stay_for_the_training_that_goes_on_from_them(tmp_path: Path) -> None:
    done = Finished(tmp_path, ckpt="b")
    done.cleanup.tidy(done.attempt, success=True)
    done.flush()
    assert done.generation.exists() and done.cleared == [()]


def test_a_failure_has_its_directory_until_the_step_succeeds(tmp_path: Path) -> None:
    failed = Finished(tmp_path)
    failed.cleanup.tidy(failed.attempt, success=False)
    kept = tmp_path / "attempts" / failed.cleanup.failed_name("a")
    assert (kept / "own.txt").exists() and failed.records == ["0", "1"]
    failed.flush()
    assert failed.generation.exists() and failed.cleared == [()]
    failed.cleanup.tidy(failed.attempt, success=True)
    assert not kept.exists()


def test_an_attempt_that_did_not_start_is_cleared_here_and_on_its_host(tmp_path: Path) -> None:
    done = Finished(tmp_path)
    done.attempt.clear_up = lambda _scrap: done.forgotten.append("all")
    done.cleanup.discard(done.attempt)
    assert done.cleared == [()] and done.forgotten == ["all"]


def test_of_checkpoints_as_many_stay_as_the_recipe_says(tmp_path: Path) -> None:
    failed = Finished(tmp_path, StateSpec("ckpt", "ckpt", "step-*", None, 1))
    for step in ("step-1", "step-2"):
        (failed.generation / "ckpt" / step).mkdir(parents=True)
        (failed.generation / "ckpt" / step / "weights").write_text(step)
    failed.cleanup.tidy(failed.attempt, success=False)
    assert names_below(failed.generation) == ["weights"]


def test_logs_of_all_nodes_are_kept_and_that_of_the_failed_one_explains_the_end(
    tmp_path: Path,
) -> None:
    failed = Finished(tmp_path)
    for log in failed.attempt.logs:
        Path(log).write_text(log)
    found = failed.cleanup.keep_log("a/b", failed.attempt)
    assert found == f"{tmp_path}/runs/r1/a%2Fb.2.1.log"
    assert Path(found).read_text() == failed.attempt.logs[1]
    first = Path(f"{tmp_path}/runs/r1/a%2Fb.2.log")
    assert first.read_text() == failed.attempt.logs[0]


def test_a_step_has_another_directory_for_its_failure_in_each_recipe() -> None:
    nobody: Any = Of(home="/w", run="r1")
    names = {
        AttemptCleanup(nobody, nobody, nobody, recipe, nobody, failures_kept=True).failed_name(id)
        for recipe in ("t@1", "u@1")
        for id in ("a", "b")
    }
    assert len(names) == 4


def test_steps_of_two_runs_keep_their_failures_apart(tmp_path: Path) -> None:
    async def fails(job: StartedJob) -> Exit:
        await writes(half="1")(job)
        return await exits(1)(job)

    (first,) = SimulatedRun(tmp_path, RECIPE, {"a": fails}).run().failures
    other = RECIPE.replace("{a:", "{b:")
    (second,) = SimulatedRun(tmp_path, other, {"b": fails}).run().failures
    assert first.left != second.left and Path(first.left).exists()
    with Workspace.open(tmp_path) as ws:
        assert len(ws.store.runs.latest()) == 2
