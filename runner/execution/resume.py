"""Which run a request goes on with: the last one of the same request, if its worker died; else a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..digest import of_value
from ..errors import Busy
from ..failures import RunFailure
from ..planning.plan import ALLOW_FAILURE
from ..planning.schedule import FINAL, Spent, State, budget_used
from ..storage.records.runs import RunRow, RunState, StepRow, settle
from ..storage.workspace import Workspace
from ..survey.facts import collect_facts
from ..survey.plan_cache import compile_request
from ..survey.survey import Survey

LOOKED_AT = 10
"""Runs of a recipe among which those with dead workers are looked for, from the last."""
_GOES_ON = frozenset(
    {State.WAITING, State.READY, State.QUEUED, State.RUNNING, State.DONE, State.FRESH}
)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run that is ours to work.  If another worker had it, also how its steps stood when that one died."""

    id: str
    fence: int
    state: str = "QUEUED"
    resumed: bool = False
    states: Mapping[str, State] = field(
        default_factory=dict
    )  # of the steps that are not over, or have to be made again
    spent: Mapping[str, Spent] = field(default_factory=dict)
    tries: Mapping[str, int] = field(default_factory=dict)  # how often each step was begun
    made: frozenset[str] = frozenset()  # keys that it has made


def request_digest(ws: Workspace, found: Survey, how: Mapping[str, object]) -> str:
    """What a request asks for and of what: two with one digest would make the same, in the same places, in the same way."""
    plan, facts = found.plan, found.facts
    if found.globs:  # the plan as it was before its first step ran
        plan = compile_request(ws, found.source, found.request, {})
        facts = collect_facts(ws, plan, found.request)
    content = [
        sorted(map(repr, part.items()))
        for part in (facts.files, facts.code, facts.takes, facts.locks)
    ]
    return of_value("request", [plan.digest, dict(plan.inputs), str(ws.root), dict(how), content])


POISON: Final = 3
"""So many recoveries in which no step moved end a run: it kills its workers."""


def take_over(ws: Workspace, found: Survey, digest: str, wanted: str = "") -> Claimed | None:
    """Claim the last run with this digest that is paused or whose worker is dead, or the run `wanted`.  None: there is none.

    Other runs of the recipe file with dead workers are over; those of another file with the same name are left to their own.

    Raises Busy where `wanted` cannot go on.
    """
    taken: Claimed | None = None
    for row in ws.store.runs.latest(recipe=found.plan.recipe, last=LOOKED_AT):
        if row.id != wanted and row.data.get("source") != str(found.source):
            continue
        asked = row.id == wanted or (
            not wanted and row.data.get("digest") == digest and row.request != "cancel"
        )
        if row.due is not None and not asked:  # a worker takes it
            continue
        if (
            not row.fence
            or row.state not in ("QUEUED", "ACTIVE", "PAUSED")
            or (row.state == "PAUSED" and not asked)
        ):
            continue
        fence = ws.store.runs.claim(row.id, f"process {os.getpid()}")
        if fence is None:
            continue
        if poisoned(ws, ws.store.runs.get(row.id), fence):
            continue
        if taken is None and asked and (taken := as_it_stood(ws, found, row, fence)) is not None:
            continue
        words = "its worker is gone"
        settle(ws.store.runs, row.id, fence, "FAILED", words, failure=RunFailure.WORKER_GONE)
    if wanted and (taken is None or taken.id != wanted):
        raise Busy(
            f"cannot resume run {wanted}: its plan has changed, or a worker is executing it",
            fix="start a new run with `recipe retry`",
        )
    return taken


def close_finished(ws: Workspace, found: Survey, left: Sequence[RunRow]) -> None:
    """Of runs that no worker has, those of this recipe file and plan that had ended all their steps well are over: nothing is left to do."""
    for row in left:
        if (
            row.data.get("source") != str(found.source)
            or row.plan != found.plan.digest
            or row.due is not None
            or not row.fence
            or row.request
        ):
            continue
        steps = ws.store.runs.steps(row.id).values()
        if not all(State(step.state) in (State.DONE, State.FRESH, State.SKIPPED) for step in steps):
            continue
        if (fence := ws.store.runs.claim(row.id, f"process {os.getpid()}")) is not None:
            settle(ws.store.runs, row.id, fence, "COMPLETED", "resumed")


def poisoned(ws: Workspace, row: RunRow, fence: int) -> bool:
    """End a claimed run as FAILED whose workers died again and again before any step moved.  `row` is as it was claimed."""
    if row.request == "cancel" or row.recoveries <= POISON:
        return False
    words = f"{row.recoveries} workers died before any step finished"
    settle(ws.store.runs, row.id, fence, "FAILED", words, failure=RunFailure.POISON)
    return True


def step_that_failed(ws: Workspace, found: Survey, run: str) -> StepRow | None:
    """Return the step whose failure ended the run before its worker was gone, if one did."""
    failed = [step for step in ws.store.runs.steps(run).values() if step.state == State.FAILED]
    return next((step for step in failed if not _may_fail(found, step.step)), None)


def _may_fail(found: Survey, step: str) -> bool:
    """Whether the run goes on when a step fails."""
    n = found.plan.index.get(step)
    return n is not None and bool(found.plan.nodes[n].flags & ALLOW_FAILURE)


def as_it_stood(ws: Workspace, found: Survey, row: RunRow, fence: int) -> Claimed | None:
    """The run whose worker died; None when it cannot go on: something in it has failed, or its plan has steps that are no more."""
    stored = {id: State(step.state) for id, step in ws.store.runs.steps(row.id).items()}
    todo = {found.plan.nodes[n].id for n in found.todo}
    open = {id for id, state in stored.items() if state not in FINAL}
    failed_well = {
        id for id, state in stored.items() if state is State.FAILED and _may_fail(found, id)
    }
    ended = {state for id, state in stored.items() if id not in failed_well}
    if not ended.isdisjoint((State.FAILED, State.BLOCKED, State.CANCELLED)):
        return None
    states_todo = {stored.get(id, State.WAITING) for id in todo - failed_well}
    if not open <= found.plan.index.keys() or not states_todo <= _GOES_ON:
        return None
    attempts = ws.store.runs.attempts(row.id)
    failed: dict[str, list[str]] = {}
    tries = {id: 1 for id, state in stored.items() if state is State.RUNNING}
    for attempt in attempts:
        tries[attempt.step] = max(
            tries.get(attempt.step, 0), attempt.n + (stored.get(attempt.step) is State.RUNNING)
        )
        if attempt.outcome == "failed" and not attempt.exit.get("saved"):
            failed.setdefault(attempt.step, []).append(attempt.reason)
    states = {id: stored.get(id, State.WAITING) for id in todo | open}
    made = frozenset(
        attempt.key for attempt in attempts if attempt.outcome == "done" and attempt.key
    )
    budgets = {id: budget_used(reasons) for id, reasons in failed.items()}
    if row.request:  # a pause that its worker never read, or that is over now; what was asked since is there to be read
        state = "QUEUED" if row.state == "PAUSED" else row.state
        ws.store.runs.group(
            row.id, fence, run_state=RunState(state, row.reason), answers=row.request
        )
    return Claimed(row.id, fence, row.state, True, states, budgets, tries, made)
