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
    from ..language.recipe import Glob, Recipe, Step
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
    base = os.path.realpath(code_files.code_folder(recipe))
    made = output_paths(recipe)
    for step in recipe.steps.values():
        runs_program = step.run is not None or step.accelerate is not None
        # The files of a checkout are unknown before it is fetched.
        if runs_program and not has_checkout(recipe, step):
            yield from _step_warnings(base, recipe, step, made, read)


def output_paths(recipe: Recipe) -> set[str]:
    """Return the normalized output paths of all steps."""
    found: set[str] = set()
    for step in recipe.steps.values():
        found.update(posixpath.normpath(output.path) for output in step.outputs)
    return found


def has_checkout(recipe: Recipe, step: Step) -> bool:
    """Return True if a step's `code` has a git repository."""
    code = step.code if step.code is not None else recipe.code
    return any(isinstance(item, GitCode) for item in code)


def _step_warnings(
    base: str, recipe: Recipe, step: Step, made: Collection[str], read: Callable[[str], Imports]
) -> Iterator[Problem]:
    """Yield the warnings about the code of one step. `made` has the outputs of all steps."""
    listed = _listed_code(base, recipe, step)
    yield from _file_as_program(recipe, step, listed)
    starts = []
    for start in find_starts(step.run, step.accelerate):
        if posixpath.normpath(start.name) not in made:
            starts.append(start)
    # A container image may have the script, and a shell script may create it.
    is_in_image = step.image or recipe.image
    if not is_in_image and not isinstance(step.run, str):
        yield from _absent_start(base, recipe, step, starts[:1], made)
    needed = follow_imports(base, starts, python_path({**recipe.env, **step.env}), read)
    files = listed.files
    if listed.auto:
        yield from _unread_imports(recipe, listed, needed)
        files = [*files, *needed.files]
    else:
        yield from _unlisted_imports(base, recipe, step, listed, needed)
    yield from _heavy_files(base, recipe, listed, files)


_STARTERS = re.compile(r"(?:.*/)?(?:python[\d.]*|sh|bash|torchrun|accelerate)")


def _absent_start(
    base: str, recipe: Recipe, step: Step, starts: Sequence[EntryPoint], made: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for a started script that is neither in the workspace nor in the step."""
    if step.run is not None:
        program, field = next(_words(step.run), ""), "run"
    else:
        program, field = "accelerate", "accelerate"
    if step.deps or not _STARTERS.fullmatch(program):
        return  # another step may create the files of `deps`
    brought = {*made, *map(posixpath.normpath, step.files)}
    for start in starts:
        path = posixpath.normpath(start.name)
        if start.kind != "script" or escapes(path):
            continue
        if brought.isdisjoint(heads(path)) and not os.path.lexists(f"{base}/{path}"):
            message = f'"{step.id}" starts {start.name}, which does not exist'
            where = (*step.origin, field)
            fix = "correct the file name, or add the git checkout with this file to `code`"
            yield recipe.document.problem(
                "no-such-file", message, where, fix=fix, severity="warning"
            )


def _words(run: object) -> Iterator[str]:
    """Yield the words of a command, including words in nested lists."""
    if not isinstance(run, list):
        return
    for item in run:
        if isinstance(item, str):
            yield item
        else:
            yield from _words(item)


def _file_as_program(recipe: Recipe, step: Step, listed: _StepCode) -> Iterator[Problem]:
    """Yield a problem for a command whose program is a `code` file without a slash."""
    program = next(_words(step.run), "")
    if not program or "/" in program:
        return
    if program in listed.files:
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
        files += code_files.code_matches(base, _as_pattern(item))
    return _StepCode(where, files, any(isinstance(item, AutoCode) for item in code))


def _as_pattern(item: str | Glob) -> str:
    return item if isinstance(item, str) else encode_pattern(item.pattern, item.exclude)


def _unread_imports(recipe: Recipe, listed: _StepCode, needed: ImportedFiles) -> Iterator[Problem]:
    fix = "list the missing files under `deps`, or list all files instead of `auto`"
    for file, doubt in needed.doubts:
        message = f"{file}: {doubt}"
        yield recipe.document.problem(
            "unread-import", message, listed.where, fix=fix, key=True, severity="warning"
        )


def _unlisted_imports(
    base: str, recipe: Recipe, step: Step, listed: _StepCode, needed: ImportedFiles
) -> Iterator[Problem]:
    brought = {*map(posixpath.normpath, listed.files), *map(posixpath.normpath, step.files)}
    # A directory of `deps` is there as a whole, with the files that `code_matches` leaves out.
    folders: list[str] = []
    for dep in map(_as_pattern, step.deps):
        if "{{" not in dep:
            brought.update(map(posixpath.normpath, code_files.code_matches(base, dep)))
        if not is_glob(dep) and os.path.isdir(f"{base}/{dep}"):
            folders.append(f"{posixpath.normpath(dep)}/")
    for found in needed.files.values():
        if found.file in brought or found.file.startswith(tuple(folders)):
            continue
        if found.by and found.by not in brought:
            continue  # the missing importer is reported already
        what = f'"{step.id}" starts {found.file}'
        if found.by:
            what = f"{found.by} imports {found.module}"
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
