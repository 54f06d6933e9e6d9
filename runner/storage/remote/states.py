"""Newest checkpoints in a shared store, so that training resumes on another machine.

`states/ab/<state key>.json` has the metadata of the generation, and the checkpoint of each state:
name, content and bytes.

The checkpoint's files are uploaded as objects before the note. Each note replaces the previous one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ... import digest
from ...reading import parse_json
from .. import checkpoints
from ..content import files
from ..content.files import Content, Entry
from ..content.objects import Objects
from .remote import Remote

WHOLE: Final = ""
"""Checkpoint name that stands for the whole directory of a state."""


class LocalSource(NamedTuple):
    """Source of contents at paths of the local disk, for uploads."""

    paths: Mapping[Content, str]

    def path(self, content: Content) -> Path:
        return Path(self.paths[content])

    def entries(self, content: Content) -> list[Entry]:
        """Return the manifest of a local tree.

        Raises Changed if the tree has changed.
        """
        manifest = files.entries(self.paths[content])
        if files.tree_id(manifest) != content:
            raise files.Changed(self.paths[content])
        return manifest

    def size(self, content: Content) -> int:
        path = self.paths[content]
        if content[0] == "t":
            return sum(entry.size for entry in files.entries(path))
        return os.path.getsize(path)


class SharedCheckpoint(NamedTuple):
    """Checkpoint in the shared store."""

    name: str
    content: Content


class Note(NamedTuple):
    """Record of a step's checkpoints in the shared store, by state name.

    `made` is its `made_under.json`.
    """

    made: Mapping[str, Any]
    states: Mapping[str, SharedCheckpoint]


def save(remote: Remote, key: str, generation: Path, found: Mapping[str, str]) -> Note:
    """Upload the newest checkpoints of a step to a shared store, then a note about them.

    Raises Corrupt or Changed if a checkpoint changes, and Infrastructure.
    """
    states = {}
    for state, name in found.items():
        path = generation / state / name
        content = files.tree_id(files.entries(path)) if path.is_dir() else files.scan(path)
        remote.put(content, LocalSource({content: str(path)}))
        states[state] = SharedCheckpoint(name, content)
    note = Note(checkpoints.of_generation(generation), states)
    body = {
        "made": dict(note.made),
        "states": {state: list(sent) for state, sent in states.items()},
    }
    remote.write_note(
        key, json.dumps({**body, "sum": digest.of_value("state-note/1", body)}).encode()
    )
    return note


def keep(remote: Remote, what: Sequence[str], contents: Mapping[Content, str]) -> None:
    """Upload contents without a trace, and protect them from garbage collection by a note.

    `what` identifies the note. Raises Corrupt, Infrastructure.
    """
    lying = LocalSource(contents)
    for content in contents:
        remote.put(content, lying)
    states = {str(n): ["", content] for n, content in enumerate(contents)}
    remote.write_note(
        digest.of_value("kept", list(what))[:32], json.dumps({"states": states}).encode()
    )


def load(remote: Remote, key: str) -> Note | None:
    """Read the note about a step's checkpoints; return None if missing or damaged."""
    return note_of(remote.read_note(key))


def note_of(data: bytes | None) -> Note | None:
    try:
        body = parse_json(data or b"")
        expected = body.pop("sum")
        if expected != digest.of_value("state-note/1", body):
            return None
        made = body["made"]
        if not isinstance(made, dict) or not isinstance(made["continues"], dict):
            return None
        states = {
            str(state): SharedCheckpoint(str(name), Content(str(content)))
            for state, (name, content) in body["states"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    for state, sent in states.items():
        if not _is_plain_name(state) or not _is_plain_name(sent.name):
            return None
        if not re.fullmatch(r"[fxt]:[0-9a-f]{64}", sent.content):
            return None
    return Note(made, states)


def _is_plain_name(name: str) -> bool:
    return "/" not in name and name not in (".", "..")


def restore(remote: Remote, note: Note, root: Path, objects: Objects) -> list[str]:
    """Download the checkpoints of a note into their local checkpoint directory.

    Returns the names of the downloaded ones.

    Raises MissingObject, Infrastructure.
    """
    generation = checkpoints.adopt(root, note.made)
    brought = []
    for state, sent in note.states.items():
        target = generation / state / sent.name if sent.name else generation / state
        if target.exists():
            continue
        if not objects.has(sent.content):
            remote.fetch(sent.content, objects)
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.copy_to(sent.content, target)
        brought.append(sent.name or state)
    return brought
