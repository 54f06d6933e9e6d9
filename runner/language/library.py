"""Find recipes, schemas and fixtures of the program and of other installed packages.

Reads only names and first lines. Apart from `document.read`, only this module of the language
accesses the disk.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from runner import extensions
from runner.errors import Invalid, NotFound, Problem, did_you_mean

from ..paths import BUNDLED, CallerLocation, is_path, shipped

_NAME = re.compile(r"([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_CALLED = re.compile(r"^recipe:[ \t]*[\"']?([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})\b", re.MULTILINE)
_HEAD_BYTES = 65536
"""`recipe:` and `summary:` stand at the top of a file."""


class LibraryEntry(NamedTuple):
    """A recipe file with its summary, read from the first lines.

    `origin` is the package with the recipe; empty for the library and for workspace files.
    """

    name: str
    version: int
    summary: str
    path: Path
    origin: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"


def fixtures() -> Path:
    """Return the directory of shipped fixtures, for `{{ fixtures }}` in templates."""
    return shipped() / "fixtures"


def schema_text() -> str:
    """Return the JSON Schema of the recipe language as text."""
    return (shipped() / "schemas" / "recipe.schema.json").read_text("utf-8")


def entries() -> list[LibraryEntry]:
    """List all library recipes, then the recipes of other installed packages.

    Sorted by name, newest version first.
    """
    return sorted(
        (*_entries(shipped() / "recipes", ""), *_list_package_recipes()),
        key=lambda entry: (entry.origin, entry.name, -entry.version),
    )


def faults() -> list[Problem]:
    """Return the problems of other recipe packages: duplicate recipe names, missing folders."""
    ours = {entry.name for entry in _entries(shipped() / "recipes", "")}
    entries_of: dict[str, list[LibraryEntry]] = {}
    for entry in _list_package_recipes():
        entries_of.setdefault(entry.name, []).append(entry)
    problems: list[Problem] = []
    for name, brought in entries_of.items():
        problem = _clash(name, brought, ours=name in ours)
        if problem is not None:
            problems.append(problem)
    for each in extensions.find_extensions(extensions.RECIPES):
        if extensions.find_folder(each) is None:
            where = f"{each.origin} declares its recipes in {each.target}"
            message = f"{where}, but this directory does not exist"
            problems.append(Problem("no-folder", message, None, f"reinstall {each.package}"))
    return problems


def list_recipes(folder: Path) -> list[LibraryEntry]:
    """List the recipe files in `folder` by file name, or none if the folder is unreadable."""
    try:
        paths = sorted(path for path in folder.iterdir() if _is_yaml_file(path))
    except OSError:
        return []
    found = []
    for path in paths:
        try:
            head = _head(path)
        except OSError:
            continue
        if called := _CALLED.search(head):
            found.append(LibraryEntry(called[1], int(called[2]), _summary(head), path))
    return found


def _is_yaml_file(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def find(name: str, workspace: Path) -> Path:
    """Find a recipe file by name (`flux-lora@1`), by name without version (newest), or by path.

    Paths are relative to `workspace`. Other packages are searched only for names that the library
    lacks, so they cannot replace library recipes. Raises NotFound, and Invalid if two packages have
    recipes of this name.
    """
    if is_path(name):
        return _by_path(name, workspace)
    # A run that was submitted elsewhere brings its own recipes.
    bundled = workspace / BUNDLED / f"{name}.yaml"
    if bundled.is_file():
        return bundled
    word, at, version = name.partition("@")
    files = _files_for(word)
    versions = sorted(number for other, number in files if other == word)
    if not versions:
        names = {other for other, _ in files}
        if at:
            names = {f"{other}@{number}" for other, number in files}
        raise _no_recipe(name, names, workspace)
    if not at:
        return files[word, versions[-1]]
    if not _is_version(version) or int(version) not in versions:
        there = ", ".join(f"{word}@{number}" for number in versions)
        raise NotFound(f'"{word}" has no version "{version}"', fix=f"there is {there}")
    return files[word, int(version)]


def _files_for(name: str) -> dict[tuple[str, int], Path]:
    """Return the files of the library, by name and version.

    If it has no recipe called `name`, those of other packages with this name are included.
    """
    files = {(found[1], int(found[2])): path for path, found in _files(shipped() / "recipes")}
    if not any(other == name for other, _ in files):
        files |= _find_package_files(name)
    return files


def _find_package_files(name: str) -> dict[tuple[str, int], Path]:
    """Return the recipe files of other packages for a name, by name and version.

    Raises Invalid if several packages have recipes called `name`.
    """
    brought = _list_package_recipes()
    same_name = [entry for entry in brought if entry.name == name]
    problem = _clash(name, same_name, ours=False)
    if problem is not None:
        raise Invalid([problem])
    return {(entry.name, entry.version): entry.path for entry in brought}


def _is_version(text: str) -> bool:
    return _VERSION.fullmatch(text) is not None


def _no_recipe(name: str, known: set[str], workspace: Path) -> NotFound:
    fix = did_you_mean(name, known)
    if not fix and (workspace / f"{name}.yaml").is_file():
        fix = f"did you mean ./{name}.yaml?"
    if not fix:
        fix = (
            "`recipe list` shows the library; for a recipe of your own, pass its path: ./NAME.yaml"
        )
    return NotFound(f'there is no recipe "{name}" in the library', fix=fix)


def resolve(location: CallerLocation, word: str | None) -> str:
    """Resolve a command-line word to a recipe path in the workspace or a library name.

    `train` is the file train.yaml in the caller's directory or the workspace, or else a library
    recipe. Without a word it is recipe.yaml. Raises NotFound.
    """
    if word is not None and is_path(word):
        return resolve_path(location, word)
    if word is None or "@" not in word:
        file = _find_file(location, word or "recipe")
        if file:
            return f"./{file}"
    if word is None:
        message = "no recipe was named, and there is no recipe.yaml here"
        if location.below:
            message += f", nor in {location.root}"
        fix = (
            "name a recipe: `recipe run sft@1`, or `recipe run ./pipeline.yaml`; "
            "`recipe list` shows the library"
        )
        raise NotFound(message, fix=fix)
    return word


def _find_file(location: CallerLocation, stem: str) -> str:
    """Find `stem`.yaml or .yml in the caller's directory or the workspace, or return ""."""
    for folder in dict.fromkeys((location.below, "")):
        for name in (f"{stem}.yaml", f"{stem}.yml"):
            file = f"{folder}/{name}" if folder else name
            if os.path.isfile(location.root / file):
                return file
    return ""


