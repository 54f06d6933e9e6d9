"""Warnings about the `code` of a recipe: unlisted imports, unreadable imports, and large files."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..language.imports import EntryPoint, Imports, find_starts
from ..language.recipe import AutoCode, GitCode
from ..language.units import about
from ..paths import escapes, heads
from ..planning.patterns import encode_pattern, is_glob, python_path
from . import code_files
from .imports import ImportedFiles, follow_imports

if TYPE_CHECKING:
    from ..errors import Problem
    from ..language.recipe import Recipe, Step
    from ..language.values import Where


class _StepCode(NamedTuple):
    """The code of one step: recipe location, listed files, and whether `code: auto` is used."""

    where: Where
    files: list[str]
    auto: bool


def warnings(recipe: Recipe, read: Callable[[str], Imports]) -> Iterator[Problem]:
    """Yield all warnings about the code of a recipe.

    `read` returns the imports of a file by its absolute path.
    """
    base = os.path.realpath(recipe.home or os.path.dirname(recipe.document.name) or ".")
    made = {
        posixpath.normpath(output.path) for step in recipe.steps.values() for output in step.outputs
    }
    for step in recipe.steps.values():
        code = step.code if step.code is not None else recipe.code
        if any(isinstance(item, GitCode) for item in code) or (
            step.run is None and step.accelerate is None
        ):
            continue  # the files of a checkout are unknown before it is fetched
        listed = _listed_code(base, recipe, step)
        yield from _file_as_program(recipe, step, listed)
        starts = [
            start
            for start in find_starts(step.run, step.accelerate)
            if posixpath.normpath(start.name) not in made
        ]
        if not (step.image or recipe.image or isinstance(step.run, str)):
            yield from _absent_start(base, recipe, step, starts[:1], made)
        needed = follow_imports(base, starts, python_path({**recipe.env, **step.env}), read)
        if not listed.auto:
            yield from _unlisted_imports(base, recipe, step, listed, needed)
        for file, doubt in needed.doubts if listed.auto else ():
            fix = "list the missing files under `deps`, or list all files instead of `auto`"
            yield recipe.document.problem(
                "unread-import",
                f"{file}: {doubt}",
                listed.where,
                fix=fix,
                key=True,
                severity="warning",
            )
        yield from _heavy_files(
            base, recipe, listed, [*listed.files, *(needed.files if listed.auto else ())]
        )


_STARTERS = re.compile(r"(?:.*/)?(?:python[\d.]*|sh|bash|torchrun|accelerate)")


def _absent_start(
    base: str, recipe: Recipe, step: Step, starts: Sequence[EntryPoint], made: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for a started script that is neither in the workspace nor in the step."""
    program = next(_words(step.run), "") if step.run is not None else "accelerate"
    if step.deps or not _STARTERS.fullmatch(program):
        return  # another step may create the files of `deps`
    for start in starts:
        path = posixpath.normpath(start.name)
        brought = {*made, *map(posixpath.normpath, step.files)}
        if start.kind != "script" or escapes(path) or not brought.isdisjoint(heads(path)):
            continue
        if not os.path.lexists(f"{base}/{path}"):
            message = f'"{step.id}" starts {start.name}, which does not exist'
            where = (*step.origin, "run" if step.run is not None else "accelerate")
            fix = "correct the file name, or add the git checkout with this file to `code`"
            yield recipe.document.problem(
                "no-such-file", message, where, fix=fix, severity="warning"
            )


def _words(run: object) -> Iterator[str]:
    """Yield the words of a command, including words in nested lists."""
    for item in run if isinstance(run, list) else ():
        yield from [item] if isinstance(item, str) else _words(item)


def _file_as_program(recipe: Recipe, step: Step, listed: _StepCode) -> Iterator[Problem]:
    """Yield a problem for a command whose program is a `code` file without a slash."""
    program = next(_words(step.run), "")
    if program and "/" not in program and program in listed.files:
        message = (
            f'"{program}" is a file in `code`, but a program without a slash is searched on PATH'
        )
        starter = "python " if program.endswith(".py") else "./"
        where = (*step.origin, "run")
        yield recipe.document.problem(
            "file-as-program", message, where, fix=f"write {starter}{program}", severity="warning"
        )


def _listed_code(base: str, recipe: Recipe, step: Step) -> _StepCode:
    code = recipe.code
    where: Where = ("code",)
    if step.code is not None:
        code, where = step.code, (*step.origin, "code")
    elif not recipe.code:
        where = step.origin
    files = []
    for item in code:
        if isinstance(item, (GitCode, AutoCode)):
            continue
        text = item if isinstance(item, str) else encode_pattern(item.pattern, item.exclude)
        files += code_files.code_matches(base, text)
    return _StepCode(where, files, any(isinstance(item, AutoCode) for item in code))


def _unlisted_imports(
    base: str, recipe: Recipe, step: Step, listed: _StepCode, needed: ImportedFiles
) -> Iterator[Problem]:
    deps = [
        dep if isinstance(dep, str) else encode_pattern(dep.pattern, dep.exclude)
        for dep in step.deps
    ]
    brought = {
        posixpath.normpath(name)
        for text in deps
        if "{{" not in text
        for name in code_files.code_matches(base, text)
    }
    brought |= {*map(posixpath.normpath, listed.files), *map(posixpath.normpath, step.files)}
    whole = [dep for dep in deps if not is_glob(dep) and os.path.isdir(f"{base}/{dep}")]
    for found in needed.files.values():
        if found.file in brought or any(
            found.file.startswith(f"{posixpath.normpath(dep)}/") for dep in whole
        ):
            continue
        if found.by and found.by not in brought:
            continue  # the missing importer is reported already
        what = (
            f"{found.by} imports {found.module}" if found.by else f'"{step.id}" starts {found.file}'
        )
        fix = f"add {found.file}, or write `code: auto`"
        message = f"{what}, which `code` does not list"
        yield recipe.document.problem(
            "unlisted-code", message, listed.where, fix=fix, key=True, severity="warning"
        )


def _heavy_files(
    base: str, recipe: Recipe, listed: _StepCode, files: list[str]
) -> Iterator[Problem]:
    for name in dict.fromkeys(files):
        size = os.stat(f"{base}/{name}").st_size
        if size > code_files.HEAVY:
            message = f"{name} in `code` has {about(size)} and is copied for every attempt"
            fix = "move the file to `deps`, which links large files, or exclude it with `exclude`"
            yield recipe.document.problem(
                "heavy-code", message, listed.where, fix=fix, key=True, severity="warning"
            )
