"""Disk usage of a workspace by category, and its shared stores. Read-only."""

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
"""Subdirectories of `.recipe` by category. Other files count as `other`."""
OTHER: Final = "other"
PATIENCE: Final = 1.0
"""Maximum number of seconds to count local files."""
SHARED_PATIENCE: Final = 10.0
"""Maximum number of seconds to list the objects of a shared store."""
_LOGIN: Final = re.compile(r"//[^/@]*@")


class DiskUsage(NamedTuple):
    """Disk usage and number of files. `whole` is False if counting timed out."""

    bytes: int = 0
    files: int = 0
    whole: bool = True


def list_stores(ws: Workspace) -> Facts:
    """Return the disk usage by category, largest first, the free disk space, and the shared stores."""
    deadline = time.monotonic() + PATIENCE
    named = set[str]().union(*PARTS.values())
    rest = [path for path in ws.home.iterdir() if path.name not in named]
    counts: dict[str, DiskUsage] = {}
    for name, folders in PARTS.items():
        counts[name] = _count([ws.home / folder for folder in folders], deadline)
    counts[OTHER] = _count(rest, deadline)
    parts: list[Facts] = []
    for name, usage in sorted(counts.items(), key=lambda each: -each[1].bytes):
        if usage.files:
            parts.append({"name": name, **usage._asdict()})
    shared: list[Facts] = []
    for store in ws.config.stores.values():
        shared.append(
            {
                "name": store.name,
                "url": _LOGIN.sub("//", store.url),
                "default": store.name == ws.config.store,
                "checkpoints": store.checkpoints,
            }
        )
    disk = shutil.disk_usage(ws.home)
    return {"parts": parts, "free": disk.free, "total": disk.total, "shared": shared}


def measure_store(ws: Workspace, name: str) -> Facts:
    """Return size and object count of a shared store, counted for at most SHARED_PATIENCE seconds.

    Raises NotFound, and Infrastructure if the store does not answer.
    """
    settings = ws.config.stores.get(name)
    if settings is None:
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
            return DiskUsage(size, files, False)._asdict()
    return DiskUsage(size, files)._asdict()


def _count(places: list[Path], deadline: float) -> DiskUsage:
    size = files = 0
    for entry in _below(places):
        size, files = size + entry.st_blocks * 512, files + 1
        if not files % 256 and time.monotonic() > deadline:
            return DiskUsage(size, files, False)
    return DiskUsage(size, files)


def _below(places: list[Path]) -> Iterator[os.stat_result]:
    """Yield the stat results of all files in these directories, without following links.

    Files deleted meanwhile are skipped.
    """
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