def resolve_path(location: CallerLocation, word: str) -> str:
    """Resolve a command-line word that is a path to a recipe."""
    found = location.typed(word)
    return found if "/" in found else f"./{found}"


def _list_package_recipes() -> list[LibraryEntry]:
    """List the recipes of other installed packages, each file once."""
    found: dict[Path, LibraryEntry] = {}
    for each in extensions.find_extensions(extensions.RECIPES):
        folder = extensions.find_folder(each)
        if folder is not None:
            found.update((entry.path, entry) for entry in _entries(folder, each.origin))
    return list(found.values())


def _clash(name: str, brought: list[LibraryEntry], *, ours: bool) -> Problem | None:
    """Return the problem of a recipe name provided by several packages, or None.

    None if all versions are from one package. `ours`: the library has the name, too.
    """
    folders = {entry.path.parent: f"{entry.origin} ({entry.path})" for entry in brought}
    owners = ["the library"] if ours else []
    owners += folders.values()
    return extensions.name_clash("recipe", name, owners) if len(owners) > 1 else None


def _entries(folder: Path, origin: str) -> list[LibraryEntry]:
    entries: list[LibraryEntry] = []
    for path, found in _files(folder):
        summary = _summary(_head(path))
        entries.append(LibraryEntry(found[1], int(found[2]), summary, path, origin))
    return entries


def _files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """List the recipe files in a folder, with the regex match of name and version."""
    if not folder.is_dir():
        return []
    found: list[tuple[Path, re.Match[str]]] = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.stem) if path.suffix == ".yaml" else None
        if match is not None:
            found.append((path, match))
    return found


def _by_path(name: str, workspace: Path) -> Path:
    path = workspace / Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise NotFound(
            f"{name} is a directory", fix="pass the path of the recipe file in this directory"
        )
    if path.exists():
        raise NotFound(f"{name} is not a regular file", fix="pass the path of a recipe file")
    others = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    fix = did_you_mean(path.name, [other.name for other in others])
    if not fix:
        fix = (
            f"looked in {os.path.abspath(path.parent)}; "
            "name a library recipe without a path; `recipe list` shows the library"
        )
    raise NotFound(f"there is no file {name}", fix=fix)


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES).decode("utf-8", "replace")


def _summary(head: str) -> str:
    """Return a recipe's top-level `summary` line, read without a YAML parser for speed."""
    found = re.search(r"^summary:[ \t]*(.*?)[ \t]*$", head, re.MULTILINE)
    if found is None:
        return ""
    text: str = found[1]
    if len(text) > 1 and text.startswith("'") and text.endswith("'"):
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        return text[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return re.split(r"[ \t]#", text, maxsplit=1)[0].rstrip()
