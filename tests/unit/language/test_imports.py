"""The scripts and modules that a command starts, by its text."""

from __future__ import annotations

from typing import Any

import pytest

from runner.language.imports import Start, find_starts


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (
            ["python", "src/train.py", "--data", "{{ inputs.data }}"],
            [Start("script", "src/train.py")],
        ),
        (["python", "-u", "-m", "pkg.train", ["--x", 1]], [Start("module", "pkg.train")]),
        (["python", "{{ inputs.script }}/a.py"], []),
        ("python src/train.py --out {{ outputs.o }}", [Start("script", "src/train.py")]),
        (
            "torchrun --nproc-per-node=2 'a b/../train.py' && python3 -m pkg",
            [Start("script", "b/../train.py"), Start("module", "pkg")],
        ),
        ("python {{ inputs.dir }}/train.py; sh ./go.sh", [Start("script", "./go.sh")]),
        ("echo a.pyc model.python", []),
    ],
)
def test_a_command_names_what_it_starts(run: Any, found: list[Start]) -> None:
    assert find_starts(run, None) == found


def test_accelerate_names_its_script() -> None:
    assert find_starts(None, {"script": "train.py", "args": {"x": "y.py"}}) == [
        Start("script", "train.py")
    ]
