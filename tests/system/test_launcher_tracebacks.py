"""What is shown of a program's own error when `accelerate` launched it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.execution.steps import attempt_result

SCRIPT = "import os, sys\nos.write(1, b'first\\n')\nif {raising}:\n    raise ValueError('row 3 is no number')\nsys.exit('row 3 is no number')\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "raising"),
    [(["--num_processes", "1"], False), (["--multi_gpu", "--num_processes", "2"], True)],
)
def test_the_last_words_are_the_programs_and_not_those_of_what_launched_it(
    launcher: list[str], raising: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(raising=raising))
    accelerate = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    # Where its usual port is taken, it warns of that first, naming launch.py.
    accelerate += ["--main_process_port", "0"]
    env = {
        "PATH": "/usr/bin:/bin",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
    }
    ran = subprocess.run(
        [*accelerate, *launcher, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        check=False,
    )
    assert ran.returncode == 1
    told = attempt_result.without_launcher(ran.stdout)
    assert b"launch.py" in ran.stdout and b"launch.py" not in told
    assert told.startswith(b"first\n") and b"row 3 is no number\n" in told
    assert told.count(b"Traceback") in (
        (1, 2) if raising else (0,)
    )  # each process has its own, unless the launcher ended it before
