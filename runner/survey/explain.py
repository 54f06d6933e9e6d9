"""Explain why a step would run: compare its key's pre-image with the last run's. Read-only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import CannotRun
from ..paths import heads
from ..planning import fingerprint
from ..planning.causes import REMEDIES
from ..planning.halving import STOPPED
from ..planning.judge import scope_of, world_of
from ..planning.plan import SELECT
from ..storage.records.index import PublishedFile
from ..storage.records.runs import AttemptRow
from ..storage.workspace import Workspace
from .survey import Survey

if TYPE_CHECKING:
    from ..language.values import Tree


def preimage_of(found: Survey, n: int) -> dict[str, Any] | None:
    """Return the pre-image of a step's cache key, or None while a dependency is unknown."""
    node = found.plan.nodes[n]
    if node.flags & SELECT or any(each not in found.made for each in found.plan.dependencies(n)):
        return None
    world, _ = world_of(node, found.facts, found.made)
    return {"author": found.plan.specs()[n].author, "world": world}


def find_changes(ws: Workspace, found: Survey, numbers: Iterable[int]) -> dict[int, list[str]]:
    """Describe all changes of each step since the step's last attempt in any run of the recipe."""
    numbers = list(numbers)
    nodes = found.plan.nodes
    before = ws.store.runs.latest_attempts(found.plan.recipe, [nodes[n].id for n in numbers])
    answer: dict[int, list[str]] = {}
    for n in numbers:
        row, image = before.get(nodes[n].id), preimage_of(found, n)
        if row is None:
            answer[n] = ["no earlier run in this workspace"]
        elif image is None or not isinstance(row.preimage, dict):
            answer[n] = []
        else:
            differ = [str(change) for change in fingerprint.explain(row.preimage, image)]
            if not differ and row.outcome != "done":
                differ = [describe_end(row)]
            answer[n] = differ
    return answer


def describe_end(row: AttemptRow) -> str:
    """Describe the end of an unsuccessful attempt."""
    if row.outcome == STOPPED:
        return f"it was {row.reason}"
    if row.reason == "stopped":
        return "its last attempt was stopped"
    words = f"its last attempt failed ({row.reason})"
    remedy = REMEDIES.get(row.reason)
    return f"{words}: {remedy}" if remedy else words


def describe_resume(ws: Workspace, found: Survey, n: int) -> str:
    """Describe the checkpoint from which a step would resume, or "" if it starts over.

    Reads no files of checkpoints.
    """
    spec, image = found.plan.specs()[n], preimage_of(found, n)
    if not spec.state or image is None:
        return ""
    from ..storage import checkpoints

    key = checkpoints.key(spec, image["world"], found.plan.nodes[n].id)
    folder, note = checkpoints.choose_folder(ws.home / "states" / key, spec.continues)
    words = [note]
    for state in spec.state:
        newest = checkpoints.newest(folder / state.name, state.checkpoint, thorough=False)
        words.append(newest.words)
    return "; ".join(filter(None, words))


def describe_replaced(ws: Workspace, paths: Iterable[str]) -> list[str]:
    """Describe the conflicting file at each path: edited, of another recipe, or foreign."""
    published = ws.store.index.list_published()
    return [f"{path}, {_whose(published, path)}" for path in paths]


def _whose(published: Mapping[str, PublishedFile], path: str) -> str:
    same = published.get(path)
    if same is not None:
        return f"which was edited after {same.recipe} created it"
    for folder in heads(path):
        if folder in published:
            above = published[folder]
            return f"which is in {above.path}, created by {above.recipe}"
    start = f"{path.rstrip('/')}/"
    for each, below in published.items():
        if each.startswith(start):
            return f"which contains {below.path}, created by {below.recipe}"
    return "which was not created by recipe"


def shown_command(found: Survey, n: int) -> tuple[str, dict[str, str]]:
    """Return a step's command as a shell command line, and the text of its `files`.

    Values known only to an attempt stay as templates.
    """
    from ..hosts.place import launch
    from ..language.template import StatePath

    node, spec = found.plan.nodes[n], found.plan.specs()[n]
    if spec.select is not None:
        return "", {}
    as_written = _command_as_written(spec.run)
    files_as_written = {path: _file_as_written(tree) for path, tree in spec.files.items()}
    if any(late.producer not in found.made for late in node.late):
        return as_written, files_as_written
    scope = scope_of(spec, found.plan, n, found.made)
    scope |= {
        "state": {s.name: StatePath(s.path, {"latest": None}) for s in spec.state},
        "host": {"gpus": 0, "cpus": 1},
        "node": {"rank": 0},
    }
    scope |= {
        "nodes": {"count": 1, "addresses": ["127.0.0.1"]},
        "run": {"id": "RUN", "recipe": found.plan.recipe},
        "step": {"id": node.id, "key": "KEY"},
    }
    try:
        made = launch.render(spec, scope, python="python")
    except CannotRun:
        return as_written, files_as_written
    files: dict[str, str] = {}
    for path, data in made.files.items():
        if path != launch.SHIM:
            files[path] = data.decode(errors="replace")
    if made.script is not None:
        return made.script.rstrip("\n"), files
    return shlex.join(made.argv), files


def _command_as_written(run: Sequence[Tree] | None) -> str:
    if isinstance(run, str):
        return run.rstrip("\n")
    return shlex.join(map(str, run or []))


def _file_as_written(tree: Tree) -> str:
    if isinstance(tree, str):
        return tree
    return json.dumps(tree, indent=2, ensure_ascii=False)
