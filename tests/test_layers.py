"""The walls between the rooms: who may import whom, and who may touch the world.  Read from the syntax alone; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.places import shipped

HOME = shipped()
FLOORS = ("words", "language", "planning", "storage", "execution", "interface")
"""A floor imports only itself and those before it.  `words` are the modules beside them; the front door, runner/__init__.py, opens any room."""

THE_WORLD = {"asyncio", "concurrent", "datetime", "fcntl", "glob", "http", "io", "multiprocessing", "random", "secrets", "select", "selectors"} | {
    "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib.request", "uuid"
}  # fmt: skip
TOUCHES = {"open", "input", "print", "exec", "eval", "__import__"}
METHODS = {"exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "open", "read_bytes", "read_text", "rglob", "stat", "unlink", "write_bytes"} | {
    "write_text", "getenv", "environ", "listdir", "scandir", "lstat", "urandom", "getcwd", "system", "popen"
}  # fmt: skip
READING = {("runner/language/library.py", None), ("runner/language/document.py", "read")}
"""Where the language touches the disk: a module, or one function of it.  Planning has no such place."""


def faults(home: Path) -> list[str]:
    """Every break of a wall below `home`."""
    found = []
    for path in sorted([*home.glob("runner/**/*.py"), *home.glob("drivers/**/*.py")]):
        name = path.relative_to(home).as_posix()
        tree = ast.parse(path.read_bytes(), name)
        found += [f"{name}:{line}: {fault}" for line, fault in (*_imports(name, tree), *_touches(name, tree))]
    return found


def _imports(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    floor = _floor(name)
    for line, target, names in _imported(name, tree):
        package = target.partition(".")[0]
        if name.startswith("drivers/"):
            if package == "runner":
                yield line, f"a driver imports {target}"
            continue
        if package == "runner" and floor is not None:
            there = _floor_of_import(target, names)
            if there > FLOORS.index(floor):
                yield line, f"{floor} imports {target}, which is {FLOORS[there]}"
        elif package == "drivers" and target != "drivers.base" and floor != "execution" and not _of_the_table(target, names):
            yield line, f"{floor} imports {target} ({', '.join(names)}); only execution loads a driver"


def _of_the_table(target: str, names: list[str]) -> bool:
    """Names and install lines: reading them loads no driver."""
    return target == "drivers" and bool(names) and {*names} <= {"DRIVERS", "install_line"}


def _touches(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if _floor(name) not in ("language", "planning") or (name, None) in READING:
        return
    for line, target, names in _imported(name, tree):
        for module in (target, *(f"{target}.{word}" for word in names)):
            if module in THE_WORLD or module.partition(".")[0] in THE_WORLD:
                yield line, f"imports {module}"
    body = [part for part in tree.body if not (isinstance(part, ast.FunctionDef) and (name, part.name) in READING)]
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TOUCHES:
            yield node.lineno, f"calls {node.func.id}()"
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.lineno, f"uses .{node.attr}"


def _imported(name: str, tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """(line, absolute module, names taken from it) of every import, wherever it stands: those inside functions and for types count too."""
    parents = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*above, *([node.module] if node.module else [])]), [alias.name for alias in node.names]


def _floor(name: str) -> str | None:
    parts = name.split("/")
    if parts[0] != "runner" or name == "runner/__init__.py":
        return None
    return parts[1] if len(parts) > 2 else "words"


def _floor_of_import(target: str, names: list[str]) -> int:
    parts = target.split(".")
    rooms = parts[1:2] or [word for word in names if word in FLOORS]  # `from runner import planning`, `from .. import planning`
    return max((FLOORS.index(room) for room in rooms if room in FLOORS), default=0)


def test_the_walls_stand() -> None:
    assert faults(HOME) == []


@pytest.mark.parametrize(
    ("where", "line", "words"),
    [
        ("runner/errors.py", "from .language import units", "words imports runner.language, which is language"),
        ("runner/language/units.py", "from ..planning.plan import Plan", "language imports runner.planning.plan, which is planning"),
        ("runner/language/units.py", "import runner.storage.store", "language imports runner.storage.store, which is storage"),
        ("runner/planning/plan.py", "def f():\n    from ..execution import session", "planning imports runner.execution, which is execution"),
        ("runner/storage/store.py", "from .. import interface", "storage imports runner, which is interface"),
        ("runner/survey/survey.py", "import runner.interface.console", "execution imports runner.interface.console, which is interface"),
        ("drivers/base.py", "from runner.errors import RecipeError", "a driver imports runner.errors"),
        ("drivers/local.py", "import runner", "a driver imports runner"),
        ("runner/interface/console.py", "from drivers import local", "interface imports drivers (local); only execution loads a driver"),
        ("runner/interface/console.py", "import drivers.local", "interface imports drivers.local (); only execution loads a driver"),
        ("runner/language/units.py", "import subprocess", "imports subprocess"),
        ("runner/language/units.py", "from urllib import request", "imports urllib.request"),
        ("runner/language/document.py", "def f(p):\n    return open(p)", "calls open()"),
        ("runner/language/parse.py", "def f(p):\n    return p.read_text()", "uses .read_text"),
        ("runner/planning/judge.py", "from time import time", "imports time"),
        ("runner/planning/judge.py", "import socket", "imports socket"),
        ("runner/planning/compile.py", "import os\nHOME = os.environ", "uses .environ"),
    ],
)
def test_a_broken_wall_is_found(tmp_path: Path, where: str, line: str, words: str) -> None:
    broken = tmp_path / where
    broken.parent.mkdir(parents=True)
    broken.write_text(f"{(HOME / where).read_text()}\n{line}\n")
    found = faults(tmp_path)
    assert found and all(fault.startswith(f"{where}:") for fault in found)
    assert words in [fault.split(": ", 1)[1] for fault in found]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("runner/interface/console.py", "from drivers.base import Exit"),
        ("runner/interface/console.py", "from drivers import install_line"),
        ("runner/survey/survey.py", "from drivers import load"),
        ("runner/planning/plan.py", "from ..language.template import references"),
        ("runner/storage/store.py", "import socket"),
    ],
)
def test_an_open_door_is_no_fault(tmp_path: Path, where: str, line: str) -> None:
    target = tmp_path / where
    target.parent.mkdir(parents=True)
    target.write_text(f"{line}\n")
    assert faults(tmp_path) == []
