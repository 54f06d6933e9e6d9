"""What a training is asked while it runs: trainers/control.py, in loops of their own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.paths import shipped

LOOP = """
import sys
sys.path.insert(0, {trainers!r})
from control import Ending, every
ending = Ending()
for step in range(1, 10):
    if step == {at}:
        {do}
    stopping = ending.asked
    if stopping or ending.checkpoint or step % every("CHECKPOINT_INTERVAL_STEPS", 100) == 0:
        print(step, end=" ", flush=True)
        ending.saved()
    if stopping:
        ending.end()
assert not {{"torch", "transformers", "loop"}} & set(sys.modules)
"""


def trained(folder: Path, do: str, **more: str) -> tuple[str, int]:
    """The steps that were saved, and the status."""
    program = LOOP.format(trainers=str(shipped() / "recipes/trainers"), at=4, do=do)
    env = {**os.environ, "RECIPE_CONTROL": str(folder / "control"), **more}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout.strip(), done.returncode


def asking(what: str) -> str:
    return f"""open({"{path}"!r}, "a").write('{json.dumps({"ask": what})}' + chr(10))"""


@pytest.mark.parametrize(
    ("what", "saved", "status"),
    [
        ("pause", "4", -signal.SIGTERM),
        ("stop", "4", -signal.SIGTERM),
        ("checkpoint", "4", 0),
        ("something newer", "", 0),
    ],
)
def test_a_training_does_what_it_is_asked_at_the_end_of_its_step(
    what: str, saved: str, status: int, tmp_path: Path
) -> None:
    assert trained(tmp_path, asking(what).replace("{path}", str(tmp_path / "control"))) == (
        saved,
        status,
    )
    first = (tmp_path / "control").read_text().splitlines()[0]
    assert json.loads(first)["listens"] == ["stop", "pause", "checkpoint"]


def test_a_signal_asks_for_the_same(tmp_path: Path) -> None:
    assert trained(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)") == (
        "4",
        -signal.SIGTERM,
    )


def test_half_a_line_asks_for_nothing_and_rubbish_neither(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    assert trained(
        tmp_path,
        f"open({path!r}, 'a').write('[1]' + chr(10) + 'x' + chr(10) + '{{\"ask\": \"pause\"')",
    ) == ("", 0)


def test_without_a_file_nothing_is_asked(tmp_path: Path) -> None:
    assert trained(tmp_path, "pass", RECIPE_CONTROL="") == ("", 0)


def test_the_interval_of_checkpoints_is_what_the_environment_says(tmp_path: Path) -> None:
    assert trained(tmp_path, "pass", CHECKPOINT_INTERVAL_STEPS="3")[0] == "3 6 9"
    assert trained(tmp_path, "pass", CHECKPOINT_INTERVAL_STEPS="many")[0] == ""
