"""Find local inputs of a step that are missing or unusable.  Fetches nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import LARGE, contents

if TYPE_CHECKING:
    import ast

    from ...planning.plan import Ahead
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey


def _hint_beside(source: Path, home: str, pattern: str) -> str:
    """Return a hint for a pattern that matches beside the recipe but not below the root."""
    folder = source.parent
    if str(folder) == home or not folder.is_relative_to(home) or not any(folder.glob(pattern)):
        return ""
    return f": for the file next to the recipe, write ./{pattern}; the command then finds it at {folder.relative_to(home)}/{pattern}"


def _hint_script(found: Survey, n: int) -> str:
    """Return a hint for a script path with `../`, which counts from the recipe's folder."""
    from ...language.imports import started

    spec = found.plan.specs()[n]
    names = [
        start.name for start in started(spec.run, spec.accelerate) if start.name.startswith("../")
    ]
    return (
        f"; steps run in this directory, wherever the recipe file is: write {names[0].replace('../', '')} instead of {names[0]}"
        if names
        else ""
    )


def find_missing(ws: Workspace, found: Survey, n: int) -> list[tuple[str, str]]:
    """Return each missing or unusable local input of a step, and its fault."""
    from ...planning.patterns import AUTO, decode_pattern
    from ...storage.sources import match_files

    node, facts = found.plan.nodes[n], found.facts
    absent = "does not exist"
    wrong = [(dep, absent) for dep in node.deps if dep in facts.files and facts.files[dep] is None]
    home = found.plan.homes[node.home]
    for pattern in (
        decode_pattern(each)[0] for each in node.code if facts.code.get((node.home, each)) == []
    ):
        if pattern == AUTO:
            wrong.append(
                (
                    "`code: auto`",
                    f"finds no script of the command below {home}{_hint_script(found, n)}",
                )
            )
        else:
            wrong.append(
                (
                    pattern,
                    f"matches no file below {home}{_hint_beside(found.source, home, pattern)}",
                )
            )
    if (
        node.lock
        and (node.home, node.lock) in facts.locks
        and facts.locks[node.home, node.lock] is None
    ):
        wrong.append((node.lock, absent))
    for source in node.takes:
        if source.kind != "path":
            continue
        path = ws.absolute(source.address)
        if facts.takes.get(source.lookup_key) is None:
            wrong.append((source.address, absent))
        elif path.is_dir() and source.only and not match_files(str(path), source.only):
            wrong.append((source.address, f"contains no {' or '.join(source.only)}"))
        elif path.is_dir() and not any(files for _, _, files in os.walk(path, followlinks=True)):
            wrong.append((source.address, "is an empty directory"))
    return [
        *wrong,
        *((each.given, each.wrong) for each in find_members(ws, found, n) if each.wrong),
    ]


def find_missing_ahead(ws: Workspace, found: Survey, ahead: Ahead) -> list[tuple[str, str]]:
    """Return the missing local inputs of a step before its expansion, as far as they are known."""
    from ...planning.patterns import AUTO, decode_pattern, is_glob
    from ...survey import code_files

    absent = "does not exist"
    home = found.plan.homes[ahead.home]
    named = [dep for dep in ahead.deps if not is_glob(dep)]
    named += [source.address for source in ahead.takes if source.kind == "path"]
    wrong = [(path, absent) for path in named if not os.path.lexists(ws.absolute(path))]
    for text in ahead.code:
        pattern = decode_pattern(text)[0]
        if pattern != AUTO and not code_files.code_matches(home, text):
            beside = _hint_beside(found.source, home, pattern)
            wrong.append((pattern, f"matches no file below {home}{beside}"))
    return wrong


class Member(NamedTuple):
    """A class or function that an input names as `FILE.py:NAME`."""

    given: str
    wrong: str  # fault, or ""
    bases: tuple[str, ...] | None  # base classes from other files; None if unknown


def find_members(ws: Workspace, found: Survey, n: int) -> Iterator[Member]:
    """Yield the members that a step's inputs name in local files."""
    files = {
        source.name: source.address for source in found.plan.nodes[n].takes if source.kind == "path"
    }
    for value in found.plan.specs()[n].names.inputs.values():
        for text in value if isinstance(value, list) else [value]:
            path, _, name = text.rpartition(":") if isinstance(text, str) else ("", "", "")
            if path in files and (data := contents(ws.absolute(files[path]), LARGE)) is not None:
                yield Member(f"{files[path]}:{name}", *_check_member(data, name))


def _check_member(data: bytes, name: str) -> tuple[str, tuple[str, ...] | None]:
    """Return the fault of a name in a Python file, and the external base classes.

    The fault is empty for a valid name. The bases are None if they are unknown, and empty for a
    function.
    """
    import ast

    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"is not valid Python: {error}", None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in classes:
        return "", tuple(dict.fromkeys(_bases(classes[name], classes)))
    if any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
        return "", ()
    said = {
        getattr(node, word, None) for node in ast.walk(tree) for word in ("id", "name", "asname")
    }
    if name in said or "*" in said:
        return "", None
    return "is not in that file" + (f" (it has {', '.join(classes)})" if classes else ""), None


def _bases(made: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    from ast import unparse

    for base in made.bases:
        word = unparse(base)
        if word in classes and classes[word].lineno < made.lineno:
            yield from _bases(classes[word], classes)
        elif word != "object":
            yield word
