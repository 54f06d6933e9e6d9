"""Which files an entry of `code` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.planning.patterns import encode_pattern
from runner.survey.code_files import code_matches

FILES = (
    "a.py pkg/__init__.py pkg/m.py pkg/deep/n.py pkg/data.json pkg/__pycache__/m.cpython-313.pyc pkg/old.pyc pkg/.git/config pkg/.hidden.py"
    " pkg/.venv/pyvenv.cfg pkg/.venv/lib/x.py pkg/env/pyvenv.cfg pkg/env/lib/y.py pkg/.recipe/z.py"
)
WHOLE = ["pkg/__init__.py", "pkg/data.json", "pkg/deep/n.py", "pkg/m.py"]


@pytest.fixture
def base(tmp_path: Path) -> str:
    for name in FILES.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "pkg/round").symlink_to(tmp_path / "pkg", target_is_directory=True)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("pkg", WHOLE),
        ("pkg/", WHOLE),
        ("./pkg/", WHOLE),
        ("pkg/*.py", ["pkg/__init__.py", "pkg/m.py"]),
        ("p*/", WHOLE),
        ("a.py", ["a.py"]),
        (encode_pattern("pkg", ["deep", "*.json"]), ["pkg/__init__.py", "pkg/m.py"]),
        (".", ["a.py", *WHOLE]),
        ("nowhere/", []),
    ],
)
def test_a_folder_is_taken_without_what_no_program_needs(
    base: str, entry: str, found: list[str]
) -> None:
    assert code_matches(base, entry) == found
