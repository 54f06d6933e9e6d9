"""The structure of the code, measured from its syntax: imports, walls between rooms, style and size.  Nothing of the project is imported.

usage: house.py

Prints the figures, those of style beside model code bases.  Exit code 1 if there is a circle of imports, a
broken wall, or a name in docs/design.md or CONTRIBUTING.md of a file or function that does not exist.  Style and sizes
are printed as signs of where to look.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import networkx as nx

HOME = Path(__file__).resolve().parents[1]
FLOORS = (
    "agent",
    "words",
    "language",
    "planning",
    "storage",
    "reports",
    "hosts",
    "survey",
    "advice",
    "execution",
    "api",
    "interface",
    "server",
)
"""A floor imports itself and those before it, but no floor's agent imports anything.  `words` are the modules of `runner` itself; the front door,
runner/__init__.py, opens any room."""
PLAN_FREE = ("runner.planning.step",)
"""What `hosts` may know of planning: the types of a step's parts, never a Plan."""
SERVES = "runner.interface.cli.serve"
"""The one module that imports the server."""
LOADERS = ("hosts",)
"""Who may load a driver."""
OPEN = ("drivers.base", "drivers.machine", "drivers.devices", "drivers.fakes")
"""What anybody may read of `drivers`: its contract, how a machine and its GPUs are described, and the front door of the fake providers."""
TABLE = ("DRIVERS", "install_line")
"""Names that load no driver: what drivers there are, and what installs one."""
ADVISED = "runner.execution.refusals"
"""The one module of `execution` that asks for advice."""

THE_WORLD = {"asyncio", "concurrent", "datetime", "fcntl", "glob", "http", "io", "multiprocessing", "random", "secrets", "select", "selectors"} | {
    "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib.request", "uuid"
}  # fmt: skip
TOUCHES = {"open", "input", "print", "exec", "eval", "__import__"}
METHODS = {"exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "open", "read_bytes", "read_text", "rglob", "stat", "unlink", "write_bytes"} | {
    "write_text", "getenv", "environ", "listdir", "scandir", "lstat", "urandom", "getcwd", "system", "popen"
}  # fmt: skip
PURE = ("language", "planning")
READING = {("runner/language/library.py", None), ("runner/language/document.py", "read")}
"""Where the pure floors touch the disk all the same: a module, or one function of it."""

FRONTS = ("argparse", "fastapi", "starlette", "httpx", "requests", "uvicorn")
"""What `api` may not import: how a front is asked, or asks."""

HERE_OR_THERE = ("RemotePlace", "local_place")
"""What `execution` may not ask with `isinstance` or `is`: a place hides whether it is this machine."""

INSIDE = ("survey", "execution")
"""Rooms that read the caller's environment from the workspace alone: a worker's is not the submitter's."""

LONG = 1000
BROAD = 25
TALL = 100
"""Sizes above which a file, class or function is printed, as a sign of where to look. They are no limits:
code that was split or folded to meet a number was harder to read than before."""


IMPORTED = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)
"""An import as a test writes it: the module, and the names that are taken from it."""


class Import(NamedTuple):
    """One name of one import statement.  `target` is the module, `name` what is taken from it, empty for the module itself."""

    source: str
    path: str
    line: int
    target: str
    name: str


def modules(home: Path) -> dict[str, Path]:
    """Every module of `runner` and `drivers` below `home`, by its dotted name."""
    found = {}
    for path in sorted([*home.glob("runner/**/*.py"), *home.glob("drivers/**/*.py")]):
        parts = path.relative_to(home).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@lru_cache(maxsize=1024)
def syntax(text: str) -> ast.Module:
    """The syntax of a module.  Each figure asks for it, and it is parsed once."""
    return ast.parse(text)


@lru_cache(maxsize=1024)
def nodes_of(text: str) -> list[ast.AST]:
    """All nodes of the syntax of a module, in the order of `ast.walk`, which takes longer than parsing."""
    return list(ast.walk(syntax(text)))


def imports(home: Path, known: set[str] | None = None) -> list[Import]:
    """Every import of ours, wherever it stands: those inside functions and for types count too.  `known` are modules that lie elsewhere."""
    there = modules(home)
    names = there.keys() | (known or set())
    return [
        Import(source, path.relative_to(home).as_posix(), *rest)
        for source, path in there.items()
        for rest in _imported(source, path, names)
    ]


