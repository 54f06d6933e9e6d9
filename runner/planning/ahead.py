"""Check a step whose matrix is not known yet, on one sample instance with unknown values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..language.unknowns import A_TEXT, TEXTS
from .beforehand import AnyResults, DryRun
from .drafts import NodeDraft, PathValue, Scope, Sketch
from .mentions import steps_of

if TYPE_CHECKING:
    from ..errors import Problem


def foresee(scope: Scope, draft: NodeDraft) -> None:
    """Add placeholder outputs for a step whose matrix is not known yet, for use by other templates.

    In the step's own templates, steps that are still unknown get placeholder outputs too.
    """
    many = draft.step.matrix is not None
    paths: dict[str, Any] = {name: path or A_TEXT for name, (path, _) in draft.outputs.items()}
    foreseen: dict[str, Any] = {}
    for name in draft.outputs:
        foreseen[name] = TEXTS if many else _path(draft, name)
    scope.foreseen[draft.step.id] = foreseen
    steps = dict(draft.spec.names.steps)
    for id in steps_of(draft.step):
        if id in scope.pending:
            steps[id] = AnyResults({**scope.foreseen.get(id, {}), "same": AnyResults()})
    names = draft.spec.names._replace(outputs=paths, steps=steps)
    draft.spec = draft.spec._replace(names=names)


def find_sample_problems(sketch: Sketch) -> list[Problem]:
    """Return the template errors of steps whose matrix is not known yet.

    Only errors that every attempt would hit are returned.
    """
    trial = DryRun(wanted={draft.id for draft in sketch.samples}.__contains__)
    trial.try_all(sketch)
    return trial.problems


def _path(draft: NodeDraft, output: str) -> object:
    path = draft.outputs[output][0]
    return PathValue(path, "step", (draft, output)) if path else A_TEXT
