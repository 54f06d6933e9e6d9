"""Write docs/settings.md from the descriptions in schemas/config.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from runner.language.reference import BEGIN, END, table
from runner.paths import shipped


def refreshed(text: str) -> str:
    """`text` with what stands between its markers written anew."""
    schema = json.loads((shipped() / "schemas" / "config.schema.json").read_text("utf-8"))
    before, _, rest = text.partition(BEGIN)
    lines = [
        line
        for heading, path in _tables(schema)
        for line in table(_of_itself(schema, path), heading, _said(schema, path), path)
    ]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.partition(END)[2]}"


def _tables(schema: dict[str, Any]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """The heading of each table of recipe.toml, and where its keys stand in the schema."""
    yield "Top level", ()
    for name, value in schema["properties"].items():
        if "properties" in value and name != "drivers":
            yield f"`[{name}]`", ("properties", name)
        elif "properties" in value.get("items", ()):
            yield f"`[[{name}]]`", ("properties", name, "items")
    yield "`[stores.NAME]`", ("$defs", "store")
    yield "`[stacks.NAME]`", ("$defs", "stack")
    drivers: dict[str, list[str]] = {}
    yield "`[drivers]`", ("properties", "drivers")
    for name, value in schema["properties"]["drivers"]["properties"].items():
        if "$ref" not in value:
            continue
        drivers.setdefault(value["$ref"].rpartition("/")[2], []).append(name)
    for one, names in drivers.items():
        yield ", ".join(f"`[drivers.{name}]`" for name in names), ("$defs", one)
    yield "A host of `[drivers.ssh]`", ("$defs", "ssh_host")


def _of_itself(schema: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """The schema without tables among the keys of `[drivers]`: each has a table of its own."""
    if path != ("properties", "drivers"):
        return schema
    drivers = schema["properties"]["drivers"]
    own = {name: value for name, value in drivers["properties"].items() if "$ref" not in value}
    return {
        **schema,
        "properties": {**schema["properties"], "drivers": {**drivers, "properties": own}},
    }


def _said(schema: Any, path: tuple[str | int, ...]) -> str:
    for part in path:
        schema = schema[part]
    return str(schema.get("description", ""))
