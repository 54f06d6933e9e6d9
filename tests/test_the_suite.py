"""What `make test` promises of itself: what is tried again, and what may be skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
HOOKS = 'from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\npytest_plugins = ["tests.retry"]\n'
FLAKY = """
import pathlib, pytest
@pytest.mark.parametrize("n", range({count}))
def test_flaky(n):
    seen = pathlib.Path(__file__).with_name(f"seen-{{n}}")
    tries = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (tries + 1))
    if tries <= n:
        pytest.fail("the first time")
def test_good(): pass
"""


def suite(folder: Path, text: str, **env: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a suite with these tests."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "RECIPE_"))
    }
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--retry",
        "3",
        ".",
    ]
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**environ, "PYTHONPATH": str(HOME), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_a_few_tests_that_fail_are_tried_twice_named_and_counted(tmp_path: Path) -> None:
    code, lines = suite(tmp_path, FLAKY.format(count=2))
    assert code == 0, lines
    assert [
        line.removeprefix("retry: test_it.py::") for line in lines if line.startswith("retry:")
    ] == [
        "test_flaky[0]: passed at the first try",
        "test_flaky[1]: failed at the first try",
        "test_flaky[1]: passed at the second try",
    ]
    assert lines[-1].startswith("3 passed, 2 retried in ")
    assert any("the first time" in line for line in lines)


def test_where_many_fail_none_is_tried_again(tmp_path: Path) -> None:
    code, lines = suite(tmp_path, FLAKY.format(count=4))
    assert code == 1
    assert "retry: 4 tests failed; at most 3 are tried again" in lines
    assert lines[-1].startswith("4 failed, 1 passed in ")


def test_one_that_fails_again_fails(tmp_path: Path) -> None:
    code, lines = suite(tmp_path, "def test_bad(): assert False\ndef test_good(): pass\n")
    assert code == 1
    assert [line for line in lines if line.startswith("retry:")] == [
        f"retry: test_it.py::test_bad: failed at the {n} try" for n in ("first", "second")
    ]
    assert lines[-1].startswith("1 failed, 1 passed in ")


@pytest.mark.parametrize(
    ("everything", "counts"), [("", "2 skipped in "), ("1", "1 failed, 1 skipped in ")]
)
def test_where_everything_has_to_run_a_missing_tool_is_a_failure(
    tmp_path: Path, everything: str, counts: str
) -> None:
    text = 'from tests.tools import lacks, needs\ndef test_a(): needs("no-such-shell")\ndef test_b(): lacks("docker")\n'
    _, lines = suite(tmp_path, text, RECIPE_TEST_ALL=everything)
    assert any("no-such-shell is not installed" in line for line in lines)
    assert lines[-1].startswith(counts)


def test_the_tests_that_the_pages_name_are_there() -> None:
    """A page that says what shows a thing says nothing once that test, or its file, has another name."""
    there = {
        name
        for path in (HOME / "tests").rglob("*.py")
        for name in (
            path.stem,
            *re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE),
        )
    }
    named = {
        (path.name, name)
        for path in (HOME / "docs").glob("*.md")
        for name in re.findall(r"\btest_\w+\b(?!:)", path.read_text())
    }
    assert (
        len(named) > 30 and sorted((page, name) for page, name in named if name not in there) == []
    )


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (HOME / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
