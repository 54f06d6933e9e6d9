"""Storage of a successful attempt: its cached result, its published outputs and its records."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from drivers.base import Exit

from ...errors import Infrastructure, Invalid
from ...hosts.place.host_task import TaskResult
from ...planning.judge import StepResult
from ...planning.schedule import AttemptOutcome
from ...storage import metrics
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from . import attempt_result
from .adjusting import SmallerInputs
from .attempt import Attempt
from .attempt_records import AttemptRecords
from .commit import GroupCommit
from .diverging import NAN, DivergedLosses
from .failing import Cause
from .failure_recorder import FailureRecorder
from .growth import PlanGrowth
from .publisher import Publisher
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .tidying import AttemptCleanup


class SuccessRecorder:
    """Recorder of the successful attempts of one run.

    An attempt still fails if its loss is NaN or infinite or if its outputs cannot be published.
    """

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        publisher: Publisher,
        smaller_inputs: SmallerInputs,
        growth: PlanGrowth,
        diverged: DivergedLosses,
        records: AttemptRecords,
        tidying: AttemptCleanup,
        failures: FailureRecorder,
    ) -> None:
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._publisher, self._smaller_inputs, self._growth = publisher, smaller_inputs, growth
        self._diverged, self._records, self._tidying = diverged, records, tidying
        self._failures = failures

    def store(self, id: str, attempt: Attempt, exit: Exit, result: TaskResult) -> None:
        """Store the results of a successful attempt and end its step.

        The outputs are already in the object store. The published files are written here. The
        trace, the records and the state change are then committed in one group.
        """
        seconds = (exit.ended - exit.started) if exit.ended else time.time() - attempt.started
        crashpoint("outputs-stored")
        warnings = self._records.warnings_of(attempt)
        values = self._values_of(id, attempt, warnings)
        diverged = self._records.close_numbers(id, attempt, values)
        if diverged:
            with contextlib.suppress(Infrastructure):  # the warning is stored anyway
                self._diverged.tell(id, attempt, diverged)
            if attempt.spec.options.ends_on_nan:
                return self._failures.fail(id, attempt, Cause(NAN, diverged), exit)
            warnings.append(diverged)
        self._say_if_went_back(id, attempt)
        made = StepResult(True, result.outputs, values)
        self._steps.set_made(attempt.number, made)
        data: dict[str, object] = {"seconds": round(seconds, 3)}
        note = self._note_of_changed_input(attempt)
        if note:
            data["note"] = note
        else:
            self._trace(id, attempt, made, exit, warnings)
        if not self._steps.survey.library:
            if error := self._publisher.try_publish(attempt.number, made):
                return self._failures.fail(id, attempt, Cause("publish", str(error)), None)
            crashpoint("published")
        links = self._records.links_of(id, attempt, result.outputs)
        self._records.store(id, attempt, "done", "", exit, links=links)
        self._records.keep_log(id, attempt)
        data |= _facts_of(values, warnings, exit)
        self._schedule.end(id, AttemptOutcome(True), data)
        self._tidying.tidy(attempt, success=True)
        self._growth.grow()
        return None

    def _note_of_changed_input(self, attempt: Attempt) -> str:
        """Return a warning if an input changed during the step; otherwise "".

        The result of such a step is not cached.
        """
        stale = attempt.directory.find_stale_sources(self._ws.cache)
        if not stale:
            return ""
        where = str(self._ws.root / stale[0]).removeprefix(f"{self._ws.root}/")
        return f"{where} changed during the step: its result is used in this run, and the next run repeats the step"

    def _values_of(self, id: str, attempt: Attempt, warnings: list[str]) -> dict[str, object]:
        """Return the metrics of an attempt; {} with a message or warning if there are none."""
        masker, how, folder = self._commits.masker, attempt.spec.metrics, attempt.directory.path
        try:
            values = attempt_result.read_metrics(folder, attempt.log, how, masker)
        except Invalid as error:  # the outputs are valid; a better pattern can read the log later
            words = error.problems[0].message
            self._commits.say(f"{id}: cannot read its metrics: {words}")
            return {}
        if how is not None and not values:
            words = attempt_result.explain_no_metrics(folder, how)
            warnings += [words] if words else []
        return values

    def _say_if_went_back(self, id: str, attempt: Attempt) -> None:
        if attempt.resumed_step is None:
            return
        from ...storage import checkpoints

        first = metrics.first_step(Path(attempt.metrics_file))
        words = checkpoints.went_back(attempt.resumed_step, first)
        if words:
            self._commits.say(f"{id}: {words}")

    def _trace(
        self, id: str, attempt: Attempt, made: StepResult, exit: Exit, warnings: list[str]
    ) -> None:
        """Cache the result of an attempt under its cache key."""
        if attempt.key is None:
            return
        facts = self._records.facts_of(attempt)
        if warnings:
            facts["warnings"] = warnings
        trace = self._commits.add_trace(
            attempt.key,
            attempt.node,
            made.outputs,
            made.metrics,
            exit,
            facts,
            again=self._steps.facts.traces.get(attempt.key) is not None,
        )
        self._smaller_inputs.note_result(id, trace)


def _facts_of(values: dict[str, object], warnings: list[str], exit: Exit) -> dict[str, object]:
    """Return the facts that are stored with the step's completion event."""
    facts: dict[str, object] = {}
    if values:
        facts["metrics"] = values
    if warnings:
        facts["warnings"] = warnings
    if exit.strays:
        facts["strays"] = exit.strays
    return facts
