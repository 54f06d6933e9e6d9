"""The files and functions that a page of the documentation names, and which of them are not there.

A page names a file by its path from the root of the repository or from `runner`: `execution/steps/loop.py`.
The ending of a module may be left out (`hosts/link/stream`), and `*` stands for any characters. Behind a colon
a page names a part of the file: of a Python file a function, class, method or constant; of another file a word in it.

Below a heading such as `### hosts: where steps run`, the name of a file alone is one in the folder `hosts`, and a
name with a slash behind it is a folder there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PAGES: Final = ("docs/design.md", "CONTRIBUTING.md")
"""Pages whose names are checked."""
TOPS: Final = (
    *("runner", "drivers", "tests", "docs", "recipes", "schemas"),
    *("benchmarks", "fixtures", "examples"),
)
WORD: Final = re.compile(
    r"(?<![\w./@*<-])(?P<path>[\w@*.-]+(?:/[\w@*.-]+)*)(?P<slash>/?)(?::(?P<part>[A-Za-z_][\w.-]*))?"
)
HEADING: Final = re.compile(r"#+ (?:(?P<floor>\w+): )?")


class Name(NamedTuple):
    """A file that a page names on `line`.

    `part` is a part of the file, empty for the file itself. `floor` is the folder that the section is about.
    """

    line: int
    path: str
    part: str
    floor: str


def names_of(text: str, home: Path) -> Iterator[Name]:
    """Every name of a file in the text of a page."""
    floors = {path.name for path in home.glob("runner/*/")} | {"drivers"}
    known_folders = {*TOPS, *floors}
    floor = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := HEADING.match(line):
            floor = heading["floor"] if heading["floor"] in floors else ""
        for found in WORD.finditer(line):
            path = found["path"].rstrip(".")
            below_known_folder = "/" in path and path.partition("/")[0] in known_folders
            is_folder = bool(floor and found["slash"])
            if path.endswith(".py") or below_known_folder or is_folder:
                yield Name(number, path, (found["part"] or "").rstrip(".-"), floor)


def stale_names(home: Path, pages: tuple[str, ...] = PAGES) -> list[str]:
    """Every name on `pages` that leads to no file, or to no part of one."""
    return [
        f"{page}:{name.line}: {fault}"
        for page in pages
        for name in names_of((home / page).read_text("utf-8"), home)
        if (fault := _fault(name, home))
    ]


def _fault(name: Name, home: Path) -> str:
    file = _find(name, home)
    if file is None:
        return f"{name.path} does not exist"
    if name.part and not _has_part(file, name.part):
        return f"{name.path} has no {name.part}"
    return ""


def _find(name: Name, home: Path) -> Path | None:
    below = "" if "/" in name.path else name.floor
    patterns = [name.path, f"{name.path}.py"]
    if below:
        patterns += [f"{below}/**/{pattern}" for pattern in patterns]
    for folder in (home, home / "runner"):
        for pattern in patterns:
            found = next(folder.glob(pattern), None)
            if found is not None:
                return found
    return None


def _has_part(file: Path, part: str) -> bool:
    text = file.read_text("utf-8")
    return part in _definitions(ast.parse(text).body) if file.suffix == ".py" else part in text


def _definitions(body: list[ast.stmt], above: str = "") -> set[str]:
    """The names that a module or class defines; those of a class also below the name of the class."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(above + node.name)
        if isinstance(node, ast.ClassDef):
            found |= _definitions(node.body, f"{above}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        found |= {above + target.id for target in targets if isinstance(target, ast.Name)}
    return found
