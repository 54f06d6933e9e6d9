"""Report the schema violations of a document as problems."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import Problem
from ..paths import shipped

if TYPE_CHECKING:
    from ..language.document import Document


def faults(read: Document, schema: str, code: str) -> list[Problem]:
    """Return every violation of schemas/`schema` in a document, as problems with this code."""
    from jsonschema import Draft202012Validator

    wanted = json.loads((shipped() / "schemas" / schema).read_text("utf-8"))
    found: list[Problem] = []
    for error in Draft202012Validator(wanted).iter_errors(read.value):
        fix = str(error.schema.get("description", ""))
        path = tuple(error.absolute_path)
        found.append(read.problem(code, _describe(error), path, fix=fix))
    return found


def _describe(error: Any) -> str:
    """Format a jsonschema error as a message."""
    name = ".".join(str(part) for part in error.absolute_path) or "the file"
    match error.validator:
        case "additionalProperties":
            strange = sorted(set(error.instance) - set(error.schema.get("properties", ())))
            return f'{name} has no key "{strange[0]}"'
        case "required":
            lacking = [key for key in error.validator_value if key not in error.instance]
            return f"{name} has no {lacking[0]}"
        case "type":
            kinds = {
                "object": "a mapping",
                "array": "a list",
                "number": "a number",
                "integer": "a whole number",
            }
            return f"{name} must be {kinds.get(error.validator_value, 'text')}"
        case "enum":
            return f"{name} must be one of {', '.join(error.validator_value)}"
        case _:
            return f"{name} has an invalid value: {json.dumps(error.instance)[:60]}"
