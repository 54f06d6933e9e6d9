"""Promise: the guides do what they say.  Their files are written and its commands run in order, in an empty folder, and what they print is compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.paths import shipped

PAGES = [
    shipped() / "docs" / name
    for name in (
        "tutorial.md",
        "environment.md",
        "multi-node.md",
        "from-a-repository.md",
        "python.md",
    )
]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "least"), [*zip(PAGES, (16, 7, 6, 13, 1), strict=True)])
def test_every_command_of_a_guide_prints_what_it_says(
    page: Path, least: int, tmp_path: Path
) -> None:
    asked = 0
    for kind, name, text in BLOCK.findall(page.read_text("utf-8")):
        if name and kind in ("python", "yaml", "toml"):
            (tmp_path / name).write_text(text)
        elif kind == "console":
            for command, expected in commands(text):
                said = ran(command, tmp_path)
                assert matches(expected, said), (
                    f"$ {command}\n--- it says\n{said}\n--- the page says\n{expected}"
                )
                asked += 1
    assert asked >= least


def test_the_readmes_first_commands_print_what_it_says(tmp_path: Path) -> None:
    """In the directory of the tutorial's script and data, as the README has it."""
    blocks = BLOCK.findall(PAGES[0].read_text("utf-8"))
    (tmp_path / "train.py").write_text(next(text for _, name, text in blocks if name))
    data = next(text for kind, _, text in blocks if kind == "console")
    ran(commands(data)[0][0], tmp_path)
    readme = BLOCK.findall((shipped() / "README.md").read_text("utf-8"))
    (typed,) = [text for kind, _, text in readme if kind == "console"]
    asked = commands(typed)
    assert len(asked) == 4
    for command, expected in asked:
        said = ran(command, tmp_path)
        assert matches(expected, said), f"$ {command}\n{said}\n--- the README says\n{expected}"


def test_a_page_that_says_otherwise_would_be_noticed() -> None:
    assert matches("a\n…\n1 step in …s\n", "a\nb\nc\n1 step in 0.3s\n")
    assert not matches("a\n…\n1 step in …s\n", "a\nb\n2 steps in 0.3s\n")
    assert not matches("a\n", "a\nb\n")
    assert not matches("a\nb\n", "a\n")
    assert commands("$ one\nsaid\n$ two\n") == [("one", "said\n"), ("two", "")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_of_a_guide_leads_somewhere(page: Path) -> None:
    links = set(re.findall(r"\]\(([\w.-]*)(?:#[\w-]*)?\)", page.read_text("utf-8")))
    assert [link for link in links if link and not (page.parent / link).is_file()] == []


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, with what it prints."""
    return [
        (part.partition("\n")[0], part.partition("\n")[2])
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)
        if part
    ]


def ran(command: str, root: Path) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("RECIPE_HOME", None)
    # What a terminal shows: both streams, in the order in which people read them.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=root,
        env=environment,
        text=True,
        timeout=60,
        check=False,
        **streams,
    ).stdout


def matches(expected: str, said: str) -> bool:
    """Whether it is what the page says.  A line of `…` is any number of lines, one within a line anything on it."""
    pattern = "".join(
        "(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + "\n"
        for line in expected.splitlines()
    )
    return re.fullmatch(pattern, f"{said.rstrip()}\n" if said.strip() else "") is not None
