"""A disk that this machine and a host share.

Inputs are read in place, and outputs are copied without the network connection.

To detect a shared disk, each side writes a random word that the other side reads.  A path is used
only if it is the same file on both sides.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...agent.neighbours import marks
from ...storage.content.disk import delete
from ..link.wire import Wire, ignore_answer, parse_strings

ROUNDS: Final = 5
"""Maximum number of comparisons of a file that changes meanwhile."""


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """The shared disk of one host and this machine."""

    wire: Wire
    host_sees_workspace: bool = False
    """Whether the host sees the local workspace at its local path."""
    sees_host_root: bool = False
    """Whether this machine sees the host's root at its path there."""

    async def find_same(self, paths: Sequence[str]) -> set[str]:
        """Return the local paths that are the same files on the host.

        A file system with a stale cache counts as different.
        """
        if not self.host_sees_workspace:
            return set()
        same: set[str] = set()
        unknown = list(paths)
        for _ in range(ROUNDS):
            local = _read_marks(unknown)
            same |= await self._compare(local)
            # Another node may have linked a file meanwhile, which changes its change time.
            unknown = [path for path in local if path not in same and marks(path) != local[path]]
            if not unknown:
                break
        return same

    async def _compare(self, local: Mapping[str, list[int]]) -> set[str]:
        """Return the paths whose file on the host has the given marks."""
        if not local:
            return set()
        flags = await self.wire.ask(
            "same", list(local.items()), read=lambda answer: _parse_flags(answer, len(local))
        )
        return {path for path, is_same in zip(local, flags, strict=True) if is_same}

    async def copy_to_host(self, sources: Mapping[str, str]) -> set[str]:
        """Let the host copy local files and trees to its upload directory: object name -> path.

        Returns the names of copied objects.
        """
        if not (self.host_sees_workspace and sources):
            return set()
        copied = await self.wire.ask("draw", list(sources.items()), read=parse_strings)
        return set(copied) & sources.keys()


async def detect_shared_disk(wire: Wire, folder: str) -> SharedDisk:
    """Test whether the host and this machine share a disk.

    `folder` is a local directory, created if missing.
    """
    word = secrets.token_hex(16)
    note = f"{folder}/word-{word}"
    try:
        _write(note, word)
        reads, theirs = await wire.ask(
            "meet", note, word, read=lambda answer: (bool(answer[0]), str(answer[1]))
        )
    finally:
        delete(Path(note))
    shows = _read(theirs, len(word)) == word
    await wire.ask("remove", [theirs], read=ignore_answer)
    return SharedDisk(wire, reads, shows)


def _read_marks(paths: Sequence[str]) -> dict[str, list[int]]:
    """Return the marks of the files that exist."""
    found = {path: marks(path) for path in paths}
    return {path: mark for path, mark in found.items() if mark}


def _write(path: str, word: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "x", encoding="ascii") as file:
        file.write(word)


def _parse_flags(answer: Any, count: int) -> list[bool]:
    if len(answer) != count:
        raise ValueError
    return [bool(each) for each in answer]


def _read(path: str, most: int) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(most + 1)
    except (OSError, ValueError):
        return ""
