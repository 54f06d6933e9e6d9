"""Names of objects on a host, and manifests that a host has sent: those are believed only as far as they stay inside.  Touches no disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from ...agent import trees
from ...storage.content.files import Entry

HEX = frozenset("0123456789abcdef")
SUFFIX = {"f": "", "x": ".x", "t": ".t"}


def name_of(content: str) -> str:
    """The file name of an object."""
    return content[2:] + SUFFIX[content[0]]


def path_of(content: str) -> str:
    """Where an object is, from the root."""
    return f"objects/{content[2:4]}/{name_of(content)}"


def stamp_of(entries: Sequence[Entry]) -> str:
    """What a host recognizes a tree of exactly these names, kinds and links by."""
    found = [(folder, "d") for folder in folders(entries)] + [
        (entry.path, entry.kind) for entry in entries if entry.kind != "d"
    ]
    return trees.stamp(found, [(entry.path, entry.value) for entry in entries if entry.kind == "l"])


def folders(manifest: Iterable[Entry]) -> list[str]:
    """Every folder of a tree, each after the one it is in."""
    found: dict[str, None] = {}
    for path, kind, _, _ in manifest:
        folder = path if kind == "d" else path.rpartition("/")[0]
        if folder in found or not folder:
            continue
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            found["/".join(parts[:depth])] = None
    return list(found)


def find_fault(entries: Sequence[Entry]) -> str:
    """What is wrong with a manifest that a host has sent, in words; empty when it may be made here."""
    kinds = {entry.path: entry.kind for entry in entries}
    if len(kinds) != len(entries):
        return "a name comes twice"
    targets = {entry.path: entry.value for entry in entries if entry.kind == "l"}
    for path, kind, size, value in entries:
        parts = path.split("/")
        if "\0" in path or any(
            part in ("", ".", "..") or len(os.fsencode(part)) > 255 for part in parts
        ):
            return f"{path!r} is no name of a file"
        if kind == "o":
            return f"{path!r} is neither a file nor a folder"
        if any("/".join(parts[:depth]) in kinds for depth in range(1, len(parts))):
            return f"{path!r} is below what is no folder"
        if kind in "fx" and (size < 0 or len(value) != 64 or not HEX.issuperset(value)):
            return f"{path!r} has no digest"
        if kind == "l" and _leads_out(path, targets):
            return f"a link to {value!r} leads out of it: {path!r}"
    return ""


def _leads_out(path: str, targets: Mapping[str, str]) -> bool:
    """Whether a link leaves its tree, through other links of it or not, or leads nowhere but round."""
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
                if target.startswith("/") or "\0" in target or not target or followed > 40:
                    return True
                at.pop()
                rest = target.split("/") + rest
    return False
