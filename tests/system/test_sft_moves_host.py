"""The show case of state: a training over ssh whose machine dies continues elsewhere, and ends in the same bits as an undisturbed one.

`make test` has the parts: a training that continues on another machine (test_spot, test_states_in_a_store), and one that is killed and ends in the same bits
(test_text_train).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.servers.sshd import Sshd
from tests.support import Space, until

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = int(os.environ.get("RECIPE_SFT_STEPS", "12")), 4
ASKED = (
    "--preset",
    "smoke",
    "--python",
    "current",
    "--until",
    "train",
    f"max_steps={STEPS}",
    f"save_every={SAVED}",
    "eval_every=0",
)

pytestmark = [pytest.mark.xdist_group("sft"), pytest.mark.proof]


def workspace(root: Path) -> Space:
    """The recipe as it is, but that its checkpoints come home every second: which is no part of any key."""
    space = Space(root)
    shutil.copytree(
        ROOT / "recipes" / "trainers",
        root / "trainers",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    recipe = (ROOT / "recipes" / "sft@1.yaml").read_text()
    assert "every: 5m" in recipe
    space.write("recipe.yaml", recipe.replace("every: 5m", "every: 1s"))
    return space


def run(space: Space, *words: str) -> tuple[int, str]:
    process = space.start("run", *words)
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def adapter(space: Space) -> bytes:
    """What step `train` made, as it is stored."""
    (found,) = (
        path
        for path in (space.root / ".recipe" / "objects").glob("*/*.t/adapter_model.safetensors")
    )
    return found.read_bytes()


def home(space: Space) -> list[Path]:
    return sorted((space.root / ".recipe" / "states").glob("*/*/checkpoints/checkpoint-*"))


def test_a_training_whose_machine_dies_goes_on_elsewhere_and_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    still = workspace(tmp_path / "still")
    assert run(still, *ASKED)[0] == 0

    moved = workspace(tmp_path / "moved")
    with Sshd(tmp_path / "sshd") as sshd:
        settings = sshd.settings(python=sys.executable)
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        there = f"root = {json.dumps(str(tmp_path / 'machines'))}\npython = {json.dumps(sys.executable)}\n"
        moved.write(
            "recipe.toml", "[drivers.ssh]\n" + "\n".join(lines) + f"\n[drivers.loopback]\n{there}"
        )
        worker = moved.start("run", *ASKED, "--driver", "ssh")
        try:
            states = sshd.home / ".recipe-host" / "states"
            until(
                lambda: (
                    worker.poll() is not None or list(states.glob("*/checkpoints/checkpoint-*"))
                ),
                seconds=120,
            )
            assert worker.poll() is None, worker.communicate()
            # Time stands still there, so that it cannot end before we look; then nothing is left of it, nor of who started it.
            for process in trainers(sshd.home):
                process.send_signal(signal.SIGSTOP)
            until(lambda: home(moved))
            sshd.kill_everything()
        finally:
            worker.kill()
            worker.communicate()
        assert int(home(moved)[-1].name.rpartition("-")[2]) < STEPS
        assert not list(
            (moved.root / ".recipe" / "objects").glob("*/*.t/adapter_model.safetensors")
        )

        code, said = run(moved, *ASKED, "--driver", "loopback", "-v")
        assert code == 0, said
        assert "resumes from checkpoint-" in said, said
    assert adapter(moved) == adapter(still)


def trainers(home: Path) -> list[psutil.Process]:
    """Every process that was started in that machine's attempt directories."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(home / ".recipe-host" / "attempts")):
                found.append(process)
        except psutil.Error:
            pass
    return found
