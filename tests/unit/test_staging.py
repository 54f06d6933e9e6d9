"""Which undeclared file an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.execution.staging import undeclared


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("cat: data/rows.csv: No such file or directory", "data/rows.csv"),
        ("python: can't open file 'ATTEMPT/helper.py'", "helper.py"),
        ("WORKSPACE/helper.py is not there", "helper.py"),
        ("FileNotFoundError: 'declared.txt'", None),
        ("nothing.txt is not in the workspace", None),
        ("folder/inner.txt lies in what is declared", None),
    ],
)
def test_a_name_that_is_in_the_workspace_and_was_not_declared_is_found(tmp_path: Path, said: str, named: str | None) -> None:
    for name in ("data/rows.csv", "helper.py", "declared.txt", "folder/inner.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    attempt = f"{tmp_path}/.recipe/attempts/a-1"
    words = said.replace("ATTEMPT", attempt).replace("WORKSPACE", str(tmp_path))
    assert undeclared(words, tmp_path, attempt, ["declared.txt", "folder"]) == named
