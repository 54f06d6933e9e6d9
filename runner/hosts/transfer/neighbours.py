"""A disk that this machine and a host both see: inputs are read where they lie, and outputs are copied without the wire.

Both directions are found out by a word: one writes it, the other reads it.  A path is used only where it is the same file on both.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...agent.neighbours import marks
from ...storage.content.disk import delete
from ..link.wire import Wire, nothing, words_of


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What one host and this machine see of each other's disk."""

    wire: Wire
    reads: bool = False
    """The host sees our workspace, at the path that it has here."""
    shows: bool = False
    """We see the host's root, at the path that it has there."""

    async def same(self, paths: Sequence[str]) -> set[str]:
        """Those of our paths that are the same files there.  A host whose file system remembers older ones says no."""
        if not (self.reads and paths):
            return set()
        known = [(path, mark) for path in paths if (mark := marks(path))]
        found = await self.wire.ask("same", known, read=lambda answer: _flags(answer, len(known)))
        return {path for (path, _), same in zip(known, found, strict=True) if same}

    async def draw(self, sources: Mapping[str, str]) -> set[str]:
        """Let the host copy our files and trees to where it keeps what arrives: name of the object -> path.  The names of those that came."""
        if not (self.reads and sources):
            return set()
        return (
            set(await self.wire.ask("draw", list(sources.items()), read=words_of)) & sources.keys()
        )


async def meet(wire: Wire, folder: str) -> Neighbour:
    """Find out.  `folder` is one of ours, made if need be."""
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
    await wire.ask("remove", [theirs], read=nothing)
    return Neighbour(wire, reads, shows)


def _write(path: str, word: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "x", encoding="ascii") as file:
        file.write(word)


def _flags(answer: Any, count: int) -> list[bool]:
    if len(answer) != count:
        raise ValueError
    return [bool(each) for each in answer]


def _read(path: str, most: int) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(most + 1)
    except (OSError, ValueError):
        return ""
