"""Recipes that can be requested by name, and their input schemas."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import Invalid, NotFound, Problem, did_you_mean
from ..language import library, parse
from ..language.library import LibraryEntry
from ..language.recipe import Input, Recipe
from ..paths import is_path
from ..settings import load
from ..storage.records.runs import RunFilter
from ..storage.workspace import Workspace
from .values import Facts, moment

_NAMED: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}(?:@[1-9][0-9]{0,8})?")
LATEST: Final = 500
"""Number of latest runs that are searched for the last use of a recipe."""
ADDRESSES: Final = ("file", "dataset", "model")
"""Input types whose values are paths or URLs."""
_JSON_TYPES: Final[Mapping[str, str]] = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "list": "array",
    "object": "object",
}
"""JSON Schema type of each input type. Other types are strings."""


class AvailableRecipe(NamedTuple):
    """A recipe available by name: its header, and its name or path in the workspace."""

    entry: LibraryEntry
    word: str


def list_recipes(
    root: Path, environ: Mapping[str, str], *, in_folder: bool
) -> list[AvailableRecipe]:
    """List the recipes available by name: library, packages and `recipes.allow`.

    With `in_folder`, include the recipe files in the workspace directory. Raises Invalid if an
    entry of `recipes.allow` is not a recipe file, or has the name of another recipe.
    """
    found = {entry.id: AvailableRecipe(entry, entry.id) for entry in library.entries()}
    for word in load(root, environ).lists.get("recipes.allow", ()):
        path = root / word
        entry = _find_entry(path)
        if entry is None:
            fix = (
                "list recipe files such as ./recipe.yaml in `allow` under [recipes] in recipe.toml"
            )
            raise Invalid([Problem("no-recipe", f"{word} is not a recipe file", None, fix)])
        if entry.id in found:
            raise Invalid(
                [
                    Problem(
                        "name-clash",
                        f"{word} has the same name as another recipe, {entry.id}",
                        None,
                        "change the name or the version",
                    )
                ]
            )
        found[entry.id] = AvailableRecipe(entry, f"./{os.path.relpath(path, root)}")
    if in_folder:
        for entry in library.list_recipes(root):
            found.setdefault(entry.id, AvailableRecipe(entry, f"./{entry.path.name}"))
    return sorted(found.values(), key=lambda each: (each.entry.name, -each.entry.version))


def _find_entry(path: Path) -> LibraryEntry | None:
    """Return the header of a recipe file, or None if the file is not a recipe."""
    for entry in library.list_recipes(path.parent):
        if entry.path.name == path.name:
            return entry
    return None


def find_recipe(known: Sequence[AvailableRecipe], name: str) -> AvailableRecipe:
    """Find a recipe by name, with or without a version. Raises NotFound."""
    if _NAMED.fullmatch(name):
        for each in known:
            if name in (each.entry.id, each.entry.name):
                return each
    ids = [each.entry.id for each in known]
    names = [each.entry.name for each in known]
    near = did_you_mean(name[:80], [*ids, *names])
    raise NotFound("unknown recipe", fix=near or "list the recipes with GET /v1/recipes")


def read_recipe(each: AvailableRecipe) -> Recipe:
    """Parse a recipe file, or return the cached result if the file has not changed."""
    found = each.entry.path.stat()
    return _parse_file(each.entry.path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _parse_file(path: Path, _mtime_ns: int, _size: int) -> Recipe:
    return parse.load(path)


def last_used(ws: Workspace) -> dict[str, float]:
    """Return the time of the last run or sweep of each recipe, among the `LATEST` runs.

    Times are seconds since the epoch.
    """
    used: dict[str, float] = {}
    for row in ws.store.runs.page(RunFilter(), LATEST):
        used.setdefault(row.recipe.replace("-sweep@", "@"), row.created)
    return used


def summary_facts(each: AvailableRecipe, used: float | None = None) -> Facts:
    """Return a recipe's list entry. `used` is its last use in seconds since the epoch."""
    entry = each.entry
    file = each.word if is_path(each.word) else ""
    return {
        "id": entry.id,
        "summary": entry.summary,
        "package": entry.origin,
        "file": file,
        "used": moment(used),
    }


def input_schema(recipe: Recipe) -> dict[str, Any]:
    """Return the JSON Schema of a recipe's inputs, except secrets."""
    given = [spec for spec in recipe.inputs.values() if spec.type != "secret"]
    required = [spec.name for spec in given if spec.required and not spec.has_default]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {spec.name: schema_of(spec) for spec in given},
        "required": required,
        "additionalProperties": False,
    }


def schema_of(spec: Input) -> dict[str, Any]:
    """Return the JSON Schema of an input as a new dictionary."""
    schema = _json_type(spec.type)
    if spec.type == "choice":
        schema = {"enum": spec.limits.get("choices")}
    if spec.doc:
        schema["description"] = spec.doc
    if spec.items:
        schema["items"] = _json_type(spec.items)
    if spec.type in ADDRESSES:
        schema["format"] = f"recipe-{spec.type}"
    # Limits of a list apply to its items, except minItems, maxItems and uniqueItems.
    limited = schema["items"] if spec.type == "list" and spec.items else schema
    for name, limit in spec.limits.items():
        if name == "choices":
            continue
        if name.endswith("Items"):
            schema[name] = limit
        else:
            limited[name] = limit
    if spec.has_default:
        schema["default"] = spec.default
    return schema


def _json_type(kind: str) -> dict[str, Any]:
    return {"type": _JSON_TYPES.get(kind, "string")}
