"""Where a step's state lives between attempts, and which of its checkpoints counts.  Knows folders and safetensors headers, not trainers.

    states/<state key>/<generation>/made_under.json    the `continues` values that its checkpoints were made under
    states/<state key>/<generation>/<name>/            the state itself, the trainer's own layout
    states/<state key>/holder                          the name of the attempt that last had it, which may outlive its worker

A state key is a step's key without its `continues` values.  An attempt gets the newest generation made under values not above the asked ones, else a
new one: a 2,000-step checkpoint is never taken for a 1,000-step one, and neither is lost.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.artifacts import delete


@dataclass(frozen=True, slots=True)
class Generation:
    """One state folder, as an attempt gets it."""

    path: Path
    note: str  # why earlier state is not used, if so

    def folder(self, name: str) -> Path:
        return self.path / name


def choose(root: Path, continues: Mapping[str, Any]) -> Generation:
    """The generation for an attempt under these `continues` values; recorded as made under them from now on."""
    note = ""
    generations = sorted((int(p.name) for p in root.iterdir() if p.name.isdigit()), reverse=True) if root.is_dir() else []
    for number in generations:
        made = _made_under(root / str(number))
        over = [f"{name}={made[name]}" for name, value in continues.items() if name in made and made[name] > value]
        if not over:
            return _record(root / str(number), continues, note)
        note = f"earlier state was made under {', '.join(over)}, above what is asked now; starting over"
    return _record(root / str((generations[0] if generations else 0) + 1), continues, note)


def holder(root: Path) -> str:
    """The attempt that last had this state; empty when none did."""
    try:
        return (root / "holder").read_text()
    except FileNotFoundError:
        return ""


def hold(root: Path, attempt: str) -> None:
    temporary = root / "holder.new"
    temporary.write_text(attempt)
    temporary.rename(root / "holder")


def latest(folder: Path, pattern: str | None) -> str | None:
    """The name of the newest valid checkpoint, by the number in its name, then by time."""
    for name in _newest_first(folder, pattern):
        if valid(folder / name):
            return name
    return None


def prune(folder: Path, pattern: str | None, keep: int | None) -> list[str]:
    """Delete checkpoints beyond the `keep` newest valid ones; nothing else.  Returns the deleted names."""
    if keep is None or pattern is None:
        return []
    good = [name for name in _newest_first(folder, pattern) if valid(folder / name)]
    for name in good[max(1, keep) :]:
        delete(folder / name)
    return good[max(1, keep) :]


def valid(path: Path) -> bool:
    """Whether a checkpoint is whole as far as its form shows: not empty, and every safetensors file as long as its header says."""
    if path.is_file():
        return path.stat().st_size > 0 and (path.suffix != ".safetensors" or whole_safetensors(path))
    files = [p for p in path.rglob("*") if p.is_file()]
    return bool(files) and all(whole_safetensors(p) for p in files if p.suffix == ".safetensors")


def whole_safetensors(path: Path) -> bool:
    """8 bytes of header length, the header (JSON), then as many bytes as its largest offset (huggingface/safetensors, format description)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > size - 8:
            return False
        try:
            table = json.loads(file.read(head))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
    return size == 8 + head + max(ends, default=0)


def _newest_first(folder: Path, pattern: str | None) -> Sequence[str]:
    if not folder.is_dir() or pattern is None:
        return []
    names = [name for name in os.listdir(folder) if fnmatch.fnmatchcase(name, pattern)]
    return sorted(names, key=lambda name: (_number(name), (folder / name).stat().st_mtime_ns), reverse=True)


def _number(name: str) -> int:
    digits = re.findall(r"\d+", name)
    return int(digits[-1]) if digits else -1


def _made_under(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / "made_under.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _record(path: Path, continues: Mapping[str, Any], note: str) -> Generation:
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / "made_under.json.new"
    temporary.write_text(json.dumps(dict(continues)))
    temporary.rename(path / "made_under.json")
    return Generation(path, note)
