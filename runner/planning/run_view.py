"""Compute the displayed view of a run: state, progress and failure.  All interfaces use this view.

Pure: rows, events, leases and the clock are passed in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from ..failures import of_step
from ..language.values import is_number
from .causes import REMEDIES
from .ids import bare
from .schedule import BUSY, FINAL, State, describe_run_state

SUCCEEDED: Final = frozenset({State.DONE, State.FRESH, State.SKIPPED})
"""Final states of a step that did not fail."""
FREE: Final = frozenset({State.FRESH, State.SKIPPED})
"""States of a step that takes no time."""
ALMOST: Final = 99.9
"""Maximum progress percentage of a run before it is COMPLETED."""
WEIGHED: Final = 500
"""Maximum number of steps for weighting each step by its duration.

In larger runs all steps count the same, and the list of runs does not read their rows.
"""
TENFOLD: Final = 10.0
"""Progress weight of a training of unknown duration, in average steps."""
NAMES: Final = 24
"""Maximum number of stored metrics of a step, besides its progress."""
LONGEST_NAME: Final = 80
LARGEST: Final = 1e15
"""Maximum absolute value of a metric; larger values are left out as implausible."""
TOTALS: Final = ("max_steps", "total_steps")
"""Metric names for the total number of training steps."""
_OVER: Final = ("COMPLETED", "FAILED", "CANCELLED")
_HALTED: Final = ("FAILED", "CANCELLED", "PAUSED")
"""States of a stopped run in which the partial work of its steps still counts as progress."""


class RunColumns(Protocol):
    """Protocol of a run's database row, with the columns that the run view reads."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def claim(self) -> str: ...
    @property
    def fence(self) -> int: ...


class Row(Protocol):
    """Protocol of a step's database row, with the columns that the run view reads."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def numbers(self) -> str: ...
    @property
    def began(self) -> float | None: ...


class StateChange(Protocol):
    """Protocol of a step's state-change event."""

    @property
    def id(self) -> str: ...
    @property
    def at(self) -> float: ...
    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


class TrainingReport(NamedTuple):
    """Last training report of a step: training step, total, remaining seconds and other metrics."""

    step: float | None = None
    total: float | None = None
    eta: float | None = None
    at: float | None = None
    """Time of the report, in seconds since the epoch."""
    values: Mapping[str, float] = {}

    def text(self, warnings: Sequence[str] = ()) -> str:
        """Return the report and the step's warnings as JSON, or "" without a report."""
        has_report = self.step is not None or self.values
        if not has_report and not warnings:
            return ""
        known = {name: value for name, value in self._asdict().items() if value is not None}
        if warnings:
            known["warnings"] = list(warnings)
        return json.dumps(known, separators=(",", ":"))

    @property
    def part(self) -> float:
        """Completed fraction of the training, from 0 to 1."""
        total = self.total or 0.0
        if self.step is None or total <= 0:
            return 0.0
        return min(1.0, max(0.0, self.step / total))

    @property
    def percent(self) -> float | None:
        """Completed percentage of the training, or None if the total is unknown."""
        return round(100 * self.part, 1) if self.total else None


class Failure(NamedTuple):
    """Cause of a failed step, or of a run without a failed step."""

    kind: str
    words: str
    step: str = ""
    exit: int | None = None
    """Exit code of the command, or None if a signal ended it or it never ran."""
    signal: int | None = None
    lines: Sequence[str] = ()
    """Last lines of the command's output."""
    fix: str = ""


class StepView(NamedTuple):
    """Displayed view of a step or matrix instance.

    Times are seconds since the epoch.
    """

    id: str
    state: str = State.WAITING
    phase: str = ""
    """Phase of a RUNNING step."""
    reason: str = ""
    """Failure kind of a FAILED step, phase of a RUNNING step, or the reason for its state."""
    detail: str = ""
    """Failure message."""
    host: str = ""
    """Host of the last attempt.  Empty for the worker's own machine."""
    attempts: int = 0
    """Number of started attempts, including the running one."""
    began: float | None = None
    """Start of the last attempt."""
    ended: float | None = None
    seconds: float | None = None
    """Total running time of all attempts, in seconds."""
    spent: Mapping[str, float] = {}
    """Running time by host, in seconds."""
    expected: float | None = None
    """Duration in an earlier run, in seconds."""
    training: TrainingReport | None = None
    failure: Failure | None = None
    warnings: Sequence[str] = ()

    @property
    def percent(self) -> float | None:
        """Completed percentage of the step, or None if unknown."""
        if self.state in SUCCEEDED:
            return 100.0
        if self.training is not None and self.training.percent is not None:
            return min(ALMOST, self.training.percent)
        if self.state != State.RUNNING or self.seconds is None:
            return None
        if not self.expected:
            return None
        return min(ALMOST, round(100 * self.seconds / self.expected, 1))

    @property
    def eta(self) -> float | None:
        """Remaining seconds of a RUNNING step, from its training report or its earlier duration."""
        if self.state != State.RUNNING:
            return None
        if self.training is not None and self.training.eta is not None:
            return self.training.eta
        if self.expected is None or self.seconds is None:
            return None
        return round(max(0.0, self.expected - self.seconds), 1)


