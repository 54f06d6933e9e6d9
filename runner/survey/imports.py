"""Follow Python imports below a root directory to find the workspace files that a command needs.

Executes nothing.

A directory without `__init__.py` counts only for modules found inside: an installed package with
the same name takes precedence.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..language.imports import EntryPoint, Import, Imports
from ..paths import VERSION
from ..reading import parse_json, whole
from .code_files import files_below

if TYPE_CHECKING:
    from ..storage.workspace import Workspace

_MOST: Final = 5000
"""Maximum files with cached imports. Beyond it, entries of earlier surveys are dropped."""


class ImportedFile(NamedTuple):
    """A file needed by a command, and the import that requires it."""

    file: str
    by: str = ""  # importing file
    module: str = ""  # module name as written in the import


class ImportedFiles(NamedTuple):
    files: dict[str, ImportedFile]
    doubts: list[tuple[str, str]]  # a file, and its unreadable import


def follow_imports(
    base: str, starts: Iterable[EntryPoint], path: Sequence[str], read: Callable[[str], Imports]
) -> ImportedFiles:
    """Return all files below `base` imported by scripts and modules, including the scripts.

    `path` has the PYTHONPATH directories relative to `base`. `read` returns the imports of a file
    by its absolute path.
    """
    files: dict[str, ImportedFile] = {}
    doubts: dict[tuple[str, str], None] = {}
    seek = ModuleFinder(base)

    def exported(file: str) -> Sequence[str]:
        return read(f"{base}/{file}").exported

    for kind, name in starts:
        place = posixpath.normpath(name)
        # Python's search path starts with the script's directory, or the current one for `-m`.
        own = posixpath.dirname(place) if kind == "script" else ""
        folders = list(dict.fromkeys([own, *path]))
        first = [place] if kind == "script" else seek.module(name, folders)
        waiting = [ImportedFile(file) for file in first]
        seen: set[str] = set()
        for found in waiting:  # grows during the loop
            if found.file in seen or not seek.is_file(found.file):
                continue
            seen.add(found.file)
            files.setdefault(found.file, found)
            if not found.file.endswith(".py"):
                continue
            imports = read(f"{base}/{found.file}")
            doubts |= dict.fromkeys((found.file, doubt) for doubt in imports.doubts)
            for each in imports.found:
                needed = seek.find_imported(each, found.file, folders, exported)
                waiting += [ImportedFile(file, found.file, str(each)) for file in needed]
    return ImportedFiles(files, list(doubts))


class ModuleFinder:
    """Finder of modules below a directory. Each directory is listed once and must not change."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._listed: dict[str, tuple[set[str], set[str]]] = {}

    def is_file(self, name: str) -> bool:
        folder, last = posixpath.split(name)
        return last in self._names(folder)[0]

    def _is_folder(self, name: str) -> bool:
        folder, last = posixpath.split(name)
        return last in self._names(folder)[1]

    def _names(self, folder: str) -> tuple[set[str], set[str]]:
        """List a directory, cached. Return the names of its files and directories."""
        if folder not in self._listed:
            files: set[str] = set()
            folders: set[str] = set()
            if not folder.startswith(("..", "/")):
                try:
                    with os.scandir(f"{self._base}/{folder}") as listing:
                        for each in listing:
                            if each.is_dir():
                                folders.add(each.name)
                            else:
                                files.add(each.name)
                except OSError:
                    pass  # a missing or unreadable directory has no modules
            self._listed[folder] = files, folders
        return self._listed[folder]

    def find_imported(
        self,
        wanted: Import,
        file: str,
        path: Sequence[str],
        exported: Callable[[str], Sequence[str]],
    ) -> list[str]:
        """Return the files loaded by one import in `file`.

        `exported` returns the names in a package's `__all__`.
        """
        if wanted.level:
            folder = posixpath.dirname(file)
            for _ in range(wanted.level - 1):
                if not folder:
                    return []
                folder = posixpath.dirname(folder)
            path = [folder]
        elif wanted.module.partition(".")[0] in sys.builtin_module_names:
            return []
        parts = wanted.module.split(".") if wanted.module else []
        files, inside = self._walk(parts, path)
        names = wanted.names
        if "*" in names:
            package = files[-1] if files else f"{path[0]}/__init__.py".lstrip("/")
            names = ()
            # Only the `__all__` of a package may name modules.
            if package.endswith("__init__.py") and self.is_file(package):
                names = tuple(exported(package))
        for name in names:
            files += self._walk([name], inside)[0]
        return files

    def module(self, name: str, path: Sequence[str]) -> list[str]:
        """Return the files loaded by `python -m NAME` before any import."""
        files, inside = self._walk(name.split("."), path)
        mains = [f"{folder}/__main__.py" for folder in inside]
        return [*files, *filter(self.is_file, mains)]

    def _walk(self, parts: Sequence[str], path: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the files of each package along a dotted name, and the search path for submodules."""
        files: list[str] = []
        for n, part in enumerate(parts):
            portions: list[str] = []
            for folder in path:
                place = posixpath.join(folder, part)
                if self._is_folder(place) and self.is_file(f"{place}/__init__.py"):
                    files.append(f"{place}/__init__.py")
                    portions = [place]
                    break
                if self.is_file(f"{place}.py"):
                    # A module has no submodules: with more parts, the import fails.
                    if n == len(parts) - 1:
                        files.append(f"{place}.py")
                    return files, []
                if self._is_folder(place):
                    portions.append(place)
            path = portions
        return files, list(path)


class ImportCache:
    """Cache of Python files' imports by content, stored in `.recipe/imports.json`."""

    def __init__(self, ws: Workspace) -> None:
        self._ws, self._path = ws, ws.home / "imports.json"
        self._known: dict[str, list[object]] | None = None
        self._new: dict[str, list[object]] = {}

    def read(self, file: str) -> Imports:
        """Return the imports of a file, or none for a missing or non-Python file."""
        if self._known is None:
            self._known = self._load()
        content = self._ws.cache.content_of(file)
        if content is None:
            return Imports()
        if content not in self._known:
            self._known[content] = self._new[content] = list(read_imports(file))
        return Imports.load(self._known[content])

    def _load(self) -> dict[str, list[object]]:
        try:
            version, known = parse_json(self._path.read_bytes())
        except (OSError, ValueError, TypeError):
            return {}
        if version != VERSION or not isinstance(known, dict):
            return {}
        return known

    def save(self) -> None:
        """Save new entries of the import cache."""
        if self._known is None or not self._new:
            return
        if not self._ws.read_only:
            kept = self._known if len(self._known) <= _MOST else self._new
            self._ws.write(self._path, json.dumps([VERSION, kept], separators=(",", ":")).encode())
            self._new = {}


def read_imports(file: str) -> Imports:
    """Parse the imports of a Python file."""
    from ..language.python_reader import read

    try:
        return read(whole(Path(file)))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        return Imports(doubts=(f"invalid Python: {error}",))


def import_advice(
    said: str, step: str, base: str, listed: Collection[str], starts: Sequence[EntryPoint]
) -> str:
    """Return advice for a failed import in a step's output, or "".

    `listed` are the files of the attempt, `starts` the scripts of its command.
    """
    if "attempted relative import with no known parent package" in said:
        return _as_module(base, starts)
    missing = re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", said)
    if not missing:
        return ""
    module = missing[-1]
    for found in follow_imports(base, starts, (), read_imports).files.values():
        if found.file not in listed and f"{found.module.lstrip('.')}.".startswith(f"{module}."):
            return f"{found.module} is {found.file}, which is not in `code` of {step}: add it, or write `code: auto`"
    for file in files_of_module(base, module):
        if file not in listed:
            return f"{module} is {file}, which is not in `code` of {step}: add it"
        name = file.removesuffix("/__init__.py").removesuffix(".py")
        folder = posixpath.normpath(name.removesuffix(module.replace(".", "/")) or ".")
        return f"{module} is {file}, but {folder} is not on Python's path: add `env: {{PYTHONPATH: {folder}}}` to {step}"
    return ""


def way_to_start(base: str, script: str) -> tuple[EntryPoint, list[str]]:
    """Return how to start a script so that its imports work, and the necessary PYTHONPATH.

    A script with relative imports is started as a module. PYTHONPATH has `src` and parent
    directories if they contain imported modules.
    """
    seek = ModuleFinder(base)
    start, path = EntryPoint("script", script), list[str]()
    is_relative = any(each.level for each in read_imports(f"{base}/{script}").found)
    named = _module_name(seek, script) if is_relative else None
    if named is not None:
        module, above = named
        start = EntryPoint("module", module)
        path = [above] if above else []
    places = [posixpath.dirname(script)]
    while places[-1]:
        places.append(posixpath.dirname(places[-1]))
    known = follow_imports(base, [start], path, read_imports).files
    for folder in [*places[1:], "src"]:
        more = follow_imports(base, [start], [*path, folder], read_imports).files
        added = [more[file].module.partition(".")[0] for file in more.keys() - known.keys()]
        if any(top and top not in sys.stdlib_module_names for top in added):
            path, known = [*path, folder], more
    return start, path


def _as_module(base: str, starts: Sequence[EntryPoint]) -> str:
    """Return advice to start a file with relative imports as a module."""
    seek = ModuleFinder(base)
    for kind, name in starts:
        file = posixpath.normpath(name)
        if kind == "module" or not seek.is_file(file):
            continue
        named = _module_name(seek, file)
        if named is None:
            continue
        module, above = named
        way = f", with `env: {{PYTHONPATH: {above}}}`" if above else ""
        return f"{file} imports from its own package: start it as a module with `python -m {module}`{way}"
    return ""


def _module_name(seek: ModuleFinder, file: str) -> tuple[str, str] | None:
    """Return the module name of a file in a package, and the package's parent directory.

    None for a file at the root.
    """
    top = posixpath.dirname(file)
    if not top:
        return None
    while seek.is_file(f"{posixpath.dirname(top)}/__init__.py"):
        top = posixpath.dirname(top)
    above = posixpath.dirname(top)
    return file.removeprefix(f"{above}/").removesuffix(".py").replace("/", "."), above


def files_of_module(base: str, module: str) -> Iterator[str]:
    """Yield files below a root that may be this module, shallowest first.

    Hidden directories and environments are skipped.
    """
    tail = f"/{module.replace('.', '/')}"
    tails = (f"{tail}.py", f"{tail}/__init__.py")
    found = [name for name in files_below(base, ".") if f"/{name}".endswith(tails)]
    yield from sorted(found, key=lambda name: (name.count("/"), name))
