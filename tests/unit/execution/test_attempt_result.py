"""What is read of an ended attempt: its exit, log, metrics and files."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from drivers.base import Exit
from runner.execution.steps import attempt_result
from runner.planning.step import MetricsSpec, StepSpec
from runner.secrets import Masker, Secret


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


@pytest.mark.parametrize(
    ("exit", "words"),
    [
        (Exit(1), "exit 1"),
        (Exit(127), "exit 127: program not found"),
        (Exit(None, signal=9, reason="signal"), "killed by SIGKILL, possibly out of memory"),
        (Exit(None, signal=15, reason="signal"), "killed by SIGTERM"),
        (Exit(None, signal=99, reason="signal"), "killed by signal 99"),
        (Exit(None, reason="stopped"), "stopped"),
        (Exit(None, reason="lost"), "the exit status is unknown: the agent was killed"),
    ],
)
def test_an_exit_is_said_in_words(exit: Exit, words: str) -> None:
    assert attempt_result.describe_exit(exit, StepSpec("r@1", "s", {}), "", b"") == words


@pytest.mark.parametrize(
    ("said", "room", "words"),
    [
        (b"", (10**9, None), ""),
        (b"", (10**9, 5), ""),
        (b"", (10**9, 0), f"{10**9} bytes and 0 inodes are free"),
        (b"", (0, 5), "0 bytes and 5 inodes are free"),
        (b"", (0, None), "0 bytes are free"),
        (os.strerror(errno.ENOSPC).encode(), (10**9, None), f"{10**9} bytes are free"),
        (os.strerror(errno.EDQUOT).encode(), (10**9, None), f"{10**9} bytes are free"),
    ],
)
def test_a_full_disk_is_one_without_bytes_or_inodes_or_one_that_the_program_complains_of(
    said: bytes, room: tuple[int, int | None], words: str
) -> None:
    found = attempt_result.describe_full_disk(b"cat: " + said, room, "node7")
    assert found == (f"no space left on a disk of node7 ({words} for attempts)" if words else "")


def test_what_a_step_put_in_place_of_its_files_is_deleted_and_named(tmp_path: Path) -> None:
    attempt, log = tmp_path / "s.1", tmp_path / "s.1.log"
    os.mkfifo(f"{attempt}.metrics")
    Path(f"{attempt}.host").mkdir()
    (tmp_path / "s.1.host" / "below").write_text("x")
    log.write_text("it")
    removed = attempt_result.remove_replaced(str(attempt), [str(log)])
    assert ["$RECIPE_METRICS" in removed[0], "record of its machine" in removed[1]] == [True, True]
    assert len(removed) == 2 and [each.name for each in tmp_path.iterdir()] == ["s.1.log"]


def test_a_log_with_nothing_in_it_is_not_kept(tmp_path: Path) -> None:
    log, metrics = tmp_path / "s.log", tmp_path / "s.metrics"
    log.touch()
    metrics.write_text('{"loss": 1}\n')
    kept = tmp_path / "runs" / "s.1"
    assert attempt_result.copy_log(str(log), str(metrics), str(kept), Masker([])) == ""
    assert [each.name for each in kept.parent.iterdir()] == ["s.1.metrics"]


def test_a_log_that_a_killed_worker_kept_is_replaced(tmp_path: Path) -> None:
    log, kept = tmp_path / "s.log", tmp_path / "runs" / "s.1"
    kept.parent.mkdir()
    Path(f"{kept}.log").write_text("half")
    log.write_text("whole")
    assert attempt_result.copy_log(str(log), "", str(kept), Masker([])) == f"{kept}.log"
    assert Path(f"{kept}.log").read_text() == "whole" and log.read_text() == "whole"