class PlannedSteps(NamedTuple):
    """Steps of a run according to its plan."""

    instances: Mapping[str, int] = {}
    """Number of instances per step, in plan order."""
    fresh: Collection[str] = ()
    """Ids of the steps that were up to date before the run."""
    total: int | None = None
    """Number of all steps, or None if unknown."""
    unnamed: int = 0
    """Number of up-to-date steps with an unknown id."""
    trains: str = ""
    """Id of the training step according to the plan."""
    reported: str = ""
    """Stored report of an up-to-date training step, or an empty string if it must run."""


UNPLANNED: Final = PlannedSteps()
NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class ProgressInput(NamedTuple):
    """Input data for computing the progress of a run."""

    state: str
    states: Mapping[str, str]
    """State of each step with an event, by id."""
    fresh: Collection[str] = ()
    """Ids of the steps that were up to date before the run."""
    total: int | None = None
    """Number of all steps, or None if unknown."""
    expected: Mapping[str, float] = {}
    """Duration of steps in an earlier run, in seconds."""
    elapsed: Mapping[str, float] = {}
    """Seconds from the start of an attempt until now, or until its last report if it has ended."""
    trainings: Mapping[str, TrainingReport] = {}
    """Last training report of each step that is unfinished or ended badly."""
    others: Mapping[str, int] = {}
    """Number of further steps with unknown ids, by state."""
    trains: str = ""
    """Id of the training step, without brackets."""


class Progress(NamedTuple):
    """Progress of a run.

    `step` counts the finished steps, and `eta` is in seconds or None if unknown.
    """

    step: int
    total: int | None
    percent: float | None
    eta: float | None


class RunView(NamedTuple):
    """View of a run for all interfaces."""

    id: str
    state: str
    word: str
    failure: str
    reason: str
    steps: Mapping[str, StepView]
    """Steps with an event, by id, in plan order."""
    counts: Mapping[str, int]
    """Number of steps in each state, including those that were up to date before the run."""
    progress: Progress
    failed: Failure | None
    """Failure that ended the run, or the first failure of an unfinished run.

    None if the run completed.
    """
    trains: str
    """Id of the training step, or an empty string if unknown."""
    training: TrainingReport | None
    """Last report of the training step, from an earlier run if it was up to date."""

    @property
    def warnings(self) -> list[str]:
        """Warnings of all steps, each prefixed with its step id."""
        lines: list[str] = []
        for step in self.steps.values():
            lines += [f"{step.id}: {text}" for text in step.warnings]
        return lines


def fold(
    run: RunColumns,
    rows: Mapping[str, Row],
    moves: Iterable[StateChange] = (),
    *,
    now: float,
    planned: PlannedSteps = UNPLANNED,
    expected: Mapping[str, float] = NOTHING,
    leases: Collection[str] = (),
    live: bool = False,
    others: Mapping[tuple[str, str], int] = NOTHING,
) -> RunView:
    """Compute the view of a run from its database rows, step events and leases.

    `rows` are its steps.  `moves` are the ordered events of its steps to and from RUNNING: without
    them, steps have no attempts and no failure details.  `leases` are the states of its machines,
    `live` tells whether a worker holds the run, and `expected` holds earlier durations of steps in
    seconds.  `others` counts further steps by state and phase.
    """
    heard: dict[str, StepView] = {}
    for move in moves:
        heard[move.id] = apply_move(heard.get(move.id, StepView(move.id)), move)
    steps: dict[str, StepView] = {}
    for id, row in _in_order(rows, planned).items():
        step = _now(heard.get(id, StepView(id)), row, now, live=live)
        steps[id] = step._replace(expected=expected.get(id))
    # The worker may have died after it claimed the run and before its first event.
    is_claimed = bool(run.fence and run.claim)
    begun = "ACTIVE" if run.state == "QUEUED" and is_claimed else run.state
    trains = _trains(steps, planned)
    standing = _standing_of(run, steps, planned, expected, others, trains, now)
    word_ = _word(run, begun, standing, steps, others, leases, live=live)
    progress = progress_of(standing)
    if word_ == "NEEDS_RECOVERY":
        progress = progress._replace(eta=None)  # no worker executes the run
    return RunView(
        run.id,
        run.state,
        word_,
        run.failure,
        run.reason,
        steps,
        _counts(standing, steps),
        progress,
        _find_failure(run, steps.values()),
        trains,
        _training(steps.get(trains), planned),
    )


