"""Find what ships with the program: library recipes, schemas, fixtures.  Reads only names and first lines; knows nothing of what a recipe means.

With `document.read` this is where the language touches the disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runner.errors import NotFound, did_you_mean

_NAME = re.compile(r"([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})")
_CALLED = re.compile(r"^recipe:[ \t]*[\"']?([a-z][a-z0-9_-]*)@([1-9][0-9]{0,8})\b", re.MULTILINE)
_FIRST_LINES = 65536  # `recipe:` and `summary:` stand at the top


@dataclass(frozen=True, slots=True)
class Entry:
    """A recipe of the library, as its first lines present it."""

    name: str
    version: int
    summary: str
    path: Path

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"


@cache
def home() -> Path:
    """The directory that holds `recipes/`, `schemas/` and `fixtures/`: inside an installed package, else the repository's root."""
    package = Path(__file__).resolve().parent.parent
    shipped = package / "shipped"
    return shipped if shipped.is_dir() else package.parent


def fixtures() -> Path:
    """What `{{ fixtures }}` stands for."""
    return home() / "fixtures"


def schema_text() -> str:
    """The schema of the recipe language, as JSON text."""
    return (home() / "schemas" / "recipe.schema.json").read_text("utf-8")


def entries() -> list[Entry]:
    """Every recipe of the library, by name, newest version first."""
    return sorted(
        (Entry(found[1], int(found[2]), _summary(_head(path)), path) for path, found in _files()),
        key=lambda entry: (entry.name, -entry.version),
    )


def beside(folder: Path) -> list[Entry]:
    """Every file in `folder` whose first lines say that it is a recipe, by file name.  A folder that cannot be read has none."""
    found = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
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
    """The file of a recipe: `flux-lora@1`, `flux-lora` (its newest version), or a path, which is looked up from `workspace`."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        return _by_path(name, workspace)
    versions = {(found[1], int(found[2])): path for path, found in _files()}
    word, at, version = name.partition("@")
    known = sorted(number for other, number in versions if other == word)
    if not known:
        names = {other for other, _ in versions}
        near = did_you_mean(word, names) or _beside(name, workspace)
        near = near or "`recipe list` shows what there is; a recipe of your own is given by its path, ./NAME.yaml"
        raise NotFound(f'there is no recipe "{name}" in the library', fix=near)
    if not at:
        return versions[word, known[-1]]
    if not version.isascii() or not version.isdecimal() or (word, int(version[:9])) not in versions or version.startswith("0"):
        raise NotFound(f'"{word}" has no version "{version}"', fix="there is " + ", ".join(f"{word}@{number}" for number in known))
    return versions[word, int(version)]


def _files() -> list[tuple[Path, re.Match[str]]]:
    folder = home() / "recipes"
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(path, found) for path in paths if path.suffix == ".yaml" and (found := _NAME.fullmatch(path.stem))]


def _by_path(name: str, workspace: Path) -> Path:
    path = workspace / Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise NotFound(f"{name} is a directory", fix="name the recipe file in it")
    near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
    raise NotFound(f"there is no file {name}", fix=near or "a recipe of the library is given by its name alone; `recipe list` shows them")


def _beside(name: str, workspace: Path) -> str:
    return f"the file beside you is given as ./{name}.yaml" if (workspace / f"{name}.yaml").is_file() else ""


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
        return text.replace("''", "'") if quote == "'" else text.replace('\\"', '"').replace("\\\\", "\\")
    return re.split(r"[ \t]#", text, maxsplit=1)[0].rstrip()
