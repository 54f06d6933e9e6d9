"""Check that the paths of a recipe stay in the attempt, workspace or recipe directory.

Works on text alone.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
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


def explain_no_path(value: object) -> str:
    """Return why the value of a template is no path, or an empty string.

    The text is the end of a sentence.
    """
    if isinstance(value, str):
        return ""  # nearly always, and faster than the other questions
    if value is None:
        return "is null"
    if isinstance(value, (list, tuple)):
        return "is a list, not a path"
    if isinstance(value, Mapping):
        return "is a mapping, not a path"
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
    for what, path, below in _named_paths(step):
        wrong = explain_unfit(path) if "{{" not in path else ""
        if wrong:
            yield recipe.document.problem(
                "path-escape",
                f"{what} {wrong}",
                (*step.origin, *_where_in_step(recipe, step, below)),
                fix=BELOW,
            )
    for path in step.files:
        wrong = explain_unfit(path, folder=False)
        if wrong:
            yield recipe.document.problem(
                "path-escape",
                f'a file of "{step.id}" {wrong}',
                (*step.origin, "files", path),
                fix=BELOW,
                key=True,
            )


def _named_paths(step: Step) -> Iterator[tuple[str, str, Where]]:
    """Yield the description, path and location of each output, state and metrics file of a step."""
    for output in step.outputs:
        yield f'output "{output.name}" of "{step.id}"', output.path, ("outputs", output.name)
    for state in step.state:
        yield f'state "{state.name}" of "{step.id}"', state.path, ("state", state.name, "path")
    if step.metrics and step.metrics.file:
        yield f'the metrics file of "{step.id}"', step.metrics.file, ("metrics", "file")


def _where_in_step(recipe: Recipe, step: Step, below: Where) -> Where:
    """Return the recipe location of a part of a step.

    Outputs written as a list are located by index.
    """
    if below[0] != "outputs":
        return below
    # Outputs in a list are named by their paths.
    is_list = all(output.name.rstrip("/") == output.path for output in step.outputs)
    if not is_list:
        return below
    names = [output.name for output in step.outputs]
    return "outputs", names.index(str(below[1]))


def _code(
    recipe: Recipe, code: tuple[str | Glob | GitCode | AutoCode, ...], origin: Where
) -> Iterator[Problem]:
    root = "the workspace" if recipe.home else "the recipe's folder"
    for n, item in enumerate(code):
        where = (*origin, "code", n)
        if isinstance(item, AutoCode):
            continue
        if not isinstance(item, GitCode):
            yield from _read(recipe, item, root, _CODE, where)
            continue
        # The whole attempt directory may be a checkout, but no output.
        is_whole = posixpath.normpath(item.at) == "."
        wrong = explain_unfit(item.at) if not is_whole else ""
        if wrong:
            message = f"a git checkout {wrong}"
            yield recipe.document.problem("path-escape", message, (*where, "at"), fix=BELOW)


def _env_files(recipe: Recipe, paths: tuple[str, ...], origin: Where) -> Iterator[Problem]:
    for path in paths:
        if "{{" in path:
            wrong = "has a template, but a recipe-wide file is the same for every step"
        elif escapes(path):
            wrong = "leaves the workspace"
        else:
            continue
        message = f'the env_file "{path}" {wrong}'
        yield recipe.document.problem("path-escape", message, (*origin, "env_file"), fix=BELOW)


def _read(recipe: Recipe, item: str | Glob, root: str, fix: str, where: Where) -> Iterator[Problem]:
    if isinstance(item, str):
        path = item
    else:
        path, where = item.pattern, (*where, "glob")
    if "{{" not in path and escapes(path):
        yield recipe.document.problem("path-escape", f'"{path}" leaves {root}', where, fix=fix)
