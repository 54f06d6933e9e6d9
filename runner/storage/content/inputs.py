"""Keep inputs of the caller's as objects, so that attempts can be given them as files of ours.  Decides which; never links to the caller's own file.

A clone costs nothing but its blocks' count, so any size is cloned.  A copy costs its bytes once for each content, so only `COPIED` are copied.
What is kept has a note below `inputs/`, which is touched when it is given: `gc` goes by that, and tells it from results.
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
"""Bytes of an input up to which it is copied where it cannot be cloned."""
EACH_FILE = 4 << 10
"""Bytes that each file counts for, beside its own: making one costs as much as writing them."""
_LARGE = f"it is larger than {COPIED >> 20} MiB"


class Source(NamedTuple):
    """An input of the caller's: `at` is the cache's name of it, `path` where it is, without links."""

    at: str
    path: str
    content: Content


class StoredInputs:
    """Those of one workspace."""

    def __init__(self, objects: Objects, cache: DigestCache) -> None:
        self.objects, self._cache = objects, cache
        self._clones: dict[int, bool] = {}  # by the device that inputs are on
        self._refused: tuple[Source, Sequence[Entry]] | None = None
        """The folder that `keep` looked at last and that is no object, with its manifest."""

    def keep(self, source: Source, together: int = 0) -> str:
        """Have an input as an object.  Answers why it is none, empty when it is one.

        `together` is what it and the others that the step is given with it count for.
        """
        try:
            self._refused = None
            if not self.objects.intact(source.content) and (why := self._store(source, together)):
                return why
            self._note(source.content)
            return ""
        except files.Unhashable:
            return "it changes while it is read"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return "the disk of the workspace is full"
            return f"it cannot be copied: {error.strerror}"

    def link_to(self, source: Source, target: str) -> int:
        """Make `target` a folder of links to the files of a folder of the caller's; answers how many.

        The links are an object, whose files get other names: a file system makes a name far faster than a link. Raises OSError.
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

    def _store(self, source: Source, together: int) -> str:
        manifest = self._cache.entries(source.at) if source.content[0] == "t" else None
        if manifest is not None:
            self._refused = source, manifest
            if files.tree_id(manifest) != source.content:
                raise files.Changed(source.path)
        size = together or _size_of(source, manifest)
        make_file = self.objects.disk.copy_file
        if size > COPIED:
            if why := self._not_cloned(source.path, manifest):
                return why
            make_file = self.objects.disk.clone_file

        def is_right(copy: str) -> bool:
            if size > COPIED:  # reading it all again would cost more than the clone spares
                return self._cache.content_of(source.at) == source.content
            return files.scan(copy) == source.content

        self.objects.keep_copy(source.path, source.content, manifest, make_file, is_right)
        return ""

    def _not_cloned(self, path: str, manifest: Sequence[Entry] | None) -> str:
        """Why a large input cannot be cloned; empty when it can."""
        if manifest is not None:
            path = next(f"{path}/{entry.path}" for entry in manifest if entry.kind in "fx")
        device = os.stat(path).st_dev
        if device not in self._clones:
            self._clones[device] = self.objects.disk.clones(path)
        if self._clones[device]:
            return ""
        root = self.objects.root
        if device != os.stat(root).st_dev:
            return f"{_LARGE} and is on another file system than the workspace"
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


def size_of(cache: DigestCache, source: Source) -> int:
    """What an input counts for: its bytes and its files."""
    manifest = cache.entries(source.at) if source.content[0] == "t" else None
    return _size_of(source, manifest)


def _size_of(source: Source, manifest: Sequence[Entry] | None) -> int:
    if manifest is None:
        return os.stat(source.path).st_size + EACH_FILE
    return sum(entry.size + EACH_FILE for entry in manifest if entry.kind in "fx")


def list_inputs(root: Path) -> Iterator[tuple[Content, float]]:
    """Contents that were kept as inputs, and when each was given last: seconds since the epoch."""
    kinds = {suffix: kind for kind, suffix in SUFFIX.items()}
    folder = root / "inputs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (kind := kinds.get(path.name[64:])) is not None:
            yield Content(f"{kind}:{path.name[:64]}"), path.stat().st_mtime


def forget(root: Path, content: Content) -> None:
    """Delete the note of an input that is not kept any more."""
    with contextlib.suppress(FileNotFoundError):
        _note_of(root, content).unlink()


def _note_of(root: Path, content: Content) -> Path:
    return root / "inputs" / f"{content[2:]}{SUFFIX[content[0]]}"
