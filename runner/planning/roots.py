"""Make the paths of a recipe relative to its workspace root.

Paths with `./` or `../` in front are relative to the recipe's directory, and other paths to the
root.  For library recipes, and recipes outside the workspace, both are the same.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ..language.recipe import AutoCode, GitCode, Glob, Python

if TYPE_CHECKING:
    from ..language.recipe import Preset, Recipe, Step
    from ..language.values import Tree, Where

_Code = TypeVar("_Code", str, "str | Glob", "str | Glob | GitCode | AutoCode")


def move_root(recipe: Recipe, source: str, root: str) -> Recipe:
    """Return a recipe with its paths made relative to the directory `root`.

    A recipe whose file `source` is outside `root` is returned unchanged.  Both paths are absolute.
    """
    above, at = root.rstrip("/") + "/", posixpath.normpath(source)
    if not at.startswith(above):
        return recipe
    folder = posixpath.dirname(at.removeprefix(above))
    if not folder:
        return replace(recipe, home=root)
    steps = {id: _step(step, folder) for id, step in recipe.steps.items()}
    presets: dict[str, Preset] = {}
    for name, preset in recipe.presets.items():
        presets[name] = replace(preset, python=_python(preset.python, folder))
    code = tuple(_item(item, folder) for item in recipe.code)
    return replace(
        recipe,
        home=root,
        folder=folder,
        code=code,
        steps=steps,
        presets=presets,
        python=_python(recipe.python, folder),
    )


def from_root(path: str, folder: str) -> str:
    """Convert a path written in a recipe in `folder` to a path relative to the workspace root.

    A path outside the root is returned unchanged.
    """
    left = folder.split("/") if folder else []
    rest = path
    while rest.startswith(("./", "../")):
        head, _, rest = rest.partition("/")
        rest = rest.lstrip("/")
        if head == "..":
            if not left:
                return path
            left.pop()
    return "/".join([*left, rest]) if rest != path else path


def shift_at(recipe: Recipe, where: Where) -> int:
    """Return the extra length of a path in the recipe file, compared to its form from the root."""
    if not recipe.folder or where[2:3] not in (("deps",), ("matrix",)):
        return 0
    written: object = recipe.document.value
    for part in where:
        if isinstance(written, dict):
            written = written.get(part)
        elif isinstance(written, list) and isinstance(part, int):
            written = written[part]
    if not isinstance(written, str):
        return 0
    return len(written) - len(from_root(written, recipe.folder))


def _step(step: Step, folder: str) -> Step:
    code, matrix = step.code, step.matrix
    if code is not None:
        code = tuple(_item(item, folder) for item in code)
    if matrix is not None:
        matrix = {name: _axis(axis, folder) for name, axis in matrix.items()}
    deps = tuple(_item(dep, folder) for dep in step.deps)
    return replace(step, code=code, deps=deps, matrix=matrix, python=_python(step.python, folder))


def _item(item: _Code, folder: str) -> _Code:
    if isinstance(item, AutoCode):
        return item
    if isinstance(item, GitCode):
        if not item.url.startswith(("./", "../")):
            return item
        # Not `from_root`: a repository may lie anywhere, also outside the root.
        return replace(item, url=posixpath.normpath(f"{folder}/{item.url}"))
    if isinstance(item, Glob):
        exclude = tuple(from_root(each, folder) for each in item.exclude)
        return Glob(from_root(item.pattern, folder), exclude)
    return from_root(item, folder)


def _axis(axis: Tree, folder: str) -> Tree:
    if not isinstance(axis, Mapping) or not isinstance(axis.get("glob"), str):
        return axis
    return {**axis, "glob": from_root(str(axis["glob"]), folder)}


def _python(python: Python | None, folder: str) -> Python | None:
    if python is None or not python.lock:
        return python
    return replace(python, lock=from_root(python.lock, folder))
