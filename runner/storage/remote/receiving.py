"""Downloads from a shared store. All bytes are hashed, and damaged downloads are repeated once.

All functions raise MissingObject.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import posixpath
import shutil
from collections.abc import Sequence

from ...agent import sparse
from ..content import files
from ..content.disk import write
from ..content.files import Content, Entry
from ..content.manifests import unsafe
from . import layout
from .session import WIDTH, Session


def get_file(session: Session, name: str, path: str, size: int, sha256: str) -> None:
    """Download an object to `path` in parts and verify its digest, with one retry."""
    for last in (False, True):
        _pour(session, name, path, size)
        if files.scan(path)[2:] == sha256:
            return
        if last:
            raise session.missing_error(name, "is damaged: its content does not match its digest")
        os.unlink(path)


def _pour(session: Session, name: str, path: str, size: int) -> None:
    handle = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    try:

        def part(start: int) -> None:
            length = min(layout.PART, size - start)
            data = session.bucket.read(name, start, length)
            if data is None:
                raise session.missing_error(name, "does not exist")
            if len(data) != length:
                raise session.missing_error(name, "is shorter than it was")
            view, at = memoryview(data), start
            while view:
                block = view[: sparse.BLOCK]
                done = len(block) if sparse.is_zero(block) else os.pwrite(handle, block, at)
                view, at = view[done:], at + done
            session.count_moved(received=length)

        session.map(part, range(0, size, layout.PART), width=8)
        sparse.extend(handle, size)
    finally:
        os.close(handle)


def get_tree(session: Session, content: Content, top: str) -> None:
    """Download a tree from a shared store to the nonexistent path `top`."""
    name = layout.object_name(content)
    parts_name = layout.parts_name(name)
    text, listed = session.map(session.bucket.read, [name, parts_name])
    if text is None:
        raise session.missing_error(name, "does not exist")
    if listed is None:
        raise session.missing_error(parts_name, "does not exist")
    manifest = entries(session, name, content, text)
    parts = layout.parts_of(listed)
    small, large = layout.split(manifest, parts.small if parts else 0)
    if parts is None or sum(count for _, count in parts.bundles) != len(small):
        raise session.missing_error(parts_name, "does not match its manifest")
    session.count_moved(received=len(text))
    _make_folders(manifest, top)
    rest = iter(small)
    groups = [(sha256, list(itertools.islice(rest, count))) for sha256, count in parts.bundles]
    download = _TreeDownload(session, top, manifest)
    session.map(download.get_bundle, groups, width=WIDTH // 2)
    session.map_files(download.get_large, large)
    for entry in manifest:
        if entry.kind == "l":
            os.symlink(entry.value, f"{top}/{entry.path}")


def _make_folders(manifest: Sequence[Entry], top: str) -> None:
    """Create the nonexistent directory `top` and the directories of a tree below it."""
    os.makedirs(top)
    made = {""}
    for entry in manifest:
        folder = entry.path if entry.kind == "d" else posixpath.dirname(entry.path)
        if folder not in made:
            os.makedirs(f"{top}/{folder}", exist_ok=True)
            made.add(folder)


class _TreeDownload:
    """Download of the files of a tree to the directory `top`, used from several threads."""

    def __init__(self, session: Session, top: str, manifest: Sequence[Entry]) -> None:
        self._session, self._top = session, top
        # A content is downloaded once, and several paths may have it.
        self._copies: dict[str, list[Entry]] = {}
        for entry in manifest:
            if entry.kind in "fx":
                self._copies.setdefault(entry.value, []).append(entry)

    def get_bundle(self, bundle: tuple[str, list[Entry]]) -> None:
        """Download one object with the contents of several small files, and write the files."""
        sha256, bundled = bundle
        name = layout.object_name(Content(f"f:{sha256}"))
        size = sum(entry.size for entry in bundled)
        view = memoryview(_whole(self._session, name, size, sha256))
        at = 0
        for entry in bundled:
            data = view[at : at + entry.size]
            at += entry.size
            if hashlib.sha256(data).hexdigest() != entry.value:
                raise self._session.missing_error(name, f"does not contain {entry.path}")
            for copy in self._copies[entry.value]:
                write(f"{self._top}/{copy.path}", data, copy.kind)

    def get_large(self, entry: Entry) -> None:
        """Download one large file, and copy it to the other paths with its content."""
        name = layout.object_name(Content(f"{entry.kind}:{entry.value}"))
        path = f"{self._top}/{entry.path}"
        get_file(self._session, name, path, entry.size, entry.value)
        for copy in self._copies[entry.value]:
            if copy is not entry:
                shutil.copyfile(path, f"{self._top}/{copy.path}")
            os.chmod(f"{self._top}/{copy.path}", 0o755 if copy.kind == "x" else 0o644)


def entries(session: Session, name: str, content: Content, text: bytes) -> list[Entry]:
    """Parse and verify the manifest of a tree in the object `name`."""
    manifest = layout.manifest_of(text)
    if manifest is None or files.tree_id(manifest) != content:
        raise session.missing_error(name, "is damaged: its content does not match its digest")
    why = unsafe(manifest)
    if why is not None:
        raise session.missing_error(name, why)
    return manifest


def _whole(session: Session, name: str, size: int, sha256: str) -> bytes:
    for _ in range(2):
        data = session.bucket.read(name)
        if data is None:
            raise session.missing_error(name, "does not exist")
        if len(data) == size and hashlib.sha256(data).hexdigest() == sha256:
            session.count_moved(received=len(data))
            return data
    raise session.missing_error(name, "is damaged: its content does not match its digest")
