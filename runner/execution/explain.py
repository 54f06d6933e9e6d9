"""Why a step would run: its pre-image now against the one it was last run with.  Reads what was stored, changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from ..planning import fingerprint
from ..planning.judge import scope_of, world_of
from ..planning.plan import SELECT
from .survey import Survey
from .workspace import Workspace


def image_of(found: Survey, n: int) -> dict[str, Any] | None:
    """The pre-image of a step's key; None while something it needs is not known."""
    node = found.plan.nodes[n]
    if node.flags & SELECT or any(need not in found.made for need in found.plan.needs(n)):
        return None
    world, _ = world_of(node, found.facts, found.made)
    return {"author": found.plan.details()[n]["author"], "world": world}


def changes(ws: Workspace, found: Survey, numbers: Iterable[int], *, run: str | None = None) -> dict[int, list[str]]:
    """What changed for each of these steps since its last attempt (in any run of this recipe, or in `run`), every part, in words."""
    numbers = list(numbers)
    nodes = found.plan.nodes
    before = ws.store.latest_attempts(found.plan.recipe, [nodes[n].id for n in numbers], run=run)
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


def shown_command(found: Survey, n: int) -> str:
    """A step's command as it would be typed; what only an attempt knows stays as written."""
    from ..language.template import Place, TemplateError
    from . import launch

    detail = found.plan.details()[n]
    if "select" in detail:
        return ""
    scope = scope_of(detail, found.plan, n, found.made)
    scope |= {"state": {s[0]: Place(s[1], {"latest": None}) for s in detail["state"]}, "host": {"gpus": 0, "cpus": 1}, "node": {"rank": 0}}
    scope |= {
        "nodes": {"count": 1, "addresses": ["127.0.0.1"]},
        "run": {"id": "RUN", "recipe": found.plan.recipe},
        "step": {"id": found.plan.nodes[n].id, "key": "KEY"},
    }
    try:
        made = launch.render(detail, scope, python="python")
    except (TemplateError, Exception):
        run = detail["run"]
        return run if isinstance(run, str) else shlex.join(map(str, run or []))
    return made.script.rstrip("\n") if made.script is not None else shlex.join(made.argv)
