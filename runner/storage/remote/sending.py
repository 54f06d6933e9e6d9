"""Uploads to a shared store: files in parts, and trees with bundles of small files.

All bytes are hashed before the upload.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

from ...errors import Corrupt
from ..content import files
from ..content.files import Content, Entry
from ..crash import crashpoint
from . import layout
from .session import WIDTH, Session


class ContentSource(Protocol):
    """Protocol of a local source of contents to upload."""

    def entries(self, content: Content) -> list[Entry]: ...
    def path(self, content: Content) -> Path: ...
    def size(self, content: Content) -> int: ...


def put_file(session: Session, name: str, path: str, size: int, sha256: str) -> None:
    """Upload a file to a shared store unless it exists."""
    if session.there(name, size):
        return
    if size <= layout.PART:
        with open(path, "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise _damage_error(path)
        session.bucket.write(name, data)
    else:
        if files.scan(path)[2:] != sha256:
            raise _damage_error(path)
        session.bucket.write_file(name, path, size, lambda do, items: session.map(do, items))
    session.count_moved(sent=size)
    session.bad.discard(name)


def put_tree(session: Session, content: Content, objects: ContentSource) -> None:
    """Upload a tree to a shared store, with its manifest last."""
    manifest = objects.entries(content)
    top = str(objects.path(content))
    small, large = layout.split(manifest, layout.SMALL)
    bundles = layout.bundle_files(small)

    def put_large(entry: Entry) -> None:
        name = layout.object_name(Content(f"{entry.kind}:{entry.value}"))
        put_file(session, name, f"{top}/{entry.path}", entry.size, entry.value)

    def put_bundle(group: list[Entry]) -> tuple[str, int]:
        data = b"".join(_bytes_of(f"{top}/{entry.path}", entry) for entry in group)
        sha256 = hashlib.sha256(data).hexdigest()
        name = layout.object_name(Content(f"f:{sha256}"))
        if not session.there(name, len(data)):
            session.bucket.write(name, data)
            session.count_moved(sent=len(data))
            session.bad.discard(name)
        return sha256, len(group)

    session.map_files(put_large, large)
    packed = session.map(put_bundle, bundles, width=WIDTH // 2)
    blobs = []
    for entry in large:
        blobs.append(f"{entry.value}.x" if entry.kind == "x" else entry.value)
    parts = {"small": layout.SMALL, "bundles": packed, "blobs": blobs}
    crashpoint("remote-blobs")
    name = layout.object_name(content)
    parts_name = layout.parts_name(name)
    session.bucket.write(parts_name, json.dumps(parts, separators=(",", ":")).encode())
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogateescape"
    )
    crashpoint("remote-parts")
    session.bucket.write(name, text)
    session.count_moved(sent=len(text))
    session.bad -= {name, parts_name}


def _bytes_of(path: str, entry: Entry) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != entry.value:
        raise _damage_error(path)
    return data


def _damage_error(path: str) -> Corrupt:
    return Corrupt(
        f"{path}: the stored file is damaged: its content does not match its digest",
        fix="run the recipe again: recipe reruns the step that creates this output",
    )
