"""An attempt is over: take its outputs and numbers, or find out why it failed; store that."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from drivers.base import DriverError, Exit, HostLost

from ...errors import Infrastructure, Invalid, RecipeError, StoreUnavailable
from ...hosts.place.host_task import TaskResult
from ...hosts.place.spare_dirs import Scrap
from ...logs import Log
from ...planning import causes
from ...planning.halving import STOPPED
from ...planning.ids import readable
from ...planning.judge import NOTHING, Made
from ...planning.schedule import BUSY, EARLY, PREEMPTIONS, Outcome
from ...storage import metrics
from ...storage.content.disk import delete
from ...storage.content.files import no_space
from ...storage.crash import crashpoint
from ...storage.workspace import Workspace
from . import attempt_result
from .adjusting import SmallerInputs
from .attempt import Attempt
from .attempt_records import AttemptRecords
from .bell import Bell
from .commit import GroupCommit
from .diagnosis import Diagnosis, error_of
from .diverging import NAN, DivergedLosses
from .early import EarlyStops
from .environments import StepEnvironments
from .failing import Cause, Evidence, Failures
from .failure_hints import FailureHints
from .growth import PlanGrowth
from .orphans import Orphans
from .publisher import Publisher
from .renting import Machines
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import End, RunningAttempts
from .tidying import Tidying

_log: Final = Log("loop")


class Ender:
    """Looks at the ends of the attempts of one run, one after the other."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        running: RunningAttempts,
        failures: Failures,
        machines: Machines,
        orphans: Orphans,
        publisher: Publisher,
        smaller_inputs: SmallerInputs,
        growth: PlanGrowth,
        early_stops: EarlyStops,
        diverged: DivergedLosses,
        environments: StepEnvironments,
        diagnosis: Diagnosis,
        hints: FailureHints,
        records: AttemptRecords,
        tidying: Tidying,
        scrap: Scrap,
        bell: Bell,
    ) -> None:
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._running, self._failures, self._machines = running, failures, machines
        self._orphans, self._publisher, self._smaller_inputs = orphans, publisher, smaller_inputs
        self._growth, self._early_stops, self._diverged = growth, early_stops, diverged
        self._environments = environments
        self._diagnosis, self._hints, self._records = diagnosis, hints, records
        self._tidying, self._scrap, self._bell = tidying, scrap, bell

    async def end_next(self) -> bool:
        """Look at the end of one attempt; False when there is none."""
        if not self._running.has_ended:
            return False
        await self.end(*self._running.next_end())
        return True

    async def end(self, id: str, end: End) -> None:
        """Take the outputs of an attempt, or note that it failed.

        Raises StoreUnavailable, which says nothing about the attempt: the next worker takes it up.
        """
        if isinstance(end, StoreUnavailable):
            raise end
        attempt = self._running.pop(id)
        if isinstance(end, Exit):
            _log_exit(id, attempt, end)
        for words in attempt_result.remove_replaced(attempt.directory.path, attempt.logs):
            self._commits.say(f"{readable(id)}: {words}")
        try:
            if isinstance(end, Exit):
                await self._close_containers(attempt, end)
            if isinstance(end, HostLost):
                self._machines.lose(attempt.place, end)
            if isinstance(end, Exit) and end.reason == BUSY:
                self._discard(attempt)
                self._failures.queue_again(id)
                return
            cause = await self._diagnosis.cause_of(id, attempt, end)
            exit = end if isinstance(end, Exit) else None
            if cause is not None and cause.reason == EARLY:
                self._stop_early(id, attempt, cause, exit)
            elif cause is not None:
                self._fail(id, attempt, cause, exit)
            elif exit is not None and attempt.result is not None:
                self._succeed(id, attempt, exit, attempt.result)
        finally:
            self._early_stops.forget(id)
            attempt.release_lock()
            if attempt.key is not None:
                self._commits.release_after_flush(attempt.key)

    async def _close_containers(self, attempt: Attempt, exit: Exit) -> None:
        if not self._environments.container_image(attempt.spec, attempt.place):
            return
        parts = attempt.task.parts or [attempt.task]
        for place, part in zip(attempt.place.members, parts, strict=True):
            containers = self._environments.containers_of(place)
            with contextlib.suppress(DriverError):
                await containers.over(place.paths(part.attempt).cwd, exit)

    def _discard(self, attempt: Attempt) -> None:
        """Delete what there is of an attempt that did not begin."""
        self._bell.run_in_background(attempt.place.clear_after(attempt.task, ()))
        attempt.clear_up(self._scrap)

    # -- it ended well

    def _succeed(self, id: str, attempt: Attempt, exit: Exit, result: TaskResult) -> None:
        seconds = (exit.ended - exit.started) if exit.ended else time.time() - attempt.started
        crashpoint("outputs-stored")
        values = self._values_of(id, attempt)
        warnings = self._warnings_of(attempt)
        diverged = self._records.close_numbers(id, attempt, values)
        if diverged:
            with contextlib.suppress(Infrastructure):  # the warning stays
                self._diverged.tell(id, attempt, diverged)
            if attempt.spec.options.ends_on_nan:
                return self._fail(id, attempt, Cause(NAN, diverged), exit)
            warnings.append(diverged)
        self._say_if_went_back(id, attempt)
        made = Made(True, result.outputs, values)
        self._steps.set_made(attempt.number, made)
        data: dict[str, object] = {"seconds": round(seconds, 3)}
        stale = attempt.directory.stale(self._ws.cache)
        if stale:
            where = str(self._ws.root / stale[0]).removeprefix(f"{self._ws.root}/")
            data["note"] = (
                f"{where} changed during the step: its result is used in this run, and the next run repeats the step"
            )
        else:
            self._trace(id, attempt, made, exit, warnings)
        if not self._steps.survey.library:
            try:
                self._publisher.publish(attempt.number, made)
            except StoreUnavailable:
                raise
            except RecipeError as error:
                return self._fail(id, attempt, Cause("publish", str(error)), None)
            crashpoint("published")
        links = self._records.links_of(id, attempt, result.outputs)
        self._records.store(id, attempt, "done", "", exit, links=links)
        self._records.keep_log(id, attempt)
        if values:
            data["metrics"] = values
        if warnings:
            data["warnings"] = warnings
        if exit.strays:
            data["strays"] = exit.strays
        self._schedule.end(id, Outcome(True), data)
        self._tidying.tidy(attempt, success=True)
        self._growth.grow()
        return None

    def _values_of(self, id: str, attempt: Attempt) -> dict[str, object]:
        """The metrics that an attempt reported; none, saying so, where they cannot be read."""
        masker, how = self._commits.masker, attempt.spec.metrics
        try:
            return attempt_result.read_metrics(attempt.directory.path, attempt.log, how, masker)
        except Invalid as error:  # what it made is good: a better pattern reads the numbers later
            words = error.problems[0].message
            self._commits.say(f"{id}: cannot read its metrics: {words}")
            return {}

    def _warnings_of(self, attempt: Attempt) -> list[str]:
        masker = self._commits.masker
        return attempt_result.read_warnings(attempt.directory.path, attempt.spec.metrics, masker)

    def _say_if_went_back(self, id: str, attempt: Attempt) -> None:
        if attempt.resumed_step is None:
            return
        from ...storage import checkpoints

        first = metrics.first_step(Path(attempt.metrics_file))
        words = checkpoints.went_back(attempt.resumed_step, first)
        if words:
            self._commits.say(f"{id}: {words}")

    def _trace(
        self, id: str, attempt: Attempt, made: Made, exit: Exit, warnings: list[str]
    ) -> None:
        """Remember a result under its key."""
        if attempt.key is None:
            return
        facts = self._records.facts_of(attempt)
        if warnings:
            facts["warnings"] = warnings
        trace = self._commits.trace(
            attempt.key,
            attempt.node,
            made.outputs,
            made.metrics,
            exit,
            facts,
            again=self._steps.facts.traces.get(attempt.key) is not None,
        )
        self._smaller_inputs.note_result(id, trace)

    # -- it did not

    def _stop_early(self, id: str, attempt: Attempt, cause: Cause, exit: Exit | None) -> None:
        """Keep what an attempt reported that others had left behind, and its state.

        A later run resumes from there.
        """
        self._records.close_numbers(id, attempt)
        self._records.keep_log(id, attempt)
        links, words = self._records.links_of(id, attempt), f"{cause.reason}: {cause.words}"
        self._records.store(id, attempt, STOPPED, words, exit, links=links)
        self._tidying.discard_log(attempt)
        self._tidying.tidy(attempt, success=False)
        self._steps.set_made(attempt.number, NOTHING)
        self._schedule.end(id, Outcome(False, EARLY, cause.words))

    def _fail(self, id: str, attempt: Attempt, cause: Cause, exit: Exit | None) -> None:
        """Keep what a failed attempt printed and wrote, with what helps to mend it."""
        tail = attempt_result.read_tail(attempt.last_log, self._commits.masker)
        warnings = self._warnings_of(attempt)
        diverged = self._records.close_numbers(id, attempt)
        if diverged:
            warnings.append(diverged)
        if _is_kept(attempt):
            return self._keep_for_next(id, attempt, cause, tail)
        if cause.reason == "disk":
            # What it wrote likely fills the disk, and there has to be room to say so.
            delete(Path(attempt.directory.path))
        links = self._records.links_of(id, attempt)
        words = cause.words
        try:
            log = self._records.keep_log(id, attempt)
            self._tidying.discard_log(attempt)
        except OSError as error:
            full = no_space(error, attempt.log)
            log, words = attempt.log, f"{words}; the log stays in place ({full})"
        text = tail.decode(errors="replace")
        hint = self._hints.hint_for(id, attempt, cause, text, exit)
        saved = cause.reason in PREEMPTIONS and attempt.left_checkpoint()
        name = self._tidying.failed_name(id)
        self._records.store(
            id, attempt, "failed", cause.reason, None, links=links, name=name, saved=saved
        )
        self._tidying.tidy(attempt, success=False)
        cause = Cause(cause.reason, words, hint)
        shown = attempt_result.without_launcher(tail)
        found = error_of(cause, shown) if exit is not None else ""
        left = self._tidying.left(attempt)
        evidence = Evidence(shown, log, left, found, warnings, exit, saved)
        return self._failures.fail(id, cause, evidence)

    def _keep_for_next(self, id: str, attempt: Attempt, cause: Cause, tail: bytes) -> None:
        """Leave an attempt where it is, for the next one to take up."""
        self._orphans.look_again()
        words = f"{cause.words}; the outputs are kept in the attempt directory until there is disk space"
        kept = Cause(cause.reason, words, causes.REMEDIES["disk"])
        self._failures.fail(id, kept, Evidence(tail, attempt.log))


def _log_exit(id: str, attempt: Attempt, exit: Exit) -> None:
    _log.info(
        "%s ended on %s: %s %s after %.3f s",
        readable(id),
        attempt.place.name,
        exit.reason,
        exit.code,
        exit.ended - exit.started,
    )


def _is_kept(attempt: Attempt) -> bool:
    """Whether an attempt ended well and there was no room to take what it made.

    The next one takes it up, as after a kill, unless its machine is given back before.
    """
    return (
        attempt.result is not None
        and attempt.result.problem == "full"
        and attempt.key is not None
        and len(attempt.place.members) == 1
        and not attempt.place.is_rented
    )
