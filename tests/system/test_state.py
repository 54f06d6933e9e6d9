"""State of a step: kept on failure, continued when more is asked, started over when less is, never shared by two attempts."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import Space, until

TRAIN = """
import os, sys, pathlib
steps, resume, out, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])
begin = int(resume.rsplit("-", 1)[1]) if resume != "none" else 0
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{begin}-{steps}\\n")
for step in range(begin + 1, steps + 1):
    (folder / f"step-{step}").mkdir()
    (folder / f"step-{step}" / "weights").write_text(str(step))
    if os.environ.get("DIE") == str(step):
        sys.exit(7)
if os.environ.get("GATE"):
    open(os.environ["GATE"]).read(1)
pathlib.Path(out).write_text(str(steps))
"""


def training(space: Space) -> None:
    space.write("train.py", TRAIN)
    space.recipe(
        "inputs: {upto: {type: integer, default: 4, continues: true}}\nsteps:\n  train:\n    code: [train.py]\n    pass_env: [NOTES, DIE, GATE]\n"
        "    run: [python, train.py, '{{ inputs.upto }}', '{{ state.ckpt.latest | default(\"none\") }}', '{{ outputs.model }}', '{{ state.ckpt }}']\n"
        "    state: {ckpt: {path: ckpt, checkpoint: 'step-*', keep: 2}}\n    outputs: {model: model.txt}\n"
    )


def run(space: Space, *words: str, **env: str) -> tuple[int, str]:
    code, _, said = space.command("run", *words, env={"NOTES": f"{space.root}/notes", **env})
    return code, said


def notes(space: Space) -> list[str]:
    return space.read("notes").split()


def kept(space: Space) -> list[str]:
    return sorted(path.name for path in (space.root / ".recipe/states").glob("*/*/ckpt/step-*"))


def test_a_failed_training_goes_on_from_its_newest_checkpoint_and_keeps_as_many_as_it_may(
    space: Space,
) -> None:
    training(space)
    assert run(space, DIE="3")[0] == 1
    assert kept(space) == ["step-2", "step-3"]
    assert run(space)[0] == 0
    assert notes(space) == ["0-4", "3-4"]


def test_a_broken_checkpoint_is_passed_over(space: Space) -> None:
    training(space)
    run(space, DIE="3")
    (newest,) = (space.root / ".recipe/states").glob("*/*/ckpt/step-3")
    (newest / "weights").unlink()
    said = run(space, "-v")[1]
    assert notes(space)[-1] == "2-4"
    assert "resumes from step-2; skipped step-3: is empty" in said, said


def test_when_every_checkpoint_is_broken_it_is_said_loudly_and_it_starts_over(space: Space) -> None:
    training(space)
    run(space, DIE="3")
    for weights in (space.root / ".recipe/states").glob("*/*/ckpt/*/weights"):
        weights.unlink()
    said = run(space)[1]
    assert notes(space)[-1] == "0-4"
    assert (
        "NO USABLE CHECKPOINT, starting over: skipped step-3: is empty; skipped step-2" in said
    ), said


def test_a_training_that_trains_again_what_it_had_is_reported(space: Space) -> None:
    training(space)
    space.write(
        "train.py",
        TRAIN.replace(
            "pathlib.Path(out)",
            "open(os.environ['RECIPE_METRICS'], 'w').write('{\"step\": 1}\\n')\npathlib.Path(out)",
        ),
    )
    space.recipe(space.read("recipe.yaml") + "    metrics: true\n")
    assert run(space, DIE="3")[0] == 1
    code, said = run(space)
    assert code == 0 and notes(space)[-1] == "3-4"
    assert (
        "train: the training should resume from step 3, but its first report is of step 1" in said
    ), said


def test_more_continues_and_less_starts_over_and_says_why(space: Space) -> None:
    training(space)
    assert run(space, "upto=4")[0] == 0
    assert run(space, "upto=6")[0] == 0
    code, said = run(space, "upto=2", "-v")
    assert code == 0
    assert notes(space) == ["0-4", "4-6", "0-2"]
    assert space.read("model.txt") == "2"
    assert "starting over" in said, said


def test_state_goes_after_success_unless_an_input_continues_it(space: Space) -> None:
    training(space)
    space.recipe(space.read("recipe.yaml").replace(", continues: true", ""))
    assert run(space)[0] == 0
    assert kept(space) == []


def test_an_attempt_that_outlived_its_worker_gives_up_its_state_before_another_has_it(
    space: Space, tmp_path: Path
) -> None:
    training(space)
    os.mkfifo(tmp_path / "gate")
    worker = space.start(
        "run", env={"NOTES": f"{space.root}/notes", "GATE": str(tmp_path / "gate")}
    )
    until(lambda: "step-4" in kept(space))
    worker.kill()
    worker.communicate()
    assert run(space, "upto=6")[0] == 0
    assert notes(space) == ["0-4", "4-6"]
    assert space.read("model.txt") == "6"


def test_plan_says_from_where_a_step_goes_on(space: Space) -> None:
    training(space)
    run(space, DIE="3")
    assert "         resumes from step-3\n" in space.command("plan", env={"NOTES": ""})[1]
    assert space.command("why", "train")[1].count("step-3") == 0 and kept(space) == [
        "step-2",
        "step-3",
    ]


def test_a_training_that_lives_on_is_not_said_to_begin_from_a_checkpoint(
    space: Space, tmp_path: Path
) -> None:
    training(space)
    os.mkfifo(tmp_path / "gate")
    worker = space.start(
        "run", env={"NOTES": f"{space.root}/notes", "GATE": str(tmp_path / "gate")}
    )
    until(lambda: "step-4" in kept(space))
    worker.kill()
    worker.communicate()
    again = space.start("run", "-v", env={"NOTES": f"{space.root}/notes"})
    (tmp_path / "gate").write_text("x")
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0 and notes(space) == ["0-4"] and "resumes from" not in said, said


def test_a_run_that_was_stopped_did_not_fail(space: Space) -> None:
    space.recipe("steps: {s: {run: 'echo begun > begun; sleep 60', outputs: {o: o}}}\n")
    worker = space.start("run")
    until(lambda: list((space.root / ".recipe/attempts").glob("*/begun")))
    worker.terminate()
    worker.communicate()
    assert "its last attempt was stopped" in space.command("plan")[1]
    assert ", stopped" in space.command("why", "s")[1]
