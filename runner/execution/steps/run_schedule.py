"""Schedule of a run: the steps that may start now, and the record of every state change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from ...planning.schedule import (
    FINAL,
    ORPHANED,
    AttemptOutcome,
    Decision,
    Move,
    RunState,
    Scheduler,
    State,
    Task,
)

NO_DATA: Final[Mapping[str, object]] = MappingProxyType({})


class Journal(Protocol):
    """Recorder of a run's state changes."""

    def record(self, moves: Sequence[Move]) -> None: ...


class RunSchedule:
    """Scheduler of one run, with delays before retries.

    Each method that changes the state of a step records the change in the journal.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal) -> None:
        self._scheduler, self._journal = scheduler, journal
        self._resting: dict[str, float] = {}  # step -> end of its rest (monotonic)
        self._disturbed = False
        journal.record(scheduler.opening)

    # -- next steps

    def ready(self) -> list[str]:
        """Return the steps to look up in the cache now, most urgent first."""
        return self._scheduler.ready()

    def startable(self) -> Iterator[str]:
        """Yield the steps that may start now, most urgent first, until a failure or a request."""
        self._drop_rested()
        self._disturbed = False
        for id in self._scheduler.startable(self._resting):
            yield id
            if self._disturbed:
                return

    def make_room(self, id: str) -> bool:
        """Free the slot of a RUNNING step whose command succeeded, if a queued step can use it."""
        self._drop_rested()
        return self._scheduler.make_room(id, self._resting)

    def _drop_rested(self) -> None:
        now = time.monotonic()
        self._resting = {id: until for id, until in self._resting.items() if until > now}

    def rest(self, id: str, seconds: float) -> None:
        """Delay the start of a QUEUED step by `seconds`."""
        self._resting[id] = time.monotonic() + seconds

    def disturb(self) -> None:
        """End the current iteration over `startable`.

        A failure or a request has changed which steps may start.
        """
        self._disturbed = True

    @property
    def is_disturbed(self) -> bool:
        """Return True after a failure or a request since the last call of `startable`."""
        return self._disturbed

    # -- state changes

    def judge(
        self, id: str, decision: Decision, reason: str, data: Mapping[str, object] = NO_DATA
    ) -> None:
        """Apply a decision about a READY step: it is up to date, runs or is skipped."""
        self._journal.record(_with_data(self._scheduler.judge(id, decision, reason), id, data))

    def start(self, id: str, data: Mapping[str, object] = NO_DATA) -> None:
        """Mark a QUEUED step as RUNNING."""
        self._journal.record([self._scheduler.start(id, data)])

    def end(
        self,
        id: str,
        outcome: AttemptOutcome,
        data: Mapping[str, object] = NO_DATA,
        *,
        if_failed: Mapping[str, object] = NO_DATA,
    ) -> Move:
        """End the attempt of a RUNNING step, and return the step's own state change.

        `if_failed` is stored beside `data` if the step is not retried.
        """
        moves = self._scheduler.end(id, outcome)
        own = next(move for move in moves if move.id == id)
        if own.after == State.FAILED:
            data = {**data, **if_failed}
        self._journal.record(_with_data(moves, id, data))
        return own

    def judge_again(self, id: str, reason: str) -> None:
        """Look up a QUEUED step in the cache again.

        Its result may exist, or its inputs have changed.
        """
        self._journal.record(self._scheduler.adopt(id, reason))

    def make_again(self, id: str, reason: str) -> None:
        """Run a FRESH or DONE step again, because its output is lost."""
        self._journal.record(self._scheduler.lose(id, reason))

    def extend(self, tasks: Iterable[Task]) -> None:
        """Add steps to the run, or replace waiting steps."""
        self._journal.record(self._scheduler.extend(tasks))

    def grow(self, jobs: int, capacity: Mapping[str, float]) -> None:
        """Raise the limit of parallel steps and the capacity of pools."""
        self._scheduler.grow(jobs, capacity)

    def take_over(self, states: Mapping[str, State]) -> None:
        """Reschedule the unfinished steps of an earlier worker.

        Their attempts are found when the steps start.
        """
        for id, state in states.items():
            if state is State.RUNNING:
                self.end(id, AttemptOutcome(False, ORPHANED))
            elif state in (State.DONE, State.FRESH):
                self.make_again(id, "the step has to run again")
            if self.state(id) is State.QUEUED:
                self.judge_again(id, "its worker is gone")

    # -- requests

    def drain(self, reason: str = "interrupted") -> None:
        """Start no more steps in this run."""
        self._journal.record(self._scheduler.drain(reason))

    def cancel(self, reason: str) -> None:
        """Cancel waiting steps now, and running steps when they end."""
        self._journal.record(self._scheduler.cancel(reason))

    def pause(self) -> None:
        """Start no more steps until `resume`; stopped steps are QUEUED again."""
        self._scheduler.pause()

    def resume(self) -> None:
        """End the pause, so that steps start again."""
        self._scheduler.resume()

    # -- state

    def state(self, id: str) -> State:
        return self._scheduler.state(id)

    def open_steps(self) -> dict[str, State]:
        """Return the unfinished steps with their states."""
        states = self._scheduler.states()
        return {id: state for id, state in states.items() if state not in FINAL}

    def skipped_steps(self) -> list[str]:
        states = self._scheduler.states()
        return [id for id, state in states.items() if state is State.SKIPPED]

    @property
    def counts(self) -> dict[str, int]:
        """Number of steps in each state, without zeros."""
        return {str(state): count for state, count in self._scheduler.counts.items() if count}

    @property
    def starts_nothing(self) -> bool:
        """Return True if no more step starts, because the run is paused or ending."""
        return self._scheduler.is_held

    @property
    def is_finished(self) -> bool:
        """Return True if every step is in a final state."""
        return self._scheduler.is_finished

    @property
    def result(self) -> RunState:
        """State of the run, as stored."""
        return self._scheduler.result


def _with_data(moves: Sequence[Move], id: str, data: Mapping[str, object]) -> Sequence[Move]:
    """Return the state changes with `data` added to those of step `id`."""
    if not data:
        return moves
    changed = []
    for move in moves:
        if move.subject == "step" and move.id == id:
            move = move._replace(data={**move.data, **data})
        changed.append(move)
    return changed