def apply_move(step: StepView, move: StateChange) -> StepView:
    """Return the view of a step after a state-change event."""
    after = move.after
    if after == State.RUNNING:
        if move.before == State.RUNNING:
            return step._replace(phase=move.reason, reason=move.reason)
        return _begin_attempt(step, move)
    ended = move.at if after in FINAL else None
    step = step._replace(state=after, phase="", reason=move.reason, detail="", ended=ended)
    if move.before == State.RUNNING:
        step = _end_attempt(step, move)
    if after == State.FAILED:
        failure = _failure(step.id, move)
        step = step._replace(failure=failure, detail=failure.words)
    said = move.data.get("warnings")
    if isinstance(said, list):
        step = step._replace(warnings=[str(text) for text in said])
    return step


def _begin_attempt(step: StepView, move: StateChange) -> StepView:
    """Return the step's view, updated with the start of an attempt."""
    attempts = step.attempts
    began: float | None = None
    number = move.data.get("attempt")
    # A step that could not be started passes RUNNING without an attempt.
    if isinstance(number, int):
        attempts, began = number, move.at
    return step._replace(
        state=move.after,
        phase=move.reason,
        reason=move.reason,
        detail="",
        host=str(move.data.get("site", "")),
        attempts=attempts,
        began=began,
        ended=None,
        failure=None,
        warnings=(),
    )


def _end_attempt(step: StepView, move: StateChange) -> StepView:
    """Return the step's view, updated with the end of its attempt."""
    if move.reason == BUSY:  # the attempt never began
        return step._replace(attempts=max(0, step.attempts - 1), began=None)
    took = move.data.get("seconds")
    if is_number(took):
        return _spend(step, took)
    if step.began is None:
        return step
    return _spend(step, max(0.0, move.at - step.began))


def _spend(step: StepView, seconds: float) -> StepView:
    """Add running time to the view of a step and its current host."""
    there = round(step.spent.get(step.host, 0.0) + seconds, 3)
    return step._replace(
        seconds=round((step.seconds or 0.0) + seconds, 3), spent={**step.spent, step.host: there}
    )


def _failure(id: str, move: StateChange) -> Failure:
    data, kind = move.data, move.reason
    words = str(data.get("error") or data.get("detail") or kind)
    exit, signal, lines = data.get("exit"), data.get("signal"), data.get("tail")
    if not isinstance(exit, int):
        exit = None
    if not isinstance(signal, int):
        signal = None
    if not isinstance(lines, list):
        lines = []
    fix = str(data.get("fix") or REMEDIES.get(kind, ""))
    return Failure(kind, words, id, exit, signal, [str(line) for line in lines], fix)


