"""Warnings about options that a script in `code` will reject: unknown names, invalid values, and
missing required options.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..language.imports import BY_VALUE, EntryPoint, Imports, find_starts
from ..language.script_options import ScriptOptions, options_of
from ..language.script_words import (
    GivenWord,
    WordFault,
    find_faults,
    words_of_list,
    words_of_mapping,
    words_of_script,
)
from ..planning.patterns import python_path
from ..reading import whole
from .code_files import code_folder
from .code_warnings import has_checkout, output_paths
from .imports import ImportedFiles, follow_imports

if TYPE_CHECKING:
    from ..errors import Problem
    from ..language.recipe import Recipe, Step
    from ..language.values import Tree, Where

_LARGE: Final = 1 << 20  # maximum bytes of a script to read
_STARTERS: Final = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|uv)")


def find_rejected_options(recipe: Recipe, read: Callable[[str], Imports]) -> Iterator[Problem]:
    """Yield a warning for each command-line option that a script will reject.

    `read` returns the imports of a file by its absolute path.
    """
    base = os.path.realpath(code_folder(recipe))
    made = output_paths(recipe)
    for step in recipe.steps.values():
        if has_checkout(recipe, step):
            continue  # the files of a checkout are unknown before it is fetched
        path = python_path({**recipe.env, **step.env})
        for start in _started_scripts(step):
            imported = follow_imports(base, [start], path, read)
            for fault in _option_faults(base, step, start, imported, made):
                yield _problem(recipe, step, start, fault)


def _option_faults(
    base: str, step: Step, start: EntryPoint, imported: ImportedFiles, made: Collection[str]
) -> Iterable[WordFault]:
    """Return the faults of a script's command-line options, or none if they are uncertain."""
    words = _given_words(step, start)
    # A dynamically named module adds no options unless it receives the parser, which is checked.
    is_uncertain = any(not doubt.endswith(BY_VALUE) for _, doubt in imported.doubts)
    script = next((each.file for each in reversed(imported.files.values()) if not each.by), "")
    if words is None or is_uncertain:
        return ()
    if script in made or script in step.files:
        return ()  # a step writes the script, so its text is not known yet
    takes = _options(base, script, imported)
    return find_faults(start.name, takes, words, _place(step)) if takes else ()


def _started_scripts(step: Step) -> list[EntryPoint]:
    """Return the scripts that a step certainly starts.

    In a list of arguments, only the first: another may be its argument.
    """
    found = find_starts(step.run, step.accelerate)
    return found if isinstance(step.run, str) else found[:1]


def _place(step: Step) -> Where:
    field = "run" if step.run is not None else "accelerate"
    return (*step.origin, field)


def _problem(recipe: Recipe, step: Step, start: EntryPoint, fault: WordFault) -> Problem:
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


def _given_words(step: Step, start: EntryPoint) -> list[GivenWord] | None:
    """Return the options that a step passes to its script, or None if uncertain."""
    if step.accelerate is not None:
        args = step.accelerate.get("args") or {}
        where: Where = (*step.origin, "accelerate", "args")
        if isinstance(args, dict):
            return words_of_mapping(args, where)
        if isinstance(args, list):
            return words_of_list([start.name, *args], start.name, where)
        return None
    if isinstance(step.run, str):
        return words_of_script(step.run, start.name, _place(step), _STARTERS)
    if not isinstance(step.run, list) or not _STARTERS.fullmatch(_first(step.run)):
        return None
    return words_of_list(step.run, start.name, _place(step))


def _first(run: Sequence[Tree]) -> str:
    """Return the program of an argument list."""
    item = run[0] if run else ""
    return _first(item) if isinstance(item, list) else str(item)


def _options(base: str, script: str, found: ImportedFiles) -> ScriptOptions | None:
    files = tuple(file for file in found.files if file.endswith(".py"))
    if script not in files:
        return None
    try:
        versions = tuple((file, _version(f"{base}/{file}")) for file in files)
        return _read_options(base, script, versions)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _version(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _read_options(
    base: str, script: str, files: tuple[tuple[str, tuple[int, int, int]], ...]
) -> ScriptOptions | None:
    """Read a script's command-line options. `files` with versions is part of the cache key."""
    trees = {file: _parse_file(f"{base}/{file}", version) for file, version in files}
    return options_of(script, trees)


@lru_cache(maxsize=256)
def _parse_file(path: str, version: tuple[int, int, int]) -> ast.Module:
    return ast.parse(whole(Path(path), _LARGE))
