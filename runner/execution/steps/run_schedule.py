"""The schedule of a run: what may start now, and every move, which is noted as it is made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from ...planning.schedule import (
    FINAL,
    ORPHANED,
    Move,
    Outcome,
    RunState,
    Scheduler,
    State,
    Task,
    Verdict,
)

NO_DATA: Final[Mapping[str, object]] = MappingProxyType({})


class Journal(Protocol):
    """Notes the moves of a run."""

    def record(self, moves: Sequence[Move]) -> None: ...


class RunSchedule:
    """The scheduler of one run with the steps that wait before another try.

    What the scheduler decides is noted in the journal by the method that asks for it.
    """

    def __init__(self, scheduler: Scheduler, journal: Journal) -> None:
        self._scheduler, self._journal = scheduler, journal
        self._resting: dict[str, float] = {}  # step -> when it may be tried again (monotonic)
        self._disturbed = False
        journal.record(scheduler.opening)

    # -- what to do next

    def ready(self) -> list[str]:
        """Steps to judge now, most urgent first."""
        return self._scheduler.ready()

    def startable(self) -> Iterator[str]:
        """Steps that may start now, most urgent first, until a failure or a request comes."""
        now = time.monotonic()
        self._resting = {id: until for id, until in self._resting.items() if until > now}
        self._disturbed = False
        for id in self._scheduler.startable(self._resting):
            yield id
            if self._disturbed:
                return

    def rest(self, id: str, seconds: float) -> None:
        """Leave a QUEUED step alone for so long."""
        self._resting[id] = time.monotonic() + seconds

    def disturb(self) -> None:
        """A failure or a request changes which steps may start: ask again."""
        self._disturbed = True

    @property
    def is_disturbed(self) -> bool:
        """Whether a failure or a request came since `startable` was asked."""
        return self._disturbed

    # -- what happened

    def judge(
        self, id: str, answer: Verdict, reason: str, data: Mapping[str, object] = NO_DATA
    ) -> None:
        """A READY step is fresh, must run, or is skipped."""
        self._journal.record(_with_data(self._scheduler.judge(id, answer, reason), id, data))

    def start(self, id: str, data: Mapping[str, object] = NO_DATA) -> None:
        """A QUEUED step begins to run."""
        self._journal.record([self._scheduler.start(id, data)])

    def end(
        self,
        id: str,
        outcome: Outcome,
        data: Mapping[str, object] = NO_DATA,
        *,
        if_failed: Mapping[str, object] = NO_DATA,
    ) -> Move:
        """An attempt is over.  Returns the step's own move.

        `if_failed` is stored beside `data` when the step is not tried again.
        """
        moves = self._scheduler.end(id, outcome)
        own = next(move for move in moves if move.id == id)
        if own.after == State.FAILED:
            data = {**data, **if_failed}
        self._journal.record(_with_data(moves, id, data))
        return own

    def judge_again(self, id: str, reason: str) -> None:
        """A QUEUED step may be made by now, or is another one than it was."""
        self._journal.record(self._scheduler.adopt(id, reason))

    def make_again(self, id: str, reason: str) -> None:
        """The bytes of a FRESH or DONE step are gone: it runs again."""
        self._journal.record(self._scheduler.lose(id, reason))

    def extend(self, tasks: Iterable[Task]) -> None:
        """Add steps to the run, or replace those that still wait."""
        self._journal.record(self._scheduler.extend(tasks))

    def grow(self, jobs: int, capacity: Mapping[str, float]) -> None:
        """There is room for so many more steps at once, and so much more in the pools."""
        self._scheduler.grow(jobs, capacity)

    def take_over(self, states: Mapping[str, State]) -> None:
        """Judge again what an earlier worker had begun, or chosen to run.

        Its attempts are looked for when their steps are started.
        """
        for id, state in states.items():
            if state is State.RUNNING:
                self.end(id, Outcome(False, ORPHANED))
            elif state in (State.DONE, State.FRESH):
                self.make_again(id, "it has to be made again")
            if self.state(id) is State.QUEUED:
                self.judge_again(id, "its worker is gone")

    # -- what people ask for

    def drain(self, reason: str = "interrupted") -> None:
        """Start nothing new."""
        self._journal.record(self._scheduler.drain(reason))

    def cancel(self, reason: str) -> None:
        """Cancel what has not started now, and what runs when it ends."""
        self._journal.record(self._scheduler.cancel(reason))

    def pause(self) -> None:
        """Start nothing new; what is stopped is QUEUED again."""
        self._scheduler.pause()

    def resume(self) -> None:
        """The pause is taken back."""
        self._scheduler.resume()

    # -- how it stands

    def state(self, id: str) -> State:
        """The state of a step."""
        return self._scheduler.state(id)

    def open_steps(self) -> dict[str, State]:
        """The steps that are not final, with their states."""
        states = self._scheduler.states()
        return {id: state for id, state in states.items() if state not in FINAL}

    def skipped(self) -> list[str]:
        """The steps that are SKIPPED."""
        states = self._scheduler.states()
        return [id for id, state in states.items() if state is State.SKIPPED]

    @property
    def counts(self) -> dict[str, int]:
        """How many steps are in each state that occurs."""
        return {str(state): count for state, count in self._scheduler.counts.items() if count}

    @property
    def starts_nothing(self) -> bool:
        """Whether nothing new starts: of a run that is paused or ends."""
        return self._scheduler.is_held

    @property
    def is_finished(self) -> bool:
        """Whether every step is final."""
        return self._scheduler.is_finished

    @property
    def result(self) -> RunState:
        """The state of the run, as it is stored."""
        return self._scheduler.result


def _with_data(moves: Sequence[Move], id: str, data: Mapping[str, object]) -> Sequence[Move]:
    """The same moves, with more to say of the step `id`."""
    if not data:
        return moves
    return [
        move._replace(data={**move.data, **data})
        if move.id == id and move.subject == "step"
        else move
        for move in moves
    ]
