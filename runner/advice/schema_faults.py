"""Say in our words where a document is not what its schema wants."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import Problem
from ..paths import shipped

if TYPE_CHECKING:
    from ..language.document import Document


def faults(read: Document, schema: str, code: str) -> list[Problem]:
    """Every place at which a document is not what schemas/`schema` says, as problems of this code."""
    from jsonschema import Draft202012Validator

    wanted = json.loads((shipped() / "schemas" / schema).read_text("utf-8"))
    return [
        read.problem(
            code,
            _worded(error),
            tuple(error.absolute_path),
            fix=str(error.schema.get("description", "")),
        )
        for error in Draft202012Validator(wanted).iter_errors(read.value)
    ]


def _worded(error: Any) -> str:
    """What jsonschema found, in our words."""
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
