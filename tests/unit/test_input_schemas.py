"""The JSON Schema that the server shows of an input is that input's own, whatever was read before it."""

from __future__ import annotations

from runner.api.recipes import schema_of
from runner.language import library, parse


def test_reading_one_recipe_never_changes_the_schema_of_another() -> None:
    recipes = [parse.load(entry.path) for entry in library.entries()]
    inputs = [spec for recipe in recipes for spec in recipe.inputs.values()]
    forwards = [schema_of(spec) for spec in inputs]
    backwards = [schema_of(spec) for spec in reversed(inputs)]
    assert forwards == backwards[::-1]
    for spec, schema in zip(inputs, forwards, strict=True):
        limited = schema.get("items", schema)
        for limit in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern"):
            assert (limit in limited) == (limit in spec.limits), f"{spec.name}: {limit}"
