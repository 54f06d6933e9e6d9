"""What a script of `code` will refuse of the options that its step gives it: names, values, options that are needed and absent."""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..language.imports import BY_VALUE, Imports, Start, find_starts
from ..language.recipe import GitCode
from ..language.script_options import ScriptOptions, options_of
from ..language.script_words import (
    GivenWord,
    WordFault,
    faults,
    words_of_list,
    words_of_mapping,
    words_of_script,
)
from ..planning.patterns import python_path
from ..reading import whole
from .imports import ImportedFiles, follow_imports

if TYPE_CHECKING:
    from ..errors import Problem
    from ..language.recipe import Recipe, Step
    from ..language.values import Tree, Where

_LARGE: Final = 1 << 20  # bytes of a program that is read
_STARTERS: Final = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|uv)")


def warnings(recipe: Recipe, read: Callable[[str], Imports]) -> Iterator[Problem]:
    """A warning for each option that a script will refuse.  `read` gives what a file imports, by its absolute path."""
    base = os.path.realpath(recipe.home or os.path.dirname(recipe.document.name) or ".")
    made = {
        posixpath.normpath(output.path) for step in recipe.steps.values() for output in step.outputs
    }
    for step in recipe.steps.values():
        code = step.code if step.code is not None else recipe.code
        if any(isinstance(item, GitCode) for item in code):
            continue  # what a checkout holds is not known before it is fetched
        path = python_path({**recipe.env, **step.env})
        for start in _scripts(step):
            words = _given_words(step, start)
            found = follow_imports(base, [start], path, read)
            file = next((each.file for each in reversed(found.files.values()) if not each.by), "")
            # A module that a value names adds no option unless it is handed the parser, which is looked for.
            unsure = any(not doubt.endswith(BY_VALUE) for _, doubt in found.doubts)
            if words is None or unsure or file in made or file in step.files:
                continue
            takes = _options(base, file, found)
            for fault in faults(start.name, takes, words, _place(step)) if takes else ():
                yield _problem(recipe, step, start, fault)


def _scripts(step: Step) -> list[Start]:
    """The files and modules that a step starts for certain: of a list of arguments the first alone, as another may be an argument of it."""
    found = find_starts(step.run, step.accelerate)
    return found if isinstance(step.run, str) else found[:1]


def _place(step: Step) -> Where:
    return (*step.origin, "run" if step.run is not None else "accelerate")


def _problem(recipe: Recipe, step: Step, start: Start, fault: WordFault) -> Problem:
    offset: int | None = None
    length: int | None = None
    if isinstance(step.run, str) and fault.word:
        offset = max(0, step.run.find(fault.word, step.run.find(start.name)))
        length = len(fault.word)
    return recipe.document.problem(
        "script-options",
        fault.message,
        fault.where,
        fix=fault.fix,
        offset=offset,
        length=length,
        severity="warning",
    )


def _given_words(step: Step, start: Start) -> list[GivenWord] | None:
    """The words that a step gives its script; None if that is not certain."""
    if step.accelerate is not None:
        args = step.accelerate.get("args") or {}
        where: Where = (*step.origin, "accelerate", "args")
        if isinstance(args, dict):
            return words_of_mapping(args, where)
        return (
            words_of_list([start.name, *args], start.name, where)
            if isinstance(args, list)
            else None
        )
    if isinstance(step.run, str):
        return words_of_script(step.run, start.name, _place(step), _STARTERS)
    if not isinstance(step.run, list) or not _STARTERS.fullmatch(_first(step.run)):
        return None
    return words_of_list(step.run, start.name, _place(step))


def _first(run: Sequence[Tree]) -> str:
    """The program of a list of arguments."""
    item = run[0] if run else ""
    return _first(item) if isinstance(item, list) else str(item)


def _options(base: str, script: str, found: ImportedFiles) -> ScriptOptions | None:
    files = tuple(file for file in found.files if file.endswith(".py"))
    if script not in files:
        return None
    try:
        return _read_options(
            base, script, tuple((file, _version(f"{base}/{file}")) for file in files)
        )
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _version(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _read_options(
    base: str, script: str, files: tuple[tuple[str, tuple[int, int, int]], ...]
) -> ScriptOptions | None:
    """What a script takes, by its files and their versions, which are in the key of the cache."""
    trees = {file: _parsed(f"{base}/{file}", version) for file, version in files}
    return options_of(script, trees)


@lru_cache(maxsize=256)
def _parsed(path: str, version: tuple[int, int, int]) -> ast.Module:
    return ast.parse(whole(Path(path), _LARGE))
