"""Missing files in the `code` and `deps` of a recipe that no step creates. Opens no files."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..language.recipe import AutoCode, GitCode, Glob
from ..paths import escapes, heads
from ..planning.mentions import steps_of
from ..planning.patterns import encode_pattern, fixed_folder, is_glob
from ..planning.step_order import may_make
from . import code_files

if TYPE_CHECKING:
    from ..errors import Problem
    from ..language.recipe import Recipe, Step
    from ..language.values import Where


def find_absent_files(recipe: Recipe, root: Path) -> Iterator[Problem]:
    """Yield a problem for each missing `code` or `deps` file, except for steps that may be skipped."""
    base = code_files.code_folder(recipe)
    skipped = _find_conditional_steps(recipe)
    steps = [step for step in recipe.steps.values() if step.id not in skipped]
    if any(_has_recipe_code(step) for step in steps):
        yield from _find_absent_code(recipe, recipe.code, (), base)
    for step in steps:
        yield from _find_absent_code(recipe, step.code or (), step.origin, base)
        yield from _find_absent_deps(recipe, step, root)


def _has_recipe_code(step: Step) -> bool:
    """Return True if a step runs a program with the recipe-level `code`."""
    return step.code is None and bool(step.run or step.accelerate)


def _find_conditional_steps(recipe: Recipe) -> set[str]:
    """Return the steps with a `when` condition, and their downstream steps."""
    found = {step.id for step in recipe.steps.values() if step.when is not None}
    more = _find_readers(recipe, found)
    while more:
        found |= more
        more = _find_readers(recipe, found)
    return found


def _find_readers(recipe: Recipe, upstream: set[str]) -> set[str]:
    """Return the steps outside of `upstream` that refer to a step in it."""
    found = set()
    for step in recipe.steps.values():
        if step.id not in upstream and not upstream.isdisjoint(steps_of(step)):
            found.add(step.id)
    return found


def _find_absent_code(
    recipe: Recipe, code: tuple[str | Glob | GitCode | AutoCode, ...], origin: Where, base: str
) -> Iterator[Problem]:
    for n, item in enumerate(code):
        if isinstance(item, (GitCode, AutoCode)):
            continue
        where: Where = (*origin, "code", n)
        exclude: tuple[str, ...] = ()
        if isinstance(item, str):
            pattern = item
        else:
            pattern, exclude = item.pattern, item.exclude
            where = (*where, "glob")
        if escapes(pattern) or code_files.code_matches(base, encode_pattern(pattern, exclude)):
            continue
        yield _absence_problem(recipe, f'"{pattern}" in `code` matches no file', where, base)


def _find_absent_deps(recipe: Recipe, step: Step, root: Path) -> Iterator[Problem]:
    for n, dep in enumerate(step.deps):
        where: Where = (*step.origin, "deps", n)
        if isinstance(dep, str):
            path = dep
            fixed = fixed_folder(path) if is_glob(path) else posixpath.normpath(path)
        elif dep.allow_empty:
            continue
        else:
            path = dep.pattern
            fixed = fixed_folder(path)
            where = (*where, "glob")
        if _is_uncertain(recipe, path):
            continue
        if fixed and not os.path.lexists(root / fixed):
            yield _absence_problem(recipe, f'"{fixed}" in `deps` does not exist', where, str(root))


def _is_uncertain(recipe: Recipe, path: str) -> bool:
    """Return True if a path of `deps` may exist by the time of the run, or cannot be checked."""
    return "{{" in path or escapes(path) or _may_be_made(recipe, path)


def _may_be_made(recipe: Recipe, path: str) -> bool:
    """Return True if a step's text suggests that it creates the path or a file below it."""
    top = heads(posixpath.normpath(path))[-1]
    if top in recipe.steps and recipe.steps[top].uses:
        return True
    folder = fixed_folder(path) if is_glob(path) else ""
    for step in recipe.steps.values():
        for output in step.outputs:
            if may_make(output.path, path):
                return True
            if folder and output.path.startswith(f"{folder}/"):
                return True
    return False


def _absence_problem(recipe: Recipe, message: str, where: Where, base: str) -> Problem:
    fix = f"correct the path: it is relative to {base}, or to the recipe file if it starts with ./ or ../"
    return recipe.document.problem("no-such-file", message, where, fix=fix)
