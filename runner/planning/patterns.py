"""Glob patterns of a recipe: how a node stores them, what they exclude, and which paths they reach."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ..language.imports import Start
from ..paths import escapes, heads

if TYPE_CHECKING:
    pass


def is_glob(path: str) -> bool:
    return "*" in path or "?" in path or "[" in path or "\0" in path


def as_pattern(path: str) -> str:
    """The pattern that means this path alone."""
    return re.sub(r"[*?[]", r"[\g<0>]", path)


def encode_pattern(pattern: str, exclude: Iterable[str]) -> str:
    """A glob as one text, which is how a node holds it."""
    return "\0".join((pattern, *exclude))


def fixed_folder(pattern: str) -> str:
    """The folder of a pattern in front of its first wildcard; empty where it begins with one."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def decode_pattern(text: str) -> tuple[str, list[str]]:
    """The pattern of a glob and what it excludes."""
    pattern, *exclude = text.split("\0")
    return pattern, exclude


AUTO: Final = "/auto"
"""In the place of a pattern: `code: auto`.  No path of a recipe begins with a slash."""


def encode_automatic(starts: Iterable[Start], path: Iterable[str]) -> str:
    """`code: auto` as one text: what a command starts, and the folders of its PYTHONPATH."""
    return encode_pattern(
        AUTO, [*(f"{kind} {name}" for kind, name in starts), *(f"path {folder}" for folder in path)]
    )


def decode_automatic(text: str) -> tuple[list[Start], list[str]]:
    """What `automatic` was given."""
    parts = [part.partition(" ") for part in decode_pattern(text)[1]]
    starts = [
        Start("script" if kind == "script" else "module", name)
        for kind, _, name in parts
        if kind != "path"
    ]
    return starts, [name for kind, _, name in parts if kind == "path"]


def code_name(text: str) -> str:
    """An entry of `code` as people call it."""
    pattern = decode_pattern(text)[0]
    return "auto" if pattern == AUTO else pattern


def python_path(env: Mapping[str, object]) -> list[str]:
    """The folders of a PYTHONPATH that is written out, from the folder in which a step runs; those outside of it are left out."""
    value = env.get("PYTHONPATH")
    folders = value.split(":") if isinstance(value, str) and "{{" not in value else []
    plain = [posixpath.normpath(folder) for folder in folders if folder and not escapes(folder)]
    return ["" if folder == "." else folder for folder in plain]


def is_excluded(path: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern names this path or a folder above it: one without a slash its last name, one with a slash all of it."""
    if not exclude:
        return False
    above = [head.split("/") for head in heads(posixpath.normpath(path))]
    return any(
        _fits(pattern.strip("/").split("/"), names if "/" in pattern else names[-1:])
        for pattern in exclude
        for names in above
    )


def _fits(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts or not names:
        return not names and all(part == "**" for part in parts)
    if parts[0] == "**":
        return _fits(parts[1:], names) or _fits(parts, names[1:])
    return fnmatch.fnmatchcase(names[0], parts[0]) and _fits(parts[1:], names[1:])


class MadePaths:
    """Paths that are made.  What is one of them, is below one or holds one is not the same before and after, and so no match of a glob."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._all = set(paths)
        self._above = {head for path in self._all for head in heads(path)[1:]}

    def meets(self, path: str) -> bool:
        path = posixpath.normpath(path)
        return path in self._above or any(head in self._all for head in heads(path))


def reaches(pattern: str, path: str, directory: bool) -> bool:
    """Whether a workspace pattern matches a path, or something below it."""
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
