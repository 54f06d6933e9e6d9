"""Generate the language reference in Markdown from the descriptions in the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = "Mapping[str, Any]"

BEGIN, END = "<!-- reference:begin -->", "<!-- reference:end -->"

_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "array": "list",
    "object": "mapping",
    "null": "`null`",
}
# The tables, in the order in which an author meets them: heading, where the mapping is written, and
# the path of its schema.
_TABLES = (
    ("Recipe", "The top level of the file.", ()),
    ("Input", "`inputs: {NAME: {…}}`", ("$defs", "input")),
    (
        "Preset",
        "`presets: {NAME: {…}}`; every other key is the name of an input, with its value.",
        ("$defs", "preset"),
    ),
    (
        "Step",
        "`steps: {ID: {…}}`; exactly one of `run`, `accelerate`, `uses`, `select`.",
        ("$defs", "step"),
    ),
    (
        "accelerate",
        "In a step: `accelerate: {…}`, with `script` or `module`.",
        ("$defs", "accelerate"),
    ),
    (
        "Output",
        "In a step: `outputs: {NAME: PATH}`, or `outputs: {NAME: {path: PATH, …}}`.",
        ("$defs", "output", "anyOf", 1),
    ),
    (
        "State",
        "In a step: `state: {NAME: {…}}`. In messages: checkpoints (state).",
        ("$defs", "state"),
    ),
    (
        "Glob",
        "In a step: `matrix: {AXIS: {glob: …}}`, instead of a list of values or an expression "
        "giving one; an item of `deps` or `code`.",
        ("$defs", "glob"),
    ),
    (
        "Retries",
        "In a step: `retries: 2`, or this mapping.",
        ("$defs", "step", "properties", "retries", "anyOf", 1),
    ),
    (
        "Metrics",
        "In a step: `metrics: true`, or this mapping with one key.",
        ("$defs", "step", "properties", "metrics", "anyOf", 1),
    ),
    (
        "Resources",
        "In the recipe, a preset or a step: `resources: {…}`, per node.",
        ("$defs", "resources"),
    ),
    ("Limits", "In the recipe or a preset: `limits: {…}`.", ("$defs", "limits")),
    ("Git checkout", "An item of `code`.", ("$defs", "code", "anyOf", 1, "items", "anyOf", 2)),
    ("Python", "In the recipe, a preset or a step: `python: {…}`.", ("$defs", "python")),
    (
        "Sandbox",
        "In the recipe or a step: `sandbox: true`, or this mapping.",
        ("$defs", "sandbox", "anyOf", 1),
    ),
    ("Health", "In the recipe: `health: {…}`.", ("properties", "health")),
    (
        "Sandbox",
        "In the recipe or a step: `sandbox: true`, or this mapping.",
        ("$defs", "sandbox", "anyOf", 1),
    ),
)


def markdown(schema: Schema) -> str:
    """Return the language reference as Markdown, with one table per mapping."""
    return "\n".join(line for heading in _TABLES for line in table(schema, *heading))


def refresh(text: str, schema: Schema) -> str:
    """Replace the generated reference between its markers in `text`."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown(schema)}\n{END}{after}"


def table(root: Schema, heading: str, where: str, path: tuple[str | int, ...]) -> Iterator[str]:
    """Yield the Markdown lines of the table for the schema mapping at `path`."""
    schema: Any = root
    for part in path:
        schema = schema[part]
    required = schema.get("required", ())
    yield f"### {heading}\n\n{where}\n\n| key | value | meaning |\n|---|---|---|"
    for key, value in schema["properties"].items():
        must = " **Required.**" if key in required else ""
        kind, meaning = _cell(_kind(root, value)), _cell(_description(root, value))
        yield f"| `{key}` | {kind} | {meaning}{must} |"
    yield ""


def _definition(root: Schema, schema: Schema) -> Any:
    """Return the definition that a schema refers to."""
    return root["$defs"][schema["$ref"].removeprefix("#/$defs/")]


def _description(root: Schema, schema: Schema) -> str:
    if "description" in schema:
        return str(schema["description"])
    return str(_definition(root, schema)["description"])


def _kind(root: Schema, schema: Schema) -> str:
    """Describe the type of a key's value briefly."""
    if "not" in schema:
        return "reserved"
    if "$ref" in schema:
        return _kind(root, _definition(root, schema))
    words = schema.get("enum", ())
    if 0 < len(words) <= 4:
        return " or ".join(f"`{word}`" for word in words)
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        return " or ".join(_kind(root, branch) for branch in schema["anyOf"])
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else types
    return " or ".join(_TYPES[word] for word in types)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
