"""List the checkpoints of a run, and choose the checkpoint from which the next run resumes."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import CannotRun, NotFound
from ..execution.session import preview
from ..execution.terms import choice_of_run, request_of_run
from ..storage.records.runs import RunRow
from ..storage.workspace import Workspace
from ..survey import kept_state
from ..survey.kept_state import StepState
from .values import Facts, moment, whole


class Checkpoints(NamedTuple):
    """Checkpoints of a run's steps.

    `unknown` lists steps whose checkpoint directory is not known until their dependencies finish.
    """

    kept: list[StepState]
    unknown: list[str]

    def facts(self) -> Facts:
        """Return the checkpoints as JSON values, newest first in each checkpoint directory."""
        found: list[Facts] = []
        for state in self.kept:
            found += _facts(state)
        return {"checkpoints": found, "unknown": self.unknown}


class NotHere(CannotRun):
    """Error for a run whose checkpoints are not in this workspace."""

    def __init__(self) -> None:
        super().__init__(fix="use the machine that executes the run")


def find_checkpoints(ws: Workspace, row: RunRow) -> Checkpoints:
    """Plan a run's request again and return the checkpoints of its steps.

    Raises NotHere, and the errors of a survey.
    """
    request = request_of_run(row)
    if request is None or row.bundle:
        raise NotHere
    found = preview(ws, request, choice_of_run(row))
    states: list[StepState] = []
    unknown: list[str] = []
    for n, spec in enumerate(found.plan.specs()):
        if not spec.state:
            continue
        try:
            states += kept_state.find_states(ws, found, [n])
        except CannotRun:
            unknown.append(found.plan.nodes[n].id)
    return Checkpoints(states, unknown)


def resume_from(ws: Workspace, row: RunRow, step: str, state: str, number: int) -> str:
    """Set aside checkpoints newer than `number`, and return the name of the newest remaining one.

    Raises NotHere, NotFound, Busy if a run uses the checkpoints, and CannotRun if checkpoint
    `number` is incomplete.
    """
    for each in find_checkpoints(ws, row).kept:
        if (each.step, each.state) == (step, state):
            return whole(kept_state.go_back(ws, each, number).path.name)
    fix = "list the checkpoints with GET …/checkpoints"
    raise NotFound(f"the run has no step {whole(step)} with checkpoints {whole(state)}", fix=fix)


def _facts(state: StepState) -> list[Facts]:
    newest, best = state.newest(), state.best()
    found: list[Facts] = []
    for each in state.checkpoints:
        number = each.number if each.number >= 0 else None
        found.append(
            {
                "step": state.step,
                "state": state.state,
                "name": whole(each.path.name),
                "number": number,
                "at_step": each.step,
                "bytes": each.size,
                "made": moment(each.made),
                "whole": not each.why,
                "why": each.why,
                "aside": each.aside,
                "newest": each is newest,
                "best": each is best,
            }
        )
    return found
