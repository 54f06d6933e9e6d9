"""Collect the contents of all files that a plan refers to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..digest import of_value
from ..errors import CannotRun
from ..extensions import packages
from ..planning.judge import Facts
from ..planning.patterns import AUTO, decode_automatic, decode_pattern, is_glob
from ..planning.plan import Node, Plan
from ..planning.step import MetricsSpec
from ..reading import why_unreadable
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from . import code_files, locks
from .caller_files import CallerFiles
from .imports import ImportCache, follow_imports
from .request import Request


def collect_facts(ws: Workspace, plan: Plan, request: Request) -> Facts:
    """Collect the content IDs of all files, code, sources and locks of a plan. Raises CannotRun."""
    return _FactCollector(ws, plan, request).collect()


class _FactCollector:
    """Collector of the facts of a plan. Each file, pattern, source and program is read once."""

    def __init__(self, ws: Workspace, plan: Plan, request: Request) -> None:
        self._ws = ws
        self._plan = plan
        self._request = request
        read_metrics = partial(_read_metrics, ws, plan)
        self._facts = Facts(ws.traces, _TreeListings(ws), stored=ws.stored, numbers=read_metrics)
        self._callers = CallerFiles(ws, plan)
        self._imports = ImportCache(ws)
        self._files: dict[str, None] = {}

    def collect(self) -> Facts:
        """Return the facts of all nodes. Raises CannotRun."""
        # With the current interpreter, the packages are what is installed, not what is locked.
        has_locks = not self._request.current_python
        # Checked before the call: a plan may have 100,000 nodes, and most have few of these.
        for node in self._plan.nodes:
            if node.deps:
                self._add_deps(node)
            if node.code:
                self._add_code(node)
            if node.takes:
                self._add_sources(node)
            if node.tools:
                self._add_tools(node)
            if has_locks and node.lock:
                self._add_lock(node)
        self._imports.save()
        self._facts.files = dict(self._ws.cache.contents(self._files))
        if self._request.current_python:
            self._facts.current_python = of_value("packages/1", packages())
        return self._facts

    def _add_deps(self, node: Node) -> None:
        files = self._files
        for dep in node.deps:
            if is_glob(dep):
                files.update(dict.fromkeys(self._find_matches(dep)))
            else:
                files[dep] = None

    def _find_matches(self, pattern: str) -> list[str]:
        matches = self._facts.matches
        if pattern not in matches:
            matches[pattern] = self._callers.matches(pattern)
        return matches[pattern]

    def _add_code(self, node: Node) -> None:
        code, home = self._facts.code, node.home
        for pattern in node.code:
            if (home, pattern) not in code:
                code[home, pattern] = _code_contents(
                    self._ws, self._plan.homes[home], pattern, self._callers, self._imports
                )

    def _add_sources(self, node: Node) -> None:
        takes = self._facts.takes
        for source in node.takes:
            key = source.lookup_key
            if key not in takes:
                takes[key] = _source_identity(
                    self._ws, source.kind, source.address, source.only, update=self._request.update
                )

    def _add_tools(self, node: Node) -> None:
        tools = self._facts.tools
        for tool in node.tools:
            if tool not in tools:
                tools[tool] = _tool_content(self._ws, tool)

    def _add_lock(self, node: Node) -> None:
        locks = self._facts.locks
        if (node.home, node.lock) not in locks:
            path = Path(self._plan.homes[node.home], node.lock)
            locks[node.home, node.lock] = _lock_content(self._ws, path)


def _read_metrics(
    ws: Workspace, plan: Plan, key: str, rule: MetricsSpec
) -> Mapping[str, Any] | None:
    """Read a cached result's metrics by a changed metrics rule, or return None if not stored."""
    # Imported on demand: only a changed `metrics:` needs this module.
    from .numbers import read_metrics

    return read_metrics(ws, plan, key, rule)


def _source_identity(
    ws: Workspace, kind: str, address: str, only: Sequence[str], *, update: bool
) -> str | None:
    """Return the content ID or pinned revision of a source, or None if it does not exist."""
    if kind != "path":
        from ..storage.sources import resolve

        return resolve(ws, kind, address, update=update)
    source = str(ws.absolute(address))
    if only and os.path.isdir(source):
        from ..storage.sources import identify_files

        return identify_files(ws.cache, source, only)[0]
    return ws.cache.content_of(source)


def _lock_content(ws: Workspace, path: Path) -> Content | None:
    """Return the content ID of a lock file, creating the lock from unpinned requirements if needed.

    Returns None if the file does not exist. Raises CannotRun.
    """
    if not locks.is_current(path) and not ws.read_only:
        locks.make_lock(path, ws.environ)
    path = locks.lock_file(path)
    try:
        wrong = why_unreadable(path.stat())
    except OSError:
        return None
    if wrong:
        raise CannotRun(
            f"cannot read the lock file {path}: {wrong}",
            fix="create the lock file again with `recipe lock`, uv or pip-compile",
        )
    return ws.cache.content_of(str(path.resolve()))


def _tool_content(ws: Workspace, name: str) -> str | None:
    """Return the content ID of a program on PATH, or None if not found."""
    found = shutil.which(name, path=ws.environ.get("PATH"))
    return ws.cache.content_of(os.path.realpath(found)) if found else None


def _code_contents(
    ws: Workspace, home: str, pattern: str, callers: CallerFiles, imports: ImportCache
) -> list[tuple[str, str]]:
    """Return the names and content IDs of the files of a `code` entry."""
    base = os.path.realpath(home)
    if decode_pattern(pattern)[0] == AUTO:
        imported = follow_imports(base, *decode_automatic(pattern), imports.read)
        names = sorted(imported.files)
        names_one_file = False
    else:
        names = code_files.code_matches(base, pattern)
        names_one_file = not is_glob(pattern) and not code_files.is_folder(base, pattern)
    root = f"{os.path.realpath(ws.root)}/"
    is_in_workspace = f"{base}/".startswith(root)
    if is_in_workspace and not names_one_file:
        by_path = {f"{base}/{name}".removeprefix(root): name for name in names}
        names = [by_path[path] for path in callers.among(list(by_path))]
    contents = ws.cache.contents(f"{base}/{name}" for name in names)
    found: list[tuple[str, str]] = []
    for name in names:
        content = contents[f"{base}/{name}"]
        if content is not None:
            found.append((name, content))
    return found


class _TreeListings(dict[str, Mapping[str, str]]):
    """File listings of stored directory trees by content ID, each loaded on first use."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __missing__(self, content: str) -> Mapping[str, str]:
        if self._ws.remote_cache is not None:
            self._ws.remote_cache.outline(Content(content))
        entries = self._ws.objects.manifests.entries(Content(content))
        listing: dict[str, str] = {}
        for entry in entries:
            if entry.kind in "fx":  # files and programs, no directories or links
                listing[entry.path] = f"{entry.kind}:{entry.value}"
        self[content] = listing
        return listing
