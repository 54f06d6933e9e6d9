"""Parse a document into a Recipe, with all problems of shape and meaning.

Edges, cycles of steps, rendered output paths and names inside commands are checked later, in
planning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.errors import Invalid, Problem

from . import document as documents
from . import schema, units
from .document import Document
from .parse_context import ParseContext, code, env_files
from .parse_inputs import InputsReader
from .parse_steps import StepsReader
from .recipe import Health, Recipe
from .spelling import as_written
from .values import Where


def load(path: Path) -> Recipe:
    """Load a recipe from a file.

    Raises Invalid with every problem, and NotFound for a missing file.
    """
    return recipe(documents.read(path))


def recipe(document: Document, *, sound: bool = False) -> Recipe:
    """Parse a document to a recipe. Raises Invalid with every problem.

    `sound`: the document is known to satisfy the schema.
    """
    result, problems = try_parse(document, sound=sound)
    if problems:
        raise Invalid(problems)
    return result


def try_parse(document: Document, *, sound: bool = False) -> tuple[Recipe, list[Problem]]:
    """Parse the valid part of a recipe, and return it with every problem.

    The recipe is `partial` if there are problems.
    """
    value: object = document.value
    found = [] if sound else schema.find_faults(value)
    problems = [schema.locate_fault(document, fault) for fault in found]
    if found:
        value = _sound_part(value, found)
    raw = value if isinstance(value, dict) else {}
    context = ParseContext(document, raw)
    result = _read(context)
    problems += context.problems
    if problems:
        result = replace(result, partial=True)
    return result, sorted(problems, key=_position)


def _position(problem: Problem) -> tuple[int, int]:
    return (problem.where.line, problem.where.column) if problem.where else (0, 0)


def _sound_part(value: Any, faults: list[schema.SchemaFault]) -> object:
    """Return a document's value without its faulty parts, so that the rest can be checked too."""
    value = _without(value, _paths_of(faults))
    if not isinstance(value, dict) or len(faults) >= schema.MANY:
        return {}
    # First drop a key of a step, input or preset, then the whole part.
    depth = 3
    while left := _paths_of(schema.find_faults(value)):
        value = _without(value, [_cut(path, depth) for path in left])
        depth = 2
    return value


def _paths_of(faults: Iterable[schema.SchemaFault]) -> list[Where]:
    """Return the paths of the faulty parts. A fault of the whole document has an empty path."""
    return [fault.path for fault in faults if fault.path]


def _cut(path: Where, depth: int) -> Where:
    """Return the path of the part to drop, `depth` levels deep in sections such as `steps`."""
    if path[0] in ("steps", "inputs", "presets"):
        return path[:depth]
    return path[:1]


def _without(value: Any, paths: Iterable[Where]) -> Any:
    """Return a copy of `value` without the values at these paths."""
    removed = set[object]()
    below: dict[object, list[Where]] = {}
    for head, *rest in paths:
        if rest:
            below.setdefault(head, []).append(tuple(rest))
        else:
            removed.add(head)
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return value
    kept: dict[Any, Any] = {}
    for key, item in items:
        if key in below and key not in removed:
            kept[key] = _without(item, below[key])
        elif key not in removed:
            kept[key] = item
    return kept if isinstance(value, dict) else list(kept.values())


def _read(context: ParseContext) -> Recipe:
    raw = context.raw
    inputs_reader, steps_reader = InputsReader(context), StepsReader(context)
    name, _, version = str(raw.get("recipe", "unnamed@1")).partition("@")
    _check_file_name(context, name, version)
    inputs = {id: inputs_reader.input(id, item) for id, item in raw.get("inputs", {}).items()}
    inputs_reader.check_defaults(inputs)
    raw_presets = raw.get("presets", {}).items()
    presets = {id: inputs_reader.preset(id, item, inputs) for id, item in raw_presets}
    steps = {id: steps_reader.step(id, item) for id, item in raw.get("steps", {}).items()}
    return Recipe(
        name=name,
        version=int(version),
        summary=raw.get("summary", ""),
        document=context.document,
        doc=raw.get("doc", ""),
        inputs=inputs,
        presets=presets,
        steps=steps,
        outputs=raw.get("outputs"),
        resources=context.resources(raw.get("resources", {}), ("resources",)),
        limits=context.limits(raw.get("limits", {}), ("limits",)),
        image=raw.get("image"),
        python=context.python(raw.get("python"), ("python",)),
        tools=tuple(raw.get("tools", ())),
        setup=tuple(raw.get("setup", ())),
        health=_health(context),
        cleanup=tuple(raw.get("cleanup", ())),
        env=as_written(context.document, raw.get("env", {}), ("env",)),
        pass_env=tuple(raw.get("pass_env", ())),
        env_files=env_files(raw),
        secrets=context.secrets(raw, ()),
        code=code(raw.get("code", ())),
    )


def _check_file_name(context: ParseContext, name: str, version: str) -> None:
    if "recipe" not in context.raw:
        return
    file = Path(context.document.name)
    # A file name without a version, such as train.yaml, need not be the recipe's name.
    if "@" in file.stem and file.stem != f"{name}@{version}":
        message = f'the recipe is named "{name}@{version}", but its file is {file.name}'
        context.problem("wrong-name", message, ("recipe",), "use the same name and version in both")


def _health(context: ParseContext) -> Health | None:
    if "health" not in context.raw:
        return None
    raw = context.raw["health"]
    every = context.unit(units.duration, raw, "every", ("health",))
    return Health(raw["run"]) if every is None else Health(raw["run"], every)
