"""Promise: a stranger who follows docs/design.md and CONTRIBUTING.md finds every file and function that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.house import FLOORS, find_untested_modules
from benchmarks.named_files import names_of, stale_names
from benchmarks.style import ANCHORS, Source, is_participle, measure

HOME = Path(__file__).parents[1]
DESIGN = (HOME / "docs/design.md").read_text("utf-8")
CONTRIBUTING = (HOME / "CONTRIBUTING.md").read_text("utf-8")
WALKS = ("a value", "an output", "a machine", "a cancel", "a log line")
EXAMPLES = ("a key to the language", "a driver", "a preflight rule", "a verb")


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}.*\n((?:(?!#+ ).*\n)*)", text, re.MULTILINE)
    assert found, heading
    return found[1]


def test_every_file_and_function_that_the_pages_name_exists() -> None:
    assert stale_names(HOME) == []


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_ten_lines_and_each_names_a_file_and_a_part_of_it(walk: str) -> None:
    lines = re.findall(r"^\d+\. .*$", section(DESIGN, f"Walk: {walk}"), re.MULTILINE)
    assert [line.partition(".")[0] for line in lines] == [str(n) for n in range(1, 11)]
    assert [line for line in lines if not any(n.part for n in names_of(line, HOME))] == []


def test_every_floor_has_a_picture_that_names_its_files() -> None:
    for floor in (*(floor for floor in FLOORS if floor != "words"), "drivers"):
        fences = re.findall(r"```\n(.*?)```", section(DESIGN, f"{floor}: "), re.DOTALL)
        assert len(fences) == 1, floor
        assert len(re.findall(r"\w+\.py", fences[0])) >= 4, floor


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_for_a_first_patch_names_its_files_and_its_test(example: str) -> None:
    paths = [name.path for name in names_of(section(CONTRIBUTING, f"Add {example}"), HOME)]
    assert len(paths) >= 4 and any(path.startswith("tests/") for path in paths)


def test_a_name_that_leads_nowhere_is_found_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "runner/hosts/link").mkdir(parents=True)
    (tmp_path / "runner/hosts/link/client.py").write_text(
        "LIMIT: int = 1\nclass Client:\n    def wait(self): ...\n"
    )
    page = (
        "`hosts/link/client.py:Client.wait`, `hosts/link/client`, `runner/hosts/*/client.py:LIMIT` "
        "and https://example.com/hosts/none.py\n"
        "`hosts/link/gone.py`, (hosts/link/client.py:Client.stop).\n"
        "`client.py`\n"
        "### hosts: where steps run\n"
        "client.py ─▶ link/ server.py lost/\n"
    )
    (tmp_path / "page.md").write_text(page)
    assert stale_names(tmp_path, ("page.md",)) == [
        "page.md:2: hosts/link/gone.py does not exist",
        "page.md:2: hosts/link/client.py has no Client.stop",
        "page.md:3: client.py does not exist",
        "page.md:5: server.py does not exist",
        "page.md:5: lost does not exist",
    ]


def test_style_is_measured_from_syntax() -> None:
    dense = "def dense(a):\n    return " + " or ".join(f"a == {n}" for n in range(12)) + "\n"
    text = (
        "# why\n"
        "class Kept:\n    def held(self):\n        import os\n"
        "class Kept:\n    x = [1 if y else 2 for y in ()]\n" + dense
    )
    figures = measure([Source(text, list(ast.walk(ast.parse(text))))])
    assert list(figures) == list(ANCHORS)
    assert figures["functions of complexity over 10, %"] == 50
    assert figures["dense functions, %"] == 50
    assert figures["conditional expressions per 1,000 lines"] == 125
    assert figures["comprehensions per 1,000 lines"] == 125
    assert figures["functions named by a participle, %"] == 50
    assert figures["classes named by a participle, %"] == 100
    assert figures["class names of two or more classes"] == 1
    assert figures["lines over 100 columns per 1,000"] == 125
    assert figures["comment lines, %"] == 12.5
    assert figures["imports inside functions"] == 1


def test_a_module_is_tested_if_a_test_imports_it_or_has_its_name(tmp_path: Path) -> None:
    for name in ("runner/a.py", "runner/b.py", "runner/c.py", "runner/d.py", "tests/test_d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tests/test_d.py").write_text("from runner import (\n    a,\n)\nimport runner.b\n")
    assert find_untested_modules(tmp_path) == ["runner.c"]


def test_a_participle_is_one_word() -> None:
    assert all(map(is_participle, ("_held", "Kept", "asked", "staging")))
    assert not any(map(is_participle, ("seed", "Settings", "held_back", "find_held", "read")))
