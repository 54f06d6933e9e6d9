"""Choice of the run for a request: an interrupted run to resume, or a new run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ..digest import of_value
from ..errors import Busy
from ..failures import RunFailure
from ..planning.plan import ALLOW_FAILURE
from ..planning.run_view import SUCCEEDED
from ..planning.schedule import FINAL, SpentRetries, State, budget_used
from ..planning.step import NOTHING
from ..storage.records.runs import AttemptRow, RunRow, RunState, StepRow, settle
from ..storage.workspace import Workspace
from ..survey.facts import collect_facts
from ..survey.plan_cache import compile_request
from ..survey.survey import Survey

LOOKED_AT = 10
"""Number of a recipe's latest runs that are checked for dead workers."""
_GOES_ON = frozenset(
    {State.WAITING, State.READY, State.QUEUED, State.RUNNING, State.DONE, State.FRESH}
)


class ClaimedRun(NamedTuple):
    """Run that this process has claimed, with the step states stored by an earlier worker."""

    id: str
    fence: int
    state: str = "QUEUED"
    resumed: bool = False
    states: Mapping[str, State] = NOTHING  # of unfinished steps, and of steps to run again
    spent: Mapping[str, SpentRetries] = NOTHING
    tries: Mapping[str, int] = NOTHING  # attempts of each step
    made: frozenset[str] = frozenset()  # keys with results of this run


def request_digest(ws: Workspace, found: Survey, how: Mapping[str, object]) -> str:
    """Return the digest of a request, its execution options and its input contents.

    Requests with equal digests create the same results at the same paths in the same way.
    """
    plan, facts = found.plan, found.facts
    if found.globs:  # use the plan without its expansions
        plan = compile_request(ws, found.source, found.request, {})
        facts = collect_facts(ws, plan, found.request)
    content = [
        sorted(map(repr, part.items()))
        for part in (facts.files, facts.code, facts.takes, facts.locks)
    ]
    return of_value("request", [plan.digest, dict(plan.inputs), str(ws.root), dict(how), content])


POISON: Final = 3
"""Maximum number of recoveries without progress before a run fails, because it kills its workers.
"""


def take_over(ws: Workspace, found: Survey, digest: str, wanted: str = "") -> ClaimedRun | None:
    """Claim the last interrupted run with this request digest, or the run `wanted`.

    Return None if there is none. Fails other runs of this recipe file whose workers died. Leaves
    runs of other files with the same recipe name alone.

    Raises Busy if `wanted` cannot resume.
    """
    taken: ClaimedRun | None = None
    for row in ws.store.runs.latest(recipe=found.plan.recipe, last=LOOKED_AT):
        if row.id != wanted and row.data.get("source") != str(found.source):
            continue
        asked = _is_asked(row, digest, wanted)
        if not _may_take_over(row, asked=asked):
            continue
        fence = ws.store.runs.claim(row.id, f"process {os.getpid()}")
        if fence is None:
            continue
        if fail_if_poisoned(ws, ws.store.runs.get(row.id), fence):
            continue
        if taken is None and asked:
            taken = recover(ws, found, row, fence)
            if taken is not None:
                continue
        words = "its worker is gone"
        settle(ws.store.runs, row.id, fence, "FAILED", words, failure=RunFailure.WORKER_GONE)
    if wanted and (taken is None or taken.id != wanted):
        raise Busy(
            f"cannot resume run {wanted}: its plan has changed, or a worker is executing it",
            fix="start a new run with `recipe retry`",
        )
    return taken


def _is_asked(row: RunRow, digest: str, wanted: str) -> bool:
    """Return True for the run `wanted`, or without one for each run of this request."""
    if wanted:
        return row.id == wanted
    return row.data.get("digest") == digest and row.request != "cancel"


def _may_take_over(row: RunRow, *, asked: bool) -> bool:
    """Return True if a run has begun and its worker may have died.

    A paused run, or one that is queued for a worker, must be `asked` for.
    """
    is_waiting = row.due is not None or row.state == "PAUSED"
    if is_waiting and not asked:
        return False
    return bool(row.fence) and row.state in ("QUEUED", "ACTIVE", "PAUSED")


