"""Globs without matches.

A typing error in a glob would otherwise silently produce an empty result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..planning.ids import bare
from ..planning.patterns import decode_pattern, fixed_folder
from ..planning.plan import SKIP

if TYPE_CHECKING:
    from ..storage.workspace import Workspace
    from .survey import Survey


class EmptyGlob(NamedTuple):
    """A glob pattern without matches."""

    step: str
    pattern: str
    axis: bool  # matrix axis, which leaves the step without instances
    refused: str  # reason to refuse the run; empty for a mere warning

    @property
    def warning(self) -> str:
        """Warning about the empty glob, with a fix."""
        result = ", so the step has no instances" if self.axis else ""
        fix = "correct the pattern, or set `{glob: …, allow_empty: true}`"
        return f'{self.step}: nothing matches "{self.pattern}"{result} ({fix})'


def find_empty_globs(ws: Workspace, found: Survey) -> Iterator[EmptyGlob]:
    """Yield the glob patterns of requested steps that match nothing.

    Patterns with `allow_empty: true` are skipped.
    """
    plan = found.plan
    if not plan.empty and not plan.globs:
        return
    if not found.only and not found.until:
        for step, pattern in plan.empty:
            yield EmptyGlob(step, pattern, True, _explain_absent_folder(ws, pattern))
    requested = _requested_steps(found)
    for step, text, allowed in plan.globs:
        if bare(step) not in requested or found.facts.matches.get(text):
            continue
        pattern = decode_pattern(text)[0]
        refused = _explain_absent_folder(ws, pattern)
        if not refused and allowed is False:
            refused = "matches nothing"
        yield EmptyGlob(step, pattern, False, refused)


def _requested_steps(found: Survey) -> set[str]:
    """Return the names of the requested steps that the plan does not skip."""
    steps: set[str] = set()
    for n in found.select_wanted(found.plan):
        node = found.plan.nodes[n]
        if not node.flags & SKIP:
            steps.add(bare(node.id))
    return steps


def warn_of_empty_globs(ws: Workspace, found: Survey) -> list[str]:
    """Return the warnings about empty globs, for a plan or a finished run."""
    return [each.warning for each in dict.fromkeys(find_empty_globs(ws, found))]


def _explain_absent_folder(ws: Workspace, pattern: str) -> str:
    folder = fixed_folder(pattern)
    if not folder or os.path.isdir(ws.absolute(folder)):
        return ""
    return f"matches nothing: {folder} does not exist"
