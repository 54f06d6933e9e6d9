"""Why a step would run: its pre-image now against the one it was last run with.  Reads what was stored, changes nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from ..planning import fingerprint
from ..planning.judge import scope_of, world_of
from ..planning.plan import SELECT
from ..storage.workspace import Workspace
from .survey import Survey


def image_of(found: Survey, n: int) -> dict[str, Any] | None:
    """The pre-image of a step's key; None while something it needs is not known."""
    node = found.plan.nodes[n]
    if node.flags & SELECT or any(need not in found.made for need in found.plan.needs(n)):
        return None
    world, _ = world_of(node, found.facts, found.made)
    return {"author": found.plan.specs()[n].author, "world": world}


def changes(ws: Workspace, found: Survey, numbers: Iterable[int], *, run: str | None = None) -> dict[int, list[str]]:
    """What changed for each of these steps since its last attempt (in any run of this recipe, or in `run`), every part, in words."""
    numbers = list(numbers)
    nodes = found.plan.nodes
    before = ws.store.runs.latest_attempts(found.plan.recipe, [nodes[n].id for n in numbers], run=run)
    answer: dict[int, list[str]] = {}
    for n in numbers:
        row, image = before.get(nodes[n].id), image_of(found, n)
        if row is None:
            answer[n] = ["it has not run here before"] if run is None else [f"it did not run in {run}"]
        elif image is None or not isinstance(row.preimage, dict):
            answer[n] = []
        else:
            differ = [str(change) for change in fingerprint.explain(row.preimage, image)]
            if not differ and row.outcome != "done":
                differ = [f"its last attempt failed ({row.reason})"]
            answer[n] = differ
    return answer


def shown_command(found: Survey, n: int) -> tuple[str, dict[str, str]]:
    """A step's command as it would be typed, and the text of the files that are written first; what only an attempt knows stays as written."""
    from ..errors import CannotRun
    from ..hosts import launch
    from ..language.template import Place

    node, spec = found.plan.nodes[n], found.plan.specs()[n]
    if spec.select is not None:
        return "", {}
    run = spec.run
    as_written = run.rstrip("\n") if isinstance(run, str) else shlex.join(map(str, run or []))
    files_as_written = {path: tree if isinstance(tree, str) else json.dumps(tree, indent=2, ensure_ascii=False) for path, tree in spec.files.items()}
    if any(late.producer not in found.made for late in node.late):
        return as_written, files_as_written
    scope = scope_of(spec, found.plan, n, found.made)
    scope |= {"state": {s.name: Place(s.path, {"latest": None}) for s in spec.state}, "host": {"gpus": 0, "cpus": 1}, "node": {"rank": 0}}
    scope |= {
        "nodes": {"count": 1, "addresses": ["127.0.0.1"]},
        "run": {"id": "RUN", "recipe": found.plan.recipe},
        "step": {"id": node.id, "key": "KEY"},
    }
    try:
        made = launch.render(spec, scope, python="python")
    except CannotRun:
        return as_written, files_as_written
    files = {path: data.decode(errors="replace") for path, data in made.files.items() if path != launch.SHIM}
    return made.script.rstrip("\n") if made.script is not None else shlex.join(made.argv), files
