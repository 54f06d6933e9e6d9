"""The schema of the language: load it, resolve references, describe its types."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TypedDict

from . import library

Schema = TypedDict(
    "Schema",
    {
        "$ref": str,
        "$defs": "dict[str, Schema]",
        "anyOf": "list[Schema]",
        "oneOf": "list[Schema]",
        "properties": "dict[str, Schema]",
        "required": "list[str]",
        "type": "str | list[str]",
        "title": str,
        "description": str,
        "pattern": str,
    },
    total=False,
)
"""The keywords of a JSON Schema that are read here."""

_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}


@cache
def load() -> Schema:
    """Load the JSON Schema of the recipe language."""
    found: Schema = json.loads(library.schema_text())
    return found


def resolve(schema: Schema) -> Schema:
    """Resolve the `$ref` of a schema to its definition."""
    if "$ref" not in schema:
        return schema
    return load()["$defs"][schema["$ref"].removeprefix("#/$defs/")]


def types_of(schema: Schema) -> set[str]:
    """Return all value types accepted by a schema."""
    schema = resolve(schema)
    if "anyOf" in schema:
        return set().union(*map(types_of, schema["anyOf"]))
    return set(_types(schema))


def _types(schema: Schema) -> Sequence[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def describe_expected(schema: Schema) -> str:
    """Describe the expected value for messages, by the schema's title or its types."""
    if "title" in schema:
        return str(schema["title"])
    return join([_TYPES[word] for word in _types(schema)])


def describe_key(schema: Schema, key: str) -> str:
    """Return a key with the first sentence of its schema description, if present."""
    text = str(schema.get("properties", {}).get(key, {}).get("description", ""))
    sentence = re.split(r"(?<=[.:]) ", text, maxsplit=1)[0].rstrip(".:")
    return f"`{key}`: {sentence[:1].lower()}{sentence[1:]}" if sentence else f"`{key}`"


def join(words: Sequence[str], conjunction: str = "or") -> str:
    """Join distinct words as `a, b or c`."""
    words = list(dict.fromkeys(words))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"
