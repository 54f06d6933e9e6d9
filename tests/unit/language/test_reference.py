"""The guide for authors is true: its reference is the schema's, and its examples are recipes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from docs import settings_page
from runner.language import document, parse, reference, schema
from runner.paths import shipped

GUIDE = shipped() / "docs" / "recipes.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


def test_the_reference_is_the_schemas() -> None:
    text = (GUIDE.parent / "language.md").read_text("utf-8")
    assert reference.refresh(text, schema.load()) == text, (
        "docs/language.md is out of date: make docs"
    )


def test_the_settings_are_the_schemas() -> None:
    text = (GUIDE.parent / "settings.md").read_text("utf-8")
    assert settings_page.refreshed(text) == text, "docs/settings.md is out of date: make docs"


def test_a_change_of_the_schema_is_a_change_of_the_reference() -> None:
    changed: dict[str, Any] = {
        **schema.load(),
        "properties": {"recipe": {"description": "Something | else", "type": "string"}},
    }
    with pytest.raises(KeyError):
        reference.markdown(changed)  # a table of the reference has lost its place
    changed["properties"] = {
        **schema.load()["properties"],
        "fresh": {"description": "Something | else", "type": "integer"},
    }
    assert "| `fresh` | whole number | Something \\| else |" in reference.markdown(changed)


def test_every_key_of_the_language_is_in_the_reference() -> None:
    def keys(node: Any) -> set[str]:
        if isinstance(node, dict):
            return {
                key for key in node.get("properties", ()) if isinstance(node["properties"], dict)
            }.union(*map(keys, node.values()))
        return set().union(*map(keys, node)) if isinstance(node, list) else set()

    listed = set(re.findall(r"^\| `(\w+)` \|", reference.markdown(schema.load()), re.MULTILINE))
    assert keys(schema.load()) - listed == set()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_every_example_of_the_guide_is_language(block: str) -> None:
    """A part of a recipe is completed with what it leaves out; nothing in it may be wrong."""
    value: Any = document.parse(block, "guide.yaml").value
    if "steps" not in value and not value.keys() <= schema.load()["properties"].keys() | {"recipe"}:
        value = {
            "steps": {"example": {"run": ["true"], **value} if "accelerate" not in value else value}
        }
    elif "outputs" in value and "steps" not in value:
        value = {"steps": {"example": {"run": ["true"], **value}}}
    value = {"recipe": "example@1", "steps": {"s": {"run": ["true"]}}, **value}
    assert schema.find_faults(value) == []
    if "recipe:" in block:
        assert parse.recipe(document.parse(block, "guide.yaml")).steps
