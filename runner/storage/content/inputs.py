"""Stored copies of the caller's inputs, so that attempts can use them like other objects.

Attempts never get hard links to the caller's own files.

A clone only shares blocks, so inputs of any size are cloned. Without clones, only inputs up to
`COPIED` bytes are copied. Each stored input has a marker file below `inputs/`, touched on every
use, by which `gc` finds unused inputs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import disk, files
from .digest_cache import DigestCache
from .files import Content, Entry
from .giving import links_to
from .manifests import SUFFIX
from .objects import Objects

COPIED = 64 << 20
"""Maximum size in bytes of an input that is copied if it cannot be cloned."""
EACH_FILE = 4 << 10
"""Additional bytes counted per file: creating a file costs as much as writing this many bytes."""
_LARGE = f"larger than {COPIED >> 20} MiB"


class InputSource(NamedTuple):
    """Input file or directory of the caller.

    `at` is its name in the digest cache, `path` its real path.
    """

    at: str
    path: str
    content: Content


class StoredInputs:
    """Stored copies of the caller's inputs in one workspace."""

    def __init__(self, objects: Objects, cache: DigestCache) -> None:
        self.objects, self._cache = objects, cache
        self._clones: dict[int, bool] = {}  # by device of the input
        self._refused: tuple[InputSource, Sequence[Entry]] | None = None
        """The last directory that `keep` rejected, and its manifest."""

    def keep(self, source: InputSource, together: int = 0) -> str:
        """Store an input as an object; return the reason if that is not possible, or "".

        `together` is the combined size of all inputs of the step.
        """
        try:
            self._refused = None
            if not self.objects.intact(source.content):
                why = self._store(source, together)
                if why:
                    return why
            self._note(source.content)
            return ""
        except files.Unhashable:
            return "the file changed while recipe read it"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return "the disk of the workspace is full"
            return f"cannot copy: {error.strerror}"

    def link_to(self, source: InputSource, target: str) -> int:
        """Create a directory of symbolic links to the caller's files, and return their number.

        The tree of links is itself stored as an object and hard-linked, because a hard link is much
        faster than a symbolic link. Raises OSError.
        """
        known, self._refused = self._refused, None
        if known is not None and known[0] == source:
            manifest = known[1]
        else:
            manifest = self._cache.entries(source.at)
        links = links_to(manifest, source.path)
        content = files.tree_id(links)
        if not self.objects.intact(content):
            self.objects.keep_copy(source.path, content, links, _no_file, lambda _copy: True)
        self._note(content)
        self.objects.give(content, target)
        return len(links)

    def _store(self, source: InputSource, together: int) -> str:
        manifest = self._cache.entries(source.at) if source.content[0] == "t" else None
        if manifest is not None:
            self._refused = source, manifest
            if files.tree_id(manifest) != source.content:
                raise files.Changed(source.path)
        size = together or _size_of(source, manifest)
        make_file = self.objects.disk.copy_file
        if size > COPIED:
            why = self._not_cloned(source.path, manifest)
            if why:
                return why
            make_file = self.objects.disk.clone_file

        def is_right(copy: str) -> bool:
            if size > COPIED:  # hashing everything again would cost more than the clone saves
                return self._cache.content_of(source.at) == source.content
            return files.scan(copy) == source.content

        self.objects.keep_copy(source.path, source.content, manifest, make_file, is_right)
        return ""

    def _not_cloned(self, path: str, manifest: Sequence[Entry] | None) -> str:
        """Return the reason why a large input cannot be cloned; otherwise ""."""
        if manifest is not None:
            path = next(f"{path}/{entry.path}" for entry in manifest if entry.kind in "fx")
        device = os.stat(path).st_dev
        if device not in self._clones:
            self._clones[device] = self.objects.disk.clones(path)
        if self._clones[device]:
            return ""
        root = self.objects.root
        if device != os.stat(root).st_dev:
            return f"{_LARGE} and not on the workspace's file system"
        kind, _ = disk.file_system(root)
        return f"{_LARGE} and {kind} cannot clone files"

    def _note(self, content: Content) -> None:
        path = _note_of(self.objects.root, content)
        try:
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            path.touch()


def _no_file(source: str, _target: str, _kind: str) -> None:
    raise ValueError(f"{source} is no link")


def size_of(cache: DigestCache, source: InputSource) -> int:
    """Return the size of an input for limits: its bytes plus `EACH_FILE` per file."""
    manifest = cache.entries(source.at) if source.content[0] == "t" else None
    return _size_of(source, manifest)


def _size_of(source: InputSource, manifest: Sequence[Entry] | None) -> int:
    if manifest is None:
        return os.stat(source.path).st_size + EACH_FILE
    return sum(entry.size + EACH_FILE for entry in manifest if entry.kind in "fx")


def list_inputs(root: Path) -> Iterator[tuple[Content, float]]:
    """Yield the stored inputs and their last use in seconds since the epoch."""
    kinds = {suffix: kind for kind, suffix in SUFFIX.items()}
    folder = root / "inputs"
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        kind = kinds.get(path.name[64:])
        if kind is not None:
            yield Content(f"{kind}:{path.name[:64]}"), path.stat().st_mtime


def forget(root: Path, content: Content) -> None:
    """Delete the marker of an input that is no longer stored."""
    with contextlib.suppress(FileNotFoundError):
        _note_of(root, content).unlink()


def _note_of(root: Path, content: Content) -> Path:
    return root / "inputs" / f"{content[2:]}{SUFFIX[content[0]]}"
