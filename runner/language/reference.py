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
    ("Recipe", "Keys at the top level of a recipe file.", ()),
    ("Input", "Keys of one input: `inputs: {NAME: {…}}`.", ("$defs", "input")),
    (
        "Preset",
        "Keys of one preset: `presets: {NAME: {…}}`. Every other key of a preset is the name of an input, with its value.",
        ("$defs", "preset"),
    ),
    (
        "Step",
        "Keys of one step: `steps: {ID: {…}}`. Each step has exactly one of `run`, `accelerate`, `uses` and `select`.",
        ("$defs", "step"),
    ),
    (
        "accelerate",
        "Keys of `accelerate: {…}` in a step. Either `script` or `module` is required.",
        ("$defs", "accelerate"),
    ),
    (
        "Output",
        "Keys of one output, in a step: `outputs: {NAME: PATH}`, or `outputs: {NAME: {path: PATH, …}}`.",
        ("$defs", "output", "anyOf", 1),
    ),
    (
        "State",
        "Keys of a checkpoint directory, in a step: `state: {NAME: {…}}`. In messages, such a directory is called checkpoints (state).",
        ("$defs", "state"),
    ),
    (
        "Glob",
        "Keys of a glob: an axis of a matrix, such as `matrix: {AXIS: {glob: …}}`, or an item of `deps` or `code`.",
        ("$defs", "glob"),
    ),
    (
        "Retries",
        "Keys of `retries` in a step. You can also write a number: `retries: 2`.",
        ("$defs", "step", "properties", "retries", "anyOf", 1),
    ),
    (
        "Metrics",
        "Keys of `metrics` in a step. Set one of the two keys, or write `metrics: true`.",
        ("$defs", "step", "properties", "metrics", "anyOf", 1),
    ),
    (
        "Resources",
        "Keys of `resources: {…}` in the recipe, a preset or a step. The numbers apply to each node.",
        ("$defs", "resources"),
    ),
    ("Limits", "Keys of `limits: {…}` in the recipe or a preset.", ("$defs", "limits")),
    (
        "Git checkout",
        "Keys of a git checkout, an item of `code`.",
        ("$defs", "code", "anyOf", 1, "items", "anyOf", 2),
    ),
    ("Python", "Keys of `python: {…}` in the recipe, a preset or a step.", ("$defs", "python")),
    (
        "Sandbox",
        "Keys of `sandbox` in the recipe or a step. You can also write `sandbox: true`.",
        ("$defs", "sandbox", "anyOf", 1),
    ),
    ("Health", "Keys of `health: {…}` in the recipe.", ("properties", "health")),
)


def markdown(schema: Schema) -> str:
    """Return the language reference as Markdown, with one table per mapping."""
    lines: list[str] = []
    for heading in _TABLES:
        lines += table(schema, *heading)
    return "\n".join(lines)


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
        kind = _escape_cell(_describe_type(root, value))
        meaning = _escape_cell(_find_description(root, value))
        yield f"| `{key}` | {kind} | {meaning}{must} |"
    yield ""


def _resolve(root: Schema, schema: Schema) -> Any:
    """Return the definition that a schema refers to."""
    return root["$defs"][schema["$ref"].removeprefix("#/$defs/")]


def _find_description(root: Schema, schema: Schema) -> str:
    if "description" in schema:
        return str(schema["description"])
    return str(_resolve(root, schema)["description"])


def _describe_type(root: Schema, schema: Schema) -> str:
    """Describe the type of a key's value briefly."""
    if "not" in schema:
        return "reserved"
    if "$ref" in schema:
        return _describe_type(root, _resolve(root, schema))
    words = schema.get("enum", ())
    if 0 < len(words) <= 4:
        return " or ".join(f"`{word}`" for word in words)
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        return " or ".join(_describe_type(root, branch) for branch in schema["anyOf"])
    return " or ".join(_words_of_types(schema))


def _words_of_types(schema: Schema) -> list[str]:
    """Return the words for the types of a schema."""
    types = schema.get("type", ())
    if isinstance(types, str):
        return [_TYPES[types]]
    return [_TYPES[word] for word in types]


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
