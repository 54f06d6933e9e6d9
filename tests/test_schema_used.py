"""Every property of the language is described, and used by some recipe, example or fixture: a word that nobody says is not in the language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from runner.language import document, parse, schema
from runner.paths import shipped

HOME = shipped()


def test_every_property_is_described() -> None:
    root = schema.load()
    assert [
        place for place, part in _properties(root, "") if not part.get("description", "").strip()
    ] == []


def test_every_property_is_used() -> None:
    root = schema.load()
    used = {place for value in _recipes() for place in _used(root, root, value, "")}
    # What is reserved (`not`) can be used by nobody.
    assert [
        place for place, part in _properties(root, "") if place not in used and "not" not in part
    ] == []


def test_the_fixtures_are_recipes() -> None:
    for path in HOME.glob("fixtures/recipes/*.yaml"):
        assert parse.load(path).steps


def test_an_unused_property_is_found() -> None:
    root: Any = {
        "properties": {"a": {}, "b": {"$ref": "#/$defs/b"}, "c": {}},
        "$defs": {"b": {"anyOf": [{}, {"properties": {"d": {}, "e": {}}}]}},
    }
    assert [place for place, _ in _properties(root, "")] == [
        "/properties/a",
        "/properties/b",
        "/properties/c",
        *_BRANCH,
    ]
    assert set(_used(root, root, {"a": 1, "b": {"e": 2}}, "")) == {
        "/properties/a",
        "/properties/b",
        _BRANCH[1],
    }


_BRANCH = ["/$defs/b/anyOf/1/properties/d", "/$defs/b/anyOf/1/properties/e"]


def _recipes() -> Iterator[Any]:
    """The library, the examples, the good fixtures, and what the guide for authors shows."""
    paths = [
        *HOME.glob("recipes/*.yaml"),
        *HOME.glob("examples/**/*.yaml"),
        *HOME.glob("fixtures/recipes/*.yaml"),
    ]
    for path in paths:
        value = document.read(path).value
        if isinstance(value, dict) and "recipe" in value:
            yield value
    guide = (HOME / "docs" / "recipes.md").read_text("utf-8")
    for block in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL):
        value = document.parse(block, "guide.yaml").value
        yield value
        yield {"steps": {"example": value}}


def _properties(part: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of every property of every mapping."""
    if isinstance(part, dict):
        for name, inner in part.items():
            if name == "properties":
                yield from ((f"{place}/properties/{key}", value) for key, value in inner.items())
            if name not in ("default", "enum", "examples", "required", "description", "title"):
                yield from _properties(inner, f"{place}/{name}")
    elif isinstance(part, list):
        for n, inner in enumerate(part):
            yield from _properties(inner, f"{place}/{n}")


def _used(root: Any, part: Any, value: Any, place: str) -> Iterator[str]:
    """The places of the properties that `value` has, looked at as `part` of the schema."""
    if not isinstance(part, dict):
        return
    if "$ref" in part:
        name = part["$ref"].removeprefix("#/$defs/")
        yield from _used(root, root["$defs"][name], value, f"/$defs/{name}")
    for word in ("anyOf", "oneOf", "allOf"):
        for n, branch in enumerate(part.get(word, ())):
            yield from _used(root, branch, value, f"{place}/{word}/{n}")
    for word in ("if", "then", "else"):
        yield from _used(root, part.get(word), value, f"{place}/{word}")
    if isinstance(value, list):
        for item in value:
            yield from _used(root, part.get("items"), item, f"{place}/items")
    if isinstance(value, dict):
        known = part.get("properties", {})
        for key, inner in value.items():
            if key in known:
                yield f"{place}/properties/{key}"
                yield from _used(root, known[key], inner, f"{place}/properties/{key}")
            else:
                yield from _used(
                    root, part.get("additionalProperties"), inner, f"{place}/additionalProperties"
                )