def _imported(
    source: str, path: Path, known: set[str] | frozenset[str]
) -> Iterator[tuple[int, str, str]]:
    package = source.split(".") if path.name == "__init__.py" else source.split(".")[:-1]
    for node in nodes_of(path.read_text("utf-8")):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{target}.{alias.name}"
                yield (
                    (node.lineno, whole, "")
                    if whole in known
                    else (node.lineno, target, alias.name)
                )


def circles(found: list[Import]) -> list[list[str]]:
    """Modules that import each other, in groups."""
    ours = {each.source for each in found}
    graph = nx.DiGraph(
        (each.source, each.target)
        for each in found
        if each.target in ours and each.target != each.source
    )
    return sorted(
        sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1
    )


def package(module: str) -> str:
    """The package of a room that a module is in; a module of the room itself counts as one."""
    parts = module.split(".")
    return ".".join(parts[:3]) if parts[0] == "runner" and len(parts) > 3 else module


def circles_of_packages(found: list[Import]) -> list[list[str]]:
    """Packages of rooms that import each other, in groups: one of them could not be read alone."""
    return circles(
        [each._replace(source=package(each.source), target=package(each.target)) for each in found]
    )


def room(module: str) -> str:
    """The room a module is in; empty for the front door and for what is not ours."""
    parts = module.split(".")
    if parts[0] == "drivers":
        return "drivers"
    if parts[0] != "runner" or len(parts) == 1:
        return ""
    return parts[1] if parts[1] in FLOORS else "words"


def faults(home: Path, known: set[str] | None = None) -> list[str]:
    """Every break of a wall below `home`."""
    found = [
        f"{each.path}:{each.line}: {fault}"
        for each in imports(home, known)
        if (fault := _import_fault(each))
    ]
    for module, path in modules(home).items():
        name = path.relative_to(home).as_posix()
        tree = syntax(path.read_text("utf-8"))
        if room(module) in PURE and (name, None) not in READING:
            found += [f"{name}:{line}: {fault}" for line, fault in _touches(name, tree)]
        if room(module) in INSIDE:
            found += [
                f"{name}:{line}: reads os.environ, which the workspace hands in"
                for line in _environment(tree)
            ]
        if room(module) == "execution":
            found += [
                f"{name}:{line}: asks whether a host is this one" for line in _asks_where(tree)
            ]
    return found


def _import_fault(each: Import) -> str:
    source, target = room(each.source), room(each.target)
    what = f"{each.target}.{each.name}" if each.name else each.target
    if source == "drivers":
        return f"a driver imports {what}" if each.target.partition(".")[0] == "runner" else ""
    if not source:
        return ""
    if source == "agent":
        return (
            f"the agent imports {what}"
            if each.target.partition(".")[0] in ("runner", "drivers") and target != "agent"
            else ""
        )
    if each.target == "runner":
        return f"{source} imports the front door: {what}"
    if target == "drivers":
        open_to = (
            each.target in OPEN
            or each.source in LOADERS
            or source in LOADERS
            or (each.target == "drivers" and each.name in TABLE)
        )
        return "" if open_to else f"{source} imports {what}; only hosts load a driver"
    if (
        target
        and FLOORS.index(target) > FLOORS.index(source)
        and not (target == "server" and each.source == SERVES)
    ):
        return f"{source} imports {what}, which is {target}"
    if source == "hosts" and target == "planning" and each.target not in PLAN_FREE:
        return f"hosts imports {what}; a place knows no plan"
    if source == "api" and each.target.partition(".")[0] in FRONTS:
        return f"api imports {what}; only a front knows how it is asked"
    if source == "execution" and target == "advice" and each.source != ADVISED:
        return f"execution imports {what}; only refusals asks for advice"
    return ""


def _touches(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        words = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            words = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (
            (node.lineno, f"imports {word}")
            for word in words
            if {word, word.partition(".")[0]} & THE_WORLD
        )
    body = [
        part
        for part in tree.body
        if not (isinstance(part, ast.FunctionDef) and (name, part.name) in READING)
    ]
    for node in (node for part in body for node in ast.walk(part)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in TOUCHES
        ):
            yield node.lineno, f"calls {node.func.id}()"
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.lineno, f"uses .{node.attr}"


def _environment(tree: ast.Module) -> list[int]:
    """The lines where a module reads the environment of this process."""
    ours = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    )
    return [
        node.lineno for node in ours if isinstance(node.value, ast.Name) and node.value.id == "os"
    ]


