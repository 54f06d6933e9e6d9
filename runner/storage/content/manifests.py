"""Manifests of stored trees, next to their objects. A manifest may exist without its tree."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Sequence

from ...errors import Corrupt
from ...paths import glob
from . import files
from .disk import Disk, fail, write
from .files import Content, Entry

SUFFIX = {"f": "", "x": ".x", "t": ".t"}
HEX = re.compile(r"[0-9a-f]{64}")
_REMEMBERED = 200_000
"""Maximum number of manifest entries in memory. Every step with a tree input reads its manifest.
"""


def place(root: str, content: Content) -> str:
    """Return the path of an object below the store's root."""
    return f"{root}/objects/{content[2:4]}/{content[2:]}{SUFFIX[content[0]]}"


class Manifests:
    """Manifests of stored trees below one store's root."""

    def __init__(self, root: str, disk: Disk) -> None:
        self._root, self._disk = root, disk
        self._recent: dict[Content, list[Entry]] = {}

    def entries(self, content: Content) -> list[Entry]:
        """Return the manifest of a tree.

        Raises Corrupt.
        """
        found = self._recent.get(content)
        if found is None:
            found = self._read(content)
            if sum(map(len, self._recent.values())) + len(found) > _REMEMBERED:
                self._recent = {}
            self._recent[content] = found
        return found

    def _read(self, content: Content) -> list[Entry]:
        target = place(self._root, content)
        try:
            with open(f"{target}.json", encoding="utf-8", errors="surrogateescape") as file:
                manifest = [Entry(*row) for row in json.load(file)]
            if files.tree_id(manifest) == content:
                return manifest
        except (OSError, ValueError, TypeError):
            pass
        # A missing or damaged manifest is rebuilt from the tree.
        try:
            manifest = files.entries(target)
        except files.Unhashable as error:
            raise Corrupt(str(error)) from error
        if files.tree_id(manifest) != content:
            raise Corrupt(
                f"{target}: the stored directory is damaged: its content does not match its digest",
                fix="run the recipe again: recipe reruns the step that creates this output",
            )
        return manifest

    def mentions(self, content: Content, word: str) -> bool:
        """Return True if a path in the manifest of a tree contains this ASCII text.

        Return False without a stored manifest.
        """
        try:
            with open(f"{place(self._root, content)}.json", "rb") as file:
                return word.encode() in file.read()
        except OSError:
            return False

    def is_known(self, content: Content) -> bool:
        """Return True if the manifest of a tree is available.

        The tree itself may be missing.
        """
        target = place(self._root, content)
        return os.path.lexists(f"{target}.json") or os.path.lexists(target)

    def put(self, content: Content, manifest: Sequence[Entry]) -> None:
        """Store the manifest of a tree that is not stored locally."""
        try:
            self.write(place(self._root, content), manifest)
        except OSError as error:
            fail(place(self._root, content), error)

    def match(self, content: Content, pattern: str) -> list[Entry]:
        """Return the files of a tree that match a glob.

        `*` and `?` do not match `/`; `**` does.
        """
        fits = glob(pattern)
        return [entry for entry in self.entries(content) if entry.kind != "d" and fits(entry.path)]

    def write(self, target: str, manifest: Sequence[Entry]) -> None:
        """Write the manifest for the tree at `target`.

        Raises OSError.
        """
        temporary = self._disk.temporary()
        text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"))
        write(temporary, text.encode("utf-8", "surrogateescape"), "f")
        self._disk.place(temporary, f"{target}.json")

    def forget(self, before: float) -> None:
        """Delete manifests, last changed before `before`, without a stored tree.

        They came from a shared store and can be downloaded again.
        """
        for prefix in os.listdir(f"{self._root}/objects"):
            for name in os.listdir(f"{self._root}/objects/{prefix}"):
                path = f"{self._root}/objects/{prefix}/{name}"
                if (
                    name.endswith(".t.json")
                    and not os.path.lexists(path[: -len(".json")])
                    and os.lstat(path).st_ctime < before
                ):
                    os.unlink(path)


def unsafe(manifest: Sequence[Entry]) -> str | None:
    """Return why an untrusted manifest must not be written to disk; None if it is safe."""
    seen: set[str] = set()
    solid: set[str] = set()  # paths that cannot be directories
    for entry in manifest:
        parts = entry.path.split("/")
        if "\0" in entry.path or any(part in ("", ".", "..") for part in parts):
            return f"has a path outside its directory: {entry.path!r}"
        if entry.path in seen:
            return f"lists {entry.path!r} twice"
        if not _has_valid_fields(entry):
            return f"has an invalid entry for {entry.path!r}"
        if entry.kind == "l" and not _links_inside(entry):
            return f"has a link that points outside its directory: {entry.path!r}"
        seen.add(entry.path)
        if entry.kind != "d":
            solid.add(entry.path)
    for entry in manifest:
        at = posixpath.dirname(entry.path)
        while at:
            if at in solid:
                return f"has {entry.path!r} below a file"
            at = posixpath.dirname(at)
    return None


def _has_valid_fields(entry: Entry) -> bool:
    if entry.kind not in ("f", "x", "l", "d") or entry.size < 0:
        return False
    return entry.kind not in "fx" or HEX.fullmatch(entry.value) is not None


def _links_inside(link: Entry) -> bool:
    """Return True if a symbolic link points into its tree."""
    if not link.value or "\0" in link.value or link.value.startswith("/"):
        return False
    target = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.value))
    return target != ".." and not target.startswith("../")