def close_finished(ws: Workspace, found: Survey, left: Sequence[RunRow]) -> None:
    """Complete interrupted runs of this recipe file and plan whose steps are all finished."""
    for row in left:
        is_same_plan = row.data.get("source") == str(found.source) and row.plan == found.plan.digest
        is_interrupted = row.due is None and row.fence and not row.request
        if not (is_same_plan and is_interrupted and _have_steps_succeeded(ws, row.id)):
            continue
        fence = ws.store.runs.claim(row.id, f"process {os.getpid()}")
        if fence is not None:
            settle(ws.store.runs, row.id, fence, "COMPLETED", "resumed")


def _have_steps_succeeded(ws: Workspace, run: str) -> bool:
    steps = ws.store.runs.steps(run).values()
    return all(State(step.state) in SUCCEEDED for step in steps)


def fail_if_poisoned(ws: Workspace, row: RunRow, fence: int) -> bool:
    """Fail a run whose workers died repeatedly before any step finished.

    Return False if the run may continue. `row` is the run's row after the claim.
    """
    if row.request == "cancel" or row.recoveries <= POISON:
        return False
    words = f"{row.recoveries} workers died before any step finished"
    settle(ws.store.runs, row.id, fence, "FAILED", words, failure=RunFailure.POISON)
    return True


def find_failed_step(ws: Workspace, found: Survey, run: str) -> StepRow | None:
    """Return the failed step that ended the run before its worker died, or None."""
    failed = [step for step in ws.store.runs.steps(run).values() if step.state == State.FAILED]
    return next((step for step in failed if not _may_fail(found, step.step)), None)


def _may_fail(found: Survey, step: str) -> bool:
    """Return True if the run continues after a failure of this step."""
    n = found.plan.index.get(step)
    return n is not None and bool(found.plan.nodes[n].flags & ALLOW_FAILURE)


def recover(ws: Workspace, found: Survey, row: RunRow, fence: int) -> ClaimedRun | None:
    """Return the stored progress of a run whose worker died, or None if it cannot resume.

    A run cannot resume after a failed step, or if its plan lacks open steps.
    """
    stored = {id: State(step.state) for id, step in ws.store.runs.steps(row.id).items()}
    todo = {found.plan.nodes[n].id for n in found.todo}
    open = {id for id, state in stored.items() if state not in FINAL}
    if not _can_resume(found, stored, todo, open):
        return None
    attempts = ws.store.runs.attempts(row.id)
    made = frozenset(attempt.key for attempt in attempts if attempt.outcome == "done") - {""}
    _answer_old_request(ws, row, fence)
    return ClaimedRun(
        row.id,
        fence,
        row.state,
        True,
        {id: stored.get(id, State.WAITING) for id in todo | open},
        _budgets_used(attempts),
        _count_tries(stored, attempts),
        made,
    )


def _can_resume(found: Survey, stored: Mapping[str, State], todo: set[str], open: set[str]) -> bool:
    failed = [id for id, state in stored.items() if state is State.FAILED]
    may_fail = {id for id in failed if _may_fail(found, id)}
    ended = {state for id, state in stored.items() if id not in may_fail}
    if not ended.isdisjoint((State.FAILED, State.BLOCKED, State.CANCELLED)):
        return False
    if not open <= found.plan.index.keys():
        return False
    return {stored.get(id, State.WAITING) for id in todo - may_fail} <= _GOES_ON


def _count_tries(stored: Mapping[str, State], attempts: Sequence[AttemptRow]) -> dict[str, int]:
    """Count the attempts of each step, including the current attempt of a RUNNING step.

    The current attempt has no row yet.
    """
    tries = {id: 1 for id, state in stored.items() if state is State.RUNNING}
    for attempt in attempts:
        is_running = stored.get(attempt.step) is State.RUNNING
        tries[attempt.step] = max(tries.get(attempt.step, 0), attempt.n + is_running)
    return tries


def _budgets_used(attempts: Sequence[AttemptRow]) -> dict[str, SpentRetries]:
    """Return the used retries of each step.

    Attempts with a new checkpoint are free.
    """
    failed: dict[str, list[str]] = {}
    for attempt in attempts:
        if attempt.outcome == "failed" and not attempt.exit.get("saved"):
            failed.setdefault(attempt.step, []).append(attempt.reason)
    return {id: budget_used(reasons) for id, reasons in failed.items()}


def _answer_old_request(ws: Workspace, row: RunRow, fence: int) -> None:
    """Clear a stored pause request from before the resume; a newer request stays."""
    if not row.request:
        return
    state = "QUEUED" if row.state == "PAUSED" else row.state
    ws.store.runs.group(row.id, fence, run_state=RunState(state, row.reason), answers=row.request)
