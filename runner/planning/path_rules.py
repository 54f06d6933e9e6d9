"""Check that the paths of a recipe stay in the attempt, workspace or recipe directory.

Works on text alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..errors import Problem
from ..language.recipe import AutoCode, GitCode, Glob
from ..paths import escapes

if TYPE_CHECKING:
    from ..language.recipe import Recipe, Step
    from ..language.values import Where

BELOW: Final = "use a relative path below the attempt directory"
WORKSPACE: Final = "use a path below the workspace, or an input of type file or dataset"
_CODE: Final = "move the code below the workspace, or use {git: …}"


def explain_unfit(path: str, *, folder: bool = True) -> str:
    """Return why a path cannot be written by an attempt, or an empty string.

    The text is the end of a sentence.  `folder` allows a directory.
    """
    plain = posixpath.normpath(path) if path else ""
    if "://" in path:
        return f'is an address, "{path}"; to upload results to a store, use `recipe push`'
    if plain in ("", ".") or escapes(path):
        return f'is "{path}", which leaves the attempt directory'
    if plain.split("/")[0] == ".recipe":
        return f'is "{path}", which is in .recipe/, reserved for recipe'
    if path.endswith("/") and not folder:
        return f'is "{path}", which is a directory'
    return ""


def find_misplaced_paths(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each literal recipe path outside its root directory.

    Templates are checked when they are rendered.
    """
    yield from _code(recipe, recipe.code, ())
    yield from _env_files(recipe, recipe.env_files, ())
    for step in recipe.steps.values():
        yield from _paths_of_step(recipe, step)
        yield from _code(recipe, step.code or (), step.origin)
        yield from _env_files(recipe, step.env_files, step.origin)
        for n, dep in enumerate(step.deps):
            yield from _read(recipe, dep, "the workspace", WORKSPACE, (*step.origin, "deps", n))
        for name, axis in (step.matrix or {}).items():
            if isinstance(axis, dict):
                yield from _read(
                    recipe,
                    Glob(str(axis["glob"]), ()),
                    "the workspace",
                    WORKSPACE,
                    (*step.origin, "matrix", name),
                )


def _paths_of_step(recipe: Recipe, step: Step) -> Iterator[Problem]:
    named: list[tuple[str, str, Where]] = []
    named += [
        (f'output "{output.name}" of "{step.id}"', output.path, ("outputs", output.name))
        for output in step.outputs
    ]
    named += [
        (f'state "{state.name}" of "{step.id}"', state.path, ("state", state.name, "path"))
        for state in step.state
    ]
    if step.metrics and step.metrics.file:
        named.append((f'the metrics file of "{step.id}"', step.metrics.file, ("metrics", "file")))
    for what, path, below in named:
        if "{{" not in path and (wrong := explain_unfit(path)):
            yield recipe.document.problem(
                "path-escape",
                f"{what} {wrong}",
                (*step.origin, *_where_in_step(recipe, step, below)),
                fix=BELOW,
            )
    for path in step.files:
        if wrong := explain_unfit(path, folder=False):
            yield recipe.document.problem(
                "path-escape",
                f'a file of "{step.id}" {wrong}',
                (*step.origin, "files", path),
                fix=BELOW,
                key=True,
            )


def _where_in_step(recipe: Recipe, step: Step, below: Where) -> Where:
    """Return the recipe location of a part of a step.

    Outputs written as a list are located by index.
    """
    names = [output.name for output in step.outputs]
    listed = below[0] == "outputs" and all(
        output.name.rstrip("/") == output.path for output in step.outputs
    )
    return (below[0], names.index(str(below[1]))) if listed else below


def _code(
    recipe: Recipe, code: tuple[str | Glob | GitCode | AutoCode, ...], origin: Where
) -> Iterator[Problem]:
    for n, item in enumerate(code):
        where = (*origin, "code", n)
        if isinstance(item, AutoCode):
            continue
        if not isinstance(item, GitCode):
            yield from _read(
                recipe,
                item,
                "the workspace" if recipe.home else "the recipe's folder",
                _CODE,
                where,
            )
        elif posixpath.normpath(item.at) != "." and (
            wrong := explain_unfit(item.at)
        ):  # the whole attempt directory may be a checkout
            yield recipe.document.problem(
                "path-escape", f"a git checkout {wrong}", (*where, "at"), fix=BELOW
            )


def _env_files(recipe: Recipe, paths: tuple[str, ...], origin: Where) -> Iterator[Problem]:
    for path in paths:
        if escapes(path) or "{{" in path:
            wrong = (
                "has a template, but a recipe-wide file is the same for every step"
                if "{{" in path
                else "leaves the workspace"
            )
            yield recipe.document.problem(
                "path-escape", f'the env_file "{path}" {wrong}', (*origin, "env_file"), fix=BELOW
            )


def _read(recipe: Recipe, item: str | Glob, root: str, fix: str, where: Where) -> Iterator[Problem]:
    path, where = (item, where) if isinstance(item, str) else (item.pattern, (*where, "glob"))
    if "{{" not in path and escapes(path):
        yield recipe.document.problem("path-escape", f'"{path}" leaves {root}', where, fix=fix)
