"""Find local inputs of a step that are missing or unusable.  Fetches nothing."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ...language.imports import find_starts
from ...planning.patterns import AUTO, decode_pattern, is_glob
from ...storage.sources import match_files
from ...survey.code_files import code_matches
from . import LARGE, contents

if TYPE_CHECKING:
    import ast

    from ...planning.plan import Ahead
    from ...planning.step import Source
    from ...storage.workspace import Workspace
    from ...survey.survey import Survey


_Key = TypeVar("_Key")

ABSENT: Final = "does not exist"


def _hint_beside(source: Path, home: str, pattern: str) -> str:
    """Return a hint if a file pattern matches beside the recipe but not below the root."""
    folder = source.parent
    if str(folder) == home or not folder.is_relative_to(home):
        return ""
    if not any(folder.glob(pattern)):
        return ""
    return f": for the file next to the recipe, write ./{pattern}; the command then finds it at {folder.relative_to(home)}/{pattern}"


def _hint_script(found: Survey, n: int) -> str:
    """Return a hint if a script path starts with `../`, as if steps ran in the recipe's folder."""
    spec = found.plan.specs()[n]
    for start in find_starts(spec.run, spec.accelerate):
        if start.name.startswith("../"):
            name = start.name.replace("../", "")
            where = "steps run in this directory, wherever the recipe file is"
            return f"; {where}: write {name} instead of {start.name}"
    return ""


def find_missing(ws: Workspace, found: Survey, n: int) -> list[tuple[str, str]]:
    """Return the missing or unusable local inputs of a step, each with an explanation."""
    node, facts = found.plan.nodes[n], found.facts
    wrong = [(dep, ABSENT) for dep in node.deps if _is_absent(dep, facts.files)]
    wrong += _find_missing_code(found, n)
    if node.lock and _is_absent((node.home, node.lock), facts.locks):
        wrong.append((node.lock, ABSENT))
    wrong += _find_unusable_sources(ws, found, node.takes)
    wrong += [(each.given, each.wrong) for each in find_members(ws, found, n) if each.wrong]
    return wrong


def _is_absent(key: _Key, files: Mapping[_Key, object]) -> bool:
    """Return True if a file is known to be missing."""
    return key in files and files[key] is None


def _find_missing_code(found: Survey, n: int) -> Iterator[tuple[str, str]]:
    """Yield the patterns of a step's `code` that match no file, each with an explanation."""
    node = found.plan.nodes[n]
    home = found.plan.homes[node.home]
    for text in node.code:
        if found.facts.code.get((node.home, text)) != []:
            continue
        pattern = decode_pattern(text)[0]
        if pattern == AUTO:
            hint = _hint_script(found, n)
            yield "`code: auto`", f"finds no script of the command below {home}{hint}"
        else:
            yield pattern, _explain_no_match(found, home, pattern)


def _explain_no_match(found: Survey, home: str, pattern: str) -> str:
    hint = _hint_beside(found.source, home, pattern)
    return f"matches no file below {home}{hint}"


def _find_unusable_sources(
    ws: Workspace, found: Survey, sources: Iterable[Source]
) -> Iterator[tuple[str, str]]:
    """Yield the local files and directories that cannot be used, each with an explanation."""
    for source in sources:
        if source.kind != "path":
            continue
        fault = _find_source_fault(ws, found, source)
        if fault:
            yield source.address, fault


def _find_source_fault(ws: Workspace, found: Survey, source: Source) -> str:
    """Return why a local file or directory cannot be used; empty if it can."""
    path = ws.absolute(source.address)
    if found.facts.takes.get(source.lookup_key) is None:
        return ABSENT
    if not path.is_dir():
        return ""
    if source.only and not match_files(str(path), source.only):
        return f"contains no {' or '.join(source.only)}"
    has_files = any(files for _, _, files in os.walk(path, followlinks=True))
    return "" if has_files else "is an empty directory"


def find_missing_ahead(ws: Workspace, found: Survey, ahead: Ahead) -> list[tuple[str, str]]:
    """Return the known missing local inputs of a step before its expansion."""
    named = [dep for dep in ahead.deps if not is_glob(dep)]
    named += [source.address for source in ahead.takes if source.kind == "path"]
    wrong = [(path, ABSENT) for path in named if not os.path.lexists(ws.absolute(path))]
    wrong += _find_missing_code_ahead(found, ahead)
    return wrong


def _find_missing_code_ahead(found: Survey, ahead: Ahead) -> Iterator[tuple[str, str]]:
    """Yield the `code` patterns that match no file before a step's expansion."""
    home = found.plan.homes[ahead.home]
    for text in ahead.code:
        pattern = decode_pattern(text)[0]
        if pattern != AUTO and not code_matches(home, text):
            yield pattern, _explain_no_match(found, home, pattern)


class Member(NamedTuple):
    """A class or function that an input names as `FILE.py:NAME`."""

    given: str
    wrong: str  # fault, or ""
    bases: tuple[str, ...] | None  # base classes from other files; None if unknown


def find_members(ws: Workspace, found: Survey, n: int) -> Iterator[Member]:
    """Yield the classes and functions in local files that a step's inputs name."""
    takes = found.plan.nodes[n].takes
    files = {source.name: source.address for source in takes if source.kind == "path"}
    for value in found.plan.specs()[n].names.inputs.values():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str):
                continue
            path, _, name = text.rpartition(":")
            if path not in files:
                continue
            data = contents(ws.absolute(files[path]), LARGE)
            if data is not None:
                yield Member(f"{files[path]}:{name}", *_check_member(data, name))


def _check_member(data: bytes, name: str) -> tuple[str, tuple[str, ...] | None]:
    """Return the fault of a class or function name in a Python file, and the external base classes.

    The fault is empty for a valid name. The bases are None if they are unknown, and empty for a
    function.
    """
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"is not valid Python: {error}", None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in classes:
        return "", tuple(dict.fromkeys(_find_bases(classes[name], classes)))
    if any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
        return "", ()
    if {name, "*"} & _collect_names(tree):
        return "", None
    existing = f" (it has {', '.join(classes)})" if classes else ""
    return f"is not in that file{existing}", None


def _collect_names(tree: ast.Module) -> set[str | None]:
    """Return every name that a file reads, assigns, defines or imports."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        names.update(getattr(node, word, None) for word in ("id", "name", "asname"))
    return names


def _find_bases(made: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    for base in made.bases:
        word = ast.unparse(base)
        if word in classes and classes[word].lineno < made.lineno:
            yield from _find_bases(classes[word], classes)
        elif word != "object":
            yield word
