"""What is shown of a failed program's log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.execution.steps import attempt_result
from runner.planning.step import MetricsSpec
from runner.secrets import Masker, Secret

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
    accelerate += [
        "--main_process_port",
        "0",
    ]  # where its usual one is taken, it warns of that first, naming launch.py
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


def test_of_what_a_pattern_of_metrics_files_fits_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "m" / "folder").mkdir(parents=True)
    os.mkfifo(tmp_path / "m" / "pipe")
    (tmp_path / "m" / "z").symlink_to("nowhere")
    (tmp_path / "m" / "it").write_text('{"loss": 0.5}\n')
    assert attempt_result.read_metrics(str(tmp_path), "", MetricsSpec("m/*", None), MASKER) == {
        "loss": 0.5
    }


def test_a_programs_own_traceback_stays() -> None:
    own = b"Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n    run()\nsubprocess.CalledProcessError: Command 'x' failed\n"
    assert attempt_result.without_launcher(own) == own


TOKEN = "hf_0123456789abcdefghijklmnopqrstuvwx"
MASKER = Masker([Secret("t", TOKEN)])


@pytest.mark.parametrize("cut", range(0, len(TOKEN) + 1, 3))
def test_a_tail_that_begins_inside_a_secret_shows_nothing_of_it(cut: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    after = b"\n" + b"x" * (attempt_result.TAIL - len(TOKEN) + cut - 1)
    log.write_bytes(b"-" * 5000 + TOKEN.encode() + after)
    tail = attempt_result.read_tail(str(log), MASKER)
    assert tail.replace(b"***", b"") == after[-attempt_result.TAIL :]


def test_a_log_that_is_cut_inside_secrets_keeps_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_result, "LOG_CAP", 2000)
    log = tmp_path / "attempt.log"
    half = b"a" * 980 + TOKEN.encode() + b"b" * 980
    log.write_bytes(half + b"dropped " * 500 + half)
    kept = attempt_result.copy_log(str(log), "", str(tmp_path / "kept"), MASKER)
    text = Path(kept).read_bytes()
    assert re.fullmatch(
        rb"a{980}\n\xe2\x80\xa6 \d+ bytes dropped \xe2\x80\xa6\n(\*\*\*)?b{980}", text
    )
