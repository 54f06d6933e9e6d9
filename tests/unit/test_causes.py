"""Why an attempt failed, by what it left, and what to do about it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from runner.planning.causes import (
    LEAST,
    REMEDIES,
    find_error,
    find_exit_cause,
    find_last_line,
    is_stalled,
)
from runner.storage import metrics
from tests.support import Space


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "oom"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            "oom",
        ),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "oom"),
        ("Traceback:\nMemoryError", "oom"),
        ("train: the loss is nan at step 3; a smaller learning_rate may help", "nan"),
        ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "nan"),
        ("the bananas are gone", "exit"),
        ("loss 0.3, then KeyError: 'x'", "exit"),
        ("the loss is fine\ninformation: 7", "exit"),
    ],
)
def test_a_bad_exit_is_explained_by_what_was_printed(said: str, cause: str) -> None:
    assert find_exit_cause("exit", said) == cause and find_exit_cause("timeout", said) == "timeout"


def test_a_training_stands_still_after_twenty_times_its_median_step() -> None:
    assert is_stalled([10.0] * 5, 201) and not is_stalled([10.0] * 5, 199)
    assert not is_stalled([0.1] * 50, LEAST - 1) and is_stalled([0.1] * 50, LEAST + 1)
    assert not is_stalled([0.1] * 4, 10_000)


def test_the_pace_of_a_training_is_read_from_its_metrics(tmp_path: Path) -> None:
    told = tmp_path / "m"
    told.write_text("".join(json.dumps({"step": n, "time_step": 2.0}) + "\n" for n in range(3)))
    os.utime(told, (0, time.time() - 100))
    steps, silent = metrics.pace(told)
    assert steps == [2.0] * 3 and 99 < silent < 200 and metrics.pace(tmp_path / "none") == ([], 0.0)


def test_the_cause_and_its_remedy_are_shown_wherever_the_failure_is(space: Space) -> None:
    space.recipe("steps: {train: {run: 'echo torch.OutOfMemoryError: CUDA out of memory; exit 1'}}")
    space.attempt()
    for words in (("status",), ("why", "train"), ("report",)):
        _, told, said = space.command(*words)
        assert "oom" in told and REMEDIES["oom"] in told, told + said


TRACEBACK = """\
step 30
Traceback (most recent call last):
  File "train.py", line 12, in <module>
    main()
{}
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.57 GiB."


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (TRACEBACK.format("ValueError: no rows"), "ValueError: no rows"),
        (
            TRACEBACK.format("datasets.exceptions.DatasetNotFoundError: 'x' is gone"),
            "datasets.exceptions.DatasetNotFoundError: 'x' is gone",
        ),
        (TRACEBACK.format("KeyboardInterrupt"), "KeyboardInterrupt"),
        (TRACEBACK.format(OOM), "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (TRACEBACK.format(f"[rank1]: {OOM}"), "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (TRACEBACK.format("[rank1]: KeyError: 'text'"), "KeyError: 'text'"),
        (TRACEBACK.format("RuntimeError: CUDA out of memory."), "CUDA out of memory"),
        (
            TRACEBACK.format("KeyError: 'text'")
            + TRACEBACK.format("subprocess.CalledProcessError: Command '[x]' returned 1"),
            "KeyError: 'text'",
        ),
        ("cc: fatal error: no input files\nmake: done\n", "cc: fatal error: no input files"),
        ("the error rate is 0.1\nerrors: none, so far\n", ""),
        ("", ""),
    ],
)
def test_the_error_is_the_one_that_the_command_printed_last(said: str, error: str) -> None:
    assert find_error(said) == error


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("a\nb\n\n", "b"),
        ("  1%\r 50%\r100%\n", "100%"),
        (" 1%\r 2%\r", "2%"),
        ("\n\n", ""),
        ("x" * 900, "x" * 500),
    ],
)
def test_of_a_log_the_last_line_is_what_a_terminal_would_show(said: str, line: str) -> None:
    assert find_last_line(said) == line
