"""Object names on a host, and checks of manifests received from a host.  Touches no disk."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence

from ...agent import trees
from ...storage.content.files import Entry

_HEX = frozenset("0123456789abcdef")
_MOST_LINKS = 40  # as on Linux, which reports a loop after that many
SUFFIX = {"f": "", "x": ".x", "t": ".t"}


def object_name(content: str) -> str:
    """Return the file name of an object."""
    return content[2:] + SUFFIX[content[0]]


def object_path(content: str) -> str:
    """Return the path of an object, relative to the root."""
    return f"objects/{content[2:4]}/{object_name(content)}"


def tree_stamp(entries: Sequence[Entry]) -> str:
    """Return the digest of a tree's names, kinds and links, by which a host recognizes it."""
    kinds = [(folder, "d") for folder in list_folders(entries)]
    kinds += [(entry.path, entry.kind) for entry in entries if entry.kind != "d"]
    return trees.stamp(kinds, _link_targets(entries).items())


def files_by_path(manifest: Iterable[Entry]) -> dict[str, Entry]:
    """Return the files of a tree, without links and directories."""
    return {entry.path: entry for entry in manifest if entry.kind in "fx"}


def files_size(manifest: Iterable[Entry]) -> int:
    """Return the bytes of a tree's files."""
    return sum(entry.size for entry in manifest if entry.kind in "fx")


def links_and_folders(manifest: Iterable[Entry]) -> list[Entry]:
    """Return the links and empty directories of a tree."""
    return [entry for entry in manifest if entry.kind in "ld"]


def list_folders(manifest: Iterable[Entry]) -> list[str]:
    """Return every directory of a tree, parents first."""
    folders: dict[str, None] = {}
    for path, kind, _, _ in manifest:
        folder = path if kind == "d" else path.rpartition("/")[0]
        if folder in folders or not folder:
            continue
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            folders["/".join(parts[:depth])] = None
    return list(folders)


def content_of(entry: Entry) -> str:
    """Return the content of a file."""
    return f"{entry.kind}:{entry.value}"


def find_fault(entries: Sequence[Entry]) -> str:
    """Return the first fault of a manifest received from a host; empty if it is safe to create its files."""
    paths = {entry.path for entry in entries}
    if len(paths) != len(entries):
        return "duplicate name"
    targets = _link_targets(entries)
    for entry in entries:
        fault = _find_entry_fault(entry, paths, targets)
        if fault:
            return fault
    return ""


def _link_targets(entries: Iterable[Entry]) -> dict[str, str]:
    return {entry.path: entry.value for entry in entries if entry.kind == "l"}


def _find_entry_fault(entry: Entry, paths: Container[str], targets: Mapping[str, str]) -> str:
    """Return the fault of one entry of a manifest with these paths and link targets."""
    path, kind, _, value = entry
    parts = path.split("/")
    if "\0" in path or not all(map(_is_valid_name, parts)):
        return f"{path!r} is not a valid file name"
    if kind == "o":
        return f"{path!r} is neither a file nor a directory"
    # A manifest lists a directory only if it is empty, so a parent among the paths is an error.
    if any("/".join(parts[:depth]) in paths for depth in range(1, len(parts))):
        return f"{path!r} is below a file"
    if kind in "fx" and not _has_digest(entry):
        return f"{path!r} has no digest"
    if kind == "l" and _leads_out(path, targets):
        return f"a link to {value!r} points outside the directory: {path!r}"
    return ""


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 digest in hexadecimal."""
    return len(text) == 64 and _HEX.issuperset(text)


def _has_digest(entry: Entry) -> bool:
    return entry.size >= 0 and is_digest(entry.value)


def _is_valid_name(name: str) -> bool:
    # A disk limits names to 255 bytes, not characters.
    return name not in ("", ".", "..") and len(os.fsencode(name)) <= 255


def _leads_out(path: str, targets: Mapping[str, str]) -> bool:
    """Return whether a link leaves its tree, directly or through other links, or is part of a loop."""
    rest = path.split("/")
    at: list[str] = []
    followed = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            if not at:
                return True
            at.pop()
        elif part not in ("", "."):
            at.append(part)
            target = targets.get("/".join(at))
            if target is not None:
                followed += 1
                if followed > _MOST_LINKS or not _is_relative(target):
                    return True
                at.pop()
                rest = target.split("/") + rest
    return False


def _is_relative(target: str) -> bool:
    """Return whether a link target is a valid relative path."""
    return bool(target) and not target.startswith("/") and "\0" not in target
