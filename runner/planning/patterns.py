"""Glob patterns of a recipe: storage form, exclusion and matching."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ..language.imports import EntryPoint
from ..paths import escapes, heads

if TYPE_CHECKING:
    pass


def is_glob(path: str) -> bool:
    return "*" in path or "?" in path or "[" in path or "\0" in path


def as_pattern(path: str) -> str:
    """Escape a path so that, as a glob pattern, it matches only this path."""
    return re.sub(r"[*?[]", r"[\g<0>]", path)


def encode_pattern(pattern: str, exclude: Iterable[str]) -> str:
    """Join a glob pattern and its exclusions into the text that a plan node stores."""
    return "\0".join((pattern, *exclude))


def fixed_folder(pattern: str) -> str:
    """Return the directory of a pattern before its first wildcard, or an empty string."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def decode_pattern(text: str) -> tuple[str, list[str]]:
    """Split a stored glob into its pattern and excluded patterns."""
    pattern, *exclude = text.split("\0")
    return pattern, exclude


AUTO: Final = "/auto"
"""Pattern that stands for `code: auto`.  No path of a recipe begins with a slash."""


def encode_automatic(starts: Iterable[EntryPoint], path: Iterable[str]) -> str:
    """Encode `code: auto` for storage: started scripts and modules, and PYTHONPATH directories."""
    parts = [f"{kind} {name}" for kind, name in starts]
    parts += [f"path {folder}" for folder in path]
    return encode_pattern(AUTO, parts)


def decode_automatic(text: str) -> tuple[list[EntryPoint], list[str]]:
    """Decode a stored `code: auto`: started scripts and modules, and PYTHONPATH directories."""
    starts: list[EntryPoint] = []
    folders: list[str] = []
    _, parts = decode_pattern(text)
    for part in parts:
        kind, _, name = part.partition(" ")
        if kind == "path":
            folders.append(name)
        elif kind == "script":
            starts.append(EntryPoint("script", name))
        else:
            starts.append(EntryPoint("module", name))
    return starts, folders


def code_name(text: str) -> str:
    """Return an entry of `code` as the recipe writes it, without excluded patterns."""
    pattern = decode_pattern(text)[0]
    return "auto" if pattern == AUTO else pattern


def python_path(env: Mapping[str, object]) -> list[str]:
    """Return the literal PYTHONPATH directories of an environment, without those outside the step.

    They are relative to the step's working directory.
    """
    value = env.get("PYTHONPATH")
    if not isinstance(value, str) or "{{" in value:
        return []
    found: list[str] = []
    for folder in value.split(":"):
        if folder and not escapes(folder):
            path = posixpath.normpath(folder)
            if path == ".":
                path = ""
            found.append(path)
    return found


def is_excluded(path: str, exclude: Sequence[str]) -> bool:
    """Return whether an excluded pattern matches a path or one of its parent directories.

    A pattern without a slash matches the last name, otherwise the entire path.
    """
    if not exclude:
        return False
    above = [head.split("/") for head in heads(posixpath.normpath(path))]
    for pattern in exclude:
        candidates = above if "/" in pattern else [names[-1:] for names in above]
        parts = pattern.strip("/").split("/")
        if any(_fits(parts, names) for names in candidates):
            return True
    return False


def _fits(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _fits(parts[1:], names) or _fits(parts, names[1:])
    return fnmatch.fnmatchcase(names[0], parts[0]) and _fits(parts[1:], names[1:])


class MadePaths:
    """Set of a plan's output paths, for detecting overlapping glob matches.

    A path at, below or above an output changes during a run and cannot be a glob match.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._all = set(paths)
        self._above: set[str] = set()
        for path in self._all:
            self._above.update(heads(path)[1:])

    def meets(self, path: str) -> bool:
        path = posixpath.normpath(path)
        return path in self._above or any(head in self._all for head in heads(path))


def reaches(pattern: str, path: str, directory: bool) -> bool:
    """Return whether a workspace glob matches an output path, or may match a file below it."""
    parts, names = pattern.split("/"), path.split("/")

    def matches(p: int, n: int, deep: bool) -> bool:
        if n == len(names):
            below = any(part != "**" for part in parts[p:])
            return not below or (directory or not deep)
        if p == len(parts):
            return False
        if parts[p] == "**":
            return matches(p + 1, n, True) or matches(p, n + 1, True)
        return fnmatch.fnmatchcase(names[n], parts[p]) and matches(p + 1, n + 1, deep)

    return matches(0, 0, False)
