"""Find what ships with the program or with other packages: recipes, schemas, fixtures.  Reads names and first lines, not what a recipe means.

With `document.read` this is where the language touches the disk.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from runner import extensions
from runner.errors import Invalid, NotFound, Problem, did_you_mean

from ..paths import BUNDLED, Location, is_path, shipped

_NAME = re.compile(r"([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})")
_CALLED = re.compile(r"^recipe:[ \t]*[\"']?([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})\b", re.MULTILINE)
_FIRST_LINES = 65536  # `recipe:` and `summary:` stand at the top


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe, as its first lines present it.  `origin` is the package that brings it, and empty where that is ours or none."""

    name: str
    version: int
    summary: str
    path: Path
    origin: str = ""

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"


def fixtures() -> Path:
    """What `{{ fixtures }}` stands for."""
    return shipped() / "fixtures"


def schema_text() -> str:
    """The schema of the recipe language, as JSON text."""
    return (shipped() / "schemas" / "recipe.schema.json").read_text("utf-8")


def entries() -> list[Entry]:
    """Every recipe of the library, then those of each other package: by name, newest version first."""
    return sorted(
        (*_entries(shipped() / "recipes", ""), *_brought()),
        key=lambda entry: (entry.origin, entry.name, -entry.version),
    )


def faults() -> list[Problem]:
    """What is wrong with what other packages bring: a name that several have, a folder that is not there."""
    ours = {entry.name for entry in _entries(shipped() / "recipes", "")}
    brought: dict[str, list[Entry]] = {}
    for entry in _brought():
        brought.setdefault(entry.name, []).append(entry)
    found = [
        problem for name, mine in brought.items() if (problem := _clash(name, mine, name in ours))
    ]
    for each in extensions.found(extensions.RECIPES):
        if extensions.folder(each) is None:
            message = f"{each.origin} says that its recipes are in {each.target}, and there is no such folder"
            found.append(Problem("no-folder", message, None, f"reinstall {each.package}"))
    return found


def beside(folder: Path) -> list[Entry]:
    """Every file in `folder` whose first lines say that it is a recipe, by file name.  A folder that cannot be read has none."""
    found = []
    try:
        paths = sorted(
            path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file()
        )
    except OSError:
        return []
    for path in paths:
        try:
            head = _head(path)
        except OSError:
            continue
        if called := _CALLED.search(head):
            found.append(Entry(called[1], int(called[2]), _summary(head), path))
    return found


def find(name: str, workspace: Path) -> Path:
    """The file of a recipe: `flux-lora@1`, `flux-lora` (its newest version), or a path, which is looked up from `workspace`.

    Other packages are asked only for a name that the library has not, and so cannot take one of its names.  Raises NotFound; Invalid where two
    packages bring recipes of that name.
    """
    if is_path(name):
        return _by_path(name, workspace)
    if (
        bundled := workspace / BUNDLED / f"{name}.yaml"
    ).is_file():  # a run that was submitted elsewhere brings its own
        return bundled
    word, at, version = name.partition("@")
    versions = {(found[1], int(found[2])): path for path, found in _files(shipped() / "recipes")}
    known = sorted(number for other, number in versions if other == word)
    if not known:
        brought = _brought()
        mine = [entry for entry in brought if entry.name == word]
        if problem := _clash(word, mine, False):
            raise Invalid([problem])
        versions |= {(entry.name, entry.version): entry.path for entry in brought}
        known = sorted(entry.version for entry in mine)
    if not known:
        names = {f"{other}@{number}" if at else other for other, number in versions}
        near = (
            did_you_mean(name, names)
            or _beside(name, workspace)
            or "`recipe list` shows what there is; a recipe of your own is given by its path, ./NAME.yaml"
        )
        raise NotFound(f'there is no recipe "{name}" in the library', fix=near)
    if not at:
        return versions[word, known[-1]]
    if (
        not version.isascii()
        or not version.isdecimal()
        or (word, int(version[:9])) not in versions
        or version.startswith("0")
    ):
        raise NotFound(
            f'"{word}" has no version "{version}"',
            fix="there is " + ", ".join(f"{word}@{number}" for number in known),
        )
    return versions[word, int(version)]


def meant(location: Location, word: str | None) -> str:
    """The recipe that a word means, as its workspace calls it: a path from the workspace, or a name in the library.  Raises NotFound.

    `train` is the file train.yaml where the caller stands, else the one in the workspace, else a recipe of the library.  No word is recipe.yaml.
    """
    if word is not None and is_path(word):
        return path(location, word)
    if word is None or "@" not in word:
        for folder in dict.fromkeys((location.below, "")):
            for name in (f"{word or 'recipe'}.yaml", f"{word or 'recipe'}.yml"):
                file = f"{folder}/{name}" if folder else name
                if os.path.isfile(location.root / file):
                    return f"./{file}"
    if word is None:
        fix = "name one: `recipe run sft@1`, or `recipe run ./pipeline.yaml`; `recipe list` shows them"
        raise NotFound(
            f"which recipe? there is no recipe.yaml here{f', nor in {location.root}' if location.below else ''}",
            fix=fix,
        )
    return word


def path(location: Location, word: str) -> str:
    """The same for a word that is known to be a path."""
    found = location.typed(word)
    return found if "/" in found else f"./{found}"


def _brought() -> list[Entry]:
    """The recipes of other packages."""
    places = [(each, extensions.folder(each)) for each in extensions.found(extensions.RECIPES)]
    found = {
        entry.path: entry
        for each, place in places
        if place is not None
        for entry in _entries(place, each.origin)
    }
    return list(found.values())


def _clash(name: str, brought: list[Entry], ours: bool) -> Problem | None:
    """A name belongs to the library, or else to one package; its versions come from there."""
    places = {entry.path.parent: f"{entry.origin} ({entry.path})" for entry in brought}
    if len(places) + ours < 2:
        return None
    return extensions.clash("recipe", name, [*(["the library"] if ours else []), *places.values()])


def _entries(folder: Path, origin: str) -> list[Entry]:
    return [
        Entry(found[1], int(found[2]), _summary(_head(path)), path, origin)
        for path, found in _files(folder)
    ]


def _files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return [
        (path, found)
        for path in paths
        if path.suffix == ".yaml" and (found := _NAME.fullmatch(path.stem))
    ]


def _by_path(name: str, workspace: Path) -> Path:
    path = workspace / Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise NotFound(f"{name} is a directory", fix="name the recipe file in it")
    if path.exists():
        raise NotFound(f"{name} is not a regular file", fix="name the file of a recipe")
    near = did_you_mean(
        path.name,
        [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [],
    )
    looked = f"looked in {os.path.abspath(path.parent)}; a recipe of the library is given by its name alone, and `recipe list` shows them"
    raise NotFound(f"there is no file {name}", fix=near or looked)


def _beside(name: str, workspace: Path) -> str:
    return f"did you mean ./{name}.yaml?" if (workspace / f"{name}.yaml").is_file() else ""


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_FIRST_LINES).decode("utf-8", "replace")


def _summary(head: str) -> str:
    """The value of the top-level line `summary: …`, read as text: parsing YAML would cost more than the whole listing."""
    found = re.search(r"^summary:[ \t]*(.*?)[ \t]*$", head, re.MULTILINE)
    if found is None:
        return ""
    text = found[1]
    if text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1:
        quote, text = text[0], text[1:-1]
        return (
            text.replace("''", "'")
            if quote == "'"
            else text.replace('\\"', '"').replace("\\\\", "\\")
        )
    return re.split(r"[ \t]#", text, maxsplit=1)[0].rstrip()
