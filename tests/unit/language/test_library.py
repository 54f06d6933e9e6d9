"""The library is found by name, newest version first, and listed without reading YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runner.errors import NotFound
from runner.language import library
from runner.paths import shipped
from tests.support import calls


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name, summary in (
        ("sft@1", "summary: Old"),
        ("sft@2", 'summary: "Fine-tune: \\"LM\\""  '),
        ("sft@10", "summary: New # really"),
        ("dpo@1", "doc: x"),
    ):
        (recipes / f"{name}.yaml").write_text(
            f"# A comment\nrecipe: {name}\n{summary}\ninputs:\n  summary: {{type: string}}\n"
        )
    (recipes / "gotchas.yaml").write_text("a: b\n")
    (recipes / "Bad Name@1.yaml").write_text("a: b\n")
    (recipes / "trainers").mkdir()
    monkeypatch.setattr(library, "shipped", lambda: tmp_path)
    return tmp_path


def test_recipes_are_listed_with_their_summaries(home: Path) -> None:
    assert [(entry.id, entry.summary) for entry in library.entries()] == [
        ("dpo@1", ""),
        ("sft@10", "New"),
        ("sft@2", 'Fine-tune: "LM"'),
        ("sft@1", "Old"),
    ]


def test_a_name_without_version_is_the_newest(home: Path) -> None:
    assert library.find("sft", home) == home / "recipes" / "sft@10.yaml"
    assert library.find("sft@2", home) == home / "recipes" / "sft@2.yaml"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("sfd", 'did you mean "sft"?'),
        ("sft@3", "there is sft@1, sft@2, sft@10"),
        ("sft@01", "there is sft@1, sft@2, sft@10"),
        ("sft@", "there is sft@1, sft@2, sft@10"),
        ("sft@²", "there is sft@1, sft@2, sft@10"),
        ("./mine.yml", 'did you mean "mine.yaml"?'),
        ("mine", "did you mean ./mine.yaml?"),
        (
            "..",
            "`recipe list` shows the library; for a recipe of your own, pass its path: ./NAME.yaml",
        ),
        (
            "zzz/",
            "looked in HOME; name a library recipe without a path; `recipe list` shows the library",
        ),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(home: Path, name: str, fix: str) -> None:
    (home / "mine.yaml").write_text("")
    with pytest.raises(NotFound) as caught:
        library.find(name, home)
    assert caught.value.fix == fix.replace("HOME", str(home))


def test_a_path_is_looked_up_from_the_workspace(home: Path) -> None:
    (home / "mine.yaml").write_text("")
    assert library.find("mine.yaml", home) == home / "mine.yaml"
    assert library.find(str(home / "mine.yaml"), Path("/nowhere")) == home / "mine.yaml"


def test_what_ships_is_found() -> None:
    assert library.schema_text().startswith("{")
    assert library.fixtures().is_dir()


def test_listing_reads_no_yaml_and_is_quick() -> None:
    heavy = {"yaml", "jinja2", "jsonschema", "networkx", "regex"}
    code = f"import sys; from runner.language import library; library.entries(); print(*{heavy!r} & set(sys.modules))"
    imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=shipped()
    )
    assert imported.stdout.strip() == ""
    assert calls(library.entries) < 600 * len(library.entries())
