"""Files of a `code` entry: glob matches, and directories without irrelevant files.

Lists directories, and opens no files.
"""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..planning.patterns import decode_pattern, is_excluded, is_glob

if TYPE_CHECKING:
    from ..language.recipe import Recipe

HEAVY = 10_000_000
"""Size in bytes above which a file is unlikely to be code."""


def code_folder(recipe: Recipe) -> str:
    """Return the directory to which the paths in a recipe's `code` are relative."""
    return recipe.home or os.path.dirname(recipe.document.name) or "."


def code_matches(base: str, text: str) -> list[str]:
    """Return the sorted files of a `code` entry: glob matches, or a directory's relevant files."""
    pattern, exclude = decode_pattern(text)
    found = glob.glob(pattern, root_dir=base, recursive=True) if is_glob(pattern) else [pattern]
    names: set[str] = set()
    for name in found:
        if os.path.isfile(f"{base}/{name}"):
            names.add(name)
        elif not is_glob(pattern) or pattern.endswith("/"):
            names.update(files_below(base, name))
    return sorted(name for name in names if _is_included(name, exclude))


def _is_included(name: str, exclude: Sequence[str]) -> bool:
    return "__pycache__" not in name and not is_excluded(name, exclude)


def files_below(base: str, folder: str) -> Iterator[str]:
    """Yield a directory's files, except hidden files, compiled files and virtual environments.

    Links to directories are not followed.
    """
    for at, folders, names in os.walk(f"{base}/{folder}"):
        # `os.walk` descends only into the directories that are left in the list.
        folders[:] = [each for each in folders if _may_hold_code(at, each)]
        here = os.path.relpath(at, base)
        for name in names:
            if _may_be_code(at, name):
                yield posixpath.normpath(f"{here}/{name}")


def _may_be_code(at: str, name: str) -> bool:
    if name[0] == "." or name.endswith(".pyc"):
        return False
    return os.path.isfile(f"{at}/{name}")  # not a socket, pipe or broken link


def _may_hold_code(at: str, folder: str) -> bool:
    if folder[0] == "." or folder == "__pycache__":
        return False
    return not os.path.exists(f"{at}/{folder}/pyvenv.cfg")


def is_folder(base: str, text: str) -> bool:
    """Return True if a `code` entry is a whole directory."""
    pattern, _ = decode_pattern(text)
    return not is_glob(pattern) and os.path.isdir(f"{base}/{pattern}")
