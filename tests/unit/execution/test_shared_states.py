"""States of trainings: where they resume, and what a shared store has of them."""

from __future__ import annotations

from pathlib import Path

from drivers.base import Exit
from tests.unit.execution.fakes import Program, SimulatedRun, StartedJob, exits, runs_for, writes

RECIPE = """
steps:
  train:
    run: "true"
    state: {{ckpt: {{{to}path: ckpt, checkpoint: "step-*", keep: 1, every: 1s}}}}
    outputs: {{o: a.txt}}
    retries: 1
"""


def saves(*steps: int, then: Program) -> Program:
    """Saves checkpoints, and goes on."""

    async def program(job: StartedJob) -> Exit:
        folder = (job.folder / "ckpt").resolve()
        for step in steps:
            path = folder / f"step-{step}"
            path.mkdir()
            (path / "weights").write_text(str(step))
        return await then(job)

    return program


def kept(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".recipe" / "states").glob("*/*/ckpt/step-*"))


def test_the_next_attempt_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    programs = {"train": [saves(1, 2, then=exits(1)), writes(a="1")]}
    run = SimulatedRun(tmp_path, RECIPE.format(to=""), programs)
    assert run.run().state == "COMPLETED"
    starts = [event for event in run.steps if event.after == "RUNNING"]
    assert "note" not in starts[0].data or "step-" not in str(starts[0].data["note"])
    assert "step-2" in str(starts[1].data["note"])
    assert not kept(tmp_path)


def test_as_many_checkpoints_as_the_recipe_says_are_kept_of_a_failed_training(
    tmp_path: Path,
) -> None:
    programs = {"train": [saves(1, 2, then=exits(1)), exits(1)]}
    assert SimulatedRun(tmp_path, RECIPE.format(to=""), programs).run().state == "FAILED"
    assert kept(tmp_path) == ["step-2"]


def test_an_interrupt_says_which_checkpoint_is_kept(tmp_path: Path) -> None:
    async def interrupt(run: SimulatedRun) -> None:
        await run.until(lambda: kept(tmp_path))
        run.own.stopper.interrupt()
        run.own.stopper.interrupt()

    slow = saves(1, then=runs_for(3000, writes(a="1")))
    run = SimulatedRun(tmp_path, RECIPE.format(to=""), {"train": slow}, then=interrupt)
    assert run.run().state == "CANCELLED"
    assert "(train keeps step-1)" in run.heard.words[0]


def store(root: Path, *, push: bool = True) -> None:
    (root / "shared").mkdir(exist_ok=True)
    (root / "recipe.toml").write_text(
        f'store = "team"\n[stores.team]\nurl = "file://{root.parent}/shared"\n'
        f"push = {str(push).lower()}\n"
    )
    (root.parent / "shared").mkdir(exist_ok=True)


def test_another_machine_resumes_from_the_checkpoint_in_the_store(tmp_path: Path) -> None:
    recipe = RECIPE.format(to="to: store, ").replace("retries: 1", "retries: 0")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        store(tmp_path / name)
    first = SimulatedRun(
        tmp_path / "one", recipe, {"train": saves(1, 2, then=exits(1))}, in_real_time=True
    )
    assert first.run().state == "FAILED"
    second = SimulatedRun(tmp_path / "two", recipe, {"train": writes(a="1")}, in_real_time=True)
    assert second.run().state == "COMPLETED"
    assert "train: step-2 downloaded from the shared store team" in second.heard.words
    start = next(event for event in second.steps if event.after == "RUNNING")
    assert "step-2" in str(start.data["note"])


def test_a_result_in_the_store_is_fetched_and_not_made_again(tmp_path: Path) -> None:
    recipe = """
steps:
  a: {run: "true", outputs: {o: a.txt}}
  b: {run: "cat {{ steps.a.o }}", outputs: {o: b.txt}}
"""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        store(tmp_path / name)
    programs = {"a": writes(a="1"), "b": writes(b="2")}
    first = SimulatedRun(tmp_path / "one", recipe, programs, in_real_time=True)
    assert first.run().state == "COMPLETED"
    second = SimulatedRun(tmp_path / "two", recipe, programs, in_real_time=True)
    assert second.run().state == "COMPLETED" and not second.started
    assert (tmp_path / "two" / "b.txt").read_text() == "2"
    changed = recipe.replace("cat {{", "tac {{")
    third = SimulatedRun(tmp_path / "two", changed, programs, in_real_time=True)
    assert third.run().state == "COMPLETED" and third.started == ["b"]


def test_a_state_for_a_store_that_is_only_read_stays_here_and_says_so(tmp_path: Path) -> None:
    root = tmp_path / "one"
    root.mkdir()
    recipe = RECIPE.format(to="to: store, ")
    run = SimulatedRun(root, recipe, {"train": writes(a="1")})
    assert run.run().state == "COMPLETED"
    words = "train: its checkpoints stay on this machine in spite of `to: store`: "
    assert f"{words}no shared store is set" in run.heard.words
    store(root, push=False)
    recipe = recipe.replace('run: "true"', 'run: "echo"')
    run = SimulatedRun(root, recipe, {"train": writes(a="1")})
    assert run.run().state == "COMPLETED"
    assert any(
        said.startswith(f"{words}the shared store team is read-only") for said in run.heard.words
    )
