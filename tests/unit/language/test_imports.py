"""The scripts and modules that a command starts, by its text."""

from __future__ import annotations

from typing import Any

import pytest

from runner.language.imports import EntryPoint, find_starts


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (
            ["python", "src/train.py", "--data", "{{ inputs.data }}"],
            [EntryPoint("script", "src/train.py")],
        ),
        (["python", "-u", "-m", "pkg.train", ["--x", 1]], [EntryPoint("module", "pkg.train")]),
        (["python", "{{ inputs.script }}/a.py"], []),
        ("python src/train.py --out {{ outputs.o }}", [EntryPoint("script", "src/train.py")]),
        (
            "torchrun --nproc-per-node=2 'a b/../train.py' && python3 -m pkg",
            [EntryPoint("script", "b/../train.py"), EntryPoint("module", "pkg")],
        ),
        ("python {{ inputs.dir }}/train.py; sh ./go.sh", [EntryPoint("script", "./go.sh")]),
        ("echo a.pyc model.python", []),
    ],
)
def test_a_command_names_what_it_starts(run: Any, found: list[EntryPoint]) -> None:
    assert find_starts(run, None) == found


def test_accelerate_names_its_script() -> None:
    assert find_starts(None, {"script": "train.py", "args": {"x": "y.py"}}) == [
        EntryPoint("script", "train.py")
    ]