def _asks_where(tree: ast.Module) -> list[int]:
    """The lines where a module asks with `isinstance` or `is` whether a host is this one."""

    def named(node: ast.AST) -> bool:
        return any(
            isinstance(part, (ast.Name, ast.Attribute))
            and (getattr(part, "id", "") or getattr(part, "attr", "")) in HERE_OR_THERE
            for part in ast.walk(node)
        )

    return [
        node.lineno
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
            and named(node.args[1])
        )
        or (
            isinstance(node, ast.Compare)
            and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
            and named(node)
        )
    ]


def lines(home: Path) -> dict[str, int]:
    """Lines of each file of `runner` and `drivers`."""
    return {
        path.relative_to(home).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in modules(home).values()
    }


def untyped(home: Path) -> Counter[str]:
    """How often each file says `dict[str, Any]`."""
    return Counter(
        {
            path.relative_to(home).as_posix(): path.read_text("utf-8").count("dict[str, Any]")
            for path in modules(home).values()
        }
    )


def find_untested_modules(home: Path) -> list[str]:
    """Modules of `runner` and `drivers` that no test imports and no test file is named after."""
    tests = {path.stem: path.read_text("utf-8") for path in home.glob("tests/**/*.py")}
    named = set()
    for text in tests.values():
        for package, names in IMPORTED.findall(text):
            named.add(package)
            named |= {f"{package}.{name}" for name in re.findall(r"\w+", names)}
    return [
        module
        for module, path in modules(home).items()
        if path.stem != "__init__"
        and module not in named
        and f"test_{path.stem.strip('_')}" not in tests
    ]


def shapes(home: Path) -> tuple[dict[str, int], dict[str, int]]:
    """How many methods each class of `runner` and `drivers` has, and how many lines each function."""
    classes, functions = {}, {}
    for path in modules(home).values():
        name = path.relative_to(home).as_posix()
        for node in nodes_of(path.read_text("utf-8")):
            if isinstance(node, ast.ClassDef):
                classes[f"{name}:{node.lineno} {node.name}"] = sum(
                    isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body
                )
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[f"{name}:{node.lineno} {node.name}"] = (
                    (node.end_lineno or node.lineno) - node.lineno + 1
                )
    return classes, functions


def main() -> int:
    from benchmarks import named_files, style

    gc.disable()  # trees of syntax have no circles, and looking for them takes a third of the time
    found, sizes = imports(HOME), lines(HOME)
    rings, broken = [*circles(found), *circles_of_packages(found)], faults(HOME)
    stale = named_files.stale_names(HOME)
    texts = [path.read_text("utf-8") for path in modules(HOME).values()]
    figures = style.measure([style.Source(text, nodes_of(text)) for text in texts])
    print(f"{len(sizes)} files, {sum(sizes.values())} lines, {len(found)} imports")
    print(f"lines by room: {_lines_by_room(sizes)}")
    print(*style.table(figures), sep="\n")
    print(f"{len(find_untested_modules(HOME))} of {len(sizes)} modules are imported by no test")
    print(*_large(sizes), sep="\n")
    for ring in rings:
        print("circle: " + " <-> ".join(ring))
    for fault in broken:
        print(f"wall: {fault}")
    for fault in stale:
        print(f"stale name: {fault}")
    counts = f"{len(rings)} circles of imports, {len(broken)} broken walls"
    print(f"{counts}, {len(stale)} stale names in {' and '.join(named_files.PAGES)}")
    return int(bool(rings or broken or stale))


def _lines_by_room(sizes: dict[str, int]) -> str:
    by_room = Counter[str]()
    for module, path in modules(HOME).items():
        by_room[room(module) or "front door"] += sizes[path.relative_to(HOME).as_posix()]
    rooms = ("front door", *FLOORS, "drivers")
    return ", ".join(f"{name} {by_room[name]}" for name in rooms if by_room[name])


def _large(sizes: dict[str, int]) -> list[str]:
    """Lines about the largest files, classes and functions, and the least typed files."""
    classes, functions = shapes(HOME)
    measured = (
        ("long", sizes, LONG),
        ("methods", classes, BROAD),
        ("lines", functions, TALL),
    )
    said = []
    for what, counts, most in measured:
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            if count > most:
                said.append(f"{what}: {name} {count}")
    for name, count in untyped(HOME).most_common(8):
        said.append(f"dict[str, Any]: {name} {count}")
    return said


if __name__ == "__main__":
    sys.path.insert(0, str(HOME))  # for `benchmarks`, when this file is run by its path
    sys.exit(main())
