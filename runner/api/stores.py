"""How much a workspace keeps on its disk, by what it is, and which stores it shares results with.  Changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import NotFound
from ..storage.buckets import opening as buckets
from ..storage.remote.remote import MARKER
from ..storage.workspace import Workspace
from .values import Facts

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "results": ("objects",),
    "checkpoints": ("states",),
    "logs and attempts": ("runs", "attempts"),
    "downloads": ("cache", "git", "local", "bundles"),
}
"""Folders of a workspace's own folder, by what they keep; all else is `other`."""
OTHER: Final = "other"
PATIENCE: Final = 1.0
"""Seconds for which files are counted."""
SHARED_PATIENCE: Final = 10.0
"""The same for the objects of a shared store."""
_LOGIN: Final = re.compile(r"//[^/@]*@")


class Counted(NamedTuple):
    """Bytes on the disk and files of some folders; not `whole` where there was no time for all."""

    bytes: int = 0
    files: int = 0
    whole: bool = True


def list_stores(ws: Workspace) -> Facts:
    """Return what is kept here, the largest part first, with the room that is left, and the shared stores of the settings."""
    deadline = time.monotonic() + PATIENCE
    named = {folder for folders in PARTS.values() for folder in folders}
    rest = [path for path in ws.home.iterdir() if path.name not in named]
    parts = {
        name: _count([ws.home / folder for folder in folders], deadline)
        for name, folders in PARTS.items()
    } | {OTHER: _count(rest, deadline)}
    disk = shutil.disk_usage(ws.home)
    return {
        "parts": [
            {"name": name, **counted._asdict()}
            for name, counted in sorted(parts.items(), key=lambda each: -each[1].bytes)
            if counted.files
        ],
        "free": disk.free,
        "total": disk.total,
        "shared": [
            {
                "name": store.name,
                "url": _LOGIN.sub("//", store.url),
                "default": store.name == ws.config.store,
                "checkpoints": store.checkpoints,
            }
            for store in ws.config.stores.values()
        ],
    }


def measure_store(ws: Workspace, name: str) -> Facts:
    """Return the bytes and objects of a shared store, as far as they are listed within SHARED_PATIENCE.

    Raises NotFound, Infrastructure for a store that does not answer.
    """
    if (settings := ws.config.stores.get(name)) is None:
        known = ", ".join(ws.config.stores) or "there is none"
        raise NotFound(
            f'there is no shared store "{name}"', fix=f"[stores.NAME] names one ({known})"
        )
    bucket = buckets.open(settings, ws.own)
    bucket.load()
    bucket.check(MARKER)
    deadline = time.monotonic() + SHARED_PATIENCE
    size = files = 0
    for each in bucket.names(""):
        size, files = size + each.size, files + 1
        if not files % 256 and time.monotonic() > deadline:
            return Counted(size, files, False)._asdict()
    return Counted(size, files)._asdict()


def _count(places: list[Path], deadline: float) -> Counted:
    size = files = 0
    for entry in _below(places):
        size, files = size + entry.st_blocks * 512, files + 1
        if not files % 256 and time.monotonic() > deadline:
            return Counted(size, files, False)
    return Counted(size, files)


def _below(places: list[Path]) -> Iterator[os.stat_result]:
    """The files at and below some places; what goes away meanwhile is passed over, and links are not followed."""
    waiting = [str(place) for place in places]
    while waiting:
        place = waiting.pop()
        try:
            if os.path.isdir(place) and not os.path.islink(place):
                waiting += [entry.path for entry in os.scandir(place)]
            else:
                yield os.lstat(place)
        except OSError:
            continue
