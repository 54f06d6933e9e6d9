"""The recipes that may be asked for by their names, and what each takes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import Invalid, NotFound, Problem, did_you_mean
from ..language import library
from ..language.library import Entry
from ..language.recipe import Input, Recipe
from ..paths import is_path
from ..settings import load
from ..storage.records.runs import Wanted
from ..storage.workspace import Workspace
from .values import Facts, moment

_NAMED: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}(?:@[1-9][0-9]{0,8})?")
LATEST: Final = 500
"""Runs that are looked at for when a recipe was used last."""
ADDRESSES: Final = ("file", "dataset", "model")
"""Types of inputs that are addresses, or paths."""
_JSON_TYPES: Final[Mapping[str, str]] = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "list": "array",
    "object": "object",
}
"""The JSON Schema type of each type of input; every other one is given as a string."""


class Offered(NamedTuple):
    """A recipe that may be asked for: its first lines, and what the workspace calls it."""

    entry: Entry
    word: str


def list_recipes(root: Path, environ: Mapping[str, str], *, in_folder: bool) -> list[Offered]:
    """Return every recipe that may be asked for by its name: the library's, of packages and of `recipes.allow`.

    With `in_folder` also those beside the workspace's settings.  Raises Invalid for a file of `recipes.allow` that is
    none, or has the name of another.
    """
    found = {entry.id: Offered(entry, entry.id) for entry in library.entries()}
    for word in load(root, environ).lists.get("recipes.allow", ()):
        path = root / word
        entry = next(
            (each for each in library.list_recipes(path.parent) if each.path.name == path.name),
            None,
        )
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
        found[entry.id] = Offered(entry, f"./{os.path.relpath(path, root)}")
    for entry in library.list_recipes(root) if in_folder else ():
        found.setdefault(entry.id, Offered(entry, f"./{entry.path.name}"))
    return sorted(found.values(), key=lambda each: (each.entry.name, -each.entry.version))


def find_recipe(known: Sequence[Offered], name: str) -> Offered:
    """Return the recipe of that name, with or without its version.  Raises NotFound."""
    if _NAMED.fullmatch(name):
        for each in known:
            if name in (each.entry.id, each.entry.name):
                return each
    near = did_you_mean(
        name[:80], [*(each.entry.id for each in known), *(each.entry.name for each in known)]
    )
    raise NotFound("unknown recipe", fix=near or "list the recipes with GET /v1/recipes")


def read_recipe(each: Offered) -> Recipe:
    """Return a recipe as it is written, parsed once for each version of its file."""
    found = each.entry.path.stat()
    return _parsed(each.entry.path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=64)
def _parsed(path: Path, _mtime_ns: int, _size: int) -> Recipe:
    from ..language import parse

    return parse.load(path)


def last_used(ws: Workspace) -> dict[str, float]:
    """Return when a run of each recipe, or a sweep of it, was stored last, in seconds since the epoch; of the latest `LATEST`."""
    used: dict[str, float] = {}
    for row in ws.store.runs.page(Wanted(), LATEST):
        used.setdefault(row.recipe.replace("-sweep@", "@"), row.created)
    return used


def summary_facts(each: Offered, used: float | None = None) -> Facts:
    """A recipe as lists show it; `used`: when a run of it was stored last, in seconds since the epoch."""
    entry = each.entry
    return {
        "id": entry.id,
        "summary": entry.summary,
        "package": entry.origin,
        "file": each.word if is_path(each.word) else "",
        "used": moment(used),
    }


def input_schema(recipe: Recipe) -> dict[str, Any]:
    """Return the JSON Schema of the inputs of a recipe, without its secrets."""
    given = [spec for spec in recipe.inputs.values() if spec.type != "secret"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {spec.name: schema_of(spec) for spec in given},
        "required": [spec.name for spec in given if spec.required and not spec.has_default],
        "additionalProperties": False,
    }


def schema_of(spec: Input) -> dict[str, Any]:
    """Return the JSON Schema of one input, in mappings that nothing else holds."""
    schema = _json_type(spec.type)
    if spec.type == "choice":
        schema = {"enum": spec.limits.get("choices")}
    if spec.doc:
        schema["description"] = spec.doc
    if spec.items:
        schema["items"] = _json_type(spec.items)
    if spec.type in ADDRESSES:
        schema["format"] = f"recipe-{spec.type}"
    # Limits of a list are those of its items, but for minItems and its like.
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
