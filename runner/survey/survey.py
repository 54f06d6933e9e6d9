"""Survey a request: parse its recipe, compile or load its plan, check the disk, and judge every
step.

Does all I/O of planning, and runs no step. It changes caches, and with unpinned requirements it
creates the lock file beside them (`facts.py`), even for `recipe plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import CannotRun
from ..language.library import find
from ..paths import is_path
from ..planning.ids import names
from ..planning.judge import MAYBE, RESTORE, RUN, Facts, StepResult, Verdict, judge
from ..planning.plan import Plan, Target
from ..storage.content.files import Content
from ..storage.workspace import Workspace
from .facts import collect_facts
from .plan_cache import as_stored, compile_request
from .request import Request


class WaitingStep(NamedTuple):
    """A step that joins the plan only after other steps have finished."""

    id: str
    shown: str
    why: str
    needs: Sequence[str]


@dataclass(slots=True)
class Survey:
    """A plan with a verdict for each step, and everything found on the disk."""

    request: Request
    source: Path
    library: bool
    plan: Plan
    facts: Facts
    verdicts: list[Verdict]
    made: dict[int, StepResult]
    # By node, the paths of its published outputs: below the workspace or absolute.
    targets: dict[int, list[Target]]
    globs: dict[str, tuple[str, ...]]
    forced: frozenset[str] = frozenset()
    all: bool = False  # all steps are forced
    begin: str = ""  # this step and its downstream steps are forced
    only: str = ""  # the single requested step
    until: str = ""  # the last requested step
    aside: set[str] = field(default_factory=set)  # steps that were not requested

    def forces(self, id: str) -> bool:
        """Return True if a step must run regardless of the cache."""
        return _is_forced(self.forced, self.all, id)

    def select_wanted(self, plan: Plan) -> set[int]:
        """Return the requested nodes of a plan, with their dependencies."""
        return plan.select_nodes(self.only, self.until)

    @property
    def later(self) -> list[WaitingStep]:
        """Requested steps that are not yet in the plan."""
        waiting = self.plan.waiting
        if self.only:
            return []
        asked = self.plan.closure_of(self.until)[1] if self.until else waiting.keys()
        axes = {
            pending.step: f"one for each {pending.pattern} from {pending.producer}"
            for pending in self.plan.pending
        }
        found = []
        for id, needs in waiting.items():
            if id not in asked:
                continue
            if id in axes:
                found.append(WaitingStep(id, f"{id}[…]", axes[id], needs))
            else:
                makers = [need for need in needs if need in waiting] or needs[:1]
                why = f"depends on the outputs of {', '.join(makers)}"
                found.append(WaitingStep(id, id, why, needs))
        return found

    @property
    def todo(self) -> list[int]:
        """Nodes that are not up to date: to run, possibly to run, or to restore."""
        unfinished = (RUN, MAYBE, RESTORE)
        return [n for n, verdict in enumerate(self.verdicts) if verdict.answer in unfinished]

    def targets_of(self, ws: Workspace, plan: Plan) -> dict[int, list[Target]]:
        """Return the published output paths of an expanded plan of the same request."""
        return _find_targets(ws, plan, self.library, self.request)

    @property
    def conflicts(self) -> list[str]:
        """Paths where an output would replace a caller's file."""
        paths: list[str] = []
        for verdict in self.verdicts:
            paths += verdict.conflicts
        return paths


