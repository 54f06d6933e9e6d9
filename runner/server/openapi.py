"""The OpenAPI document, with the guard's rules for the texts of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_VALUE: Final = {"$ref": "#/components/schemas/JsonValue"}
_TEXT: Final = {"pattern": r"^[^\u0000]*$"}
_TEXT_RULES: Final = {"pattern", "format", "enum"}
_JSON_VALUE: Final[dict[str, Any]] = {
    "description": "Any JSON value. Texts and property names contain no NUL character.",
    "anyOf": [
        {"type": ["null", "boolean", "number"]},
        {"type": "string", **_TEXT},
        {"type": "array", "items": _VALUE},
        {"type": "object", "propertyNames": _TEXT, "additionalProperties": _VALUE},
    ],
}
_PREFIX: Final = "#/components/schemas/"


def document_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return a function that builds the OpenAPI document once and caches it."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(get_openapi(title=app.title, version=app.version, routes=app.routes))
            _forbid_nul(made)
        return made

    return document


def _forbid_nul(document: dict[str, Any]) -> None:
    """Add to all parameter and body schemas that texts contain no NUL character."""
    operations: list[dict[str, Any]] = []
    for methods in document["paths"].values():
        operations += methods.values()
    for operation in operations:
        _restrict(operation.get("parameters", []))
    schemas = document["components"]["schemas"]
    names: set[str] = set()
    waiting = [each["requestBody"] for each in operations if "requestBody" in each]
    while waiting:
        for name in set(_references(waiting.pop())) - names:
            names.add(name)
            waiting.append(schemas[name])
    for name in names:
        _restrict(schemas[name])
    schemas["JsonValue"] = _JSON_VALUE


def _references(schema: object) -> Iterator[str]:
    """Yield the names of component schemas referenced by a schema."""
    for each in _inner(schema):
        yield from _references(each)
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"].removeprefix(_PREFIX)


def _restrict(schema: object) -> None:
    """Forbid NUL characters in the texts of a schema, and in values of any type."""
    for each in _inner(schema):
        _restrict(each)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "string" and not schema.keys() & _TEXT_RULES:
        schema.update(_TEXT)
    if kind == "array" and not schema.get("items"):
        schema["items"] = _VALUE
    if "patternProperties" in schema:
        schema["additionalProperties"] = False  # pydantic checks each name, but does not say so
    elif kind == "object":
        _restrict_properties(schema)


def _restrict_properties(schema: dict[str, Any]) -> None:
    """Forbid NUL characters in the names and values of an object's undeclared properties."""
    undeclared = schema.get("additionalProperties")
    if undeclared is False:
        return
    schema["propertyNames"] = _TEXT
    if undeclared in (True, None, {}):
        schema["additionalProperties"] = _VALUE


def _inner(schema: object) -> list[object]:
    """Return the values directly inside a part of the OpenAPI document."""
    if isinstance(schema, dict):
        return list(schema.values())
    return list(schema) if isinstance(schema, list) else []
