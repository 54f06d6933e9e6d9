"""Claims about `{"warning": "…"}` in $RECIPE_METRICS: said under the step's line, kept with its result, and no number."""

from __future__ import annotations

from pathlib import Path

from tests.support import Space

PROGRAM = """
import json, os
with open(os.environ["RECIPE_METRICS"], "a") as metrics:
    for _ in range(3):
        metrics.write(json.dumps({"warning": "rows were\\ncut " + os.environ.get("PASS", "")}) + "\\n")
    for number in range(30):
        metrics.write(json.dumps({"warning": f"{number} " + "x" * 600}) + "\\n")
    metrics.write(json.dumps({"step": 1, "loss": 2.5}) + "\\n")
open("made.txt", "w").write("made")
"""
STEPS = """
inputs: {word: {type: secret, env: PASS}}
steps:
  data: {run: [python, program.py], code: [program.py], metrics: true, secrets: [word], outputs: {made: made.txt}}
"""


def test_a_warning_is_said_under_the_steps_line_and_again_when_the_step_is_fresh_or_restored(
    tmp_path: Path,
) -> None:
    space = Space(tmp_path)
    space.write("program.py", PROGRAM)
    space.recipe(STEPS)
    secret = {"PASS": "hunter2-hunter2"}
    said = []
    for again in ("made", "fresh", "restored"):
        if again == "restored":
            (tmp_path / "made.txt").unlink()
        code, out, err = space.command("run", "./recipe.yaml", env=secret)
        assert code == 0, err
        said.append([line for line in (out + err).splitlines() if "warning: " in line])
        assert "hunter2" not in out + err
    assert said[0] == said[1] == said[2]
    _, out, _ = space.command("check", "./recipe.yaml", env=secret)
    assert [line for line in out.splitlines() if "warning: " in line] == said[0]
    assert said[0][0].startswith("data: warning: rows were cut ") and "(3 times)" in said[0][0]
    assert len(said[0]) == 21 and said[0][-1].endswith("11 more warnings: see the step's log")
    assert all(len(line) < 530 for line in said[0])


def test_a_warning_is_no_number(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.write("program.py", PROGRAM)
    space.recipe(
        STEPS.replace("inputs: {word: {type: secret, env: PASS}}", "").replace(
            "secrets: [word], ", ""
        )
    )
    space.run()
    (done,) = (event for event in space.events if event.id == "data" and event.after == "DONE")
    assert done.data["metrics"] == {"step": 1, "loss": 2.5}