def training_from(
    values: Mapping[str, object],
    total: float | None,
    *,
    eta: float | None = None,
    at: float | None = None,
) -> TrainingReport:
    """Build a training report from the last metrics of a step.

    `total` is the number of training steps from its inputs.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if is_number(value) and abs(value) < LARGEST:
            numbers[name] = value
    total = next((numbers[name] for name in TOTALS if name in numbers), total)
    if total is not None and total <= 0:
        total = None
    others: list[tuple[str, float]] = []
    for name, value in numbers.items():
        if name not in ("step", *TOTALS) and len(name) <= LONGEST_NAME:
            others.append((name, value))
    return TrainingReport(numbers.get("step"), total, eta, at, dict(others[:NAMES]))


def stored_training(
    text: str, *, now: float | None = None
) -> tuple[TrainingReport | None, Sequence[str]]:
    """Parse a stored training report and the step's warnings.

    With `now`, the remaining time is reduced by the age of the report.
    """
    try:
        found = json.loads(text) if text else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return None, ()
    said = found.get("warnings")
    if not isinstance(said, list):
        said = []
    warnings = [str(each) for each in said]
    training = TrainingReport(
        **_numbers_of(found, ("step", "total", "eta", "at")),
        values=_numbers_of(found.get("values")),
    )
    if training.step is None and not training.values:
        return None, warnings
    if now is not None:
        training = _update_eta(training, now)
    return training, warnings


def _update_eta(training: TrainingReport, now: float) -> TrainingReport:
    """Return a training report with its remaining time reduced by its age."""
    if training.eta is None or training.at is None:
        return training
    age = max(0.0, now - training.at)
    return training._replace(eta=round(max(0.0, training.eta - age), 1))


def _numbers_of(stored: object, names: Collection[str] | None = None) -> dict[str, float]:
    """Return the numbers in a stored mapping, or only those with a name in `names`."""
    if not isinstance(stored, dict):
        return {}
    numbers: dict[str, float] = {}
    for name, value in stored.items():
        if is_number(value) and (names is None or name in names):
            numbers[str(name)] = value
    return numbers


def _now(step: StepView, row: Row, now: float, *, live: bool) -> StepView:
    """Return the view of a step, updated with the state and metrics from its database row."""
    running = row.state == State.RUNNING
    if running:
        phase = row.reason
        training, said = stored_training(row.numbers, now=now)
    else:
        phase = ""
        training, said = stored_training(row.numbers)
    began = step.began if step.began is not None else row.began
    step = step._replace(
        state=row.state,
        phase=phase,
        reason=row.reason,
        detail=row.detail,
        training=training,
        began=began,
    )
    # Without a live worker, nobody knows how long the step ran after its last event.
    is_live = running and live
    if is_live and began is not None:
        step = _spend(step, max(0.0, now - began))
    if running or not step.warnings:
        step = step._replace(warnings=said)
    if row.state == State.FAILED and step.failure is None:
        words = row.detail or row.reason
        failure = Failure(row.reason, words, step.id, fix=REMEDIES.get(row.reason, ""))
        step = step._replace(failure=failure)
    return step


def _in_order(rows: Mapping[str, Row], planned: PlannedSteps) -> dict[str, Row]:
    """Return the rows of steps in plan order."""
    places = {step: n for n, step in enumerate(planned.instances)}
    if not places:
        return dict(sorted(rows.items()))

    def place_of(item: tuple[str, Row]) -> tuple[int, str]:
        id, _ = item
        return places.get(bare(id), len(places)), id

    return dict(sorted(rows.items(), key=place_of))


def _word(
    run: RunColumns,
    begun: str,
    standing: ProgressInput,
    steps: Mapping[str, StepView],
    others: Mapping[tuple[str, str], int],
    leases: Collection[str],
    *,
    live: bool,
) -> str:
    """Return the displayed state of a run, such as EXECUTING."""
    phases = {(step.state, step.phase) for step in steps.values()} | set(others)
    happened = len(steps) + sum(standing.others.values()) + _count_restored(standing)
    if standing.total is None or standing.total > happened:
        phases.add((State.WAITING, ""))  # a step without events
    return describe_run_state(begun, failure=run.failure, steps=phases, leases=leases, claimed=live)


def _standing_of(
    run: RunColumns,
    steps: Mapping[str, StepView],
    planned: PlannedSteps,
    expected: Mapping[str, float],
    others: Mapping[tuple[str, str], int],
    trains: str,
    now: float,
) -> ProgressInput:
    states = {id: str(step.state) for id, step in steps.items()}
    if not others:
        _add_unbegun(states, planned)
    elapsed: dict[str, float] = {}
    trainings: dict[str, TrainingReport] = {}
    for id, step in steps.items():
        seconds = _elapsed_of(step, now)
        if seconds is not None:
            elapsed[id] = seconds
        if step.training is not None and step.state not in SUCCEEDED:
            trainings[id] = step.training
    return ProgressInput(
        run.state,
        states,
        planned.fresh,
        planned.total,
        expected,
        elapsed,
        trainings,
        _count_unlisted(others, planned, len(states)),
        bare(trains),
    )


def _add_unbegun(states: dict[str, str], planned: PlannedSteps) -> None:
    """Add each single-instance step without an event, which is counted by its name."""
    for name, count in planned.instances.items():
        is_counted = name in states or name in planned.fresh
        if count == 1 and not is_counted:
            states[name] = State.WAITING


def _count_unlisted(
    others: Mapping[tuple[str, str], int], planned: PlannedSteps, named: int
) -> dict[str, int]:
    """Return the number of steps without a name in each state, beside the `named` ones."""
    counted: dict[str, int] = {}
    for (state, _), number in others.items():
        counted[state] = counted.get(state, 0) + number
    if planned.unnamed:
        room = planned.unnamed
        if planned.total is not None:
            room = max(0, planned.total - named - sum(counted.values()))
        counted[State.FRESH] = counted.get(State.FRESH, 0) + min(planned.unnamed, room)
    return counted


def _elapsed_of(step: StepView, now: float) -> float | None:
    """Return the seconds from the start of a step until now, or until its last report if it ended.

    None: it never began, or reported nothing.
    """
    if step.began is None:
        return None
    if step.state == State.RUNNING:
        return max(0.0, now - step.began)
    if step.training is None or step.training.at is None:
        return None
    return max(0.0, step.training.at - step.began)


def _counts(standing: ProgressInput, steps: Mapping[str, StepView]) -> dict[str, int]:
    counts = dict(standing.others)
    for step in steps.values():
        counts[step.state] = counts.get(step.state, 0) + 1
    restored = _count_restored(standing)
    if restored:
        counts[State.FRESH] = counts.get(State.FRESH, 0) + restored
    return {str(state): number for state, number in counts.items()}


def _find_failure(run: RunColumns, steps: Iterable[StepView]) -> Failure | None:
    """Return the failure that ended a run, or the first failure of an unfinished run."""
    if run.state == "COMPLETED":
        return None
    failures = _failures_in_order(steps)
    if run.state != "FAILED":
        return failures[0] if failures else None
    if not failures:
        return Failure(run.failure, run.reason, fix=REMEDIES.get(run.failure, ""))
    stored = (run.failure, run.reason)
    matching = [each for each in failures if (of_step(each.kind), each.words) == stored]
    return [*matching, *failures][0]._replace(kind=run.failure)


def _failures_in_order(steps: Iterable[StepView]) -> list[Failure]:
    """Return the failures of steps, in the order in which the steps ended."""
    in_order = sorted(steps, key=lambda step: step.ended or 0.0)
    return [step.failure for step in in_order if step.failure is not None]


def _training(step: StepView | None, planned: PlannedSteps) -> TrainingReport | None:
    if step is not None and (step.training is not None or step.state != State.FRESH):
        return step.training
    return stored_training(planned.reported)[0]


def _trains(steps: Mapping[str, StepView], planned: PlannedSteps) -> str:
    """Return the id of the training step: from the plan, otherwise the best candidate.

    Candidates are the steps that report training metrics.
    """
    if planned.trains in steps:
        return planned.trains
    # At the start of the run, the planned id may have stood for unknown instances.
    reporting: list[StepView] = []
    for step in steps.values():
        if step.training is not None and planned.trains in ("", bare(step.id)):
            reporting.append(step)
    if not reporting:
        return planned.trains
    return max(reporting, key=_rank_training).id


def _rank_training(step: StepView) -> tuple[bool, bool, bool, float]:
    """Return how likely a step is the training of its run, for comparison with other steps.

    Of running steps the one with the most work left ranks highest, of others the latest.
    """
    training = step.training or TrainingReport()
    has_loss = any(name.endswith("loss") for name in training.values)
    if step.state != State.RUNNING:
        return bool(training.total), has_loss, False, training.at or 0.0
    left = training.eta if training.eta is not None else training.total
    return bool(training.total), has_loss, True, left or 0.0


# -- progress --------------------------------------------------------------------------------------


def progress_of(run: ProgressInput) -> Progress:
    """Return the progress of a run, from training reports and earlier durations of steps."""
    is_over = run.state in _OVER
    total = None
    if is_over or run.total is not None:
        total = _count_steps(run)
    if run.state == "COMPLETED":
        return Progress(total or 0, total, 100.0, 0.0)
    ended = _count_ended(run)
    eta = 0.0 if is_over else _eta(run, _seconds_left(run), total, ended)
    return Progress(ended, total, _percent(run, total), eta)


def _count_steps(run: ProgressInput) -> int:
    """Return the number of planned steps, or of known steps if that is larger."""
    stored = len(run.states) + sum(run.others.values())
    return max(run.total or 0, stored + _count_restored(run))


def _count_ended(run: ProgressInput) -> int:
    """Return the number of finished steps, including those that were up to date before the run."""
    named = sum(state in FINAL for state in run.states.values())
    return _count_restored(run) + named + _count_others(run, FINAL)


def _count_others(run: ProgressInput, states: Collection[str]) -> int:
    """Return the number of steps with an unknown id that are in one of `states`."""
    return sum(number for state, number in run.others.items() if state in states)


def _count_restored(run: ProgressInput) -> int:
    """Return the number of up-to-date steps without a database row."""
    restored = len(set(run.fresh) - run.states.keys())
    if run.others and run.total is not None:  # the ids of these steps are unknown
        room = run.total - len(run.states) - sum(run.others.values())
        return min(restored, max(0, room))
    return restored


def _percent(run: ProgressInput, total: int | None) -> float | None:
    """Return the completed percentage of a run, or None if unknown.

    Up-to-date and skipped steps do not count.
    """
    if not total:
        return None
    parts: dict[str, float] = {}
    free = 0
    for id, state in run.states.items():
        if state in FREE:
            free += 1
        else:
            parts[id] = _part(run, id, state)
    free += _count_others(run, FREE)
    if total <= WEIGHED:
        weights = {id: _weight(run, id) for id in parts}
    else:
        weights = dict.fromkeys(parts, 1.0)
    # Steps without a known id have the usual weight.
    usual = _usual(run, weights)
    whole = usual * (total - free - _count_restored(run) - len(parts))
    done = usual * run.others.get(State.DONE, 0)
    for id, part in parts.items():
        weight = weights[id]
        if not weight:
            weight = usual * TENFOLD if bare(id) == run.trains else usual
        whole += weight
        done += weight * part
    if whole <= 0:
        return 0.0
    return min(ALMOST, round(100 * done / whole, 1))


def _usual(run: ProgressInput, weights: Mapping[str, float]) -> float:
    """Return the progress weight of a step of unknown duration.

    It is the mean of the others, or a fraction of the training's.
    """
    known: list[float] = []
    trained: list[float] = []
    for id, weight in weights.items():
        if not weight:
            continue
        if bare(id) == run.trains:
            trained.append(weight)
        else:
            known.append(weight)
    if known:
        return sum(known) / len(known)
    if trained:
        return sum(trained) / len(trained) / TENFOLD
    return 1.0


def _part(run: ProgressInput, id: str, state: str) -> float:
    """Return the completed fraction of a step, from 0 to 1."""
    if state in SUCCEEDED:
        return 1.0
    training = run.trainings.get(id)
    is_partial = state == State.RUNNING or run.state in _HALTED
    if is_partial and training is not None and training.total:
        return training.part
    if state != State.RUNNING or id not in run.expected:
        return 0.0
    elapsed = run.elapsed.get(id, 0.0)
    whole = max(elapsed, run.expected[id])
    return elapsed / whole if whole else 0.0


def _weight(run: ProgressInput, id: str) -> float:
    """Return the total duration of a step in seconds, or 0 if unknown."""
    training = run.trainings.get(id)
    if training is not None and training.eta is not None:
        return run.elapsed.get(id, 0.0) + training.eta
    return run.expected.get(id, 0.0)


def _seconds_left(run: ProgressInput) -> dict[str, float | None]:
    """Return the remaining seconds of each unfinished step, or None if unknown."""
    left: dict[str, float | None] = {}
    for id, state in run.states.items():
        if state in FINAL:
            continue
        training = run.trainings.get(id)
        reported = training.eta if training is not None else None
        if state == State.RUNNING and reported is not None:
            left[id] = reported
        elif id in run.expected:
            elapsed = run.elapsed.get(id, 0.0) if state == State.RUNNING else 0.0
            left[id] = max(0.0, run.expected[id] - elapsed)
        else:
            left[id] = None
    return left


def _eta(
    run: ProgressInput, left: Mapping[str, float | None], total: int | None, ended: int
) -> float | None:
    """Return the estimated seconds until the run ends, at its current number of parallel steps."""
    known = [seconds for seconds in left.values() if seconds is not None]
    if total is None or len(known) < len(left):
        return None
    # Steps without a known id are left, and their durations are unknown.
    if ended + len(left) < total:
        return None
    at_once = sum(state == State.RUNNING for state in run.states.values())
    return max(max(known, default=0.0), sum(known) / max(1, at_once))