def survey(
    ws: Workspace, request: Request, *, forced: frozenset[str] = frozenset(), all: bool = False
) -> Survey:
    """Survey a request: compile its plan and judge each step, without running anything.

    `forced` steps run regardless of the cache; with `all`, every step does. Raises NotFound,
    Invalid, CannotRun.
    """
    source = find(request.recipe, ws.root)
    library = not is_path(request.recipe)
    known: dict[str, tuple[str, ...]] = {}
    words = forced
    while True:
        plan = compile_request(ws, source, request, known)
        forced = frozenset(plan.resolve_words(words)) if words else words
        request = as_stored(ws, plan, request)
        ws.traces.expect(plan.recipe, len(plan.nodes))
        facts = collect_facts(ws, plan, request)
        targets = _find_targets(ws, plan, library, request)
        all_targets = itertools.chain.from_iterable(targets.values())
        facts.there = dict(ws.cache.contents(target.path for target in all_targets))
        facts.ours = ws.published_contents()
        verdicts, made = judge_all(plan, facts, targets, forced=forced, all=all)
        while ws.remote_cache is not None and ws.remote_cache.learn(plan, verdicts):
            verdicts, made = judge_all(plan, facts, targets, forced=forced, all=all)
        _rename_traces(ws, plan, verdicts)
        grown = find_expansions(ws, plan, made)
        if not grown:
            ws.save_costly_digests()
            return Survey(
                request, source, library, plan, facts, verdicts, made, targets, known, forced, all
            )
        known.update(grown)


def judge_all(
    plan: Plan,
    facts: Facts,
    targets: Mapping[int, list[Target]],
    *,
    forced: frozenset[str],
    all: bool,
) -> tuple[list[Verdict], dict[int, StepResult]]:
    """Judge every plan node before the run. Returns the verdicts and the known results."""
    made: dict[int, StepResult] = {}
    verdicts = []
    for n, node in enumerate(plan.nodes):
        force = _is_forced(forced, all, node.id)
        try:
            verdict = judge(plan, n, facts, made, force=force, targets=targets)
        except CannotRun as error:  # the error is raised when the step is due
            verdict = Verdict(RUN, None, (str(error),), None)
        if verdict.made is not None:
            made[n] = verdict.made
        verdicts.append(verdict)
    return verdicts, made


def _is_forced(forced: frozenset[str], all: bool, id: str) -> bool:
    if all:
        return True
    return bool(forced) and not forced.isdisjoint(names(id))


def _rename_traces(ws: Workspace, plan: Plan, verdicts: Sequence[Verdict]) -> None:
    """Move results stored under a former cache key to the current key."""
    for n, verdict in enumerate(verdicts):
        if verdict.former is None or verdict.made is None:
            continue
        if verdict.key is not None:
            ws.traces.rename(verdict.former, verdict.key, plan.nodes[n].rule)


def find_expansions(
    ws: Workspace, plan: Plan, made: Mapping[int, StepResult]
) -> dict[str, tuple[str, ...]]:
    """Return the known matches of globs below step outputs, by the compiler's name."""
    found = {}
    for pending in plan.pending:
        left = made.get(plan.index[pending.producer])
        if left is None or not left.ok:
            continue
        if pending.output not in left.outputs:
            continue
        content = Content(left.outputs[pending.output])
        if ws.remote_cache is not None:
            ws.remote_cache.outline(content)
        matches = ws.objects.manifests.match(content, pending.pattern)
        spelled = f"{pending.producer}/{pending.output}:{pending.pattern}"
        found[spelled] = tuple(entry.path for entry in matches)
    return found


def _find_targets(
    ws: Workspace, plan: Plan, library: bool, request: Request
) -> dict[int, list[Target]]:
    """Return the published output paths of each plan node."""
    base = out_dir(ws, plan, library, request)
    head = "" if base == ws.root else f"{base}/"
    targets: dict[int, list[Target]] = {}
    for n, output, path, _name in plan.publish:
        targets.setdefault(n, []).append(Target(output, head + path))
    return targets


def out_dir(ws: Workspace, plan: Plan, library: bool, request: Request) -> Path:
    """Return the directory for a plan's published results.

    For a recipe given by path, this is the workspace; for a library recipe,
    `out/NAME@VERSION/DIGEST`.
    """
    if request.out is not None:
        return ws.absolute(str(request.out))
    return ws.root / "out" / plan.recipe / plan.digest[:12] if library else ws.root
