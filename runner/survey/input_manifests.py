"""Stored manifests of input directories, to tell later which files changed.

manifests/<sha256>.json has the rows [path, kind, size, value], as next to a stored tree.

Outputs of steps are objects with their own manifests. An input directory is not stored, and the
keys only have its digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from ..errors import RecipeError
from ..reading import parse_json
from ..storage.content.files import Content, Entry, tree_id

if TYPE_CHECKING:
    from ..storage.workspace import Workspace
    from .survey import Survey

MOST = 100_000
"""Maximum entries of a stored manifest."""


def store_manifests(ws: Workspace, found: Survey) -> None:
    """Store a manifest (file listing) of every input directory of a plan's steps."""
    for path, content in _trees(ws, found):
        if not _is_known(ws, content):
            entries = ws.cache.entries(path)
            if tree_id(entries) == content:
                store_entries(ws, content, entries)


def store_entries(ws: Workspace, content: str, entries: Sequence[Entry]) -> None:
    """Store the manifest of a directory tree, unless it is stored already or too large."""
    if len(entries) <= MOST and not _is_known(ws, content):
        ws.write(_file(ws, content), json.dumps(entries).encode("utf-8", "surrogateescape"))


def load_manifest(ws: Workspace, content: str) -> dict[str, str] | None:
    """Load the stored manifest of a directory tree as path -> content ID, or None if not stored."""
    entries = load_entries(ws, content)
    return _by_path(entries) if entries is not None else None


def load_entries(ws: Workspace, content: str) -> list[Entry] | None:
    """Load the stored manifest entries of a directory tree, or None if not stored.

    Trees of inputs have a manifest of their own, and trees of outputs one among the objects.
    """
    try:
        text = _file(ws, content).read_text("utf-8", "surrogateescape")
        return [Entry(*row) for row in parse_json(text)]
    except (OSError, ValueError, TypeError):
        try:
            return ws.objects.manifests.entries(Content(content))
        except RecipeError:
            return None


def find_manifest(ws: Workspace, found: Survey, content: str) -> dict[str, str] | None:
    """Return a directory's manifest as path -> content ID, stored or of a current plan input."""
    for path, now in _trees(ws, found):
        if now == content:
            return _by_path(ws.cache.entries(path))
    return load_manifest(ws, content)


def _by_path(entries: Iterable[Entry]) -> dict[str, str]:
    return {entry.path: f"{entry.kind}:{entry.value}" for entry in entries}


def _file(ws: Workspace, content: str) -> Path:
    return ws.home / "manifests" / f"{content[2:]}.json"


def _is_known(ws: Workspace, content: str) -> bool:
    return _file(ws, content).exists() or ws.objects.has(Content(content))


def _trees(ws: Workspace, found: Survey) -> Iterator[tuple[str, str]]:
    for (kind, address, *_), content in found.facts.takes.items():
        if kind == "path" and _is_tree(content):
            yield str(ws.absolute(address)), content
    for path, content in found.facts.files.items():
        if _is_tree(content):
            yield path, content


def _is_tree(content: str | None) -> TypeGuard[str]:
    return content is not None and content.startswith("t:")
